"""Reads shards that another system has cut: into a sharded array, and back to a spec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from partitioning.compat.pytorch.sharding_specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from partitioning.layout.ownership import index_bounds
from partitioning.rules import MeshLike, check_layout


def array_from_shards(
    blocks: Sequence[tuple[ShardMetadata, Any]],
    shape: Sequence[int],
    sharding: Sharding,
    dtype: Any = None,
) -> jax.Array:
    """Makes a sharded array from the shards of a tensor.

    Args:
      blocks: each shard with its array, or with a function that reads the array. A process reads
        only the shards that its devices hold a part of, each once.
      shape, sharding: the shape and the layout of the whole array.
      dtype: the type to which the blocks are cast; by default their own.

    Raises:
      ValueError: if the shards do not make an array of this shape, if a block has another shape or
        dtype than the others, or if the sharding does not divide the shape.
    """
    check_tensor([shard for shard, _ in blocks], shape)
    if isinstance(sharding, NamedSharding):
        check_layout(sharding.spec, sharding.mesh, 'the array', shape)
    arrays: dict[int, np.ndarray] = {}

    def read(i: int) -> np.ndarray:
        if i not in arrays:
            shard, given = blocks[i]
            array = np.asarray(given() if callable(given) else given)
            if array.shape != shard.shard_sizes:
                raise ValueError(f'shard {shard} has an array of shape {array.shape}')
            kept = jax.dtypes.canonicalize_dtype(array.dtype)
            if dtype is not None:
                array = array.astype(np.dtype(dtype), casting='same_kind')
            elif kept != array.dtype:
                raise ValueError(
                    f'shard {shard} is {array.dtype}, which jax would make {kept}: write '
                    f"dtype='{kept}' to accept that, or "
                    "jax.config.update('jax_enable_x64', True)"
                )
            arrays[i] = array
            first = next(iter(arrays))
            if arrays[i].dtype != arrays[first].dtype:
                raise ValueError(
                    f'shard {blocks[i][0]} is {arrays[i].dtype}, but shard {blocks[first][0]} is '
                    f'{arrays[first].dtype}: give dtype='
                )
        return arrays[i]

    def part(index: Any) -> np.ndarray:
        bounds = index_bounds(index, shape)
        pieces = []
        for i, (shard, _) in enumerate(blocks):
            shared = [
                (max(start, s.start), min(stop, s.stop))
                for (start, stop), s in zip(bounds, shard.index, strict=True)
            ]
            if all(low < high for low, high in shared):
                pieces.append((i, shared))
        kind = np.dtype(dtype) if dtype is not None else read(pieces[0][0] if pieces else 0).dtype
        made = np.empty([stop - start for start, stop in bounds], kind)
        for i, shared in pieces:
            to = _relative(shared, [start for start, _ in bounds])
            made[to] = read(i)[_relative(shared, blocks[i][0].shard_offsets)]
        return made

    return jax.make_array_from_callback(tuple(shape), sharding, part)


def infer_sharding_spec(
    shards: Sequence[ShardMetadata],
) -> ChunkShardingSpec | EnumerableShardingSpec:
    """The ChunkShardingSpec that cuts a tensor into these shards, or else one that lists them.

    Raises:
      ValueError: if the shards do not make a tensor.
    """
    shape = _shape(shards)
    check_tensor(shards, shape)
    for dim in range(len(shape)):
        ordered = sorted(shards, key=lambda s: s.shard_offsets[dim])
        placements = [shard.placement for shard in ordered]
        if len({*placements}) < len(placements):
            placements = [*range(len(ordered))]
        spec = ChunkShardingSpec(dim, placements)
        cut = [(s.shard_offsets, s.shard_sizes) for s in spec.build_metadata(shape)]
        if cut == [(s.shard_offsets, s.shard_sizes) for s in ordered]:
            return spec
    return EnumerableShardingSpec(tuple(shards))


def infer_partition_spec(shards: Sequence[ShardMetadata], mesh: MeshLike) -> PartitionSpec:
    """The spec that cuts a tensor over a mesh into these shards.

    Args:
      shards: equal blocks along every dimension, in any order; or chunks along one dimension, of
        which the last may be smaller: the `on_indivisible` of a plan decides about those.
      mesh: the mesh, or the sizes of its axes.

    Raises:
      ValueError: if the shards do not make a tensor, if they are neither blocks nor chunks, or if
        no axes of the mesh make them.
    """
    unplaced = [ShardMetadata(shard.shard_offsets, shard.shard_sizes) for shard in shards]
    return infer_sharding_spec(unplaced).to_partition_spec(mesh, _shape(shards))


def _shape(shards: Sequence[ShardMetadata]) -> tuple[int, ...]:
    """The shape of the tensor; raises ValueError if the shards do not form one."""
    validate_non_overlapping_shards_metadata(shards)
    return tuple(map(max, zip(*(shard.stops for shard in shards), strict=True)))


def _relative(bounds: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    """Bounds in a tensor as slices of a part of it that begins at `origin`."""
    return tuple(
        slice(low - first, high - first) for (low, high), first in zip(bounds, origin, strict=True)
    )
