"""Attention block by block in plain jax: the scores of all queries and keys never exist at once.

The softmax over the keys is computed online: each block of keys corrects the maximum, the sum of
the weights and the weighted sum of the values (Milakov and Gimelshein, Online normalizer
calculation for softmax, 2018; Rabe and Staats, Self-attention does not need O(n^2) memory, 2021).
The backward pass computes the scores again from the logarithm of the sums (Dao et al.,
FlashAttention, 2022), so that only the arguments, the result and these logarithms are kept.

Suffixes of array names: B batch, L length or queries of a block, S slots or keys of a block,
H heads, K kv_heads, G heads of one kv_head, N head_dim. Names that begin with `blocks_` have one
more dimension in front, the block.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from partitioning.products.recomputed import computed_again
from train.attention.block_pairs import Arrays, BlockPairs, Blocks, block, multiply, with_block
from train.attention.settings import ATTENDED
from train.attention.sight import Sight

# The maximum before the first key: less than all scores, and unlike -inf, without inf - inf.
LOWEST = -1e30


def attend_by_blocks(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
    scale: float,
    soft_cap: float | None,
    *,
    queries: int,
    keys: int,
) -> jax.Array:
    """Computes attention block by block; see `attend`.

    A query that sees no key gets zeros.

    Args:
      q_BLHN: see `attend`.
      k_BSKN: see `attend`.
      v_BSKN: see `attend`.
      sight: see `attend`.
      scale: see `attend`.
      soft_cap: see `attend`.
      queries: the largest number of queries of a block.
      keys: the largest number of keys of a block.
    """
    blocks = Blocks(
        sight=sight.without_arrays(),
        scale=scale,
        soft_cap=soft_cap,
        queries=min(queries, q_BLHN.shape[1]),
        keys=min(keys, k_BSKN.shape[1]),
    )
    return _attend(blocks, q_BLHN, k_BSKN, v_BSKN, sight.arrays())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, arrays: Arrays) -> jax.Array:
    return attend_with_sums(blocks, q_BLHN, k_BSKN, v_BSKN, arrays)[0]


def _forward(blocks: Blocks, q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, arrays: Arrays) -> Any:
    found = attend_with_sums(blocks, q_BLHN, k_BSKN, v_BSKN, arrays)
    attended_BLHN, sums = (checkpoint_name(x, ATTENDED) for x in found)
    return attended_BLHN, (q_BLHN, k_BSKN, v_BSKN, arrays, attended_BLHN, sums)


def attend_with_sums(
    blocks: Blocks, q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, arrays: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention and the logarithms of the sums of its weights.

    Args:
      blocks: what does not change between blocks.
      q_BLHN: see `attend`.
      k_BSKN: see `attend`.
      v_BSKN: see `attend`.
      arrays: the arrays of the sight.

    Returns:
      The attention, like the queries, and the logarithms, float32 [batch, length, heads]. A query
      that sees no key has zeros and `LOWEST`.
    """
    pairs = BlockPairs(blocks, arrays, q_BLHN.shape[1], *k_BSKN.shape[1:3])
    blocks_q = pairs.split_queries(q_BLHN)
    blocks_k, blocks_v = pairs.split_keys(k_BSKN), pairs.split_keys(v_BSKN)

    def add(state: Any, i: jax.Array, j: jax.Array) -> Any:
        attended_BKGLN, top_BKGL, sum_BKGL = state
        scores = pairs.scores(block(blocks_q, i), block(blocks_k, j), i, j)
        new_top_BKGL = jnp.maximum(top_BKGL, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top_BKGL[..., None])
        kept_BKGL = jnp.exp(top_BKGL - new_top_BKGL)
        sum_BKGL = sum_BKGL * kept_BKGL + jnp.sum(weights, axis=-1)
        v_BKSN = block(blocks_v, j)
        added_BKGLN = multiply('BKGLS,BKSN->BKGLN', weights.astype(v_BKSN.dtype), v_BKSN)
        return attended_BKGLN * kept_BKGL[..., None] + added_BKGLN, new_top_BKGL, sum_BKGL

    def step(carry: Any, pair: Any) -> tuple[Any, None]:
        i, j = pair
        new = pairs.unless_unseen(add, jax.tree.map(lambda x: block(x, i), carry), i, j)
        return jax.tree.map(lambda x, y: with_block(x, i, y), carry, new), None

    shape = blocks_q.shape
    start = (jnp.zeros(shape), jnp.full(shape[:-1], LOWEST), jnp.zeros(shape[:-1]))
    carry, _ = jax.lax.scan(step, start, pairs.indices)
    blocks_attended, blocks_top, blocks_sum = carry
    blocks_sum = jnp.where(blocks_sum == 0, 1.0, blocks_sum)
    attended_BLHN = pairs.join_queries(blocks_attended / blocks_sum[..., None])
    sums_BLH = pairs.join_queries((blocks_top + jnp.log(blocks_sum))[..., None])[..., 0]
    return attended_BLHN.astype(q_BLHN.dtype), sums_BLH


def _backward(blocks: Blocks, saved: Any, d_BLHN: jax.Array) -> Any:
    q_BLHN, k_BSKN, v_BSKN, arrays, attended_BLHN, sums_BLH = saved
    gradients = find_gradients(
        blocks, q_BLHN, k_BSKN, v_BSKN, arrays, attended_BLHN, sums_BLH, d_BLHN
    )
    return *gradients, None


def find_gradients(
    blocks: Blocks,
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    arrays: Arrays,
    attended_BLHN: jax.Array,
    sums_BLH: jax.Array,
    d_BLHN: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradients of queries, keys and values, like these.

    Args:
      blocks: what does not change between blocks.
      q_BLHN: see `attend`.
      k_BSKN: see `attend`.
      v_BSKN: see `attend`.
      arrays: the arrays of the sight.
      attended_BLHN: the attention over all keys, of which these may be a part.
      sums_BLH: the logarithms of the sums of its weights, float32.
      d_BLHN: the gradient of the attention.
    """
    pairs = BlockPairs(blocks, arrays, q_BLHN.shape[1], *k_BSKN.shape[1:3])
    blocks_q = pairs.split_queries(q_BLHN)
    blocks_k, blocks_v = pairs.split_keys(k_BSKN), pairs.split_keys(v_BSKN)
    blocks_d, blocks_sums = pairs.split_queries(d_BLHN), pairs.split_queries(sums_BLH[..., None])
    dots_BLH = jnp.sum(attended_BLHN.astype(jnp.float32) * d_BLHN.astype(jnp.float32), axis=-1)
    blocks_dots = pairs.split_queries(dots_BLH[..., None])

    def add(state: Any, i: jax.Array, j: jax.Array) -> Any:
        dq_BKGLN, dk_BKSN, dv_BKSN = state
        q_BKGLN, k_BKSN, v_BKSN = block(blocks_q, i), block(blocks_k, j), block(blocks_v, j)
        d_BKGLN = block(blocks_d, i)
        with computed_again():
            scores = pairs.scores(q_BKGLN, k_BKSN, i, j)
        weights = jnp.exp(scores - block(blocks_sums, i))
        d_scores = multiply('BKGLN,BKSN->BKGLS', d_BKGLN, v_BKSN) - block(blocks_dots, i)
        d_scores *= weights * blocks.scale
        if blocks.soft_cap is not None:
            seen = jnp.where(weights == 0, 0.0, scores)  # the others are -inf
            d_scores *= 1 - jnp.square(seen / blocks.soft_cap)
        d_scores, weights = d_scores.astype(q_BKGLN.dtype), weights.astype(d_BKGLN.dtype)
        return (
            dq_BKGLN + multiply('BKGLS,BKSN->BKGLN', d_scores, k_BKSN),
            dk_BKSN + multiply('BKGLS,BKGLN->BKSN', d_scores, q_BKGLN),
            dv_BKSN + multiply('BKGLS,BKGLN->BKSN', weights, d_BKGLN),
        )

    def step(carry: Any, pair: Any) -> tuple[Any, None]:
        places = (pair[0], pair[1], pair[1])
        new = pairs.unless_unseen(add, tuple(map(block, carry, places)), *pair)
        return tuple(map(with_block, carry, places, new)), None

    start = tuple(jnp.zeros(x.shape) for x in (blocks_q, blocks_k, blocks_v))
    (blocks_dq, blocks_dk, blocks_dv), _ = jax.lax.scan(step, start, pairs.indices)
    return (
        pairs.join_queries(blocks_dq).astype(q_BLHN.dtype),
        pairs.join_keys(blocks_dk).astype(k_BSKN.dtype),
        pairs.join_keys(blocks_dv).astype(v_BSKN.dtype),
    )


_attend.defvjp(_forward, _backward)
