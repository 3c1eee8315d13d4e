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
from train.attention.sight import ATTENDED, Sight, sees_any

Arrays = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocks:
    """What a sum over blocks computes; it can be hashed.

    `sight` says what a query sees, without its arrays.
    """

    sight: Sight
    queries: int
    keys: int


class BlockPairs:
    """Pairs of a block of queries and a block of keys with its values.

    `indices` are two int32 arrays, of the block of queries and of the block of keys of each pair.
    Pairs of which the sight is known to see nothing before the program runs are left out.
    """

    def __init__(self, blocks: Blocks, q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, arrays: Arrays):
        self._blocks, self._sight = blocks, dataclasses.replace(blocks.sight, **arrays)
        self._length, (_, self._slots, self._kv_heads, _) = q_BLHN.shape[1], k_BSKN.shape
        self.q = self.split_queries(q_BLHN)
        self.k, self.v = self.split_keys(k_BSKN), self.split_keys(v_BSKN)
        self._blocks_segments: Any = None
        if self._sight.segments_BL is not None and self._sight.segments_BS is not None:
            self._blocks_segments = (
                self.split_queries(self._sight.segments_BL[..., None, None])[:, :, 0, 0, :, 0],
                self.split_keys(self._sight.segments_BS[..., None, None])[:, :, 0, :, 0],
            )
        i, j = np.indices((len(self.q), len(self.k))).reshape(2, -1)
        if isinstance(self._sight.first, int):
            seen = sees_any(self._sight.known_window, *self._distances(i, j))
            i, j = i[seen], j[seen]
        self.indices = i.astype(np.int32), j.astype(np.int32)

    def split_queries(self, x_BLHN: jax.Array) -> jax.Array:
        """Returns the blocks of an array with queries: [blocks, B, K, G, L, N]."""
        kv_heads = min(self._kv_heads, x_BLHN.shape[2])
        return _split(x_BLHN, self._blocks.queries, kv_heads)

    def split_keys(self, x_BSKN: jax.Array) -> jax.Array:
        """Returns the blocks of an array with keys: [blocks, B, K, S, N]."""
        return _split(x_BSKN, self._blocks.keys, x_BSKN.shape[2])[:, :, :, 0]

    def join_queries(self, blocks_x: jax.Array) -> jax.Array:
        """The inverse of `split_queries`: [B, length, H, N]."""
        return _join(blocks_x, self._length)

    def scores(self, i: Any, j: Any) -> jax.Array:
        """Returns the scores of pair (i, j), float32 [B, K, G, L, S]; -inf is not seen."""
        blocks = self._blocks
        products = multiply('BKGLN,BKSN->BKGLS', block(self.q, i), block(self.k, j))
        scores = self._sight.bound(products * self._sight.scale)
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
        is_known = isinstance(self._sight.first, int) and not self._sight.chooses
        if is_known or len(self.indices[0]) == 1:
            return add(state, i, j)  # `indices` has left out such pairs, or the only pair is seen
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
    return jax.lax.dynamic_index_in_dim(blocks_x, i, keepdims=False)


def with_block(blocks_x: jax.Array, i: Any, x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(blocks_x, x, i, 0)


def _split(x_BLHN: jax.Array, rows: int, kv_heads: int) -> jax.Array:
    """The blocks of an array, with zeros up to whole blocks: [blocks, B, kv_heads, G, rows, N]."""
    x_BLHN = jnp.pad(x_BLHN, ((0, 0), (0, -x_BLHN.shape[1] % rows), (0, 0), (0, 0)))
    batch, _, heads, width = x_BLHN.shape
    shape = (batch, -1, rows, kv_heads, heads // kv_heads, width)
    return x_BLHN.reshape(shape).transpose(1, 0, 3, 4, 2, 5)


def _join(blocks_x: jax.Array, length: int) -> jax.Array:
    n, batch, kv_heads, group, rows, width = blocks_x.shape
    x = blocks_x.transpose(1, 0, 4, 2, 3, 5)
    return x.reshape(batch, n * rows, kv_heads * group, width)[:, :length]


# The maximum before the first key: less than all scores, and unlike -inf, without inf - inf.
LOWEST = -1e30


def attend_by_blocks(
    q_BLHN: jax.Array,
    k_BSKN: jax.Array,
    v_BSKN: jax.Array,
    sight: Sight,
    *,
    queries: int,
    keys: int,
) -> jax.Array:
    """Computes attention block by block; see `attend`.

    A query that sees no key gets zeros. `queries` and `keys` are the largest numbers of a block.
    """
    blocks = Blocks(
        sight=sight.without_arrays(),
        queries=min(queries, q_BLHN.shape[1]),
        keys=min(keys, k_BSKN.shape[1]),
    )
    return _attend(blocks, q_BLHN, k_BSKN, v_BSKN, sight.arrays())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, arrays: Arrays) -> jax.Array:
    return _forward(blocks, q_BLHN, k_BSKN, v_BSKN, arrays)[0]


def _forward(blocks: Blocks, q_BLHN: Any, k_BSKN: Any, v_BSKN: Any, arrays: Arrays) -> Any:
    attended_BLHN, sums_BLH = attend_with_sums(blocks, q_BLHN, k_BSKN, v_BSKN, arrays)
    attended_BLHN = checkpoint_name(attended_BLHN.astype(q_BLHN.dtype), ATTENDED)
    sums = checkpoint_name(sums_BLH, ATTENDED)
    return attended_BLHN, (q_BLHN, k_BSKN, v_BSKN, arrays, attended_BLHN, sums)


def attend_with_sums(
    blocks: Blocks, q_BLHN: jax.Array, k_BSKN: jax.Array, v_BSKN: jax.Array, arrays: Arrays
) -> tuple[jax.Array, jax.Array]:
    """Returns the attention and the logarithms of the sums of its weights.

    Returns the attention, float32 of the shape of the queries, and the logarithms, float32 [batch,
    length, heads]. A query that sees no key has zeros and `LOWEST`.
    """
    pairs = BlockPairs(blocks, q_BLHN, k_BSKN, v_BSKN, arrays)

    def add(state: Any, i: jax.Array, j: jax.Array) -> Any:
        attended_BKGLN, top_BKGL, sum_BKGL = state
        scores = pairs.scores(i, j)
        new_top_BKGL = jnp.maximum(top_BKGL, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_top_BKGL[..., None])
        kept_BKGL = jnp.exp(top_BKGL - new_top_BKGL)
        sum_BKGL = sum_BKGL * kept_BKGL + jnp.sum(weights, axis=-1)
        v_BKSN = block(pairs.v, j)
        added_BKGLN = multiply('BKGLS,BKSN->BKGLN', weights.astype(v_BKSN.dtype), v_BKSN)
        return attended_BKGLN * kept_BKGL[..., None] + added_BKGLN, new_top_BKGL, sum_BKGL

    def step(carry: Any, pair: Any) -> tuple[Any, None]:
        i, j = pair
        new = pairs.unless_unseen(add, jax.tree.map(lambda x: block(x, i), carry), i, j)
        return jax.tree.map(lambda x, y: with_block(x, i, y), carry, new), None

    shape = pairs.q.shape
    start = (jnp.zeros(shape), jnp.full(shape[:-1], LOWEST), jnp.zeros(shape[:-1]))
    carry, _ = jax.lax.scan(step, start, pairs.indices)
    blocks_attended, blocks_top, blocks_sum = carry
    blocks_sum = jnp.where(blocks_sum == 0, 1.0, blocks_sum)
    attended_BLHN = pairs.join_queries(blocks_attended / blocks_sum[..., None])
    sums_BLH = pairs.join_queries((blocks_top + jnp.log(blocks_sum))[..., None])[..., 0]
    return attended_BLHN, sums_BLH


def _backward(blocks: Blocks, saved: Any, d_BLHN: jax.Array) -> Any:
    arrays = (*saved, d_BLHN)
    gradients = find_gradients(blocks, *arrays)
    return *(d.astype(x.dtype) for d, x in zip(gradients, saved[:3], strict=True)), None


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
    """Returns the gradients of queries, keys and values, in float32.

    Args:
      attended_BLHN: the attention over all keys, of which these may be a part.
      sums_BLH: the logarithms of the sums of its weights, float32.
      d_BLHN: the gradient of the attention.
    """
    pairs = BlockPairs(blocks, q_BLHN, k_BSKN, v_BSKN, arrays)
    blocks_d, blocks_sums = pairs.split_queries(d_BLHN), pairs.split_queries(sums_BLH[..., None])
    dots_BLH = jnp.sum(attended_BLHN.astype(jnp.float32) * d_BLHN.astype(jnp.float32), axis=-1)
    blocks_dots = pairs.split_queries(dots_BLH[..., None])

    def add(state: Any, i: jax.Array, j: jax.Array) -> Any:
        dq_BKGLN, dk_BKSN, dv_BKSN = state
        q_BKGLN, k_BKSN, v_BKSN = block(pairs.q, i), block(pairs.k, j), block(pairs.v, j)
        d_BKGLN = block(blocks_d, i)
        with computed_again():
            scores = pairs.scores(i, j)
        weights = jnp.exp(scores - block(blocks_sums, i))
        d_scores = multiply('BKGLN,BKSN->BKGLS', d_BKGLN, v_BKSN) - block(blocks_dots, i)
        d_scores *= weights * blocks.sight.scale
        if (soft_cap := blocks.sight.soft_cap) is not None:
            seen = jnp.where(weights == 0, 0.0, scores)  # the others are -inf
            d_scores *= 1 - jnp.square(seen / soft_cap)
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

    start = tuple(jnp.zeros(x.shape) for x in (pairs.q, pairs.k, pairs.v))
    (blocks_dq, blocks_dk, blocks_dv), _ = jax.lax.scan(step, start, pairs.indices)
    return (
        pairs.join_queries(blocks_dq),
        _join(blocks_dk[:, :, :, None], k_BSKN.shape[1]),
        _join(blocks_dv[:, :, :, None], k_BSKN.shape[1]),
    )


_attend.defvjp(_forward, _backward)
