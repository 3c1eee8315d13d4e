"""PyTorch's ways to cut a tensor, and what they are on a mesh.

Chunks fill up from the front: 10 rows in 3 are 4, 4 and 2, and the last may be empty. jax cuts only
what divides; elsewhere a policy decides, such as 'pad', which fills up in the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from partitioning.compat.pytorch.shards.metadata import (
    ShardMetadata,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from partitioning.mesh.checks import as_tuple_of
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

    Args:
      sharding_dim_size: of the dimension.
      world_size: how many chunks there are.
      spec: who holds them.
      rank: one of these.

    Raises:
      ValueError: a rank that holds nothing, placements for another number of chunks.
    """
    if world_size != len(spec.placements):
        raise ValueError(f'{world_size} chunks for {len(spec.placements)} placements')
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
        object.__setattr__(self, 'placements', _check_placements(self.placements))

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
        """The spec over the mesh axis of as many devices as there are chunks; see `axes_of_ways`.

        Sizes that do not divide are what `on_indivisible` of a plan is for.

        Raises:
          ValueError: no such mesh axis, or several; chunks that are not in the order of their
            ranks, which is a matter of the mesh here.
        """
        _check_order(self.placements)
        ways = [1] * len(shape)
        ways[self._dim(shape)] = len(self.placements)
        return axes_of_ways(ways, mesh)

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

    def __post_init__(self) -> None:
        if not isinstance(self.grid_size, int):
            object.__setattr__(self, 'grid_size', tuple(self.grid_size))
        object.__setattr__(self, 'placements', _check_placements(self.placements))

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
        ways = self._blocks(shape)[1]
        _check_order(self.placements)
        return axes_of_ways(ways, mesh)

    def _blocks(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        given = self.grid_size
        sizes = (given,) * len(shape) if isinstance(given, int) else given
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


def axes_of_ways(ways: Sequence[int], mesh: MeshLike) -> PartitionSpec:
    """The spec that cuts dimensions in so many parts each, by whole mesh axes.

    A dimension takes one axis where there is one of its size, else several in the order of the
    mesh, as long as the other dimensions find theirs.

    Raises:
      ValueError: the sizes of the axes do not make these parts; one dimension is cut, and several
        axes are of its size.
    """
    sizes = {axis: size for axis, size in axis_sizes(mesh).items() if size > 1}
    cut = [parts for parts in ways if parts > 1]
    fitting = [axis for axis, size in sizes.items() if cut == [size]]
    shown = describe_axes(axis_sizes(mesh))
    if len(fitting) > 1:
        raise ValueError(
            f'{cut[0]} parts could be over {" or ".join(fitting)} of the mesh {shown}: write a '
            'PartitionSpec'
        )
    found = _take_axes(tuple(ways), tuple(sizes), sizes)
    if found is None:
        raise ValueError(
            f'parts {tuple(ways)} along the dimensions: the axes of the mesh {shown} do not make '
            'them; use another mesh, or a PartitionSpec'
        )
    last = max((dim for dim, axes in enumerate(found) if axes), default=-1)
    return PartitionSpec(*(a[0] if len(a) == 1 else a or None for a in found[: last + 1]))


def _take_axes(
    ways: tuple[int, ...], left: tuple[str, ...], sizes: Mapping[str, int]
) -> list[tuple[str, ...]] | None:
    """The axes of each dimension, out of those that are left; None: there are no such."""
    if not ways:
        return []
    for number in range(len(left) + 1):
        for axes in itertools.combinations(left, number):
            if math.prod(sizes[axis] for axis in axes) == ways[0]:
                rest = tuple(axis for axis in left if axis not in axes)
                if (others := _take_axes(ways[1:], rest, sizes)) is not None:
                    return [axes, *others]
    return None


def _check_placements(placements: Any) -> tuple[Placement, ...]:
    found = as_tuple_of(placements, 'placements')
    if not found or len({*found}) < len(found):
        raise ValueError(f'placements {list(found)} must be one or more, none twice')
    return found


def _check_order(placements: Sequence[Placement]) -> None:
    """Raises ValueError for ranks in another order than their numbers have."""
    ranks = [_rank(placement) for placement in placements]
    if len({*map(type, ranks)}) > 1:
        raise ValueError(f'placements {list(placements)} are ranks of several kinds: write one')
    if isinstance(ranks[0], int) and ranks != sorted(ranks):
        raise ValueError(
            f'placements {list(placements)} are not in the order of their ranks: a spec has no '
            'order; give the mesh that of its devices (spmd.mesh_from_device_ids)'
        )


def _rank(placement: Placement) -> Any:
    """The number of a placement: 3 of 3 and of 'rank:3/cuda:1'; anything else as it is."""
    if isinstance(placement, str) and placement.startswith('rank:'):
        number = placement.removeprefix('rank:').partition('/')[0]
        return int(number) if number.isdigit() else placement
    return placement
