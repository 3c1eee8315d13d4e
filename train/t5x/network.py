"""T5X's `network` of decoder-only models, as this trainer's `Transformer`.

Positions are rotary here and relative biases in T5X, so checkpoints of T5X's networks cannot be
read; sizes, types and dropout mean the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from partitioning import PjitPartitioner
from train.checks import check_partitioner
from train.errors import ConfigError
from train.models import transformer
from train.t5x.refusals import expect, refusal

# Of the gated hidden layer: what one half goes through -> its name here. The other is linear.
MLP_ACTIVATIONS: dict[str, transformer.Activation] = {
    'silu': 'silu',
    'swish': 'silu',
    'gelu': 'gelu',
    'relu': 'relu',
}
ONLY_DECODER = 'this trainer has a decoder-only model: use models.DecoderOnlyModel with '
ONLY_DECODER += 'network.DecoderWrapper and network.TransformerConfig'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes of a decoder-only model.

    Attributes:
      vocab_size: number of tokens.
      dtype: of computation, 'float32' or 'bfloat16'.
      emb_dim: width of the residual stream.
      num_heads: heads of the attention.
      num_layers: layers.
      head_dim: width of a head; even.
      mlp_dim: width of the hidden layer.
      mlp_activations: of the hidden layer's two halves, whose product it is.
      dropout_rate: of the attention and MLP outputs, while training.
      logits_via_embedding: the output layer is the embedding's transpose.
    """

    vocab_size: int
    dtype: Any = 'float32'
    emb_dim: int = 512
    num_heads: int = 8
    num_layers: int = 6
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: Sequence[str] = ('silu', 'linear')
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False

    def __post_init__(self) -> None:
        activations = self.mlp_activations
        gated = isinstance(activations, list | tuple) and len(activations) == 2
        if not gated or activations[0] not in MLP_ACTIVATIONS or activations[1] != 'linear':
            raise refusal(
                'network.TransformerConfig.mlp_activations',
                activations,
                "the hidden layer is gated: write ('silu', 'linear'), or 'gelu' or 'relu' first",
            )

    def transformer(self) -> transformer.Transformer:
        """The model."""
        config = transformer.TransformerConfig(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            embed_dim=self.emb_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            dropout_rate=self.dropout_rate,
            dtype=self.dtype if isinstance(self.dtype, str) else jnp.dtype(self.dtype).name,
            activation=MLP_ACTIVATIONS[self.mlp_activations[0]],
            tie_embeddings=self.logits_via_embedding,
            scan_layers=False,  # as in T5X: Adafactor scales each layer's parameters by themselves
        )
        return transformer.Transformer(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderWrapper:
    """The network of a decoder-only model."""

    config: TransformerConfig

    def __post_init__(self) -> None:
        key, written = 'network.DecoderWrapper.config', '@network.TransformerConfig()'
        expect(key, self.config, TransformerConfig, written)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Sizes of T5, an encoder-decoder; refused."""

    vocab_size: int
    dtype: Any = 'float32'
    emb_dim: int = 512
    num_heads: int = 8
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    head_dim: int = 64
    mlp_dim: int = 2048
    mlp_activations: Sequence[str] = ('relu',)
    dropout_rate: float = 0.1
    logits_via_embedding: bool = False
    float32_attention_logits: bool = False

    def __post_init__(self) -> None:
        raise ConfigError(
            f'network.T5Config has {self.num_encoder_layers} layers of an encoder: {ONLY_DECODER}'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """T5's network, an encoder-decoder; refused."""

    config: Any = None

    def __post_init__(self) -> None:
        raise ConfigError(f'network.Transformer is an encoder-decoder: {ONLY_DECODER}')


def with_kv_heads(partitioner: Any) -> Any:
    """The partitioner with a rule for 'kv_heads', which T5X's rules call 'heads' too."""
    if not isinstance(partitioner, PjitPartitioner):
        return partitioner
    check_partitioner(partitioner)  # its rules may depend on its mesh
    rules = partitioner.logical_axis_rules
    heads = [('kv_heads', axes) for name, axes in rules if name == 'heads']
    if not heads or any(name == 'kv_heads' for name, _ in rules):
        return partitioner
    return partitioner.with_rules(rules.with_rules([*rules, *heads]))
