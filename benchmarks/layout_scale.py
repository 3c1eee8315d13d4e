"""How long the layouts of very many processes take, beside jax's own index map of the batch.

  python benchmarks/layout_scale.py

Meshes (data, 8) of 64 to 8,192 made-up processes of 4 devices each, two of which read the same
rows; 4 rows a part. For each mesh the seconds of: one process's chunker; the layouts of all
processes; the proof of them; the chunks of a matrix over both axes for all processes, their
chunkers included. The peer is `NamedSharding.devices_indices_map` of the same batch, in turns with
ours; medians. A process needs its own chunker and layout: that is the last column.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

jax.config.update('jax_platforms', 'cpu')

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning import LocalChunker
from partitioning.layout import data_layout, verify

ROUNDS = 5
PROCESSES = (64, 256, 1024, 4096, 8192)
DEVICES_OF_A_PROCESS = 4
MODEL = 8
ROWS_OF_A_PART = 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SyntheticDevice:
    """A device of a process."""

    id: int
    process_index: int
    device_kind: str = 'cpu'
    platform: str = 'cpu'


def mesh_of(devices: np.ndarray, turn: int) -> Mesh:
    """A mesh that no cache knows: its axes have names of their own in each turn."""
    return Mesh(devices, (f'data{turn}', f'model{turn}'))


def chunker(mesh: Mesh, batch: int) -> Any:
    """The chunker of one process."""
    return LocalChunker(mesh, 0)


def own_layout(mesh: Mesh, batch: int) -> Any:
    """What a process makes when it starts: its chunker and its layout."""
    return LocalChunker(mesh, 0), data_layout(mesh, mesh.axis_names[:1], batch, 0)


def layouts(mesh: Mesh, batch: int) -> Any:
    """The layouts of all processes."""
    processes = mesh.size // DEVICES_OF_A_PROCESS
    return [data_layout(mesh, mesh.axis_names[:1], batch, p) for p in range(processes)]


def proof(mesh: Mesh, batch: int) -> Any:
    """The proof of all layouts, which it makes itself."""
    return verify(mesh, PartitionSpec(mesh.axis_names[0]), batch)


def chunks(mesh: Mesh, batch: int) -> Any:
    """The blocks of a matrix of all processes."""
    processes = mesh.size // DEVICES_OF_A_PROCESS
    return [
        LocalChunker(mesh, p).get_local_chunks((batch, 4 * MODEL), mesh.axis_names)
        for p in range(processes)
    ]


def peer(mesh: Mesh, batch: int) -> Any:
    """jax's map of the batch."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names[0]))
    return sharding.devices_indices_map((batch,))


OURS = (chunker, layouts, proof, chunks, own_layout)


def compare(processes: int) -> tuple[list[float], float]:
    """Medians of ours and of the peer, each call on a mesh that nothing has seen."""
    devices = np.empty(processes * DEVICES_OF_A_PROCESS, object)
    for i in range(devices.size):
        devices[i] = SyntheticDevice(i, i // DEVICES_OF_A_PROCESS)
    grid = devices.reshape(-1, MODEL)
    batch = ROWS_OF_A_PART * len(grid)
    turns = iter(range(ROUNDS * (len(OURS) + 1)))

    def seconds(work: Callable[[Mesh, int], Any]) -> float:
        mesh = mesh_of(grid, next(turns))
        gc.collect()  # what the last call left
        start = time.perf_counter()
        work(mesh, batch)
        return time.perf_counter() - start

    rounds = [[seconds(work) for work in (*OURS, peer)] for _ in range(ROUNDS)]
    *mine, other = (statistics.median(times) for times in zip(*rounds, strict=True))
    return mine, other


def main() -> None:
    """Prints the table, the times a process, and the growth."""
    compare(PROCESSES[0])  # what is imported and compiled once
    results = {processes: compare(processes) for processes in PROCESSES}
    print('seconds, and in brackets how many times those of jax')
    print(
        f'processes  {"jax":>7}  {"chunker":>13}  {"all layouts":>14}  {"verify":>14}  '
        f'{"all chunks":>14}  {"own start":>13}'
    )
    for processes, (mine, other) in results.items():
        cells = [f'{t:7.4f} ({t / other:4.1f})' for t in mine]
        print(
            f'{processes:9,}  {other:7.4f}  {cells[0]:>13}  {cells[1]:>14}  {cells[2]:>14}  '
            f'{cells[3]:>14}  {cells[4]:>13}'
        )
    print('microseconds a process')
    for processes, (mine, other) in results.items():
        each = [1e6 * t / processes for t in (other, *mine)]
        print(
            f'{processes:9,}  {each[0]:7.1f}  {each[1]:13.1f}  {each[2]:14.1f}  {each[3]:14.1f}  '
            f'{each[4]:14.1f}  {each[5]:13.1f}'
        )
    (few, (first, first_peer)), *_, (many, (last, last_peer)) = results.items()
    growth = math.log(many / few)
    exponents = [math.log(b / a) / growth for a, b in zip(first, last, strict=True)]
    print(
        f'time grows with processes (of {few:,} to {many:,}) to the power of: '
        + ', '.join(
            f'{name} {exponent:.2f}'
            for name, exponent in zip(
                ('chunker', 'all layouts', 'verify', 'all chunks', 'own start'),
                exponents,
                strict=True,
            )
        )
        + f'; jax {math.log(last_peer / first_peer) / growth:.2f}'
    )


if __name__ == '__main__':
    main()
