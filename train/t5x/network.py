"""T5X's `network` of decoder-only models, translated to this trainer's `Transformer`.

This trainer uses rotary positions and T5X uses relative biases, so checkpoints of T5X cannot be
read. Sizes, dtypes and dropout mean the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from partitioning import PjitPartitioner
from train.config import check_partitioner
from train.errors import ConfigError
from train.models import transformer
from train.models.config import Activation
from train.t5x.refusals import expect, refusal

# T5X's name of the activation of the gated hidden layer -> its name here. The gate is linear.
MLP_ACTIVATIONS: dict[str, Activation] = {
    'silu': 'silu',
    'swish': 'silu',
    'gelu': 'gelu_tanh',
    'relu': 'relu',
}
ONLY_DECODER = 'this trainer has only a decoder-only model: use models.DecoderOnlyModel with '
ONLY_DECODER += 'network.DecoderWrapper and network.TransformerConfig'


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of a decoder-only model.

    Attributes:
      vocab_size: the number of tokens.
      dtype: the dtype of computations, 'float32' or 'bfloat16'.
      emb_dim: the width of the residual stream.
      num_heads: the number of attention heads.
      num_layers: the number of layers.
      head_dim: the width of a head, an even number.
      mlp_dim: the width of the hidden layer.
      mlp_activations: the activations of the two halves of the hidden layer, which are multiplied.
      dropout_rate: the dropout rate of attention and MLP outputs during training.
      logits_via_embedding: whether the output layer is the transposed embedding.
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
                "the hidden layer is gated; write ('silu', 'linear'), or 'gelu' or 'relu' for "
                "'silu'",
            )

    def transformer(self) -> transformer.Transformer:
        """The same model for this trainer."""
        dtype: Any = self.dtype if isinstance(self.dtype, str) else jnp.dtype(self.dtype).name
        config = transformer.TransformerConfig(
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            embed_dim=self.emb_dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            dropout_rate=self.dropout_rate,
            dtype=dtype,
            activation=MLP_ACTIVATIONS[self.mlp_activations[0]],
            tie_embeddings=self.logits_via_embedding,
            scan_layers=False,  # as in T5X, so that Adafactor scales each layer separately
        )
        return transformer.Transformer(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderWrapper:
    """The network of a decoder-only model.

    Attributes:
      config: its sizes.
    """

    config: TransformerConfig

    def __post_init__(self) -> None:
        key, written = 'network.DecoderWrapper.config', '@network.TransformerConfig()'
        expect(key, self.config, TransformerConfig, written)


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config:
    """Stands for the sizes of T5, an encoder-decoder model, which is refused."""

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
            f'network.T5Config has {self.num_encoder_layers} encoder layers: {ONLY_DECODER}'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transformer:
    """Stands for T5's network, an encoder-decoder model, which is refused."""

    config: Any = None

    def __post_init__(self) -> None:
        raise ConfigError(f'network.Transformer is an encoder-decoder model: {ONLY_DECODER}')


def with_kv_heads(partitioner: Any) -> Any:
    """The partitioner with a rule for 'kv_heads', which T5X's rules also call 'heads'."""
    if not isinstance(partitioner, PjitPartitioner):
        return partitioner
    check_partitioner(partitioner)  # its rules may depend on its mesh
    rules = partitioner.logical_axis_rules
    heads = [('kv_heads', axes) for name, axes in rules if name == 'heads']
    if not heads or any(name == 'kv_heads' for name, _ in rules):
        return partitioner
    return partitioner.with_rules(rules.with_rules([*rules, *heads]))
