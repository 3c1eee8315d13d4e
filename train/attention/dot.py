"""Attention that computes the scores of all queries and keys at once.

Suffixes of array names: B batch, L length, S slots of keys and values, H heads, K kv_heads,
G heads of one kv_head, N head_dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from train.attention.sight import Sight


def attend_at_once(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
    scale: float,
    soft_cap: float | None,
) -> jax.Array:
    """Computes attention in plain jax, with scores in float32; see `attend`."""
    if soft_cap is None:
        mask = sight.mask(q_BLHN.shape[1], k_BSKN.shape[1])
        return jax.nn.dot_product_attention(q_BLHN, k_BSKN, v_BSKN, mask=mask, scale=scale)
    # jax.nn.dot_product_attention has no soft cap.
    scores, _ = masked_scores(q_BLHN * scale, k_BSKN, sight, soft_cap)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BSKN.dtype)
    return jnp.einsum('BKGLS,BSKN->BLKGN', weights, v_BSKN).reshape(q_BLHN.shape)


def masked_scores(
    q_BLHN: jax.Array, k_BSKN: jax.Array, sight: Sight, soft_cap: float | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the scores of scaled queries, -inf where they see no key, and the soft cap's slope.

    Returns:
      The scores, float32 [batch, kv_heads, group, length, slots]; and the derivative of their soft
      cap, like them, or None without one.
    """
    q_BLKGN = q_BLHN.reshape(*q_BLHN.shape[:2], k_BSKN.shape[2], -1, q_BLHN.shape[3])
    scores = jnp.einsum('BLKGN,BSKN->BKGLS', q_BLKGN, k_BSKN, preferred_element_type=jnp.float32)
    slope = None
    if soft_cap is not None:
        bounded = jnp.tanh(scores / soft_cap)
        scores, slope = soft_cap * bounded, 1 - jnp.square(bounded)
    mask = sight.mask(q_BLHN.shape[1], k_BSKN.shape[1])
    if mask is not None:
        scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
    return scores, slope
