"""The layers of T5's networks, one after another or scanned, and the output layer.

Suffixes of array names: B batch, L length, S length of the encoder, E embed, V vocab.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.models.remat import Remat, named
from train.models.residual import lay_out, lay_out_residual, residual_names
from train.models.t5.attention import Attention
from train.models.t5.config import T5Config
from train.models.t5.layers import EMBED, Dense, Embed, Norm, RelativeBias, apply_mlp, dropout
from train.output_layer import DeferredLogits


class Layer(nn.Module):
    """One layer of an encoder, of a decoder, or of a decoder that has a prefix and no encoder."""

    config: T5Config
    deterministic: bool
    kind: Literal['encoder', 'decoder', 'prefix']
    decode: bool = False
    prefill: bool = False
    max_decode_length: int | None = None

    @nn.compact
    def __call__(
        self,
        x_BLE: jax.Array,
        mask: jax.Array | None,
        bias: jax.Array | None,
        encoded_BSE: jax.Array | None = None,
        cross_mask: jax.Array | None = None,
        prefill_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, None]:
        c, is_encoder = self.config, self.kind == 'encoder'
        if bias is None:
            length = (self.decode and self.max_decode_length) or x_BLE.shape[1]
            bias = RelativeBias(c, bidirectional=is_encoder, name='relpos_bias')(length)
        x_BLE = named(x_BLE, 'residual')
        name = 'attention' if is_encoder else 'self_attention'
        h_BLE = self._norm(x_BLE, name)
        attend = Attention(c, self.deterministic, self.decode, self.prefill, name=name)
        x_BLE = self._add(x_BLE, attend(h_BLE, h_BLE, mask, bias, prefill_lengths), name)
        if encoded_BSE is not None:
            h_BLE = self._norm(x_BLE, 'cross_attention')
            attend = Attention(c, self.deterministic, name='encoder_decoder_attention')
            x_BLE = self._add(x_BLE, attend(h_BLE, encoded_BSE, cross_mask), 'cross_attention')
        h_BLE = self._norm(x_BLE, 'mlp')
        h_BLE = apply_mlp(c, h_BLE, mask, self.deterministic, self.decode or self.prefill)
        return self._add(x_BLE, h_BLE, 'mlp'), None

    def _norm(self, x_BLE: jax.Array, before: str) -> jax.Array:
        h_BLE = Norm(self.config.dtype, name=f'pre_{before}_layer_norm')(x_BLE)
        return lay_out(h_BLE, EMBED, self.decode)

    def _add(self, x_BLE: jax.Array, branch_BLE: jax.Array, after: str) -> jax.Array:
        # The names decide the random numbers: T5X names the dropout of this network only.
        name = f'post_{after}_dropout' if self.kind == 'prefix' else None
        branch_BLE = dropout(self.config, branch_BLE, self.deterministic, name)
        return lay_out_residual(x_BLE + branch_BLE, self.decode)


def run_layers(
    config: T5Config,
    count: int,
    scanned_name: str,
    attributes: dict[str, Any],
    x: jax.Array,
    *arguments: Any,
) -> jax.Array:
    """Runs the layers of a stack, in a compact method of it, and returns what the last one does.

    The module of scanned layers is called 'encoder' or 'decoder', others are 'layers_0' and so on.
    Every layer has the attributes, and gets the arguments after the output of the one before it.
    """

    def recomputed(remat: Remat | None) -> Any:
        if remat is None:
            return Layer
        return nn.remat(Layer, policy=remat.policy, prevent_cse=not config.scan_layers)

    if not config.scan_layers:
        for i in range(count):
            made = recomputed(config.remats[i % len(config.remats)])
            settings = attributes | {'config': config.of_layer(scanned_name, i)}
            x, _ = made(**settings, name=f'layers_{i}')(x, *arguments)
        return x
    scanned = nn.scan(
        recomputed(config.remats[0]),
        variable_axes={'params': config.param_scan_axis, 'cache': 0, 'losses': 0, 'metrics': 0},
        split_rngs={'params': True, 'dropout': True},
        in_axes=nn.broadcast,
        length=count,
        metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    settings = attributes | {'config': config.of_layer(scanned_name, 0)}
    return scanned(**settings, name=scanned_name)(x, *arguments)[0]


class Encoder(nn.Module):
    """The encoder's layers, between the embeddings and the final norm."""

    config: T5Config
    embed: Embed

    @nn.compact
    def __call__(self, tokens_BL: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
        c = self.config
        x_BLE = dropout(c, self.embed(tokens_BL), deterministic, None)
        bias = None
        if not c.scalable:
            bias = RelativeBias(c, bidirectional=True, name='relpos_bias')(tokens_BL.shape[1])
        layer = {'deterministic': deterministic, 'kind': 'encoder'}
        x_BLE = run_layers(c, c.num_encoder_layers, 'encoder', layer, x_BLE, mask, bias)
        x_BLE = lay_out(Norm(c.dtype, name='encoder_norm')(x_BLE), EMBED)
        return nn.Dropout(c.dropout_rate)(x_BLE, deterministic)


class Decoder(nn.Module):
    """The decoder's layers, between the embeddings and the logits.

    It uses the embeddings of the network; a decoder without an encoder has its own.
    """

    config: T5Config
    embed: Embed | None = None

    @nn.compact
    def __call__(
        self,
        tokens_BL: jax.Array,
        mask: jax.Array | None,
        encoded_BSE: jax.Array | None = None,
        cross_mask: jax.Array | None = None,
        prefill_lengths: jax.Array | None = None,
        *,
        deterministic: bool,
        decode: bool,
        max_decode_length: int | None,
        prefill: bool = False,
    ) -> DeferredLogits:
        c, has_prefix = self.config, self.embed is None
        bias, embed = None, self.embed
        if not c.scalable:
            length = (decode and max_decode_length) or tokens_BL.shape[1]
            relative = RelativeBias(c, bidirectional=False, cache=has_prefix, name='relpos_bias')
            bias = relative(length, decode)
        if embed is None:
            embed = Embed(c, name='token_embedder')
        name = 'input_dropout' if has_prefix else None
        x_BLE = dropout(c, embed(tokens_BL), deterministic, name)
        layer = {
            'deterministic': deterministic,
            'kind': 'prefix' if has_prefix else 'decoder',
            'decode': decode,
            'prefill': prefill,
            'max_decode_length': max_decode_length,
        }
        arguments = (x_BLE, mask, bias, encoded_BSE, cross_mask, prefill_lengths)
        x_BLE = run_layers(c, c.num_decoder_layers, 'decoder', layer, *arguments)
        x_BLE = lay_out_residual(Norm(c.dtype, name='decoder_norm')(x_BLE), decode)
        name = 'output_dropout' if has_prefix else None
        return apply_output_layer(c, embed, dropout(c, x_BLE, deterministic, name))


def apply_output_layer(config: T5Config, embed: Embed, x_BLE: jax.Array) -> DeferredLogits:
    """Returns what computes the float32 logits, in a compact method of a decoder."""
    if config.logits_via_embedding:
        output_EV, divisor = embed.embedding.T, math.sqrt(config.emb_dim)
    else:
        shape, names = (config.emb_dim, config.vocab_size), ('embed', 'vocab')
        dense = Dense(shape, 1, names, jnp.float32, name='logits_dense')
        output_EV, divisor = dense.get_kernel(), 1.0
    return DeferredLogits(
        x_BLD=x_BLE, w_DV=output_EV, dtype=jnp.float32, names=residual_names(), divisor=divisor
    )
