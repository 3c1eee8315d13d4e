"""Kills and signals at random moments of real runs, which must end like an undisturbed run.

  python benchmarks/faults.py --results faults.jsonl [--kills 30] [--signals 20] [--folder DIR]

Each trial starts `python -m train` in a folder of its own, sends SIGKILL, SIGTERM, SIGINT or SIGHUP
at a moment, runs the command that resumes, and compares parameters, optimizer state and metrics
with a run without a signal, bit by bit. Moments are a time after the start of the process,
or a time after something has begun: tokenizing, compiling, a step, an evaluation or a save. Runs
use a cache of tokens and compiled programs, unless the signal is to come while these are made.

Each trial is a line of JSON in the file of results. The command can be stopped and started again:
it does the trials that are missing, and then prints a table.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from benchmarks.campaigns import TINY_RUN, run_trials, start_run, write_texts
from train.checkpoints import complete_steps
from train.checkpoints.orbax.files import read_orbax

STEPS, PERIOD = 100, 10
POLL_SECONDS = 0.002
# How long it takes at most, in seconds, what a signal interrupts. For 'start', it is the whole run.
SPREAD = {'tokenizing': 0.3, 'compiling': 2.0, 'stepping': 0.1, 'evaluating': 0.05, 'saving': 0.05}
LIMIT_SECONDS = 900.0  # Far longer than a run takes; it only ends runs that hang.
CONFIG = f"""{TINY_RUN}
TRAIN_STEPS = {STEPS}
EVAL_PERIOD = {PERIOD}
CHECKPOINT_PERIOD = {PERIOD}
TrainConfig.log_every = 1
TrainConfig.writers = [@JsonWriter]
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--results', type=Path, required=True, help='a file of JSON lines')
    parser.add_argument('--kills', type=int, default=30, help='trials with SIGKILL (30)')
    parser.add_argument('--signals', type=int, default=20, help='trials with other signals (20)')
    parser.add_argument('--folder', type=Path, help='where the runs are')
    parser.add_argument('--seed', type=int, default=0, help='another seed chooses other moments')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write_texts(folder, 400)
        (folder / 'small.gin').write_text(CONFIG)
        expected = Expected(folder)
        drawn = trials(options.kills, options.signals, options.seed)
        works = (functools.partial(run_trial, folder, trial, expected) for trial in drawn)
        done = run_trials(options.results, ((work.args[1]['trial'], work) for work in works))
    show(done)
    return 0 if all(line['ok'] for line in done) else 1


def trials(kills: int, signals: int, seed: int) -> Iterator[dict[str, Any]]:
    """The signal of each trial, and its moment.

    It is a random share of the whole run, of a random step, or of something that takes a short part
    of a run only: tokenizing, compiling, an evaluation or a save. The kills are shared between the
    whole run, steps and saves. Half of the other signals come at a share of the whole run.
    """
    rng, others = random.Random(seed), ('tokenizing', 'compiling', 'evaluating', 'saving')
    names = ('SIGTERM', 'SIGTERM', 'SIGTERM', 'SIGHUP', 'SIGINT')
    kinds = [('SIGKILL', ('start', 'stepping', 'saving')[i % 3]) for i in range(kills)]
    kinds += [(names[i % 5], others[i // 2 % 4] if i % 2 else 'start') for i in range(signals)]
    for i, (name, begun) in enumerate(kinds):
        number, count = (i, kills) if i < kills else (i - kills, signals)
        share = (number + rng.random()) / count if begun == 'start' else rng.random()
        step = rng.randrange(1, STEPS - PERIOD)
        if begun == 'evaluating':
            step += -step % PERIOD
        yield {
            'trial': f'{"kill" if i < kills else "signal"} {number}',
            'signal': name,
            'begun': begun,
            'step': step,
            'share': share,
        }


class Expected:
    """An undisturbed run: its arrays and metrics, and its duration with and without caches."""

    def __init__(self, folder: Path):
        self.seconds = {}
        for name, is_cold in (('cold', True), ('warm', False), ('undisturbed', False)):
            started = time.monotonic()
            code, _, errors = finish(begin(folder, name, is_cold))
            assert code == 0, errors
            self.seconds[is_cold] = time.monotonic() - started
        self.arrays, self.metrics = read_run(folder / 'undisturbed')


def begin(folder: Path, name: str, is_cold: bool, command: str = '') -> subprocess.Popen[str]:
    """Starts a run in the folder of the campaign, or resumes it with a command.

    If it is cold, it has a cache of tokens and programs of its own.
    """
    cache = folder / (f'{name}-cache' if is_cold else 'cache')
    arguments = ['small.gin', f"--gin.MODEL_DIR='{name}'", '--cpu_devices=2']
    given = shlex.split(command) or [sys.executable, '-m', 'train', *arguments]
    # A shell may have told this process to ignore them, which its children would inherit.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    with (folder / f'{name}.out').open('a') as output:
        return start_run(given, folder, cache, stdout=output, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[int, float, str]:
    """Waits for a run, and returns its exit code, the seconds, and its errors."""
    started = time.monotonic()
    try:
        _, errors = process.communicate(timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        _, errors = process.communicate()
        errors += '\nthis run hung'
    return process.returncode, time.monotonic() - started, errors


def has_begun(folder: Path, trial: Mapping[str, Any], name: str) -> bool:
    """Whether a run has come to what a trial interrupts."""
    run, step = folder / name, trial['step']
    if trial['begun'] == 'tokenizing':
        return any((folder / f'{name}-cache').rglob('*.unfinished'))
    if trial['begun'] == 'compiling':
        return 'per device (parameters' in (folder / f'{name}.out').read_text()
    if trial['begun'] in ('stepping', 'evaluating'):
        return last_step(run) >= step
    if trial['begun'] == 'saving':
        return last_step(run) >= step and is_saving(run)
    return True


def is_saving(run: Path) -> bool:
    """Whether Orbax writes a checkpoint of a run at the moment."""
    folder = run / 'checkpoints'
    return folder.exists() and any('tmp' in name for name in os.listdir(folder))


def interrupt(
    folder: Path, trial: Mapping[str, Any], name: str, seconds: float, is_cold: bool
) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Starts a run, sends its signal, and returns the process and what it had done."""
    process = begin(folder, name, is_cold)
    while not has_begun(folder, trial, name) and process.poll() is None:
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(trial['share'] * SPREAD.get(trial['begun'], seconds))
    found = {
        'step': last_step(folder / name),
        'is_saving': is_saving(folder / name),
        'ended_before': process.poll() is not None,
    }
    process.send_signal(signal.Signals[trial['signal']])
    return process, found


def run_trial(folder: Path, trial: Mapping[str, Any], expected: Expected) -> dict[str, Any]:
    """Interrupts a run, resumes it, and returns what was found."""
    name, number = trial['trial'].replace(' ', '-'), signal.Signals[trial['signal']]
    is_cold = trial['begun'] in ('tokenizing', 'compiling')
    longest = expected.seconds[is_cold]
    while True:
        process, found = interrupt(folder, trial, name, longest, is_cold)
        code, seconds, errors = finish(process)
        if not found['ended_before']:
            break
        longest *= 0.8  # The machine is faster than it was: the moment is sooner.
        remove_run(folder, name)
    saved = newest_checkpoint(folder / name)
    problems = list(check_end(number, code, errors, found['step'], saved))
    lines = (folder / f'{name}.out').read_text().splitlines()
    found |= {'saved': saved, 'code': code, 'seconds': seconds, 'error': errors, 'at': lines[-1:]}
    if code != 0:
        command = errors.strip().partition('resume with: ')[2]
        again, _, errors = finish(begin(folder, name, is_cold, command))
        if again != 0:
            problems.append(f'the resumed run ended with {again}: {errors[-500:]}')
    if not problems:
        arrays, metrics = read_run(folder / name)
        differing = [key for key in expected.arrays if arrays.get(key) != expected.arrays[key]]
        if differing or arrays.keys() != expected.arrays.keys():
            problems.append(f'{len(differing)} arrays differ, such as {differing[:1]}')
        if metrics != expected.metrics:
            problems.append('the metrics differ')
    if not problems:
        remove_run(folder, name)
    return {**trial, **found, 'ok': not problems, 'problems': problems}


def remove_run(folder: Path, name: str) -> None:
    """Removes a run with its cache and its output."""
    for path in (folder / name, folder / f'{name}-cache'):
        shutil.rmtree(path, ignore_errors=True)
    (folder / f'{name}.out').unlink()


def check_end(number: int, code: int, errors: str, steps: int, saved: int) -> Iterator[str]:
    """Says what is wrong with the end of an interrupted run."""
    if number == signal.SIGKILL:
        if code not in (0, -signal.SIGKILL):
            yield f'exit code {code} after SIGKILL: {errors[-500:]}'
        return
    if code == 0 and steps >= STEPS - 1:
        return
    if code != (130 if number == signal.SIGINT else 75):
        yield f'exit code {code}: {errors[-500:]}'
    if errors.count('\n') != 1 or 'resume with: ' not in errors:
        yield f'not one line: {errors[-500:]}'
    if saved < steps:
        yield f'step {steps} was done, but step {saved} is the last that was saved'


def read_run(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The arrays of the last checkpoint of a run, as bytes, and its metrics."""
    stored = read_orbax(epath.Path(folder) / f'checkpoints/{STEPS}/state')
    arrays = {}
    for name, array in stored.items():
        values = array.read()
        arrays[name] = (values.shape, str(values.dtype), values.tobytes())
    return arrays, read_metrics(folder)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The complete records of a run, without measured times."""
    path = folder / 'metrics.jsonl'
    lines = path.read_text().split('\n')[:-1] if path.exists() else []
    return [
        {name: x for name, x in record.items() if 'second' not in name and 'wait' not in name}
        for record in map(json.loads, lines)
    ]


def last_step(folder: Path) -> int:
    """The last step whose metrics are written, or 0."""
    return max((record['step'] for record in read_metrics(folder)), default=0)


def newest_checkpoint(folder: Path) -> int:
    """The newest complete step of a run, or 0."""
    return max(complete_steps(epath.Path(folder) / 'checkpoints'), default=0)


def show(lines: list[dict[str, Any]]) -> None:
    """Prints a row for each signal."""
    groups = collections.defaultdict(list)
    for line in lines:
        groups[line['signal'], line['begun']].append(line)
    print(f'{"signal":8} {"after":11} {"trials":>6} {"good":>5}  {"exit codes":24} worst seconds')
    for (name, begun), rows in sorted(groups.items()):
        codes = collections.Counter(row['code'] for row in rows)
        shown = ', '.join(f'{code}: {count}' for code, count in sorted(codes.items()))
        good, worst = sum(row['ok'] for row in rows), max(row['seconds'] for row in rows)
        print(f'{name:8} {begun:11} {len(rows):6} {good:5}  {shown:24} {worst:.1f}')


if __name__ == '__main__':
    sys.exit(main())
