"""Saving and restoring next to the speed of the disk: time, peak memory, and how long a step waits.

  python benchmarks/checkpoint.py [--gib 1] [--rounds 3] [--folder DIR]

Every round writes and reads the same bytes with plain files first (write and fsync, then a read
without the page cache), and then saves and restores a state of 8 virtual CPU devices with all
checksums. Each measurement has its own process, so that its peak memory is its own. The table has
the median of the rounds, and ratios to the plain files of the same run. DIR is on the disk to
measure; it needs three times the size of the state.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from benchmarks.campaigns import call_command, peak_memory, reset_peak
from partitioning import TrainState
from train.checkpoints import CheckpointConfig, open_checkpoints

MIB, GIB = 2**20, 2**30
NUM_RAW_FILES = 4
SAVE_MESH = (4, 2)
# The settings of each save; the checkpoint of the last one is restored.
SAVES = {
    'save due while one is in flight': {'when_busy': 'later'},
    'save, synchronous': {'asynchronous': False},
    'save, asynchronous': {},
}


class Restore(NamedTuple):
    """A mesh, whether every device gets whole arrays, and the number of processes."""

    mesh: tuple[int, int]
    replicated: bool = False
    processes: int = 1


RESTORES = {
    'restore, same mesh 4x2': Restore((4, 2)),
    'restore, mesh 1x8': Restore((1, 8)),
    'restore, replicated on 2 devices': Restore((2, 1), replicated=True),
    'restore, 2 processes, replicated': Restore((2, 1), replicated=True, processes=2),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--gib', type=float, default=1, help='the size of the state, in GiB')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--folder', type=Path, help='a folder on the disk to measure')
    parser.add_argument('--only', default='', help='measures only saves or restores with this name')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = list(run_rounds(options, Path(folder)))
    show(options.gib, results)
    return 0


def run_rounds(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Measures everything once per round, alternating with the plain files."""
    for number in range(options.rounds):
        result: dict[str, Any] = {'raw': measure_raw(folder, options.gib)}
        for name in (*SAVES, *RESTORES):
            if options.only in name or (name in SAVES and not (folder / 'checkpoints').exists()):
                if name in SAVES:
                    shutil.rmtree(folder / 'checkpoints', ignore_errors=True)
                result[name] = in_new_process(name, options.gib, folder)
                print(f'round {number + 1}: {name}: {result[name]}', file=sys.stderr, flush=True)
        yield result


def in_new_process(name: str, gib: float, folder: Path) -> dict[str, float]:
    """Runs one measurement in its own processes, and returns the greatest of their figures."""
    processes = RESTORES[name].processes if name in RESTORES else 1
    with socket.socket() as reserved:
        reserved.bind(('127.0.0.1', 0))
        port = reserved.getsockname()[1]
    commands = [
        call_command(measure, name, gib, str(folder), port, index) for index in range(processes)
    ]
    started = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in commands]
    results = [json.loads(one.communicate()[0].splitlines()[-1]) for one in started]
    return {field: max(result[field] for result in results) for field in results[0]}


# Plain files.


def measure_raw(folder: Path, gib: float) -> dict[str, float]:
    """The seconds to write and fsync plain files, and to read them without the page cache."""
    block = os.urandom(16 * MIB)
    paths = [folder / f'raw{i}' for i in range(NUM_RAW_FILES)]
    num_blocks = round(gib * GIB) // len(block) // NUM_RAW_FILES

    def write(path: Path) -> None:
        with path.open('wb', buffering=0) as file:
            for _ in range(num_blocks):
                file.write(block)
            os.fsync(file.fileno())

    def read(path: Path) -> None:
        buffer = bytearray(MIB)
        with path.open('rb', buffering=0) as file:
            while file.readinto(buffer):
                pass

    touch_memory(2 * num_blocks * len(block) * NUM_RAW_FILES)
    with ThreadPoolExecutor(NUM_RAW_FILES) as pool:
        start = time.perf_counter()
        list(pool.map(write, paths))
        written = time.perf_counter() - start
        forget(folder)
        start = time.perf_counter()
        list(pool.map(read, paths))
        seconds = {'write': written, 'read': time.perf_counter() - start}
    for path in paths:
        path.unlink()
    return seconds


def forget(folder: Path) -> None:
    """Removes the files below a folder from the page cache."""
    for path in folder.rglob('*'):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)  # Pages that are not written yet would stay.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# One measurement, in a process with virtual devices.


def measure(name: str, gib: float, folder: str, port: int, index: int) -> dict[str, float]:
    """Saves or restores once, and returns the seconds and the bytes of it.

    Before that, it joins the other processes of the measurement at a port, with its index.
    """
    restore = RESTORES.get(name, Restore(SAVE_MESH))
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_num_cpu_devices', math.prod(restore.mesh) // restore.processes)
    if restore.processes > 1:
        jax.distributed.initialize(f'127.0.0.1:{port}', restore.processes, index)
    if name in SAVES:
        return measure_save(gib, epath.Path(folder), SAVES[name])
    return measure_restore(gib, epath.Path(folder), restore)


def abstract_state(gib: float, mesh_shape: tuple[int, int], replicated: bool = False) -> Any:
    """A state like Adam's: parameters of 32 MiB and of a few KiB, with two moments each."""
    devices = np.array(jax.devices()[: mesh_shape[0] * mesh_shape[1]]).reshape(mesh_shape)
    mesh = Mesh(devices, ('data', 'model'))

    def struct(shape: tuple[int, ...], spec: P, dtype: str = 'float32') -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, P() if replicated else spec)
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)

    def tree() -> dict[str, Any]:
        layers = range(max(1, round(gib * GIB / 3 / (32 * MIB))))
        return {
            f'layer_{i}': {
                'kernel': struct((4096, 2048), P('data', 'model')),
                'scale': struct((4096,), P()),
            }
            for i in layers
        }

    return TrainState(
        step=struct((), P(), 'int32'), params=tree(), opt_state={'mu': tree(), 'nu': tree()}
    )


def random_state(abstract: Any) -> Any:
    """Normal numbers for every array. Each array has them in another order."""
    numbers = np.random.default_rng(0).standard_normal(2**23 + 2**16, dtype=np.float32)

    def make(i: int, struct: jax.ShapeDtypeStruct) -> jax.Array:
        start = 997 * i % 2**16
        size = struct.size
        values = numbers[start : start + size].reshape(struct.shape).astype(struct.dtype)
        # The jitted copy owns its memory, as the state of a run does.
        return jax.jit(lambda x: x + 0, out_shardings=struct.sharding)(values)

    leaves, treedef = jax.tree.flatten(abstract)
    return jax.tree.unflatten(treedef, [make(i, leaf) for i, leaf in enumerate(leaves)])


def measure_save(gib: float, folder: epath.Path, settings: dict[str, Any]) -> dict[str, float]:
    """Saves a step. If another step is due while one is in flight, it is asked whether to save."""
    state = jax.block_until_ready(random_state(abstract_state(gib, SAVE_MESH)))
    warm_up(folder / f'warm{os.getpid()}', SAVE_MESH)
    saved = open_checkpoints(CheckpointConfig(period=1, keep=1, **settings), folder)
    touch_memory(round(gib * GIB))
    before = reset_peak()
    start = time.perf_counter()
    saved.save(1, state)
    result = {'blocked': time.perf_counter() - start}
    if 'when_busy' in settings:
        again = time.perf_counter()
        assert not saved.is_due(2), 'the first save has ended already'
        result = {'blocked': time.perf_counter() - again}
    assert saved.latest_step() == 1  # It waits until the step is complete.
    if 'when_busy' not in settings:
        result['seconds'] = time.perf_counter() - start
    result |= {'peak': peak_memory() - before, 'held': held_bytes(state)}
    saved.close()
    return result


def warm_up(folder: epath.Path, mesh_shape: tuple[int, int], replicated: bool = False) -> None:
    """Saves and restores a small state, so that imports and threads are not measured."""
    abstract = abstract_state(0, mesh_shape, replicated)
    small = open_checkpoints(CheckpointConfig(), folder)
    small.save(1, random_state(abstract))
    small.close()
    multihost_utils.sync_global_devices('saved')
    small.restore(1, abstract)
    multihost_utils.sync_global_devices('restored')
    if jax.process_index() == 0:
        shutil.rmtree(folder)


def measure_restore(gib: float, folder: epath.Path, restore: Restore) -> dict[str, float]:
    """Restores the newest step without the page cache."""
    abstract = abstract_state(gib, restore.mesh, restore.replicated)
    warm_up(folder / 'warm', restore.mesh, restore.replicated)
    saved = open_checkpoints(CheckpointConfig(keep=2), folder)
    step = saved.latest_step()
    assert step is not None
    saved.preflight(step, abstract).check()
    touch_memory(2 * round(gib * GIB))
    forget(Path(folder))
    before = reset_peak()
    start = time.perf_counter()
    state = jax.block_until_ready(saved.restore(step, abstract))
    seconds, highest = time.perf_counter() - start, peak_memory()
    held = held_bytes(state)
    return {'seconds': seconds, 'peak': highest - before - held, 'held': held}


def touch_memory(size: int) -> None:
    """Makes a virtual machine have memory of a size in bytes, which its host may have taken back.

    Otherwise, the first use of each page takes longer than reading it from the disk, for whoever
    comes first. Plain files and checkpoints are measured after it alike.
    """
    np.ones(size, np.uint8)


def held_bytes(state: Any) -> int:
    """The size of all shards of a state, in bytes."""
    return sum(x.data.nbytes for leaf in jax.tree.leaves(state) for x in leaf.addressable_shards)


def show(gib: float, results: list[dict[str, Any]]) -> None:
    """Prints the medians of the rounds, next to plain files."""
    raw = {kind: statistics.median(r['raw'][kind] for r in results) for kind in ('write', 'read')}
    speeds = ', '.join(f'{kind} {gib / seconds:.2f} GiB/s' for kind, seconds in raw.items())
    print(f'{gib:g} GiB, median of {len(results)} rounds; plain files: {speeds}')
    print(f'{"":36}{"time":>9}{"of raw":>8}{"blocks":>10}{"peak above":>13}{"of state":>10}')
    for name in [name for name in results[0] if name != 'raw']:
        median = {
            field: statistics.median(result[name][field] for result in results)
            for field in results[0][name]
        }
        seconds, blocked = median.get('seconds'), median.get('blocked')
        ratio = None if seconds is None else raw['write' if name in SAVES else 'read'] / seconds
        cells = [
            '' if seconds is None else f'{seconds:.2f} s',
            '' if ratio is None else f'{ratio:.2f}',
            '' if blocked is None else f'{blocked * 1000:.0f} ms',
            f'{median["peak"] / GIB:.2f} GiB',
            f'{median["peak"] / median["held"]:.2f}',
        ]
        print(f'{name:36}{cells[0]:>9}{cells[1]:>8}{cells[2]:>10}{cells[3]:>13}{cells[4]:>10}')


if __name__ == '__main__':
    sys.exit(main())
