"""Whether a run grows while it trains for long, is killed, and goes on with other meshes.

  python benchmarks/soak.py [--minutes 60] [--folder DIR]

The first half of the time is one process. In the second half, it is killed at random moments, and
resumed with 8, 4 or 2 devices and one to four of them on the model axis. Every few seconds, the
memory, descriptors, threads and files are counted. The tables compare the beginning of the first
half with its end, and processes of the second half with each other; a process that resumes must
not need more memory than the first one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.campaigns import TINY_RUN, start_run, write_texts

MESHES = ((8, 2), (8, 4), (4, 2), (4, 1), (2, 2), (8, 1))
SECONDS_BETWEEN = 5.0
CONFIG = f"""{TINY_RUN}
TRAIN_STEPS = 10000000
TextFiles.holdout_percent = 10
EVAL_PERIOD = 50
CHECKPOINT_PERIOD = 50
CheckpointConfig.keep = 3
TrainConfig.log_every = 10
TrainConfig.writers = [@JsonWriter]
"""


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a process holds at a moment: bytes, counts, and the newest line of its metrics."""

    memory: int
    peak: int
    descriptors: int
    threads: int
    files: int
    step: int
    time: float


def main() -> None:
    """Runs both halves, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--minutes', type=float, default=60.0)
    parser.add_argument('--folder', type=Path, help='where the run is (a temporary folder)')
    parser.add_argument('--seed', type=int, default=0, help='of the moments and meshes (0)')
    options = parser.parse_args()
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_texts(folder, 40)
        (folder / 'soak.gin').write_text(CONFIG)
        half, rng = options.minutes * 30, random.Random(options.seed)
        whole = run(folder, *MESHES[0], half)
        print_growth(whole)
        end, pieces = time.monotonic() + half, []
        while time.monotonic() < end:
            mesh = rng.choice(MESHES)
            pieces.append((mesh, run(folder, *mesh, rng.uniform(60.0, 180.0))))
        print_pieces(whole, pieces)


def run(folder: Path, devices: int, model_axis: int, seconds: float) -> list[Sample]:
    """Trains for some seconds after the first step of this process, kills it, returns samples."""
    flags = [f'--cpu_devices={devices}', f'--gin.NUM_PARTITIONS={model_axis}']
    command = [sys.executable, '-m', 'train', 'soak.gin', '--gin.MODEL_DIR=run', *flags]
    before = last_line(folder)
    with (folder / 'output.txt').open('a') as output:
        process = start_run(command, folder, folder / 'cache', stdout=output, stderr=output)
    try:
        while last_line(folder) == before:
            check_runs(process, folder)
            time.sleep(0.5)
        samples, end = [], time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(SECONDS_BETWEEN)
            check_runs(process, folder)
            samples.append(take_sample(process.pid, folder))
    finally:
        process.kill()
        process.wait()
    return samples


def check_runs(process: subprocess.Popen[str], folder: Path) -> None:
    """Raises an error if the process has ended by itself."""
    if process.poll() is not None:
        lines = (folder / 'output.txt').read_text().splitlines()
        raise SystemExit(f'the run ended with {process.returncode}: {lines[-1]}')


def last_line(folder: Path) -> int:
    """The number of lines of the metrics."""
    path = folder / 'run/metrics.jsonl'
    return path.read_bytes().count(b'\n') if path.exists() else 0


def take_sample(pid: int, folder: Path) -> Sample:
    """What a process holds now."""
    of = Path(f'/proc/{pid}')
    status = dict(line.split(':', 1) for line in (of / 'status').read_text().splitlines())
    return Sample(
        memory=int(status['VmRSS'].split()[0]) * 1024,
        peak=int(status['VmHWM'].split()[0]) * 1024,
        descriptors=len(list((of / 'fd').iterdir())),
        threads=int(status['Threads']),
        files=sum(len(files) for _, _, files in os.walk(folder / 'run')),
        step=last_line(folder),
        time=time.monotonic(),
    )


def print_growth(samples: list[Sample]) -> None:
    """Compares the second sixth of a run, when its caches are full, with the last one."""
    count = max(1, len(samples) // 6)
    early, late = samples[count : 2 * count], samples[-count:]
    print(f'one process, {len(samples)} samples {"early":>18}{"late":>12}')
    for name, value in COLUMNS.items():
        print(f'  {name:<34}{value(early):>12,.1f}{value(late):>12,.1f}')


def print_pieces(whole: list[Sample], pieces: list[tuple[tuple[int, int], list[Sample]]]) -> None:
    """Shows each process of the second half next to the first one."""
    print(f'{"devices, model axis":<24}' + ''.join(f'{name:>18}' for name in COLUMNS))
    for mesh, samples in [(MESHES[0], whole), *pieces]:
        if samples:
            cells = ''.join(f'{value(samples):>18,.1f}' for value in COLUMNS.values())
            print(f'{f"{mesh[0]}, {mesh[1]}":<24}{cells}')


def median_of(field: str, scale: float = 1.0) -> Callable[[list[Sample]], float]:
    """The median of a field of samples."""
    return lambda samples: statistics.median(getattr(s, field) for s in samples) / scale


def lines_per_minute(samples: list[Sample]) -> float:
    """How fast the metrics grow, which is how fast the run trains."""
    seconds = samples[-1].time - samples[0].time
    return 60 * (samples[-1].step - samples[0].step) / seconds if seconds else 0.0


COLUMNS = {
    'memory in MB': median_of('memory', 1e6),
    'peak in MB': median_of('peak', 1e6),
    'descriptors': median_of('descriptors'),
    'threads': median_of('threads'),
    'files': median_of('files'),
    'lines per minute': lines_per_minute,
}


if __name__ == '__main__':
    main()
