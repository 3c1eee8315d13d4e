"""The proof of a layout: every row and every element, counted over all processes of a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.layout.chunker import LocalChunker
from partitioning.layout.held import axes_of, check_axes
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

        return (
            f'{self.batch_size} rows in {self.num_shards} shards'
            f'{"" if self.is_even else " that share rows or differ in size"}: '
            f'{self.num_processes} processes read {span(self.rows_per_process)} rows each, '
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
    held = _rows_by_place(mesh, axes, batch)
    readers = np.zeros(batch, int)
    sets: dict[tuple[int, ...], list[tuple[int, bool]]] = {}
    is_even = True
    for process, rows in held.items():
        layout = data_layout(mesh, axes, batch, process)
        if layout.row_indices != tuple(rows.tolist()):
            raise ValueError(
                f'process {process} of {describe_axes(mesh.shape)} is given rows '
                f'{_abridged(layout.row_indices)}, but its devices hold {_abridged(rows.tolist())}'
            )
        readers[rows] += 1
        sets.setdefault(layout.row_indices, []).append(
            (layout.shard_id, layout.is_first_host_in_replica_set)
        )
        is_even &= layout.is_even
    for number, rows_of_set in enumerate(sorted(sets)):
        ids, first = zip(*sets[rows_of_set], strict=True)
        if set(ids) != {number} or sum(first) != 1:
            raise ValueError(
                f'the processes that hold rows {_abridged(rows_of_set)} have shard ids '
                f'{sorted(set(ids))}, not {number}, and {sum(first)} of them are first'
            )
    if not readers.all():
        raise ValueError(f'rows {_abridged(np.flatnonzero(readers == 0).tolist())} are not read')
    sizes = [len(rows) for rows in held.values()]
    return LayoutProof(
        batch_size=batch,
        num_processes=len(held),
        num_shards=len(sets),
        rows_per_process=(min(sizes), max(sizes)),
        readers_per_row=(int(readers.min()), int(readers.max())),
        num_strided=sum(bool((np.diff(rows) != 1).any()) for rows in held.values()),
        is_even=is_even,
    )


def verify_chunks(
    mesh: Mesh, spec: PartitionSpec | Sequence[MeshAxes], shape: Sequence[int]
) -> dict[int, int]:
    """Proves that the chunks of an array are written once, all of it and nothing twice.

    Each process writes the blocks of `LocalChunker.get_local_chunks` whose `replica_id` is 0; sizes
    that do not divide are laid out as padded.

    Args:
      mesh: any mesh.
      spec: the mesh axes of each dimension.
      shape: that of the array. One count an element is kept while it is proved.

    Returns:
      For each process the number of elements it writes.

    Raises:
      ValueError: an element that is written twice or not at all.
    """
    partitions: list[MeshAxes] = list(axes_of(spec))
    partitions += [None] * (len(shape) - len(partitions))
    written = np.zeros(tuple(shape), np.uint8)
    elements = {}
    for process in sorted({d.process_index for d in mesh.devices.flat}):
        elements[process] = 0
        for block in LocalChunker(mesh, process).get_local_chunks(shape, partitions, 'pad'):
            if block.replica_id == 0:
                written[block.slice] += 1
                elements[process] += written[block.slice].size
    if (written != 1).any():
        where = tuple(np.argwhere(written != 1)[0].tolist())
        raise ValueError(f'element {where} of {tuple(shape)} is written {written[where]} times')
    return elements


def _rows_by_place(mesh: Mesh, axes: tuple[str, ...], batch: int) -> dict[int, np.ndarray]:
    """The rows of each process by the places of its devices, each place checked with jax's map."""
    ways = math.prod(mesh.shape[a] for a in axes)
    if batch % ways:
        raise ValueError(f'batch {batch} does not divide by {ways}, the size of mesh axes {axes}')
    block = batch // ways
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    index_map: Mapping[Any, Any] = sharding.devices_indices_map((batch,))
    places = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1)
    part = np.zeros(mesh.size, int)
    for axis in axes:
        part = part * mesh.shape[axis] + places[mesh.axis_names.index(axis)]
    held: dict[int, set[int]] = {}
    for device, number in zip(mesh.devices.flat, part.tolist(), strict=True):
        start, stop, _ = index_map[device][0].indices(batch)
        if (start, stop) != (number * block, (number + 1) * block):
            raise ValueError(
                f'{device} stands at part {number} of {ways}, but jax gives it rows {start} to '
                f'{stop} of {batch}'
            )
        held.setdefault(device.process_index, set()).add(number)
    return {
        process: (np.array(sorted(parts))[:, None] * block + np.arange(block)).ravel()
        for process, parts in held.items()
    }


def _abridged(numbers: Sequence[int]) -> str:
    shown = ', '.join(map(str, numbers[:8]))
    return f'[{shown}{", ..." if len(numbers) > 8 else ""}]'
