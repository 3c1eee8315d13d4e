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

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from partitioning.products.flops import computed_again
from train.attention.settings import ATTENDED
from train.attention.sight import Sight

Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """What a sum over blocks computes; it can be hashed.

    Attributes:
      sight: what a query sees, without its arrays.
      scale: see `attend`.
      soft_cap: see `attend`.
      queries: the number of queries of a block.
      keys: the number of keys of a block.
    """

    sight: Sight
    scale: float
    soft_cap: float | None
    queries: int
    keys: int


class BlockPairs:
    """Pairs of a block of queries and a block of keys.

    Args:
      blocks: what is computed.
      arrays: the arrays of the sight.
      length: the number of queries.
      slots: the number of keys.
      kv_heads: the number of kv_heads.

    Attributes:
      indices: the block of queries and the block of keys of each pair, two int32 arrays. Pairs of
        which the sight is known to see nothing before the program runs are left out.
    """

    def __init__(self, blocks: Blocks, arrays: Arrays, length: int, slots: int, kv_heads: int):
        self._blocks, self._sight = blocks, blocks.sight.with_arrays(arrays)
        self._length, self._slots, self._kv_heads = length, slots, kv_heads
        self._blocks_segments: Any = None
        if self._sight.segments_BL is not None and self._sight.segments_BS is not None:
            self._blocks_segments = (
                self.split_queries(self._sight.segments_BL[..., None, None])[:, :, 0, 0, :, 0],
                self.split_keys(self._sight.segments_BS[..., None, None])[:, :, 0, :, 0],
            )
        i, j = np.indices((-(-length // blocks.queries), -(-slots // blocks.keys))).reshape(2, -1)
        if isinstance(self._sight.first, int):
            seen = self._sight.band.sees_any(*self._distances(i, j))
            i, j = i[seen], j[seen]
        self.indices = i.astype(np.int32), j.astype(np.int32)

    def split_queries(self, x_BLHN: jax.Array) -> jax.Array:
        """Returns the blocks of an array with queries: [blocks, B, K, G, L, N]."""
        x_BLHN = _pad(x_BLHN, self._blocks.queries)
        batch, _, heads, width = x_BLHN.shape
        kv_heads = min(self._kv_heads, heads)
        shape = (batch, -1, self._blocks.queries, kv_heads, heads // kv_heads, width)
        return x_BLHN.reshape(shape).transpose(1, 0, 3, 4, 2, 5)

    def split_keys(self, x_BSKN: jax.Array) -> jax.Array:
        """Returns the blocks of an array with keys: [blocks, B, K, S, N]."""
        x_BSKN = _pad(x_BSKN, self._blocks.keys)
        batch, _, kv_heads, width = x_BSKN.shape
        shape = (batch, -1, self._blocks.keys, kv_heads, width)
        return x_BSKN.reshape(shape).transpose(1, 0, 3, 2, 4)

    def join_queries(self, blocks_x: jax.Array) -> jax.Array:
        """The inverse of `split_queries`: [B, length, H, N]."""
        n, batch, kv_heads, group, rows, width = blocks_x.shape
        x = blocks_x.transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(batch, n * rows, kv_heads * group, width)[:, : self._length]

    def join_keys(self, blocks_x: jax.Array) -> jax.Array:
        """The inverse of `split_keys`: [B, slots, K, N]."""
        n, batch, kv_heads, rows, width = blocks_x.shape
        x = blocks_x.transpose(1, 0, 3, 2, 4)
        return x.reshape(batch, n * rows, kv_heads, width)[:, : self._slots]

    def scores(self, q_BKGLN: jax.Array, k_BKSN: jax.Array, i: Any, j: Any) -> jax.Array:
        """Returns the scores of pair (i, j), float32 [B, K, G, L, S]; -inf is not seen."""
        blocks = self._blocks
        scores = multiply('BKGLN,BKSN->BKGLS', q_BKGLN, k_BKSN) * blocks.scale
        if blocks.soft_cap is not None:
            scores = blocks.soft_cap * jnp.tanh(scores / blocks.soft_cap)
        slot_S = j * blocks.keys + jnp.arange(blocks.keys)
        place_L = self._sight.first + i * blocks.queries + jnp.arange(blocks.queries)
        seen = self._sight.sees(place_L[:, None] - slot_S) & (slot_S < self._slots)
        if self._blocks_segments is not None:
            segments_BL, segments_BS = map(block, self._blocks_segments, (i, j))
            same = segments_BL[:, :, None] == segments_BS[:, None, :]
            seen = (seen & same)[:, None, None]
        return jnp.where(seen, scores, -jnp.inf)

    def unless_unseen(self, add: Callable[..., Any], state: Any, i: Any, j: Any) -> Any:
        """Returns `add(state, i, j)`, or `state` if arrays say that pair (i, j) sees nothing."""
        if isinstance(self._sight.first, int) and not self._sight.chooses:
            return add(state, i, j)  # `indices` has left out such pairs
        seen = self._sight.sees_any(*self._distances(i, j))
        return jax.lax.cond(seen, add, lambda state, i, j: state, state, i, j)

    def _distances(self, i: Any, j: Any) -> tuple[Any, Any]:
        """The least and the greatest distance of a query and a key of pair (i, j)."""
        first = self._sight.first + i * self._blocks.queries - j * self._blocks.keys
        return first - (self._blocks.keys - 1), first + (self._blocks.queries - 1)


def multiply(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns a product in float32."""
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)


def block(blocks_x: jax.Array, i: Any) -> jax.Array:
    """Returns block i."""
    return jax.lax.dynamic_index_in_dim(blocks_x, i, keepdims=False)


def with_block(blocks_x: jax.Array, i: Any, x: jax.Array) -> jax.Array:
    """Returns the blocks with `x` as block i."""
    return jax.lax.dynamic_update_index_in_dim(blocks_x, x, i, 0)


def _pad(x_BL: jax.Array, rows: int) -> jax.Array:
    """`x_BL` with zeros up to whole blocks."""
    missing = -x_BL.shape[1] % rows
    return jnp.pad(x_BL, [(0, 0), (0, missing)] + [(0, 0)] * (x_BL.ndim - 2)) if missing else x_BL


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
