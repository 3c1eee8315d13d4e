"""Shards of any cut -> one array of any layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from partitioning.compat.pytorch.shards.metadata import ShardMetadata, check_tensor
from partitioning.layout.ownership import index_bounds
from partitioning.rules import check_layout

Blocks = Sequence[tuple[ShardMetadata, Any]]


def array_from_shards(
    blocks: Blocks, shape: Sequence[int], sharding: Sharding, dtype: Any = None
) -> jax.Array:
    """A sharded array out of blocks of it, however these were cut.

    Usage:
      shards = ChunkShardingSpec(0, range(3)).build_metadata((10, 16))
      x = array_from_shards([(s, load(s.placement)) for s in shards], (10, 16), sharding)

    Args:
      blocks: each shard with its array, or with a function that reads it; a process reads only
        those that its devices hold some of, each once.
      shape: of the whole array.
      sharding: how it is laid out.
      dtype: its type, to which the blocks are cast; by default that of the blocks.

    Returns:
      A jax.Array of that shape and sharding.

    Raises:
      ValueError: shards that do not make an array of this shape, or blocks of other sizes or types
        than they say.
    """
    check_tensor([shard for shard, _ in blocks], shape)
    if isinstance(sharding, NamedSharding):
        check_layout(sharding.spec, sharding.mesh, 'the array', shape)
    read: dict[int, np.ndarray] = {}
    kind = None if dtype is None else np.dtype(dtype)

    def block(i: int) -> np.ndarray:
        if i not in read:
            read[i] = _checked(*blocks[i])
            if kind is not None:
                read[i] = read[i].astype(kind, casting='same_kind')
            _check_type(blocks[i][0], read[i], *next((blocks[j][0], x) for j, x in read.items()))
        return read[i]

    def part(index: Any) -> np.ndarray:
        bounds = index_bounds(index, shape)
        pieces = []
        for i, (shard, _) in enumerate(blocks):
            places = [
                (max(start, s.start), min(stop, s.stop))
                for (start, stop), s in zip(bounds, shard.index, strict=True)
            ]
            if all(low < high for low, high in places):
                pieces.append((places, i))
        made = np.empty(
            [stop - start for start, stop in bounds],
            kind or block(pieces[0][1] if pieces else 0).dtype,
        )
        for places, i in pieces:
            made[_within(places, [start for start, _ in bounds])] = block(i)[
                _within(places, blocks[i][0].shard_offsets)
            ]
        return made

    return jax.make_array_from_callback(tuple(shape), sharding, part)


def _check_type(shard: ShardMetadata, block: np.ndarray, first: ShardMetadata, of: Any) -> None:
    """Raises ValueError for blocks of two types, and for one that jax would change."""
    if block.dtype != of.dtype:
        raise ValueError(f'shard {shard} is {block.dtype}, {first} {of.dtype}: give dtype=')
    kept = jax.dtypes.canonicalize_dtype(block.dtype)
    if kept != block.dtype:
        raise ValueError(
            f"shard {shard} is {block.dtype}, which jax would make {kept}: give dtype='{kept}' to "
            "mean it, or jax.config.update('jax_enable_x64', True)"
        )


def _within(places: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Places in a tensor, counted from the origin of a part of it."""
    return tuple(
        slice(low - first, high - first) for (low, high), first in zip(places, origin, strict=True)
    )


def _checked(shard: ShardMetadata, given: Any | Callable[[], Any]) -> np.ndarray:
    array = np.asarray(given() if callable(given) else given)
    if array.shape != shard.shard_sizes:
        raise ValueError(f'shard {shard} comes as an array of shape {array.shape}')
    return array
