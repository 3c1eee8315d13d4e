"""Where a shard lies in its tensor, and whether several make one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from partitioning.mesh.checks import as_tuple_of
from partitioning.rules import is_count


@dataclasses.dataclass(frozen=True)
class ShardMetadata:
    """A block of a tensor.

    Attributes:
      shard_offsets: its first element, along each dimension.
      shard_sizes: its size along each dimension; 0 where the shard is empty.
      placement: who holds it: a rank, or a text such as 'rank:0/cpu'; None: it does not say.
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
        _check_numbers(offsets, 'shard_offsets should be >=0')
        _check_numbers(sizes, 'shard_sizes should be >= 0')
        object.__setattr__(self, 'shard_offsets', tuple(map(int, offsets)))
        object.__setattr__(self, 'shard_sizes', tuple(map(int, sizes)))

    @property
    def index(self) -> tuple[slice, ...]:
        """Its place, to index the tensor with."""
        pairs = zip(self.shard_offsets, self.shard_sizes, strict=True)
        return tuple(slice(start, start + size) for start, size in pairs)

    @property
    def stops(self) -> tuple[int, ...]:
        """The element after its last, along each dimension."""
        return tuple(s.stop for s in self.index)

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shard_sizes)

    def __str__(self) -> str:
        held = '' if self.placement is None else f' of {self.placement}'
        return f'{list(self.shard_offsets)}x{list(self.shard_sizes)}{held}'


def validate_non_overlapping_shards_metadata(shards: Sequence[ShardMetadata]) -> None:
    """Raises ValueError for no shards, shards of several ranks, or two that share an element."""
    for shard in shards:
        if not isinstance(shard, ShardMetadata):
            raise ValueError(f'{shard!r} is no ShardMetadata: write ShardMetadata(offsets, sizes)')
    if not shards:
        raise ValueError('Empty shard list provided: a tensor has one shard at least')
    ranks = {len(shard.shard_offsets): shard for shard in shards}
    if len(ranks) > 1:
        listed = ', '.join(f'{rank} ({shard})' for rank, shard in sorted(ranks.items()))
        raise ValueError(f'Found inconsistent ranks for shards: {listed}')
    # One shard against all that follow it: quick for the thousands that checkpoints have.
    full = [shard for shard in shards if shard.num_elements]
    rank = next(iter(ranks))
    starts = np.array([shard.shard_offsets for shard in full]).reshape(len(full), rank)
    stops = np.array([shard.stops for shard in full]).reshape(len(full), rank)
    for i, shard in enumerate(full):
        shared = (starts[i + 1 :] < stops[i]) & (starts[i] < stops[i + 1 :])
        overlapping = np.flatnonzero(shared.all(axis=1))
        if overlapping.size:
            other = full[i + 1 + int(overlapping[0])]
            raise ValueError(f'Shards {shard} and {other} overlap')


def check_tensor(shards: Sequence[ShardMetadata], shape: Sequence[int]) -> None:
    """Raises ValueError unless the shards make all of a tensor of this shape, each element once."""
    validate_non_overlapping_shards_metadata(shards)
    rank = len(shards[0].shard_offsets)
    if rank != len(shape):
        raise ValueError(f'Rank of tensor is {len(shape)}, but shards rank is {rank}')
    for shard in shards:
        for dim, (stop, size) in enumerate(zip(shard.stops, shape, strict=True)):
            if stop > size:
                raise ValueError(
                    f'Shard {shard} exceeds tensor dim {dim}: it ends at {stop}, of a tensor of '
                    f'shape {tuple(shape)}'
                )
    held = sum(shard.num_elements for shard in shards)
    if held != math.prod(shape):
        raise ValueError(
            f'Shards have {held} elements in all, which does not match tensor volume '
            f'{math.prod(shape)} of shape {tuple(shape)}: some are missing'
        )


def _check_numbers(numbers: Sequence[Any], rule: str) -> None:
    for number in numbers:
        if not is_count(number) and not (isinstance(number, int | np.integer) and number == 0):
            raise ValueError(f'{rule} and whole, not {number!r} of {tuple(numbers)}')
