"""The scores of targets.

Suffixes of array names: B batch, L length, V vocab.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
