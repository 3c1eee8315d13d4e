"""The trainer next to plain JAX, MaxText, Levanter and T5X, on 1 and on 8 virtual CPU devices.

All train the tiny model of `train_step.py` on the same rows, in float32 with AdamW;
`other_trainers.py` has their settings and what differs. Each measurement is a process of its own,
and the trainers take turns: each is measured with no compiled programs, and then again with those
that it has kept. Figures in brackets are the median of the ratios of our trainer to the row.

A trainer is measured if its Python is given, which must have its packages and jax. Results are
added to a file. Measurements that it has are not repeated, so a campaign can be resumed.

Usage:
  python benchmarks/trainer_steps.py [--maxtext=PYTHON] [--levanter=PYTHON] [--t5x=PYTHON]
      [--devices=1,8] [--repetitions=3] [--steps=40] [--results=build/trainer_steps.jsonl]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from other_trainers import count_parameters, run_levanter, run_maxtext, run_t5x
from plain_transformer import init_params
from train_step import CASES, run_plain, run_trainer

from benchmarks.campaigns import call_in_new_process, run_trials

PEERS = {'maxtext': run_maxtext, 'levanter': run_levanter, 't5x': run_t5x}
LOOPS: dict[str, Callable[[str, int, float], dict[str, float]]] = {
    'trainer': run_trainer,
    'plain': run_plain,
    **PEERS,
}


def measure(
    loop: str, python: str, devices: int, kept: bool, programs: Path, steps: int
) -> dict[str, Any]:
    """Trains in a new process and returns what its clock notes.

    Compiled programs are kept in the folder `programs`, which is emptied first unless `kept`.
    """
    if not kept:
        shutil.rmtree(programs, ignore_errors=True)
    os.environ['JAX_NUM_CPU_DEVICES'] = str(devices)
    os.environ['JAX_COMPILATION_CACHE_DIR'] = str(programs)
    found = call_in_new_process(LOOPS[loop], 'tiny', steps, time.time(), python=python)
    return {'loop': loop, 'devices': devices, 'kept': kept} | found


def list_trials(
    pythons: Mapping[str, str], devices: Sequence[int], repetitions: int, steps: int, folder: Path
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields the name and the measurement of each trial; trainers take turns."""
    for repetition in range(repetitions):
        for count, kept in itertools.product(devices, (False, True)):
            for loop in list(pythons)[:: -1 if repetition % 2 else 1]:
                programs = folder / f'{loop}-{count}'
                name = f'{loop} {count} {repetition} {"kept" if kept else "new"}'
                run = functools.partial(measure, loop, pythons[loop], count, kept, programs, steps)
                yield name, run


FIELDS = {
    'tokens/s': ('steps_per_second', CASES['tiny'].batch_size * CASES['tiny'].length, None),
    'processor ms per step': ('processor', 1e3, None),
    'first step s': ('first_step', 1, False),
    'with kept programs': ('first_step', 1, True),
    'peak MB': ('peak', 1e-6, False),
    'peak MB, kept programs': ('peak', 1e-6, True),
}


def print_table(trials: Sequence[Mapping[str, Any]], devices: int) -> None:
    """Prints each trainer's medians, and the medians of the ratios of `trainer` to it."""
    found = {one['trial']: one for one in trials if one['devices'] == devices}
    plain = jax.eval_shape(lambda: init_params(CASES['tiny'].sizes, jax.random.key(0)))
    print(f'\n| {devices} devices | parameters |', ' | '.join(FIELDS), '|')
    print('|---' * (2 + len(FIELDS)) + '|')
    for loop in LOOPS:
        own = {name: one for name, one in found.items() if one['loop'] == loop}
        if not own:
            continue
        parameters = next(iter(own.values())).get('parameters') or count_parameters(plain)
        cells = [loop, f'{parameters:,}']
        for field, factor, kept in FIELDS.values():
            chosen = {n: one[field] for n, one in own.items() if kept in (None, one['kept'])}
            pairs = [(found.get(name.replace(loop, 'trainer', 1)), x) for name, x in chosen.items()]
            ratios = [ours[field] / x for ours, x in pairs if ours]
            value = statistics.median(chosen.values()) * factor
            ratio = statistics.median(ratios) if ratios else math.nan
            cells.append(f'{value:,.{0 if value >= 100 else 1}f} ({ratio:.2f})')
        print('|', ' | '.join(cells), '|')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for loop in PEERS:
        parser.add_argument(f'--{loop}', metavar='PYTHON')
    parser.add_argument('--devices', default='1,8')
    parser.add_argument('--repetitions', type=int, default=3)
    parser.add_argument('--steps', type=int, default=40)
    parser.add_argument('--results', type=Path, default=Path('build/trainer_steps.jsonl'))
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    pythons = dict.fromkeys(('trainer', 'plain'), sys.executable)
    pythons |= {loop: python for loop in PEERS if (python := getattr(options, loop))}
    devices = [int(count) for count in options.devices.split(',')]
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'  # small programs are kept, too
    os.environ['PYTHONPATH'] = str(Path(__file__).resolve().parent.parent)
    programs = options.results.absolute().with_suffix('.programs')
    trials = list_trials(pythons, devices, options.repetitions, options.steps, programs)
    found = run_trials(options.results, trials)
    for count in devices:
        print_table(found, count)


if __name__ == '__main__':
    main()
