"""Which parts of an array each process holds, read off jax's own index map."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.rules import as_tuple, describe_axes, is_count, nearest

# The mesh axes of each dimension of an array.
Axes = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Held:
    """The equal parts into which mesh axes divide an array, and the processes that hold them.

    Parts are numbered in row-major order. Processes stand in the order of their replicas: by their
    places along the mesh axes that do not divide the array, then by their numbers.

    Attributes:
      ways: how many parts there are along each dimension.
      parts: the parts that each process holds, rising.
    """

    ways: tuple[int, ...]
    parts: Mapping[int, tuple[int, ...]]

    @functools.cached_property
    def shards(self) -> Mapping[tuple[int, ...], int]:
        """The number of each distinct set of parts, in the order of the parts."""
        return {parts: i for i, parts in enumerate(sorted(set(self.parts.values())))}

    @functools.cached_property
    def replica_ids(self) -> Mapping[int, int]:
        """The number of each process among those that hold the same set of parts."""
        seen = dict.fromkeys(self.shards, 0)
        numbers = {}
        for process, parts in self.parts.items():
            numbers[process] = seen[parts]
            seen[parts] += 1
        return numbers

    @functools.cached_property
    def part_replica_ids(self) -> Mapping[int, Mapping[int, int]]:
        """For each part, the number of each process among those that hold it."""
        numbers: dict[int, dict[int, int]] = {}
        for process, parts in self.parts.items():
            for part in parts:
                holders = numbers.setdefault(part, {})
                holders[process] = len(holders)
        return numbers

    @functools.cached_property
    def overlap(self) -> bool:
        """Whether two processes hold sets that differ and yet have a part in common."""
        return sum(map(len, self.shards)) > math.prod(self.ways)

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether the distinct sets have as many parts each, and none in common."""
        return not self.overlap and len(set(map(len, self.shards))) == 1

    def place(self, part: int) -> tuple[int, ...]:
        """Where a part is along each dimension."""
        return tuple(int(at) for at in np.unravel_index(part, self.ways)) if self.ways else ()

    def check_holds(self, process: Any, mesh: Mesh) -> None:
        """The process has devices in the mesh, and so parts of the array."""
        if isinstance(process, bool | float) or process not in self.parts:
            known = sorted(self.parts)
            which = f'processes {known}'
            if len(known) > 16:
                which = f'{len(known)} processes, {known[0]} to {known[-1]}'
            raise ValueError(
                f'process {process!r} holds no device of the mesh {describe_axes(mesh.shape)}; it '
                f'has {which}'
            )


@functools.lru_cache(maxsize=256)
def held_parts(mesh: Mesh, axes: Axes) -> Held:
    """What every process of a mesh holds of an array that `axes` divide; one pass over devices.

    Raises:
      ValueError: an axis that the mesh lacks, or that is used twice.
    """
    flat = tuple(axis for dimension in axes for axis in dimension)
    check_axes(mesh, flat)
    ways = tuple(math.prod(mesh.shape[a] for a in dimension) for dimension in axes)
    parts = _parts_of_processes(mesh, axes, ways)
    others = tuple(a for a in mesh.axis_names if a not in flat)
    places = parts
    if others:
        sizes = tuple(mesh.shape[a] for a in others)
        places = _parts_of_processes(mesh, tuple((a,) for a in others), sizes)
    order = sorted(parts, key=lambda process: (places[process], process))
    return Held(ways, {process: parts[process] for process in order})


def check_axes(mesh: Mesh, axes: tuple[str, ...]) -> None:
    """Each axis is one of the mesh, and used once."""
    for axis in axes:
        if axis not in mesh.shape:
            raise ValueError(
                f'mesh axis {axis!r} does not exist: the mesh is {describe_axes(mesh.shape)}.'
                f'{nearest(axis, mesh.shape)}'
            )
        if axes.count(axis) > 1:
            raise ValueError(f'mesh axis {axis!r} is used twice in {axes}')


def axes_of(mesh_axes: Any) -> Axes:
    """The mesh axes of each dimension, as a PartitionSpec or a sequence names them.

    Raises:
      ValueError: a string, whose letters are no axes, or a dimension without a decision.
    """
    partitions = tuple(mesh_axes) if isinstance(mesh_axes, PartitionSpec) else mesh_axes
    if not isinstance(partitions, tuple | list):
        raise ValueError(f"{mesh_axes!r} must have an entry a dimension, such as ('data', None)")
    for axes in partitions:
        if not isinstance(axes, str | tuple | list | None):
            raise ValueError(
                f'{axes!r} in {mesh_axes!r} is no mesh axis, no tuple of them, not None'
            )
    return tuple(as_tuple(axes) for axes in partitions)


def bounds_of(index: Sequence[slice], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Start and stop of an index in each dimension of an array."""
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def check_rows_divide(batch_size: Any, ways: int, mesh: Mesh) -> None:
    """The batch is a positive whole number of rows that its mesh axes divide."""
    if not is_count(batch_size):
        raise ValueError(f'batch size {batch_size!r} must be a positive whole number')
    if batch_size % ways:
        above = -(-batch_size // ways) * ways
        fits = f'{above - ways} or {above}' if above > ways else above
        raise ValueError(
            f'Batch size ({batch_size}) must be divisible by corresponding data mesh size '
            f'({ways}): the mesh is {describe_axes(mesh.shape)}. Use {fits}.'
        )


def _parts_of_processes(
    mesh: Mesh, axes: Axes, ways: tuple[int, ...]
) -> dict[int, tuple[int, ...]]:
    """The parts that the devices of each process hold, of an array of one element a part."""
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    strides = [math.prod(ways[dim + 1 :]) for dim in range(len(ways))]
    index_map: Mapping[Any, Any] = sharding.devices_indices_map(ways)
    held: dict[int, set[int]] = {}
    for device, index in index_map.items():
        part = sum((s.start or 0) * stride for s, stride in zip(index, strides, strict=True))
        held.setdefault(device.process_index, set()).add(part)
    return {process: tuple(sorted(parts)) for process, parts in held.items()}
