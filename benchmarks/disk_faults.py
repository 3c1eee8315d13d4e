"""Disks that fill up, become read-only or disappear under real runs.

  python benchmarks/disk_faults.py [--cases full,removed] [--folder DIR]

Each case is a run of `python -m train` in a folder of its own, on a small file system in memory,
which needs the permission to mount. The fault happens before the start or as soon as the first
checkpoint is complete. The table has the seconds from the fault (or the start) to the first message
and to the end of the process, the exit code, the lines that are neither usual nor figures of steps,
and whether every file of every good step still has its checksum.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath

from benchmarks.campaigns import TINY_RUN, parse_names, start_run
from train.checkpoints.steps.finding import complete_steps, examine
from train.checkpoints.steps.verifying import verify

LIMIT_SECONDS = 600.0  # Far longer than a run takes; it only ends runs that hang.
# What is not a line of a run that is well.
TROUBLE = re.compile(r'cannot|Traceback|error|exception|warning|^  File', re.IGNORECASE)
CONFIG = f"""{TINY_RUN}
TRAIN_STEPS = 1000
EVAL_PERIOD = 0
CHECKPOINT_PERIOD = 20
CheckpointConfig.when_busy = 'wait'
TextFiles.holdout_percent = 20.0
TrainConfig.log_every = 5
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A fault of the disk.

    Attributes:
      expected: the exit code that the documentation promises.
      before: does something to the disk before the start.
      during: does something to the disk after the first checkpoint.
      disk: the size of the file system.
      trained: whether an earlier run has left checkpoints.
    """

    name: str
    expected: int = 2
    before: Callable[[Path], None] = lambda disk: None
    during: Callable[[Path], None] | None = None
    disk: str = '64m'
    bindings: tuple[str, ...] = ()
    trained: bool = False


def fill(disk: Path) -> None:
    """Fills a disk to its last byte, as another program would."""
    with contextlib.suppress(OSError), (disk / 'filler').open('wb', buffering=0) as file:
        while file.write(bytes(2**16)):
            pass


def fill_for_a_while(disk: Path) -> None:
    """Fills a disk for ten seconds."""
    fill(disk)
    time.sleep(10)
    (disk / 'filler').unlink()


def remount_read_only(disk: Path) -> None:
    subprocess.run(['mount', '-o', 'remount,ro', str(disk)], check=True)


def make_folder_of_metrics(disk: Path) -> None:
    (disk / 'run/metrics.jsonl').mkdir(parents=True)


def make_checkpoints_read_only(disk: Path) -> None:
    """Makes the folder of checkpoints read-only, for root as well."""
    path = str(disk / 'run/checkpoints')
    subprocess.run(['mount', '--bind', path, path], check=True)
    subprocess.run(['mount', '-o', 'remount,ro,bind', path], check=True)


KEEP_ALL = ('CheckpointConfig.keep = None',)
CONTINUE = ("CheckpointConfig.on_failure = 'continue'", 'TRAIN_STEPS = 4000')
NO_SAVES = ('CHECKPOINT_PERIOD = 0', 'CheckpointConfig.at_end = False', 'TRAIN_STEPS = 1500')
CASES = (
    Case(name='too_small', disk='8m', bindings=KEEP_ALL),
    Case(name='full', during=fill),
    Case(name='full_for_a_while', during=fill_for_a_while, bindings=CONTINUE, expected=0),
    Case(name='read_only', during=remount_read_only),
    Case(name='removed', during=lambda disk: shutil.rmtree(disk / 'run', ignore_errors=True)),
    Case(name='full_at_start', before=fill, trained=True),
    Case(name='read_only_at_start', before=remount_read_only, trained=True),
    Case(name='checkpoints_read_only', before=make_checkpoints_read_only, trained=True),
    Case(name='metrics_are_a_folder', before=make_folder_of_metrics),
    Case(name='only_metrics_fail', during=fill, bindings=NO_SAVES, expected=0),
    Case(
        name='metrics_stop',
        during=fill,
        bindings=(*NO_SAVES, "TrainConfig.metrics_on_failure = 'stop'"),
    ),
)


@contextlib.contextmanager
def file_system(folder: Path, size: str) -> Iterator[Path]:
    """Mounts a file system in memory, and unmounts it with all that is mounted below."""
    disk = folder / 'disk'
    disk.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(disk)]
    subprocess.run(mount, check=True)
    try:
        yield disk
    finally:
        for path in (disk / 'run/checkpoints', disk):
            subprocess.run(['umount', '-l', str(path)], capture_output=True)


class Run:
    """A run in a process of its own, whose lines are noted with their times."""

    def __init__(self, folder: Path, disk: Path, bindings: tuple[str, ...]):
        command = [sys.executable, '-m', 'train', f'--gin_file={folder / "config.gin"}']
        settings = (f"MODEL_DIR = '{disk / 'run'}'", *bindings)
        self.lines: list[tuple[float, str]] = []
        self.process = start_run(
            [*command, *(f'--gin.{s.replace(" = ", "=", 1)}' for s in settings)],
            folder,
            folder / 'cache',
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip('\n')))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition holds or the run ends."""
        while not condition() and self.process.poll() is None:
            time.sleep(0.005)

    def wait(self) -> int | None:
        """Waits for the end, and returns the exit code, or None if the run hangs."""
        try:
            code: int | None = self.process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = None
        self._reader.join(10)
        return code


def prepare(folder: Path) -> None:
    """Writes the texts and the settings of the runs."""
    (folder / 'texts').mkdir()
    for i in range(20):
        text = f'file {i} counts: ' + ' '.join(map(str, range(i, 400)))
        (folder / f'texts/{i}.txt').write_text(text)
    (folder / 'config.gin').write_text(CONFIG)


def run_case(case: Case, folder: Path) -> str:
    """Runs a case, and returns its row of the table."""
    with file_system(folder, case.disk) as disk:
        checkpoints = epath.Path(disk / 'run/checkpoints')
        if case.trained:
            assert Run(folder, disk, ('TRAIN_STEPS = 40',)).wait() == 0
        case.before(disk)
        started = time.monotonic()
        run = Run(folder, disk, case.bindings)

        def is_due() -> bool:
            if set(NO_SAVES) & set(case.bindings):
                return any(text.startswith('step 5/') for _, text in run.lines)
            return bool(complete_steps(checkpoints))

        if case.during is not None:
            run.wait_until(is_due)
            started = time.monotonic()
            case.during(disk)
        code = run.wait()
        ended = time.monotonic()
        messages = [(at, text) for at, text in run.lines if TROUBLE.search(text)]
        first = f'{messages[0][0] - started:.1f}' if messages else '-'
        good = check_steps(checkpoints)
        exit_code = 'hangs' if code is None else f'{code}{"" if code == case.expected else "!"}'
        row = f'{case.name:<24}{first:>9}{ended - started:>9.1f}{exit_code:>7}{len(messages):>7}'
        return '\n'.join([f'{row}  {good}', *(f'    {text}' for _, text in messages[:4])])


def check_steps(checkpoints: epath.Path) -> str:
    """Checks every file of the good steps."""
    steps = complete_steps(checkpoints)
    for step in steps:
        verified = verify(examine(checkpoints / str(step), step))
        assert verified.status == 'good', verified.reasons
    return f'{len(steps)} steps verify' if steps else 'no steps'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--cases', help='separated by commas (all)')
    parser.add_argument('--folder', type=Path, help='where the runs are')
    options = parser.parse_args()
    names = parse_names(options.cases, [case.name for case in CASES], 'case')
    print(f'{"case":<24}{"message":>9}{"end":>9}{"exit":>7}{"lines":>7}  checkpoints')
    cache = tempfile.mkdtemp(dir=options.folder)
    for case in CASES:
        if case.name in names:
            with tempfile.TemporaryDirectory(dir=options.folder) as name:
                folder = Path(name)
                prepare(folder)
                (folder / 'cache').symlink_to(cache)
                print(run_case(case, folder), flush=True)
    shutil.rmtree(cache)


if __name__ == '__main__':
    main()
