"""Which shards of an array and which rows of the batch each process holds, by jax's index map."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.hardware import this_process
from partitioning.rules import (
    as_tuple,
    check_axes,
    check_has_devices,
    describe_axes,
    is_count,
    num_shards,
    sizes_that_fit,
)
from partitioning.short_help import ShortHelp
from partitioning.values import value_str

# The mesh axes of each dimension of an array.
Axes = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class ShardOwnership:
    """The equal shards into which mesh axes divide an array, and the processes that hold them.

    Shards are numbered in row-major order. The chunk of a process is the set of its shards.
    Processes are sorted by replica: first by their places along the mesh axes that do not shard the
    array, then by their numbers.

    Attributes:
      num_shards: the number of shards along each dimension.
      chunks: the chunk of each process, as shard numbers in rising order.
    """

    num_shards: tuple[int, ...]
    chunks: Mapping[int, tuple[int, ...]]

    @functools.cached_property
    def chunk_ids(self) -> Mapping[tuple[int, ...], int]:
        """The number of each distinct chunk, in the order of the shards."""
        return {chunk: i for i, chunk in enumerate(sorted(set(self.chunks.values())))}

    @functools.cached_property
    def replica_ids(self) -> Mapping[int, int]:
        """The number of each process among those that hold the same chunk."""
        next_id = dict.fromkeys(self.chunk_ids, 0)
        replica_ids = {}
        for process, chunk in self.chunks.items():
            replica_ids[process] = next_id[chunk]
            next_id[chunk] += 1
        return replica_ids

    @functools.cached_property
    def shard_replica_ids(self) -> Mapping[int, Mapping[int, int]]:
        """For each shard, the number of each process among those that hold it."""
        replica_ids: dict[int, dict[int, int]] = {}
        for process, chunk in self.chunks.items():
            for shard in chunk:
                holders = replica_ids.setdefault(shard, {})
                holders[process] = len(holders)
        return replica_ids

    @functools.cached_property
    def chunks_overlap(self) -> bool:
        """Whether two different chunks have a shard in common."""
        return sum(map(len, self.chunk_ids)) > math.prod(self.num_shards)

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether the chunks have equal sizes and different chunks have no shard in common."""
        return not self.chunks_overlap and len(set(map(len, self.chunk_ids))) == 1

    def positions(self, shards: Sequence[int]) -> list[list[int]]:
        """The positions of shards along each dimension, each once, in rising order."""
        if not self.num_shards:
            return []
        places = np.unravel_index(np.array(shards), self.num_shards)
        return [np.unique(along).tolist() for along in places]

    def check_process(self, process: Any, mesh: Mesh) -> None:
        """Raises ValueError if the process holds no device of the mesh."""
        if isinstance(process, bool | float) or process not in self.chunks:
            known = sorted(self.chunks)
            which = f'processes {known}'
            if len(known) > 16:
                which = f'{len(known)} processes, {known[0]} to {known[-1]}'
            raise ValueError(
                f'process {process!r} holds no device of the mesh {describe_axes(mesh.shape)}; the '
                f'mesh has {which}'
            )


@functools.lru_cache(maxsize=256)
def shard_ownership(mesh: Mesh, axes: Axes) -> ShardOwnership:
    """The shards of every process, from the mesh axes of each dimension, in one pass over devices.

    Raises:
      ValueError: if the mesh lacks one of the axes, if an axis appears twice, or if the mesh is an
        AbstractMesh.
    """
    check_has_devices(mesh, 'the part of an array that a process holds')
    flat = tuple(axis for dimension in axes for axis in dimension)
    check_axes(flat, mesh, 'the array')
    shards = tuple(num_shards(dimension, mesh) for dimension in axes)
    index_map = NamedSharding(mesh, PartitionSpec(*axes)).devices_indices_map(shards)
    # The array has one element per shard.
    numbers: np.ndarray = np.zeros(len(index_map), np.int64)
    for dim, size in enumerate(shards):
        numbers = numbers * size + [index[dim].start or 0 for index in index_map.values()]
    chunks = _by_process(index_map, numbers)
    places, devices = chunks, mesh.devices
    if others := tuple(i for i, axis in enumerate(mesh.axis_names) if axis not in flat):
        sizes = tuple(devices.shape[i] for i in others)
        along = np.ravel_multi_index(tuple(np.indices(devices.shape)[i] for i in others), sizes)
        places = _by_process(devices.flat, along.ravel())
    order = sorted(chunks, key=lambda process: (places[process], process))
    return ShardOwnership(shards, {process: chunks[process] for process in order})


def axes_per_dimension(mesh_axes: Any) -> Axes:
    """The mesh axes of each dimension, as tuples, from a PartitionSpec or a sequence like one.

    Raises:
      ValueError: if `mesh_axes` is not a sequence, or if an entry is not a mesh axis, a tuple of
        them or None. A string is an error because its letters would be taken for axes.
    """
    entries = tuple(mesh_axes) if isinstance(mesh_axes, PartitionSpec) else mesh_axes
    if not isinstance(entries, tuple | list):
        raise ValueError(
            f"mesh_axes={mesh_axes!r} must have one entry per dimension, such as ('data', None)"
        )
    for entry in entries:
        if not isinstance(entry, str | tuple | list | None):
            raise ValueError(
                f'{entry!r} in mesh_axes={mesh_axes!r} must be a mesh axis, a tuple of them or None'
            )
    return tuple(as_tuple(entry) for entry in entries)


def index_bounds(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The start and stop of an index in each dimension of an array of this shape."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _by_process(devices: Iterable[Any], numbers: np.ndarray) -> dict[int, tuple[int, ...]]:
    """The numbers of the devices of each process, each once and in rising order."""
    processes, size = np.array([device.process_index for device in devices]), numbers.max() + 1
    pairs = np.unique(processes * size + numbers)
    known, first = np.unique(pairs // size, return_index=True)
    bounds, found = [*first.tolist(), len(pairs)], (pairs % size).tolist()
    ranges = zip(known.tolist(), itertools.pairwise(bounds), strict=True)
    return {process: tuple(found[start:stop]) for process, (start, stop) in ranges}


@dataclasses.dataclass(frozen=True)
class DataLayout(metaclass=ShortHelp):
    """The part of the batch that one process reads, which T5X calls its shard.

    `row_indices` is correct on every mesh. A reader that uses only `shard_id` and `num_shards`, as
    in T5X, reads the correct rows if `is_even` is True.

    Attributes:
      batch_size: the number of rows of the global batch.
      shard_id: the number of the shard that this process reads.
      num_shards: the number of distinct shards that processes read.
      is_first_host_in_replica_set: True for exactly one of the processes that read this shard.
      row_indices: the global rows of this process in rising order, which is also the order of its
        local rows.
      is_even: whether all shards have equal sizes and different shards have no row in common.
    """

    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool
    row_indices: tuple[int, ...] = dataclasses.field(repr=False)
    is_even: bool = True


def data_layout(
    mesh: Mesh, axes: str | Sequence[str], batch_size: int, process_index: int | None = None
) -> DataLayout:
    """The part of a batch over these mesh axes that a process reads, by default this process.

    Raises:
      ValueError: if `batch_size` is not an integer >= 1 that divides into equal shards, if an axis
        does not exist or appears twice, or if the process holds no device of the mesh.
    """
    process = this_process() if process_index is None else process_index
    ownership = shard_ownership(mesh, (as_tuple(axes),))
    [num_shards] = ownership.num_shards
    check_batch_size(batch_size, num_shards, mesh)
    ownership.check_process(process, mesh)
    chunk, size = ownership.chunks[process], batch_size // num_shards
    rows = [range(shard * size, (shard + 1) * size) for shard in chunk]
    return DataLayout(
        batch_size=int(batch_size),
        shard_id=ownership.chunk_ids[chunk],
        num_shards=len(ownership.chunk_ids),
        is_first_host_in_replica_set=ownership.replica_ids[process] == 0,
        row_indices=tuple(rows[0] if len(rows) == 1 else itertools.chain(*rows)),
        is_even=ownership.is_even,
    )


def check_batch_size(batch_size: Any, num_shards: int, mesh: Mesh) -> None:
    """Raises ValueError unless the batch size is an integer >= 1 that the shards divide."""
    if not is_count(batch_size):
        raise ValueError(f'batch size {value_str(batch_size)} must be an integer >= 1')
    if batch_size % num_shards:
        fits = ' or '.join(map(str, sizes_that_fit(batch_size, num_shards)))
        raise ValueError(  # The first clause is T5X's.
            f'Batch size ({batch_size}) must be divisible by corresponding data mesh size '
            f'({num_shards}); the mesh is {describe_axes(mesh.shape)}. Use {fits}.'
        )
