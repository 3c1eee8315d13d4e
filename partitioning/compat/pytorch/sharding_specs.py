"""PyTorch's descriptions of how a tensor is cut, and the PartitionSpecs that cut it the same way.

Chunks are filled from the front: 10 rows in 3 chunks are 4, 4 and 2, and the last chunk may be
empty. jax lays out only sizes that divide. For other sizes a policy decides: on_indivisible='pad'
also fills from the front.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from partitioning.compat.pytorch.shard_metadata import (
    ShardMetadata,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from partitioning.mesh.validation import as_tuple_of
from partitioning.rules import (
    MeshLike,
    axis_sizes,
    describe_axes,
    from_tuple,
    is_count,
    num_shards,
)

Placement = int | str | None


def get_split_size(dim_size: int, chunks: int) -> int:
    """The size of all chunks but the last ones: `dim_size / chunks`, rounded up."""
    if not is_count(chunks):
        raise ValueError(f'chunks={chunks!r} must be an integer >= 1')
    return -(-dim_size // chunks)


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The size of chunk `idx` of a dimension in chunks of `split_size`, 0 after its end."""
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """The start and the size of a rank's chunk of a dimension, by its place in the placements.

    Raises:
      ValueError: if `rank` holds no chunk, or if there are not `world_size` placements.
    """
    if world_size != len(spec.placements):
        raise ValueError(f'{world_size} chunks do not match {len(spec.placements)} placements')
    ranks = [_rank(placement) for placement in spec.placements]
    if rank not in ranks:
        raise ValueError(f'rank {rank} is not among the placements {list(spec.placements)}')
    place, split = ranks.index(rank), get_split_size(sharding_dim_size, world_size)
    size = get_chunked_dim_size(sharding_dim_size, split, place)
    return min(split * place, sharding_dim_size), size


class ShardingSpec(abc.ABC):
    """A description of how a tensor is cut into shards."""

    @abc.abstractmethod
    def build_metadata(self, shape: Sequence[int]) -> tuple[ShardMetadata, ...]:
        """The shards of a tensor of this shape, in the order of the placements.

        Raises:
          ValueError: if they do not make a tensor of this shape.
        """

    def to_partition_spec(self, mesh: MeshLike, shape: Sequence[int]) -> PartitionSpec:
        """The spec that cuts a tensor of this shape into the same number of parts per dimension.

        It does not check that chunks are equal: the `on_indivisible` of a plan decides about that.

        Raises:
          ValueError: if no mesh axes, or several single ones, make these parts; if the blocks
            differ in size; or if the placements are not sorted by rank, which only a mesh can
            express.
        """
        return _spec_of_parts(self._parts(shape), mesh)

    @abc.abstractmethod
    def _parts(self, shape: Sequence[int]) -> Sequence[int]:
        """The number of parts along each dimension."""


@dataclasses.dataclass(frozen=True)
class ChunkShardingSpec(ShardingSpec):
    """A tensor in chunks along one dimension.

    Usage:
      ChunkShardingSpec(0, [0, 1, 2, 3])  # or ['rank:0/cpu', 'rank:1/cpu', ...]

    Attributes:
      dim: the dimension; a negative number counts from the last one.
      placements: the holders of the chunks, in the order of the chunks.
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
        dim, chunks = self._dim(shape), len(self.placements)
        split = get_split_size(shape[dim], chunks)
        shards = []
        for i, placement in enumerate(self.placements):
            offsets, sizes = [0] * len(shape), [*shape]
            offsets[dim] = min(split * i, shape[dim])
            sizes[dim] = get_chunked_dim_size(shape[dim], split, i)
            shards.append(ShardMetadata(tuple(offsets), tuple(sizes), placement))
        return tuple(shards)

    def _parts(self, shape: Sequence[int]) -> Sequence[int]:
        _check_order(self.placements)
        parts = [1] * len(shape)
        parts[self._dim(shape)] = len(self.placements)
        return parts

    def _dim(self, shape: Sequence[int]) -> int:
        if not -len(shape) <= self.dim < len(shape):
            raise ValueError(
                f'Invalid sharding dim: {self.dim} of a tensor of shape {tuple(shape)}'
            )
        return self.dim % len(shape)


@dataclasses.dataclass(frozen=True)
class GridShardingSpec(ShardingSpec):
    """A tensor in equal blocks along every dimension.

    Attributes:
      grid_size: the size of a block along each dimension, or one size for all dimensions.
      placements: the holders of the blocks, in row-major order.
    """

    grid_size: int | tuple[int, ...]
    placements: Sequence[Placement]

    def __post_init__(self) -> None:
        if not isinstance(self.grid_size, int):
            object.__setattr__(self, 'grid_size', tuple(self.grid_size))
        object.__setattr__(self, 'placements', _check_placements(self.placements))

    def build_metadata(self, shape: Sequence[int]) -> tuple[ShardMetadata, ...]:
        sizes, parts = self._blocks(shape)
        places = itertools.product(*map(range, parts))
        return tuple(
            ShardMetadata(tuple(n * s for n, s in zip(at, sizes, strict=True)), sizes, placement)
            for at, placement in zip(places, self.placements, strict=True)
        )

    def _parts(self, shape: Sequence[int]) -> Sequence[int]:
        _check_order(self.placements)
        return self._blocks(shape)[1]

    def _blocks(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The size of a block and the number of blocks, along each dimension."""
        given = self.grid_size
        sizes = (given,) * len(shape) if isinstance(given, int) else given
        if len(sizes) != len(shape) or not all(map(is_count, sizes)):
            raise ValueError(
                f'grid_size={given!r} must be an integer >= 1 for each dimension of {tuple(shape)}'
            )
        if any(size % block for size, block in zip(shape, sizes, strict=True)):
            raise ValueError(f'blocks of {sizes} do not divide a tensor of shape {tuple(shape)}')
        parts = tuple(size // block for size, block in zip(shape, sizes, strict=True))
        if math.prod(parts) != len(self.placements):
            raise ValueError(
                f'a tensor of shape {tuple(shape)} has {math.prod(parts)} blocks of {sizes}, but '
                f'there are {len(self.placements)} placements'
            )
        return sizes, parts


@dataclasses.dataclass(frozen=True)
class EnumerableShardingSpec(ShardingSpec):
    """A tensor in blocks of any sizes, which are listed one by one.

    Attributes:
      shards: the blocks, in any order; they do not overlap.
    """

    shards: tuple[ShardMetadata, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, 'shards', tuple(self.shards))
        validate_non_overlapping_shards_metadata(self.shards)

    def build_metadata(self, shape: Sequence[int]) -> tuple[ShardMetadata, ...]:
        check_tensor(self.shards, shape)
        return self.shards

    def _parts(self, shape: Sequence[int]) -> Sequence[int]:
        check_tensor(self.shards, shape)
        sizes = {shard.shard_sizes for shard in self.shards}
        if len(sizes) > 1:
            first, second = sorted(sizes)[:2]
            raise ValueError(
                f'shards of sizes {first} and {second} have no PartitionSpec, which needs equal '
                'blocks or chunks along one dimension: array_from_shards reads them into any layout'
            )
        pairs = zip(shape, self.shards[0].shard_sizes, strict=True)
        return [size // max(block, 1) for size, block in pairs]


def _spec_of_parts(parts: Sequence[int], mesh: MeshLike) -> PartitionSpec:
    """The spec that cuts each dimension into a number of parts, by whole mesh axes.

    A dimension takes one axis if one has that size, and otherwise several in the order of the
    mesh, as long as axes remain for the other dimensions. It is a ValueError if no axes make these
    parts, or if several axes have the size of the only dimension that is cut.
    """
    sizes = {axis: size for axis, size in axis_sizes(mesh).items() if size > 1}
    cut = [number for number in parts if number > 1]
    fitting = [axis for axis, size in sizes.items() if cut == [size]]
    if len(fitting) > 1:
        raise ValueError(
            f'{cut[0]} parts could be over mesh axis {" or ".join(fitting)} of the mesh '
            f'{describe_axes(mesh)}: write a PartitionSpec'
        )
    found = _take_axes(tuple(parts), tuple(sizes), sizes)
    if found is None:
        raise ValueError(
            f'no axes of the mesh {describe_axes(mesh)} make {tuple(parts)} parts along the '
            'dimensions: use another mesh, or write a PartitionSpec'
        )
    rank = max((dim for dim, axes in enumerate(found, start=1) if axes), default=0)
    return PartitionSpec(*map(from_tuple, found[:rank]))


def _take_axes(
    parts: tuple[int, ...], left: tuple[str, ...], mesh: MeshLike
) -> list[tuple[str, ...]] | None:
    """The axes of each dimension, chosen from `left`; None if there is no choice."""
    if not parts:
        return []
    for number in range(len(left) + 1):
        for axes in itertools.combinations(left, number):
            if num_shards(axes, mesh) == parts[0]:
                rest = tuple(axis for axis in left if axis not in axes)
                if (others := _take_axes(parts[1:], rest, mesh)) is not None:
                    return [axes, *others]
    return None


def _check_placements(placements: Any) -> tuple[Placement, ...]:
    found = as_tuple_of(placements, 'placements')
    if not found or len({*found}) < len(found):
        raise ValueError(f'placements {list(found)} must name each holder once, and at least one')
    return found


def _check_order(placements: Sequence[Placement]) -> None:
    """Raises ValueError for placements that are not sorted by rank."""
    ranks = [_rank(placement) for placement in placements]
    if len({*map(type, ranks)}) > 1:
        raise ValueError(f'placements {list(placements)} mix several kinds of ranks: use one kind')
    if isinstance(ranks[0], int) and ranks != sorted(ranks):
        raise ValueError(
            f'placements {list(placements)} are not in the order of their ranks, which a spec '
            'cannot express: put the devices of the mesh in that order'
        )


def _rank(placement: Placement) -> Any:
    """The number of a placement: 3 for 3 and for 'rank:3/cuda:1'; other values unchanged."""
    if isinstance(placement, str) and placement.startswith('rank:'):
        number = placement.removeprefix('rank:').partition('/')[0]
        return int(number) if number.isdigit() else placement
    return placement
