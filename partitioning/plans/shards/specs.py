"""PyTorch's ways to cut a tensor, and what they are on a mesh.

Chunks fill up from the front: 10 rows in 3 are 4, 4 and 2, and the last may be empty. jax cuts only
what divides; elsewhere a policy decides, such as 'pad', which fills up in the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from partitioning.plans.shards.metadata import (
    ShardMetadata,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from partitioning.rules import MeshLike, axis_sizes, describe_axes, is_count

Placement = int | str | None


def get_split_size(dim_size: int, chunks: int) -> int:
    """The size of every chunk but the last ones: `dim_size / chunks`, rounded up."""
    if not is_count(chunks):
        raise ValueError(f'{chunks!r} chunks: there must be 1 or more')
    return -(-dim_size // chunks)


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The size of chunk `idx`, of a dimension in chunks of `split_size`: 0 past its end."""
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """(start, size) of what a rank holds: its place among the placements decides, not its number.

    Raises:
      ValueError: a rank that holds nothing.
    """
    ranks = [_rank(placement) for placement in spec.placements]
    if rank not in ranks:
        raise ValueError(f'rank {rank} is none of the placements {list(spec.placements)}')
    place, split = ranks.index(rank), get_split_size(sharding_dim_size, world_size)
    size = get_chunked_dim_size(sharding_dim_size, split, place)
    return min(split * place, sharding_dim_size), size


@dataclasses.dataclass(frozen=True)
class ChunkShardingSpec:
    """A tensor in chunks along one dimension.

    Usage:
      ChunkShardingSpec(0, [0, 1, 2, 3])  # or ['rank:0/cpu', 'rank:1/cpu', ...]

    Attributes:
      dim: the dimension; negative, from the last.
      placements: who holds the chunks, in their order.
    """

    dim: int
    placements: Sequence[Placement]

    def __post_init__(self) -> None:
        if isinstance(self.dim, str):
            raise NotImplementedError(
                f'ChunkShardingSpec does not support named dimension {self.dim!r}: write its number'
            )
        if isinstance(self.dim, bool) or not isinstance(self.dim, int | np.integer):
            raise ValueError(f'Sharding dim needs to be an integer, found: {self.dim!r}')
        placements = tuple(self.placements)
        if not placements or len({*placements}) < len(placements):
            raise ValueError(f'placements {list(placements)} must be one or more, none twice')
        object.__setattr__(self, 'placements', placements)

    def build_metadata(self, shape: Sequence[int]) -> tuple[ShardMetadata, ...]:
        """The shards of a tensor of this shape, in the order of the placements."""
        dim, chunks = self._dim(shape), len(self.placements)
        split = get_split_size(shape[dim], chunks)
        shards = []
        for i, placement in enumerate(self.placements):
            offsets, sizes = [0] * len(shape), [*shape]
            offsets[dim] = min(split * i, shape[dim])
            sizes[dim] = get_chunked_dim_size(shape[dim], split, i)
            shards.append(ShardMetadata(tuple(offsets), tuple(sizes), placement))
        return tuple(shards)

    def to_partition_spec(self, mesh: MeshLike, shape: Sequence[int]) -> PartitionSpec:
        """The spec over the one mesh axis of as many devices as there are chunks.

        Sizes that do not divide are what `on_indivisible` of a plan is for.

        Raises:
          ValueError: no mesh axis of that size, or several; chunks that are not in the order of
            their ranks, which is a matter of the mesh here.
        """
        ranks = [_rank(placement) for placement in self.placements]
        if ranks != sorted(ranks):
            raise ValueError(
                f'placements {list(self.placements)} are not in the order of their ranks: a spec '
                'has no order; give the mesh that of its devices (spmd.mesh_from_device_ids)'
            )
        if len(ranks) == 1:
            return PartitionSpec()
        return PartitionSpec(*[None] * self._dim(shape), _axis_of_size(len(ranks), mesh))

    def _dim(self, shape: Sequence[int]) -> int:
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(
                f'Invalid sharding dim: {self.dim} of a tensor of shape {tuple(shape)}'
            )
        return self.dim % len(shape)


@dataclasses.dataclass(frozen=True)
class GridShardingSpec:
    """A tensor in equal blocks along every dimension.

    Attributes:
      grid_size: the size of a block along each dimension, or one size for all.
      placements: who holds the blocks, in row-major order.
    """

    grid_size: int | tuple[int, ...]
    placements: Sequence[Placement]

    def build_metadata(self, shape: Sequence[int]) -> tuple[ShardMetadata, ...]:
        """The shards of a tensor of this shape, in the order of the placements.

        Raises:
          ValueError: blocks that do not divide the shape, or of another number than placements.
        """
        sizes, ways = self._blocks(shape)
        places = itertools.product(*map(range, ways))
        return tuple(
            ShardMetadata(tuple(n * s for n, s in zip(at, sizes, strict=True)), sizes, placement)
            for at, placement in zip(places, self.placements, strict=True)
        )

    def to_partition_spec(self, mesh: MeshLike, shape: Sequence[int]) -> PartitionSpec:
        """The spec that cuts a tensor of this shape into the same blocks; see `axes_of_ways`."""
        return axes_of_ways(self._blocks(shape)[1], mesh)

    def _blocks(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        given = self.grid_size
        sizes = (given,) * len(shape) if isinstance(given, int) else tuple(given)
        if len(sizes) != len(shape) or not all(map(is_count, sizes)):
            raise ValueError(f'grid_size {given!r} must be a size for each of {tuple(shape)}')
        for dim, (size, block) in enumerate(zip(shape, sizes, strict=True)):
            if size % block:
                raise ValueError(f'dimension {dim} of {tuple(shape)} does not divide by {block}')
        ways = tuple(size // block for size, block in zip(shape, sizes, strict=True))
        if math.prod(ways) != len(self.placements):
            raise ValueError(
                f'blocks of {sizes} make {math.prod(ways)} of {tuple(shape)}, for '
                f'{len(self.placements)} placements'
            )
        return sizes, ways


@dataclasses.dataclass(frozen=True)
class EnumerableShardingSpec:
    """A tensor in any blocks, each written out.

    Attributes:
      shards: the blocks, in any order; they share no element.
    """

    shards: tuple[ShardMetadata, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, 'shards', tuple(self.shards))
        validate_non_overlapping_shards_metadata(self.shards)

    def build_metadata(self, shape: Sequence[int]) -> tuple[ShardMetadata, ...]:
        """The shards.

        Raises:
          ValueError: they do not make all of a tensor of this shape.
        """
        check_tensor(self.shards, shape)
        return self.shards

    def to_partition_spec(self, mesh: MeshLike, shape: Sequence[int]) -> PartitionSpec:
        """The spec that cuts a tensor of this shape into these blocks; see `axes_of_ways`.

        Raises:
          ValueError: blocks of several sizes, or that no axes of the mesh make.
        """
        check_tensor(self.shards, shape)
        sizes = {shard.shard_sizes for shard in self.shards}
        if len(sizes) > 1:
            first, second = sorted(sizes)[:2]
            raise ValueError(
                f'shards of sizes {first} and {second} are no equal blocks, and no chunks along '
                'one dimension: array_from_shards reads them into any layout'
            )
        pairs = zip(shape, self.shards[0].shard_sizes, strict=True)
        return axes_of_ways([size // max(block, 1) for size, block in pairs], mesh)


def _axis_of_size(chunks: int, mesh: MeshLike) -> str:
    """The one mesh axis of as many devices as there are chunks."""
    sizes = axis_sizes(mesh)
    fitting = [axis for axis, size in sizes.items() if size == chunks]
    if len(fitting) != 1:
        found = f'{" and ".join(fitting)} have' if fitting else 'no axis has'
        raise ValueError(
            f'{chunks} chunks take one mesh axis of size {chunks}, but of the mesh '
            f'{describe_axes(sizes)} {found} it: use another mesh, or a PartitionSpec'
        )
    return fitting[0]


def axes_of_ways(ways: Sequence[int], mesh: MeshLike) -> PartitionSpec:
    """The spec that cuts dimensions in so many parts each, by whole mesh axes.

    Axes are taken in the order of the mesh; a dimension may take several that follow each other.

    Raises:
      ValueError: the sizes of the axes do not make these parts.
    """
    left = [(axis, size) for axis, size in axis_sizes(mesh).items() if size > 1]
    entries: list[Any] = []
    for parts in ways:
        runs = [
            left[i:j]
            for i in range(len(left))
            for j in range(i + 1, len(left) + 1)
            if math.prod(size for _, size in left[i:j]) == parts
        ]
        if parts > 1 and not runs:
            raise ValueError(
                f'parts {tuple(ways)} along the dimensions: no axes of the mesh '
                f'{describe_axes(axis_sizes(mesh))} make {parts}; use another mesh'
            )
        taken = runs[0] if parts > 1 else []
        left = [pair for pair in left if pair not in taken]
        names = tuple(axis for axis, _ in taken)
        entries.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*entries)


def _rank(placement: Placement) -> Any:
    """The number of a placement: 3 of 3 and of 'rank:3/cuda:1'; anything else as it is."""
    if isinstance(placement, str) and placement.startswith('rank:'):
        number = placement.removeprefix('rank:').partition('/')[0]
        return int(number) if number.isdigit() else placement
    return placement
