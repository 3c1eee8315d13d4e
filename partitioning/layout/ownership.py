"""Which shards of an array each process holds, read from jax's own index map."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.rules import (
    as_tuple,
    check_axes,
    check_has_devices,
    describe_axes,
    num_shards,
)

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

    def position(self, shard: int) -> tuple[int, ...]:
        """The position of a shard along each dimension."""
        if not self.num_shards:
            return ()
        return tuple(int(place) for place in np.unravel_index(shard, self.num_shards))

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
    """The shards of every process of a mesh, found in one pass over its devices.

    Args:
      mesh: the mesh.
      axes: the mesh axes of each dimension of the array.

    Raises:
      ValueError: if the mesh lacks one of the axes, if an axis appears twice, or if the mesh is an
        AbstractMesh.
    """
    check_has_devices(mesh, 'the part of an array that a process holds')
    flat = tuple(axis for dimension in axes for axis in dimension)
    check_axes(flat, mesh, 'the array')
    shards = tuple(num_shards(dimension, mesh) for dimension in axes)
    chunks = _chunks(mesh, axes, shards)
    others = tuple(axis for axis in mesh.axis_names if axis not in flat)
    places = chunks
    if others:
        sizes = tuple(mesh.shape[axis] for axis in others)
        places = _chunks(mesh, tuple((axis,) for axis in others), sizes)
    order = sorted(chunks, key=lambda process: (places[process], process))
    return ShardOwnership(shards, {process: chunks[process] for process in order})


def axes_per_dimension(mesh_axes: Any) -> Axes:
    """The mesh axes of each dimension, as tuples.

    Args:
      mesh_axes: a PartitionSpec, or a sequence with a mesh axis, axes or None for each dimension.

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


def _chunks(mesh: Mesh, axes: Axes, shards: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """The chunk of each process, of an array that has one element per shard."""
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    strides = [math.prod(shards[dim + 1 :]) for dim in range(len(shards))]
    index_map: Mapping[Any, Any] = sharding.devices_indices_map(shards)
    held: dict[int, set[int]] = {}
    for device, index in index_map.items():
        shard = 0
        for along, stride in zip(index, strides, strict=True):
            shard += (along.start or 0) * stride
        held.setdefault(device.process_index, set()).add(shard)
    return {process: tuple(sorted(chunk)) for process, chunk in held.items()}
