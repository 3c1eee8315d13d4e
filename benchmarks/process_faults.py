"""How runs of several processes end when one of them fails: named faults, and faults at random.

  python benchmarks/process_faults.py --results faults.jsonl [--named] [--random 200] [--folder DIR]

The named faults print a table: the seconds from the fault to the end of the last process, the exit
codes, and whether the messages name the process with the fault.

The faults at random are drawn by a seed. One of 2 or 4 processes is killed, stopped, sent a signal,
or raises an error, at a moment of its start, of a compilation, a step, a save or an evaluation. The
run is then resumed without a fault. Its state and its metrics must equal a run that had no
fault, bit by bit.

Each trial is a line of JSON in the file of results. The command can be stopped and started again:
it does the trials that are missing, and then prints the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / 'tests/multiprocess'), str(ROOT / 'tests/train'), str(ROOT)]
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'  # Compiling would take most of the time.

import faulty_runs

from benchmarks.campaigns import append_line, read_lines

HEARTBEAT = INIT = WATCHDOG = 10.0
STEPS = 8


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault with what is expected of it.

    Attributes:
      name: what happens.
      fault: the setting of the process with the fault; None if it never starts.
      victim: the process with the fault, which one of the others names.
      limit: the seconds after which the run must have ended, plus 5.
      code: the exit code of the other processes.
    """

    name: str
    fault: str | None
    victim: int = 1
    limit: float = 0.0
    code: int = 75


NAMED = (
    Fault('SIGKILL to a worker', 'SIGKILL'),
    Fault('SIGKILL to process 0', 'SIGKILL', victim=0),
    Fault('SIGSTOP to a worker', 'SIGSTOP', limit=HEARTBEAT),
    Fault('SIGSTOP to process 0', 'SIGSTOP', victim=0, limit=HEARTBEAT),
    Fault('an exception in one process', 'exception', code=1),
    Fault('Ctrl-C on one process', 'SIGINT', code=130),
    Fault('SIGTERM to one process', 'SIGTERM'),
    Fault('stuck in Python', 'stuck in Python', limit=WATCHDOG),
    Fault('stuck in the input', 'stuck in input', limit=WATCHDOG),
    Fault('stuck in a save', 'stuck in a save', limit=WATCHDOG),
    Fault('process 0 cannot be reached', 'unreachable', limit=INIT),
    Fault('a process never starts', None, limit=INIT),
    Fault('another optimizer', 'other optimizer', code=2),
    Fault('another seed', 'other seed', code=2),
    Fault('other steps', 'other steps', code=2),
    Fault('another mesh', 'other mesh', code=2),
    Fault('other data', 'other data', code=2),
    Fault('another version of jax', 'other jax', code=2),
    Fault('MODEL_DIR is not shared', 'other folder', code=2),
    Fault('a full disk on one process', 'full disk', code=2),
)


def run_named(fault: Fault, folder: Path) -> dict[str, Any]:
    """Runs 4 processes with a named fault."""
    # Only the faults of the start are about its limit, and it takes long on a busy machine.
    init = INIT if fault.fault in ('unreachable', None) else 60.0
    limits = {'heartbeat': HEARTBEAT, 'init': init, 'watchdog': WATCHDOG}
    settings = {'fault': fault.fault, 'moment': 'step 3'} if fault.fault else {'missing': (1,)}
    ending = faulty_runs.run(
        folder / 'run', 4, fault.victim, devices=1, steps=STEPS, **limits, **settings
    )
    others = [code for i, code in enumerate(ending.codes) if i != fault.victim]
    texts, name = ending.survivors(fault.victim), f'process {fault.victim}'
    return {
        'name': fault.name,
        'seconds': ending.seconds,
        'codes': ending.codes,
        'named': any(name in line for text in texts for line in text.splitlines()[-12:]),
        'right code': set(others) == {fault.code},
        'in time': (ending.seconds or 0) <= fault.limit + 5,
        'says': next((t.splitlines()[-1].replace(f'{folder}/', '')[:300] for t in texts if t), ''),
    }


def run_random(seed: int, folder: Path, expected: Mapping[int, Any]) -> dict[str, Any]:
    """Runs 2 to 4 processes with a fault at random, and then the same without it."""
    rng = random.Random(seed)
    count = rng.choice((2, 4))
    victim = rng.randrange(count)
    settings = faulty_runs.draw_fault(rng)
    devices = 4 // count
    run = folder / 'run'
    ending = faulty_runs.run(run, count, victim, devices=devices, steps=STEPS, **settings)
    others = [code for i, code in enumerate(ending.codes) if i != victim]
    found = {
        'seed': seed,
        'count': count,
        'victim': victim,
        **settings,
        'codes': ending.codes,
        'seconds': ending.seconds,
        'ended': None not in others,
        'named': any(f'process {victim}' in text for text in ending.survivors(victim)),
    }
    if run.exists():
        found['kept'] = sorted(path.name for path in (run / 'checkpoints').glob('[0-9]*'))
    again = faulty_runs.run(run, count, devices=devices, steps=STEPS)
    return found | {
        'resumed': set(again.codes) == {0},
        'right': set(again.codes) == {0} and faulty_runs.results(run, STEPS) == expected[count],
    }


def undisturbed(folder: Path) -> Mapping[int, Any]:
    """The results of runs without a fault, by the number of processes."""
    found = {}
    for count in (2, 4):
        run = folder / f'undisturbed-{count}'
        if not (run / f'checkpoints/{STEPS}/manifest.json').exists():
            ending = faulty_runs.run(run, count, devices=4 // count, steps=STEPS)
            assert set(ending.codes) == {0}, ending.texts
        found[count] = faulty_runs.results(run, STEPS)
    return found


def print_table(trials: list[dict[str, Any]]) -> None:
    """Prints the named faults, and the sums of the random ones."""
    yes = {True: 'yes', False: 'NO'}
    named = [t for t in trials if 'name' in t]
    if named:
        print(f'{"fault":<30}{"seconds":>9}  {"in time":<9}{"named":<7}{"right code":<12}codes')
    for t in named:
        seconds = 'never' if t['seconds'] is None else f'{t["seconds"]:.1f}'
        print(
            f'{t["name"]:<30}{seconds:>9}  {yes[t["in time"]]:<9}{yes[t["named"]]:<7}'
            f'{yes[t["right code"]]:<12}{t["codes"]}'
        )
    drawn = [t for t in trials if 'seed' in t]
    if drawn:
        for key in ('ended', 'resumed', 'right'):
            print(f'{key}: {sum(t[key] for t in drawn)} of {len(drawn)} random faults')
        for t in drawn:
            if not (t['ended'] and t['right']):
                print(f'  seed {t["seed"]}: {t}')


def main() -> None:
    # nohup and background jobs of shells ignore these, and the processes would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--results', type=Path, required=True)
    parser.add_argument('--named', action='store_true', help='run the named faults')
    parser.add_argument('--random', type=int, default=0, help='how many random faults to run')
    parser.add_argument('--folder', type=Path, help='where the runs are (a temporary folder)')
    options = parser.parse_args()
    trials = read_lines(options.results)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)

        def record(trial: dict[str, Any]) -> None:
            trials.append(trial)
            append_line(options.results, trial)
            print(json.dumps(trial), flush=True)
            shutil.rmtree(folder / 'run', ignore_errors=True)

        done = {t.get('name') for t in trials}
        for fault in NAMED if options.named else ():
            if fault.name not in done:
                record(run_named(fault, folder))
        seeds = set(range(options.random)) - {t.get('seed') for t in trials}
        expected = undisturbed(folder) if seeds else {}
        for seed in sorted(seeds):
            record(run_random(seed, folder, expected))
    print_table(trials)


if __name__ == '__main__':
    main()
