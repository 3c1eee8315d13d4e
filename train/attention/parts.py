"""Attention over some keys of a row, as partial sums that can be added over all its keys.

Each part comes with the logarithm of the sum of its weights, so that parts can be added. The
gradients of a part are computed from the logarithm of the sum over all keys.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
G heads of one kv_head, N head_dim.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from partitioning.products.flops import computed_again
from train.attention.dot_product import masked_scores
from train.attention.settings import SplashBlocks
from train.attention.sight import Sight
from train.attention.splash_parts import splash_part, splash_part_gradients

LOWEST = -1e30  # the logarithm of a sum over no keys; infinities would give NaN

# The attention of some queries in float32 [batch, length, heads, head_dim], and the logarithms of
# the sums of their weights, [batch, heads, length].
Attended = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartSettings:
    """How the attention of a part is computed.

    Attributes:
      scale: see `attend`.
      soft_cap: see `attend`.
      blocks: the block sizes of splash kernels, or None to compute all scores at once.
    """

    scale: float
    soft_cap: float | None
    blocks: SplashBlocks | None


def add_parts(one: Attended, other: Attended) -> Attended:
    """Returns the attention over the keys of two parts."""
    log_sum_BHL = jnp.logaddexp(one[1], other[1])

    def weighted(attended_BLHN: jax.Array, part_BHL: jax.Array) -> jax.Array:
        return attended_BLHN * jnp.exp(part_BHL - log_sum_BHL).swapaxes(1, 2)[..., None]

    return weighted(*one) + weighted(*other), log_sum_BHL


def attend_part(
    q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, sight: Sight, settings: PartSettings
) -> Attended:
    """Computes the attention over some keys."""
    scaled, soft_cap = q_BLHN * settings.scale, settings.soft_cap
    if settings.blocks is not None:
        attended_BLHN, log_sum_BHL = splash_part(
            scaled, k_BSKN, v_BSKN, sight, soft_cap, settings.blocks
        )
        is_seen_BHL = log_sum_BHL > LOWEST
        attended_BLHN = jnp.where(
            is_seen_BHL.swapaxes(1, 2)[..., None], attended_BLHN.astype(jnp.float32), 0
        )
        return attended_BLHN, jnp.where(is_seen_BHL, log_sum_BHL, LOWEST)
    scores, _ = masked_scores(scaled, k_BSKN, sight, soft_cap)
    log_sum = jnp.maximum(jax.nn.logsumexp(scores, axis=-1), LOWEST)
    weights = jnp.exp(scores - log_sum[..., None]).astype(v_BSKN.dtype)
    attended = jnp.einsum('BKGLS,BSKN->BLKGN', weights, v_BSKN, preferred_element_type=jnp.float32)
    batch, length, heads, _ = q_BLHN.shape
    return attended.reshape(batch, length, heads, -1), log_sum.reshape(batch, heads, length)


def part_gradients(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    attended_BLHN: jax.Array,
    log_sum_BHL: jax.Array,
    gradient_BLHN: jax.Array,
    *,
    sight: Sight,
    settings: PartSettings,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what some keys add to the gradients of queries, keys and values, in float32.

    Args:
      q_BLHN: the queries.
      k_BSKN: the keys of the part.
      v_BSKN: its values.
      attended_BLHN: the attention over all keys.
      log_sum_BHL: its logarithms of the sums of weights.
      gradient_BLHN: its gradient.
      sight: what the queries see of the keys of the part.
      settings: how it is computed.
    """
    scaled, soft_cap = q_BLHN * settings.scale, settings.soft_cap
    found: Any
    if settings.blocks is not None:
        kept = (scaled, k_BSKN, v_BSKN, attended_BLHN, log_sum_BHL)
        found = splash_part_gradients(*kept, gradient_BLHN, sight, soft_cap, settings.blocks)
    else:
        grouped = (*q_BLHN.shape[:2], k_BSKN.shape[2], -1, q_BLHN.shape[3])
        with computed_again():
            scores, slope = masked_scores(scaled, k_BSKN, sight, soft_cap)
        weights = jnp.exp(scores - log_sum_BHL.reshape(*scores.shape[:-1], 1))
        gradient = gradient_BLHN.astype(jnp.float32).reshape(grouped)
        dv = jnp.einsum('BKGLS,BLKGN->BSKN', weights, gradient)
        of_weights = jnp.einsum('BLKGN,BSKN->BKGLS', gradient, v_BSKN.astype(jnp.float32))
        common = jnp.sum(gradient * attended_BLHN.reshape(grouped), axis=-1)
        of_scores = weights * (of_weights - jnp.moveaxis(common, 1, -1)[..., None])
        if slope is not None:
            of_scores *= slope
        dq = jnp.einsum('BKGLS,BSKN->BLKGN', of_scores, k_BSKN.astype(jnp.float32))
        dk = jnp.einsum('BKGLS,BLKGN->BSKN', of_scores, scaled.astype(jnp.float32).reshape(grouped))
        found = (dq.reshape(q_BLHN.shape), dk, dv)
    dq, dk, dv = (x.astype(jnp.float32) for x in found)
    return dq * settings.scale, dk, dv
