"""From shards back to the way that a tensor was cut."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from partitioning.compat.pytorch.shards.metadata import (
    ShardMetadata,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from partitioning.compat.pytorch.shards.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
)
from partitioning.rules import MeshLike


def infer_sharding_spec(
    shards: Sequence[ShardMetadata],
) -> ChunkShardingSpec | EnumerableShardingSpec:
    """The ChunkShardingSpec that cuts a tensor into these shards, else one that lists them.

    Raises:
      ValueError: shards that make no tensor.
    """
    validate_non_overlapping_shards_metadata(shards)
    shape = _shape(shards)
    check_tensor(shards, shape)
    for dim in range(len(shape)):
        # An empty chunk begins where the last full one ends, and comes after it.
        ordered = sorted(shards, key=lambda s: (s.shard_offsets[dim], not s.shard_sizes[dim]))
        placements = [shard.placement for shard in ordered]
        if len({*placements}) < len(placements):
            placements = [*range(len(ordered))]
        spec = ChunkShardingSpec(dim, placements)
        cut = [(s.shard_offsets, s.shard_sizes) for s in spec.build_metadata(shape)]
        if cut == [(s.shard_offsets, s.shard_sizes) for s in ordered]:
            return spec
    return EnumerableShardingSpec(tuple(shards))


def infer_partition_spec(shards: Sequence[ShardMetadata], mesh: MeshLike) -> PartitionSpec:
    """The spec by which a mesh cuts a tensor as these shards do.

    Args:
      shards: equal blocks along every dimension, in any order; or chunks along one, of which the
        last may be smaller, for `on_indivisible` of a plan to decide on.
      mesh: the mesh, or the sizes of its axes.

    Raises:
      ValueError: shards that make no tensor, that are no such blocks, or that no axes of the mesh
        make.
    """
    unplaced = [ShardMetadata(shard.shard_offsets, shard.shard_sizes) for shard in shards]
    return infer_sharding_spec(unplaced).to_partition_spec(mesh, _shape(shards))


def _shape(shards: Sequence[ShardMetadata]) -> tuple[int, ...]:
    """Of the tensor that the shards make, if they make one."""
    return tuple(map(max, zip(*(shard.stops for shard in shards), strict=True)))
