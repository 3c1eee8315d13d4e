"""Logits that a model has not computed yet, and the scores of targets that replace them.

Suffixes of array names: B batch, L length, D embed, V vocab.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from partitioning import constrain
from train.errors import check_fields

DType = Literal['float32', 'bfloat16']


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """How the output layer and the loss of a model are computed.

    They apply to models that hand over their hidden states, such as the built-in transformer and
    T5's networks.

    Attributes:
      num_chunks: the number of parts into which each device divides its vocabulary. Only the
        logits of one part exist at a time. By default, it is the smallest number whose float32
        logits take at most 256 MiB per device. If it is 1, the logits are kept for the backward
        pass; otherwise they are computed again.
      logits_dtype: the dtype in which the matrix product stores the logits. The softmax is always
        computed in float32.
      gradient_dtype: the dtype in which devices exchange the gradients of the output layer. By
        default, it is the dtype of the matrix product.
    """

    num_chunks: int | None = None
    logits_dtype: DType = 'float32'
    gradient_dtype: DType | None = None

    def __post_init__(self) -> None:
        check_fields(OutputSettings, self, 'OutputSettings.')


HIDDEN = ('batch', 'length', 'embed')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeferredLogits:
    """The hidden states and the output layer of a model, in place of its logits.

    A model whose `__call__` has an argument `defer_logits` returns this if the argument is True.

    Attributes:
      x_BLD: the hidden states after the last norm, [batch, length, embed].
      w_DV: the output layer, [embed, vocab], in the dtype of the parameters.
      dtype: the dtype of the operands of the matrix product.
      names: the logical axes of the hidden states. The output layer has ('embed', 'vocab').
      divisor: what the products are divided by.
      soft_cap: bounds the logits by soft_cap * tanh(logit / soft_cap). None leaves them unbounded.
    """

    x_BLD: jax.Array
    w_DV: jax.Array
    dtype: Any = dataclasses.field(metadata={'static': True})
    names: tuple[str, ...] = dataclasses.field(default=HIDDEN, metadata={'static': True})
    divisor: float = dataclasses.field(default=1.0, metadata={'static': True})
    soft_cap: float | None = dataclasses.field(default=None, metadata={'static': True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        return (*self.x_BLD.shape[:-1], self.w_DV.shape[-1])

    def logits(self, on_indivisible: Any = None) -> jax.Array:
        """Computes the logits, float32 [batch, length, vocab].

        Args:
          on_indivisible: the policy for a dimension that its mesh axes do not divide, see
            `partitioning.constrain`.
        """
        x_BLD = constrain(self.x_BLD, HIDDEN, on_indivisible=on_indivisible)
        logits_BLV = multiply(x_BLD, self.w_DV, self.dtype, jnp.float32)
        logits_BLV = finish(logits_BLV, self.divisor, self.soft_cap)
        names = ('batch', 'length', 'vocab')
        return constrain(logits_BLV, names, on_indivisible=on_indivisible)


def multiply(x_BLD: jax.Array, w_DV: jax.Array, dtype: Any, logits_dtype: Any) -> jax.Array:
    """Returns the products of hidden states and output layer, [batch, length, vocab]."""
    x_BLD, w_DV = x_BLD.astype(dtype), w_DV.astype(dtype)
    return jnp.einsum('BLD,DV->BLV', x_BLD, w_DV, preferred_element_type=logits_dtype)


def finish(products_BLV: jax.Array, divisor: float, soft_cap: float | None) -> jax.Array:
    """Returns the float32 logits that the products give."""
    logits_BLV = products_BLV.astype(jnp.float32)
    if divisor != 1:
        logits_BLV = logits_BLV / divisor
    return logits_BLV if soft_cap is None else soft_cap * jnp.tanh(logits_BLV / soft_cap)


class TargetScores(NamedTuple):
    """What losses and metrics of targets need of the logits, each [batch, length].

    All but `argmax_BL` can be differentiated.

    Attributes:
      log_z_BL: the logarithm of the softmax's normalizer.
      logit_BL: the logit of the target.
      logit_sum_BL: the sum of all logits.
      argmax_BL: the token with the greatest logit, int32; the first of several.
    """

    log_z_BL: jax.Array
    logit_BL: jax.Array
    logit_sum_BL: jax.Array
    argmax_BL: jax.Array

    @property
    def nats_BL(self) -> jax.Array:
        """The cross-entropy of each target, in nats."""
        return self.log_z_BL - self.logit_BL


def score_logits(logits_BLV: jax.Array, targets_BL: jax.Array) -> TargetScores:
    """Scores int targets [batch, length], given logits [batch, length, vocab]."""
    # The product with one-hot targets fuses with the softmax. Gathering the target's logit would
    # keep a second copy of the logits.
    one_hot_BLV = jax.nn.one_hot(targets_BL, logits_BLV.shape[-1], dtype=logits_BLV.dtype)
    return TargetScores(
        jax.nn.logsumexp(logits_BLV, axis=-1),
        jnp.sum(one_hot_BLV * logits_BLV, axis=-1),
        jnp.sum(logits_BLV, axis=-1),
        jnp.argmax(logits_BLV, axis=-1).astype(jnp.int32),
    )
