"""The proof of a layout: every row and every element, counted over all processes of a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.layout.chunker import LocalChunker
from partitioning.layout.held import axes_of, bounds_of, check_axes, check_rows_divide
from partitioning.layout.rows import data_layout
from partitioning.rules import MeshAxes, describe_axes


@dataclasses.dataclass(frozen=True)
class LayoutProof:
    """What a verified layout of a batch is like.

    Attributes:
      batch_size: rows of the global batch.
      num_processes: processes of the mesh.
      num_shards: distinct sets of rows that processes read.
      rows_per_process: the fewest and the most that one reads.
      readers_per_row: the fewest and the most processes that read a row.
      num_strided: processes whose rows do not follow each other.
      is_even: whether the shards are equal in size and have no row in common.
    """

    batch_size: int
    num_processes: int
    num_shards: int
    rows_per_process: tuple[int, int]
    readers_per_row: tuple[int, int]
    num_strided: int
    is_even: bool

    def __str__(self) -> str:
        def span(least_most: tuple[int, int]) -> str:
            least, most = least_most
            return str(least) if least == most else f'{least} to {most}'

        shards = 'shard' if self.num_shards == 1 else 'shards'
        several = f'{self.num_processes} processes read'
        processes = '1 process reads' if self.num_processes == 1 else several
        return (
            f'{self.batch_size} rows in {self.num_shards} {shards}'
            f'{"" if self.is_even else " that share rows or differ in size"}: '
            f'{processes} {span(self.rows_per_process)} rows each, '
            f'{self.num_strided} of them strided; a row is read by '
            f'{span(self.readers_per_row)} of them'
        )


def verify(mesh: Mesh, spec: PartitionSpec | Sequence[MeshAxes], batch: int) -> LayoutProof:
    """Proves that each row of a batch is read by exactly the processes that hold it.

    It walks all devices and all processes, and compares three things with each other: the layout
    that each process is given, jax's index map, and the places of the devices in the mesh.

    Args:
      mesh: any mesh, of machines that are here or described.
      spec: the mesh axes of the batch, first those of its rows.
      batch: rows of the global batch.

    Raises:
      ValueError: the axes do not divide the batch, or a row is read by a process that does not hold
        it, not read by one that does, or a replica set has no first process or several.
    """
    axes = (axes_of(spec) or ((),))[0]
    check_axes(mesh, axes)
    check_rows_divide(batch, math.prod(mesh.shape[a] for a in axes), mesh)
    held = _rows_by_place(mesh, axes, batch)
    numbers = {rows: number for number, rows in enumerate(sorted(set(held.values())))}
    sizes = [len(rows) for rows in held.values()]
    readers = np.bincount([row for rows in held.values() for row in rows], minlength=batch)
    is_even = len(set(sizes)) == 1 and sum(map(len, numbers)) == batch
    firsts = dict.fromkeys(numbers, 0)
    for process, rows in held.items():
        layout = data_layout(mesh, axes, batch, process)
        firsts[rows] += layout.is_first_host_in_replica_set
        if layout.row_indices != rows:
            raise ValueError(
                f'process {process} of {describe_axes(mesh.shape)} is given rows '
                f'{_abridged(layout.row_indices)}, but its devices hold {_abridged(rows)}'
            )
        given = (layout.batch_size, layout.shard_id, layout.num_shards, layout.is_even)
        proved = (batch, numbers[rows], len(numbers), is_even)
        if given != proved:
            raise ValueError(
                f'process {process}, which holds rows {_abridged(rows)}, is given batch size, '
                f'shard id, number of shards and evenness {given}, not {proved}'
            )
    for rows, first in firsts.items():
        if first != 1:
            raise ValueError(
                f'{first} of the processes that hold rows {_abridged(rows)} say they are the first'
            )
    return LayoutProof(
        batch_size=int(batch),
        num_processes=len(held),
        num_shards=len(numbers),
        rows_per_process=(min(sizes), max(sizes)),
        readers_per_row=(int(np.min(readers)), int(np.max(readers))),
        num_strided=sum(rows[-1] - rows[0] >= len(rows) for rows in held.values()),
        is_even=is_even,
    )


def verify_chunks(
    mesh: Mesh, spec: PartitionSpec | Sequence[MeshAxes], shape: Sequence[int]
) -> dict[int, int]:
    """Proves that each process's chunks of an array are what its devices hold, and written once.

    Each process writes the blocks of `LocalChunker.get_local_chunks` whose `replica_id` is 0; sizes
    that do not divide are laid out as padded.

    Args:
      mesh: any mesh.
      spec: the mesh axes of each dimension.
      shape: that of the array. One count an element is kept while it is proved.

    Returns:
      For each process the number of elements it writes.

    Raises:
      ValueError: a block that no device of the process holds, or that one holds and the process is
        not given; an element that is written twice or not at all.
    """
    axes = list(axes_of(spec))
    if len(axes) > len(shape):
        raise ValueError(
            f'{len(axes)} mesh axes {tuple(axes)} for an array of {len(shape)} dimensions'
        )
    axes += [()] * (len(shape) - len(axes))
    written = np.zeros(tuple(shape), np.int32)
    elements = {}
    for process, held in _blocks_by_place(mesh, axes, shape).items():
        blocks = LocalChunker(mesh, process).get_local_chunks(shape, axes, 'pad')
        given = {bounds_of(block.slice, shape) for block in blocks}
        if given != held:
            raise ValueError(
                f'process {process} is given blocks {sorted(given)} of {tuple(shape)}, but its '
                f'devices hold {sorted(held)}'
            )
        elements[process] = 0
        for block in blocks:
            if block.replica_id == 0:
                written[block.slice] += 1
                elements[process] += written[block.slice].size
    if (written != 1).any():
        where = tuple(np.argwhere(written != 1)[0].tolist())
        raise ValueError(f'element {where} of {tuple(shape)} is written {written[where]} times')
    return elements


def _rows_by_place(mesh: Mesh, axes: tuple[str, ...], batch: int) -> dict[int, tuple[int, ...]]:
    """The rows of each process by the places of its devices, each place checked with jax's map."""
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    index_map: Mapping[Any, Any] = sharding.devices_indices_map((batch,))
    parts, ways = _part_by_place(mesh, axes)
    block = batch // ways
    held: dict[int, set[int]] = {}
    for device, part in zip(mesh.devices.flat, parts.tolist(), strict=True):
        start, stop, _ = index_map[device][0].indices(batch)
        if (start, stop) != (part * block, (part + 1) * block):
            raise ValueError(
                f'{device} stands at part {part} of {ways}, but jax gives it rows {start} to '
                f'{stop} of {batch}'
            )
        held.setdefault(device.process_index, set()).add(part)
    return {
        process: tuple(row for p in sorted(own) for row in range(p * block, (p + 1) * block))
        for process, own in held.items()
    }


def _blocks_by_place(
    mesh: Mesh, axes: Sequence[tuple[str, ...]], shape: Sequence[int]
) -> dict[int, set[tuple[tuple[int, int], ...]]]:
    """The blocks (start and stop of each dimension) of each process by its devices' places."""
    bounds = []
    for size, dim_axes in zip(shape, axes, strict=True):
        parts, ways = _part_by_place(mesh, dim_axes)
        block = -(-size // ways)
        starts, stops = np.minimum(parts * block, size), np.minimum((parts + 1) * block, size)
        bounds.append(list(zip(starts.tolist(), stops.tolist(), strict=True)))
    held: dict[int, set[tuple[tuple[int, int], ...]]] = {}
    for i, device in enumerate(mesh.devices.flat):
        held.setdefault(device.process_index, set()).add(tuple(b[i] for b in bounds))
    return held


def _part_by_place(mesh: Mesh, axes: tuple[str, ...]) -> tuple[np.ndarray, int]:
    """The part of a dimension that each device has, in the order of the mesh, of how many."""
    places = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1)
    part, ways = np.zeros(mesh.size, int), 1
    for axis in axes:
        part = part * mesh.shape[axis] + places[mesh.axis_names.index(axis)]
        ways *= mesh.shape[axis]
    return part, ways


def _abridged(numbers: Sequence[int]) -> str:
    shown = ', '.join(map(str, numbers[:8]))
    return f'[{shown}{", ..." if len(numbers) > 8 else ""}]'
