"""Shards of tensors, PyTorch's descriptions of them, and the PartitionSpecs that cut them alike.

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

from partitioning.mesh.validation import as_tuple_of
from partitioning.rules import MeshLike, axis_sizes, describe_axes, from_tuple, is_count, num_shards


@dataclasses.dataclass(frozen=True)
class ShardMetadata:
    """A block of a tensor.

    Attributes:
      shard_offsets: the index of its first element, along each dimension.
      shard_sizes: its size along each dimension; 0 if the shard is empty.
      placement: the holder of the shard: a rank, a text such as 'rank:0/cpu', or None if it is
        unknown.
    """

    shard_offsets: tuple[int, ...]
    shard_sizes: tuple[int, ...]
    placement: int | str | None = None

    def __post_init__(self) -> None:
        offsets = as_tuple_of(self.shard_offsets, 'shard_offsets')
        sizes = as_tuple_of(self.shard_sizes, 'shard_sizes')
        if len(offsets) != len(sizes):
            raise ValueError(
                'shard_offsets and shard_sizes must have the same number of elements, but '
                f'{offsets} has {len(offsets)} and {sizes} has {len(sizes)}'
            )
        for field, numbers, rule in (  # PyTorch's words
            ('shard_offsets', offsets, 'shard_offsets should be >=0'),
            ('shard_sizes', sizes, 'shard_sizes should be >= 0'),
        ):
            for number in numbers:
                if not is_count(number) and (type(number) is bool or number != 0):
                    raise ValueError(f'{rule} integers, but {numbers} contains {number!r}')
            object.__setattr__(self, field, tuple(map(int, numbers)))

    @property
    def index(self) -> tuple[slice, ...]:
        """The slices of the tensor that the shard holds."""
        return tuple(map(slice, self.shard_offsets, self.stops))

    @property
    def stops(self) -> tuple[int, ...]:
        """The index after its last element, along each dimension."""
        pairs = zip(self.shard_offsets, self.shard_sizes, strict=True)
        return tuple(start + size for start, size in pairs)

    @property
    def num_elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shard_sizes)

    def __str__(self) -> str:
        held = '' if self.placement is None else f' of {self.placement}'
        return f'{list(self.shard_offsets)}x{list(self.shard_sizes)}{held}'


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Raises ValueError if there are no shards, if their ranks differ, or if shards overlap."""
    for shard in shards:
        if not isinstance(shard, ShardMetadata):
            raise ValueError(
                f'{shard!r} is not a ShardMetadata: write ShardMetadata(offsets, sizes)'
            )
    if not shards:
        raise ValueError('Empty shard list provided: a tensor has at least one shard')
    ranks = {len(shard.shard_offsets): shard for shard in shards}
    if len(ranks) > 1:
        listed = ', '.join(f'{rank} ({shard})' for rank, shard in sorted(ranks.items()))
        raise ValueError(f'Found inconsistent ranks for shards: {listed}')
    # Each shard is compared with all later ones at once: checkpoints have thousands of shards.
    full = [shard for shard in shards if shard.num_elements]
    rank = next(iter(ranks))
    starts = np.array([shard.shard_offsets for shard in full]).reshape(len(full), rank)
    stops = np.array([shard.stops for shard in full]).reshape(len(full), rank)
    for i, shard in enumerate(full):
        shared = (starts[i + 1 :] < stops[i]) & (starts[i] < stops[i + 1 :])
        overlapping = np.flatnonzero(shared.all(axis=1))
        if overlapping.size:
            raise ValueError(f'Shards {shard} and {full[i + 1 + int(overlapping[0])]} overlap')


def check_tensor(shards: Sequence[ShardMetadata], shape: Sequence[int]) -> None:
    """Raises ValueError unless each element of a tensor of this shape is in exactly one shard."""
    validate_non_overlapping_shards_metadata(shards)
    rank = len(shards[0].shard_offsets)
    if rank != len(shape):
        raise ValueError(f'Rank of tensor is {len(shape)}, but shards rank is {rank}')
    for shard in shards:
        for dim, (stop, size) in enumerate(zip(shard.stops, shape, strict=True)):
            if stop > size:
                raise ValueError(
                    f'Shard {shard} exceeds tensor dim {dim}: it ends at {stop}, but the shape is '
                    f'{tuple(shape)}'
                )
    held = sum(shard.num_elements for shard in shards)
    if held != math.prod(shape):
        raise ValueError(
            f'Shards have {held} elements in total, which does not match tensor volume '
            f'{math.prod(shape)} of shape {tuple(shape)}: some shards are missing'
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

        A dimension takes one axis if one has that size, and otherwise several in the order of the
        mesh, as long as axes remain for the other dimensions. That chunks are equal is not checked:
        the `on_indivisible` of a plan decides about that.

        Raises:
          ValueError: if no mesh axes, or several single ones, make these parts; if the blocks
            differ in size; or if the placements are not sorted by rank, which only a mesh can
            express.
        """
        parts = tuple(self._parts(shape))
        sizes = {axis: size for axis, size in axis_sizes(mesh).items() if size > 1}
        cut = [number for number in parts if number > 1]
        fitting = [axis for axis, size in sizes.items() if cut == [size]]
        if len(fitting) > 1:
            raise ValueError(
                f'{cut[0]} parts could be over mesh axis {" or ".join(fitting)} of the mesh '
                f'{describe_axes(mesh)}: write a PartitionSpec'
            )
        found = _take_axes(parts, tuple(sizes), sizes)
        if found is None:
            raise ValueError(
                f'no axes of the mesh {describe_axes(mesh)} make {parts} parts along the '
                'dimensions: use another mesh, or write a PartitionSpec'
            )
        rank = max((dim for dim, axes in enumerate(found, start=1) if axes), default=0)
        return PartitionSpec(*map(from_tuple, found[:rank]))

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
        dim, shape = self._dim(shape), tuple(shape)
        split = get_split_size(shape[dim], len(self.placements))
        shards = []
        for i, placement in enumerate(self.placements):
            start, size = min(split * i, shape[dim]), get_chunked_dim_size(shape[dim], split, i)
            offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
            sizes = (*shape[:dim], size, *shape[dim + 1 :])
            shards.append(ShardMetadata(offsets, sizes, placement))
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
