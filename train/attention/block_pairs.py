"""Blocks of queries and of keys, and the pairs of them that attention computes.

Suffixes of array names: B batch, L queries of a block, S keys of a block, H heads, K kv_heads,
G heads of one kv_head, N head_dim. Names that begin with `blocks_` have one more dimension in
front, the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
