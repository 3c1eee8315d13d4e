"""Checkpoints through other formats and back: whether bits stay equal, and the memory it takes.

  python benchmarks/conversions.py --data DIR --gib 1

DIR is the DIR of t5x_parity.py. Every checkpoint of T5X in it is converted to safetensors,
to a step of this package and to plain Orbax, and from each of them back to T5X. Then a checkpoint
of Orbax, half of which is one array, goes through all formats, each conversion in its own process.
Its peak memory must be below the largest array plus 2 GiB. The command fails if a bit differs or
the memory is exceeded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from benchmarks.campaigns import call_command, peak_memory
from train.checkpoints.formats.opening import choose_place, open_checkpoint
from train.checkpoints.offline.comparing import compare
from train.checkpoints.offline.converting import plan_conversion, write
from train.cli import main as meshwright

FORMATS = ('safetensors', 'meshwright', 'orbax')
MEMORY_ABOVE_LARGEST = 2 * 2**30


def convert(source: Path, to: Path, format: Any) -> Path:
    """Converts a checkpoint, and returns the path of the result."""
    checkpoint = open_checkpoint(choose_place(epath.Path(source))[0])
    conversion = plan_conversion(checkpoint, epath.Path(to), format)
    write(conversion, lambda count: None)
    return Path(conversion.folder)


def count_differences(first: Path, second: Path) -> tuple[int, int]:
    """The number of arrays, and of those that differ in name, shape, dtype or any bit."""
    arrays = [open_checkpoint(choose_place(epath.Path(p))[0]).arrays for p in (first, second)]
    return len(arrays[0]), sum(1 for _ in compare(*arrays, lambda count: None))


def convert_references(data: Path) -> Iterator[tuple[str, str, int, int]]:
    """Converts every reference of T5X through each format and back."""
    for path in sorted(data.glob('*/*/checkpoint_*')):
        for format in FORMATS:
            with tempfile.TemporaryDirectory() as temporary:
                between = convert(path, Path(temporary, 'between'), format)
                back = convert(between, Path(temporary, 'back'), 't5x')
                yield str(path.relative_to(data)), format, *count_differences(path, back)


def save_large(path: Path, gib: float) -> int:
    """Saves a checkpoint of Orbax, half of which is one array, and returns the size of that."""
    rng, rows = np.random.default_rng(0), int(gib * 2**14)
    tree = {f'layer_{i}': rng.standard_normal((rows // 16, 1024), np.float32) for i in range(64)}
    tree['largest'] = rng.standard_normal((rows // 2, 2**14), np.float32)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {'params': tree, 'step': np.int32(7)})
    return tree['largest'].nbytes


def run_command(*arguments: str) -> int:
    """Runs `meshwright checkpoint` in this process, and returns its peak memory in bytes."""
    if status := meshwright(['checkpoint', *arguments]):
        sys.exit(status)
    return peak_memory()


def measure(*arguments: str) -> tuple[float, int]:
    """Runs `meshwright checkpoint` in a new process: the seconds, and its peak memory in bytes."""
    started = time.perf_counter()
    run = subprocess.run(call_command(run_command, *arguments), capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return time.perf_counter() - started, json.loads(run.stdout.splitlines()[-1])


def convert_large(folder: Path, gib: float) -> Iterator[tuple[str, float, int, int]]:
    """Converts a large checkpoint from one format to the next, and compares the last with it."""
    largest = save_large(folder / 'source', gib)
    source = folder / 'source'
    for format in ('meshwright', 't5x', 'safetensors', 'meshwright', 'orbax'):
        to = folder / f'{source.name}_to_{format}'
        yield f'to {format}', *measure('convert', str(source), str(to), f'--to={format}'), largest
        source = to
    yield 'diff', *measure('diff', str(folder / 'source'), str(source)), largest
    yield 'inspect', *measure('inspect', str(folder / 'source')), largest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--data', type=Path, required=True, help='the folder of the references')
    parser.add_argument('--gib', type=float, default=1.0, help='the size of the large checkpoint')
    options, failed = parser.parse_args(), False
    jax.config.update('jax_platforms', 'cpu')
    print(f'{"checkpoint of T5X":52}{"through":14}{"arrays":>8}{"differing":>11}')
    for name, format, count, differing in convert_references(options.data):
        failed |= differing > 0
        print(f'{name:52}{format:14}{count:8,}{differing:11,}', flush=True)
    print(f'\n{options.gib:g} GiB of Orbax{"":7}{"seconds":>9}{"peak GiB":>10}{"allowed":>9}')
    with tempfile.TemporaryDirectory() as temporary:
        for name, seconds, peak, largest in convert_large(Path(temporary), options.gib):
            allowed = largest + MEMORY_ABOVE_LARGEST
            failed |= peak > allowed
            print(f'{name:20}{seconds:9.1f}{peak / 2**30:10.2f}{allowed / 2**30:9.2f}', flush=True)
    sys.exit(failed)


if __name__ == '__main__':
    main()
