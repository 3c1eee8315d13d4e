"""The settings of T5's networks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from train.errors import ConfigError, check_fields
from train.models.experts import ExpertsConfig
from train.models.remat import WORDS, Remat, check_placed, list_remats

RematPolicy = Literal['none', 'minimal', 'full']
_REMATS = {'none': None, 'minimal': WORDS['dots'], 'full': WORDS['full']}
Activation = Callable[[jax.Array], jax.Array]
# The number of relative position buckets, and the distance from which all positions share one.
NUM_BUCKETS, MAX_DISTANCE = 32, 128


# The arguments can be given by position, in T5X's order.
@dataclasses.dataclass(frozen=True)
class T5Config:
    """Sizes and choices of an encoder-decoder. The names and defaults are T5X's.

    Attributes:
      vocab_size: the number of tokens.
      dtype: the dtype of activations. Parameters, norms and logits are always float32.
      emb_dim: the width of the residual stream.
      num_heads: the number of attention heads.
      num_encoder_layers: the number of encoder layers.
      num_decoder_layers: the number of decoder layers.
      head_dim: the width of a head.
      mlp_dim: the width of the hidden layer.
      mlp_activations: one function for each part of the hidden layer, by its name in flax.linen, or
        'linear'. The parts are multiplied.
      dropout_rate: the dropout rate during training.
      logits_via_embedding: whether the output layer is the transposed embedding.
      float32_attention_logits: whether products of queries and keys are computed in float32.
      scale_attn_logits: whether queries are divided by sqrt(head_dim). By default, only their
        initial kernels are.
      remat_policy: what the backward pass recomputes: 'none', 'minimal' (everything except the
        products with parameters), 'full' (everything), or a `Remat`, which lists what is kept. Of a
        list of these, layer n takes entry n modulo the length; scanned layers need one entry.
      scan_layers: whether the layers are scanned, with stacked parameters. Needs `scalable`.
      param_scan_axis: the dimension along which scanned parameters are stacked.
      scalable: whether attention kernels have a dimension for heads, and each layer has relative
        position biases. Otherwise, heads are joined, and all layers of a stack share the biases.
      experts: the experts of the layers that have experts instead of an MLP, or None. T5X leaves
        such networks to its users.
    """

    vocab_size: int
    dtype: Any = jnp.float32
    emb_dim: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: Sequence[str | Activation] = ('relu',)
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False
    float32_attention_logits: bool = False
    scale_attn_logits: bool = False
    remat_policy: RematPolicy | Remat | Sequence[RematPolicy | Remat] = 'none'
    scan_layers: bool = False
    param_scan_axis: int = 1
    scalable: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        if self.param_scan_axis not in (0, 1):
            raise ConfigError(f'param_scan_axis is {self.param_scan_axis!r}: use 0 or 1')
        _check(self)
        if self.remat_policy is None:
            object.__setattr__(self, 'remat_policy', 'none')
        if isinstance(self.remat_policy, list):
            object.__setattr__(self, 'remat_policy', tuple(self.remat_policy))
        missing = {}
        if len(self.mlp_activations) == 1:
            missing['mlp_gate'] = 'mlp_activations has one entry'
        check_placed('remat_policy', self.remats, missing)
        if self.scan_layers and len(self.remats) > 1:
            raise ConfigError(
                f'remat_policy has {len(self.remats)} entries, but scanned layers are all equal: '
                'use one entry, or set scan_layers to False'
            )
        if self.scan_layers and not self.scalable:
            raise ConfigError('scan_layers is True and scalable is False: set scalable = True')
        if self.scan_layers and self.experts is not None:
            every = (self.experts.encoder_every, self.experts.decoder_every)
            if every != (1, 1):
                raise ConfigError(
                    f'encoder_every is {every[0]} and decoder_every is {every[1]}, but scanned '
                    'layers are all equal: set both to 1, or scan_layers to False'
                )

    @property
    def remats(self) -> tuple[Remat | None, ...]:
        """What the layers keep for the backward pass; see `list_remats`."""
        return list_remats('remat_policy', self.remat_policy, _REMATS)

    def of_layer(self, stack: str, index: int) -> T5Config:
        """Returns the settings of a layer of a stack; `experts` is None if it has an MLP."""
        if self.experts is None:
            return self
        layers = {'encoder': self.num_encoder_layers, 'decoder': self.num_decoder_layers}
        return dataclasses.replace(self, experts=self.experts.of_layer(layers, stack, index))


@dataclasses.dataclass(frozen=True)
class DecoderOnlyConfig:
    """Sizes and choices of a decoder-only network. The names and defaults are T5X's.

    Attributes:
      num_layers: the number of layers.

    `T5Config` describes the other attributes.
    """

    vocab_size: int
    dtype: Any = jnp.float32
    emb_dim: int = 512
    num_heads: int = 8
    num_layers: int = 6
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: Sequence[str | Activation] = ('relu',)
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        _check(self)

    def layer_config(self) -> T5Config:
        """Returns the same choices for layers, which take a `T5Config`."""
        same = {f.name: getattr(self, f.name) for f in dataclasses.fields(DecoderOnlyConfig)}
        layers = same.pop('num_layers')
        return T5Config(**same, num_encoder_layers=0, num_decoder_layers=layers)


def activation(name: str | Activation) -> Activation:
    """Returns the activation function with a name: 'linear', or a function of flax.linen."""
    if name == 'linear':
        return lambda x: x
    found = getattr(nn, name, None) if isinstance(name, str) else name
    if not callable(found) or isinstance(found, type):
        raise ConfigError(
            f"mlp_activations has {name!r}: use 'linear', or a function of flax.linen such as "
            "'relu', 'gelu' or 'silu'"
        )
    return found


def _check(config: T5Config | DecoderOnlyConfig) -> None:
    """Checks sizes and activations, and makes them hashable."""
    names = ('num_layers', 'num_encoder_layers', 'num_decoder_layers', 'param_scan_axis')
    kind = T5Config if isinstance(config, T5Config) else DecoderOnlyConfig
    check_fields(kind, config, dropout_rate='[0, 1)', **dict.fromkeys(names, '[0, inf)'))
    try:
        dtype = jnp.dtype(config.dtype)
    except TypeError as error:
        raise ConfigError(f"dtype is {config.dtype!r}: use 'float32' or 'bfloat16'") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ConfigError(f"dtype is {dtype.name!r}: use 'float32' or 'bfloat16'")
    activations = config.mlp_activations
    if isinstance(activations, str) or not isinstance(activations, Sequence) or not activations:
        raise ConfigError(
            f"mlp_activations is {activations!r}: use a sequence of names, such as ('relu',)"
        )
    for name in activations:
        activation(name)
    object.__setattr__(config, 'dtype', dtype)
    object.__setattr__(config, 'mlp_activations', tuple(activations))
