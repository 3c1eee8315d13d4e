"""The time that the layouts of many processes take, relative to jax's own index map of the batch.

  python benchmarks/layout_scale.py

The meshes have the shape (data, 8) and 64 to 8,192 synthetic processes of 4 devices each, so two
processes read the same rows. Each data shard has 4 rows. For each mesh, it measures four things:

  chunker       the chunker of one process
  all layouts   the data layouts of all processes
  all chunks    the chunks that all processes hold of a matrix sharded over both axes
  own start     what one process computes when it starts: its own chunker and data layout

The peer is `NamedSharding.devices_indices_map` of the same batch. All are measured in alternation,
and the medians are printed.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import jax

jax.config.update('jax_platforms', 'cpu')

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.timing import growth, seconds
from partitioning import LocalChunker
from partitioning.layout import data_layout

ROUNDS = 5
PROCESSES = (64, 256, 1024, 4096, 8192)
DEVICES_PER_PROCESS = 4
MODEL = 8
ROWS_PER_SHARD = 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SyntheticDevice:
    """A device of a process."""

    id: int
    process_index: int
    device_kind: str = 'cpu'
    platform: str = 'cpu'


def all_layouts(mesh: Mesh, batch: int) -> Any:
    processes = mesh.size // DEVICES_PER_PROCESS
    return [data_layout(mesh, mesh.axis_names[:1], batch, p) for p in range(processes)]


def all_chunks(mesh: Mesh, batch: int) -> Any:
    processes = mesh.size // DEVICES_PER_PROCESS
    return [
        LocalChunker(mesh, p).get_local_chunks((batch, 4 * MODEL), mesh.axis_names)
        for p in range(processes)
    ]


def own_start(mesh: Mesh, batch: int) -> Any:
    return LocalChunker(mesh, 0), data_layout(mesh, mesh.axis_names[:1], batch, 0)


def peer(mesh: Mesh, batch: int) -> Any:
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    return sharding.devices_indices_map((batch,))


ALL = {
    'jax': peer,
    'chunker': lambda mesh, batch: LocalChunker(mesh, 0),
    'all layouts': all_layouts,
    'all chunks': all_chunks,
    'own start': own_start,
}


def measure_all(processes: int) -> list[float]:
    """Returns the median seconds of jax and of our functions, on uncached meshes."""
    devices = np.empty(processes * DEVICES_PER_PROCESS, object)
    for i in range(devices.size):
        devices[i] = SyntheticDevice(i, i // DEVICES_PER_PROCESS)
    grid = devices.reshape(-1, MODEL)
    batch = ROWS_PER_SHARD * len(grid)
    turns = itertools.count()

    def measure(work: Callable[[Mesh, int], Any]) -> float:
        turn = next(turns)
        # New axis names, so no cache contains this mesh.
        mesh = Mesh(grid, (f'data{turn}', f'model{turn}'))
        gc.collect()
        return seconds(lambda: work(mesh, batch))

    rounds = [[measure(work) for work in ALL.values()] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    """Prints the seconds, and the exponent of the growth."""
    measure_all(PROCESSES[0])  # The first call also imports modules, so it is not measured.
    results = {processes: measure_all(processes) for processes in PROCESSES}
    _, *names = ALL
    header = ''.join(f'  {name:>14}' for name in names)
    print('measured: seconds, and in parentheses the ratio to jax')
    print(f'processes  {"jax":>7}{header}')
    for processes, (theirs, *ours) in results.items():
        cells = ''.join(f'  {f"{t:.4f} ({t / theirs:.1f})":>14}' for t in ours)
        print(f'{processes:9,}  {theirs:7.4f}{cells}')
    few, many, exponents = growth(results)
    listed = ', '.join(f'{n} {e:.2f}' for n, e in zip(ALL, exponents, strict=True))
    print(f'exponent of the growth of time from {few:,} to {many:,} processes: {listed}')


if __name__ == '__main__':
    main()
