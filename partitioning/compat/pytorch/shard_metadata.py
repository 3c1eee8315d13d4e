"""Where a shard lies in its tensor, and whether several shards make one tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from partitioning.mesh.validation import as_tuple_of
from partitioning.rules import is_count


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
