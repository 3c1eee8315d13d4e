"""A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Suffixes of array names: B batch, L length, D embed, H heads, K kv_heads, N head_dim, F mlp,
V vocab. Every parameter carries its logical axes, and activations are constrained by theirs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp

from partitioning import constrain
from train.errors import check_counts

Remat = Literal['none', 'dots', 'full']
Activation = Literal['silu', 'gelu', 'relu']


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of a Transformer.

    Attributes:
      vocab_size: the number of tokens.
      num_layers: the number of layers.
      embed_dim: the width of the residual stream.
      num_heads: the number of query heads, a multiple of `num_kv_heads`.
      num_kv_heads: the number of key and value heads.
      head_dim: the width of a head, an even number.
      mlp_dim: the width of the gated hidden layer.
      dropout_rate: the dropout rate of attention and MLP outputs during training.
      dtype: the dtype of the computation, 'float32' or 'bfloat16'. Norms, softmax and the loss are
        always computed in float32.
      param_dtype: the dtype of the parameters, 'float32' or 'bfloat16'.
      remat: what the backward pass recomputes: 'none', 'dots' (everything except matmul results)
        or 'full' (everything).
      scan_layers: whether the layers are scanned. A scan traces one layer and stacks the
        parameters; otherwise every layer is traced.
      tie_embeddings: whether the output layer is the transpose of the embedding.
      activation: the activation function of the gate.
      rope_max_wavelength: the longest wavelength of the rotary positions, in positions.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    dropout_rate: float = 0.0
    dtype: str = 'float32'
    param_dtype: str = 'float32'
    remat: Remat = 'none'
    scan_layers: bool = True
    tie_embeddings: bool = False
    activation: Activation = 'silu'
    rope_max_wavelength: float = 10_000.0

    def __post_init__(self) -> None:
        check_counts(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            embed_dim=self.embed_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
        )
        for name, dtype in (('dtype', self.dtype), ('param_dtype', self.param_dtype)):
            if dtype not in ('float32', 'bfloat16'):
                raise ValueError(f"{name} is {dtype!r}: use 'float32' or 'bfloat16'")
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f'dropout_rate is {self.dropout_rate!r}: it must be >= 0 and < 1')
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f'num_heads ({self.num_heads}) must be a multiple of num_kv_heads '
                f'({self.num_kv_heads})'
            )
        if self.head_dim % 2:
            raise ValueError(f'head_dim ({self.head_dim}) must be even for rotary positions')
        if self.remat not in ('none', 'dots', 'full'):
            raise ValueError(f"remat is {self.remat!r}: use 'none', 'dots' or 'full'")
        if self.activation not in get_args(Activation):
            raise ValueError(f"activation is {self.activation!r}: use 'silu', 'gelu' or 'relu'")


def _param(module: nn.Module, name: str, init: Any, names: tuple[str, ...], *shape: int) -> Any:
    boxed = nn.with_logical_partitioning(init, names)
    return module.param(name, boxed, shape, module.config.param_dtype)


def _fan_in(num_in: int, num_out: int, scale: float = 1.0) -> Any:
    """Returns an initializer that keeps the variance of its input.

    Args:
      num_in: the number of input dimensions, which come first.
      num_out: the number of output dimensions, which follow.
      scale: multiplies the variance.
    """
    ins, outs = range(num_in), range(num_in, num_in + num_out)
    return nn.initializers.variance_scaling(
        scale, 'fan_in', 'truncated_normal', in_axis=tuple(ins), out_axis=tuple(outs)
    )


class RMSNorm(nn.Module):
    """Computes x / rms(x) * scale in float32."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        scale_D = _param(self, 'scale', nn.initializers.ones, ('embed',), x_BLD.shape[-1])
        x = x_BLD.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return (x * scale_D).astype(self.config.dtype)


def rotary(x_BLHN: jax.Array, positions_BL: jax.Array, max_wavelength: float) -> jax.Array:
    """Rotates each pair (i, i + N/2) of a head by an angle proportional to the position."""
    half = x_BLHN.shape[-1] // 2
    wavelength_N = max_wavelength ** (jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions_BL[:, :, None, None].astype(jnp.float32) / wavelength_N
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x_BLHN.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BLHN.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention.

    Attributes:
      config: sizes and choices.
      decode_length: the length of the cache of keys and values. If it is not 0, each call takes one
        position.
    """

    config: TransformerConfig
    decode_length: int = 0

    @nn.compact
    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array | None = None
    ) -> jax.Array:
        c = self.config
        d, h, k, n = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim
        query = _param(self, 'query', _fan_in(1, 2), ('embed', 'heads', 'kv'), d, h, n)
        key = _param(self, 'key', _fan_in(1, 2), ('embed', 'kv_heads', 'kv'), d, k, n)
        value = _param(self, 'value', _fan_in(1, 2), ('embed', 'kv_heads', 'kv'), d, k, n)
        # Each layer adds two residual branches; with this scale, the sum of all branches has the
        # scale of the embedding.
        out_init = _fan_in(2, 1, scale=1 / (2 * c.num_layers))
        out = _param(self, 'out', out_init, ('heads', 'kv', 'embed'), h, n, d)

        query, key, value, out = (w.astype(c.dtype) for w in (query, key, value, out))
        q_BLHN = jnp.einsum('BLD,DHN->BLHN', x_BLD, query)
        k_BLKN = jnp.einsum('BLD,DKN->BLKN', x_BLD, key)
        v_BLKN = jnp.einsum('BLD,DKN->BLKN', x_BLD, value)
        q_BLHN = rotary(q_BLHN, positions_BL, c.rope_max_wavelength)
        k_BLKN = rotary(k_BLKN, positions_BL, c.rope_max_wavelength)
        q_BLHN = constrain(q_BLHN, ('batch', 'length', 'heads', 'kv'))
        k_BLKN = constrain(k_BLKN, ('batch', 'length', 'kv_heads', 'kv'))
        v_BLKN = constrain(v_BLKN, ('batch', 'length', 'kv_heads', 'kv'))

        if self.decode_length:
            attended_BLHN = self._attend_to_cache(q_BLHN, k_BLKN, v_BLKN, positions_BL)
        else:
            attended_BLHN = jax.nn.dot_product_attention(
                q_BLHN, k_BLKN, v_BLKN, mask=_same_segment(segments_BL), is_causal=True
            )
        attended_BLHN = constrain(attended_BLHN, ('batch', 'length', 'heads', 'kv'))
        return jnp.einsum('BLHN,HND->BLD', attended_BLHN, out)

    def _attend_to_cache(
        self, q_BLHN: jax.Array, k_BLKN: jax.Array, v_BLKN: jax.Array, positions_BL: jax.Array
    ) -> jax.Array:
        batch, _, *head = k_BLKN.shape
        shape = (batch, self.decode_length, *head)
        cached_k = self.variable('cache', 'key', jnp.zeros, shape, k_BLKN.dtype)
        cached_v = self.variable('cache', 'value', jnp.zeros, shape, v_BLKN.dtype)
        now = positions_BL[0, 0]
        names = ('batch', 'length', 'kv_heads', 'kv')
        for cached, new in ((cached_k, k_BLKN), (cached_v, v_BLKN)):
            updated = jax.lax.dynamic_update_slice_in_dim(cached.value, new, now, axis=1)
            cached.value = constrain(updated, names)
        seen = (jnp.arange(self.decode_length) <= now)[None, None, None, :]
        return jax.nn.dot_product_attention(q_BLHN, cached_k.value, cached_v.value, mask=seen)


def _same_segment(segments_BL: jax.Array | None) -> jax.Array | None:
    """Returns the mask of pairs in one segment, bool [batch, 1, length, length], or None."""
    if segments_BL is None:
        return None
    return (segments_BL[:, :, None] == segments_BL[:, None, :])[:, None]


class SwiGLU(nn.Module):
    """Computes (act(x gate) * (x up)) down. It is SwiGLU if act is silu."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        c = self.config
        d, f = c.embed_dim, c.mlp_dim
        gate_DF = _param(self, 'gate', _fan_in(1, 1), ('embed', 'mlp'), d, f).astype(c.dtype)
        up_DF = _param(self, 'up', _fan_in(1, 1), ('embed', 'mlp'), d, f).astype(c.dtype)
        down_init = _fan_in(1, 1, scale=1 / (2 * c.num_layers))
        down_FD = _param(self, 'down', down_init, ('mlp', 'embed'), f, d).astype(c.dtype)
        hidden_BLF = getattr(jax.nn, c.activation)(x_BLD @ gate_DF) * (x_BLD @ up_DF)
        return constrain(hidden_BLF, ('batch', 'length', 'mlp')) @ down_FD


class Layer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    config: TransformerConfig
    deterministic: bool
    decode_length: int = 0

    @nn.compact
    def __call__(
        self, x_BLD: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        c = self.config
        dropout = nn.Dropout(c.dropout_rate, deterministic=self.deterministic)
        names = ('batch', 'length', 'embed')
        x_BLD = constrain(x_BLD, names)
        normed = RMSNorm(c, name='attention_norm')(x_BLD)
        attention = Attention(c, self.decode_length, name='attention')
        attended = attention(normed, positions_BL, segments_BL)
        x_BLD = constrain(x_BLD + dropout(attended), names)
        normed = RMSNorm(c, name='mlp_norm')(x_BLD)
        return constrain(x_BLD + dropout(SwiGLU(c, name='mlp')(normed)), names), None


@gin.configurable
class Transformer(nn.Module):
    """A language model: maps tokens to the float32 logits of the next token."""

    config: TransformerConfig

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        *,
        positions_BL: jax.Array | None = None,
        segments_BL: jax.Array | None = None,
        deterministic: bool = True,
        decode_position: jax.Array | None = None,
        decode_length: int = 0,
    ) -> jax.Array:
        """Computes the logits.

        Args:
          tokens_BL: int tokens, [batch, length].
          positions_BL: int positions, [batch, length]. By default, they are 0, 1, 2, ...
          segments_BL: int segments, [batch, length]. A token attends only to its own segment. By
            default, a row is one segment.
          deterministic: whether dropout is off. Otherwise the rng 'dropout' is needed.
          decode_position: the position of the one given token, while decoding. The keys and values
            of earlier tokens are in the collection 'cache'.
          decode_length: the length of the longest sequence to decode, or 0.

        Returns:
          The logits, float32 [batch, length, vocab].
        """
        c = self.config
        init = nn.initializers.normal(stddev=c.embed_dim**-0.5)
        embedding_VD = _param(
            self, 'embedding', init, ('vocab', 'embed'), c.vocab_size, c.embed_dim
        ).astype(c.dtype)
        # Whole rows are looked up, because XLA would replicate rows whose 'embed' is sharded over
        # the axes of the batch. The factor gives embeddings unit variance.
        rows_VD = constrain(embedding_VD, ('vocab', None))
        x_BLD = jnp.take(rows_VD, tokens_BL, axis=0) * c.embed_dim**0.5
        x_BLD = constrain(x_BLD, ('batch', 'length', 'embed'))
        start = 0 if decode_position is None else decode_position
        if positions_BL is None:
            positions_BL = jnp.broadcast_to(start + jnp.arange(tokens_BL.shape[1]), tokens_BL.shape)

        x_BLD = self._layers(x_BLD, (positions_BL, segments_BL), deterministic, decode_length)
        x_BLD = RMSNorm(c, name='final_norm')(x_BLD)
        if c.tie_embeddings:
            output_DV = embedding_VD.T
        else:
            output_DV = _param(
                self, 'output', _fan_in(1, 1), ('embed', 'vocab'), c.embed_dim, c.vocab_size
            ).astype(c.dtype)
        logits_BLV = jnp.einsum('BLD,DV->BLV', x_BLD, output_DV, preferred_element_type=jnp.float32)
        return constrain(logits_BLV, ('batch', 'length', 'vocab'))

    def _layers(
        self,
        x_BLD: jax.Array,
        places: tuple[jax.Array, jax.Array | None],
        deterministic: bool,
        decode_length: int,
    ) -> jax.Array:
        """Applies all layers. `places` holds the positions and segments."""
        c = self.config
        layer: Any = Layer
        if c.remat != 'none' and not decode_length:
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            layer = nn.remat(
                Layer, prevent_cse=not c.scan_layers, policy=policy if c.remat == 'dots' else None
            )
        if not c.scan_layers:
            for i in range(c.num_layers):
                one = layer(c, deterministic, decode_length, name=f'layer_{i}')
                x_BLD, _ = one(x_BLD, *places)
            return x_BLD
        stack = nn.scan(
            layer,
            variable_axes={'params': 0, 'cache': 0},
            split_rngs={'params': True, 'dropout': True},
            in_axes=nn.broadcast,
            length=c.num_layers,
            metadata_params={nn.PARTITION_NAME: 'layers'},
        )
        x_BLD, _ = stack(c, deterministic, decode_length, name='layers')(x_BLD, *places)
        return x_BLD
