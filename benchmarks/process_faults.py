"""How runs of several processes end when one of them fails: named faults, and faults at random.

  python benchmarks/process_faults.py --results faults.jsonl [--named] [--random 200] [--counts]
      [--folder DIR]

The named faults print a table: the seconds from the fault to the end of the last process, the exit
codes, and whether the messages name the process with the fault.

The faults at random are drawn by a seed. One of 2 or 4 processes is killed, stopped, sent a signal,
or raises an error, at a moment of its start, of a compilation, a step, a save or an evaluation. The
run is then resumed without a fault. Its state and its metrics must equal a run that had no
fault, bit by bit.

`--counts` trains the same run, on 8 devices and the same mesh, in 1, 2, 4 and 8 processes. The
losses of each are compared with one process (at most 1e-6 apart, and equal bit by bit among several
processes); runs that stop halfway and continue with another number of processes with a run that
does not stop; and with it, too, a run in which one of 4 processes is killed, and which continues
with 2 processes and 4 devices on another mesh.

Each trial is a line of JSON in the file of results. The command can be stopped and started again:
it does the trials that are missing, and then prints the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / 'tests/multiprocess'), str(ROOT / 'tests/train'), str(ROOT)]
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'  # Compiling would take most of the time.

import faulty_runs
from small import records

from benchmarks.campaigns import run_trials

HEARTBEAT = INIT = WATCHDOG = 10.0
STEPS = 8
COUNTS = (1, 2, 4, 8)
Trial = tuple[str, Callable[[], dict[str, Any]]]


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
    shutil.rmtree(folder / 'run', ignore_errors=True)
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
        'fault': fault.name,
        'seconds': ending.seconds,
        'codes': ending.codes,
        'named': any(name in line for text in texts for line in text.splitlines()[-12:]),
        'right code': set(others) == {fault.code},
        'in time': (ending.seconds or 0) <= fault.limit + 5,
        'says': next((t.splitlines()[-1].replace(f'{folder}/', '')[:300] for t in texts if t), ''),
    }


def run_random(seed: int, folder: Path) -> dict[str, Any]:
    """Runs 2 to 4 processes with a fault at random, and then the same without it."""
    rng = random.Random(seed)
    count = rng.choice((2, 4))
    victim = rng.randrange(count)
    settings = faulty_runs.draw_fault(rng)
    devices = 4 // count
    run = folder / 'run'
    shutil.rmtree(run, ignore_errors=True)
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
        'right': set(again.codes) == {0}
        and faulty_runs.results(run, STEPS) == undisturbed(folder, count),
    }


def undisturbed(folder: Path, count: int) -> Any:
    """The results of a run without a fault."""
    run = folder / f'undisturbed-{count}'
    if not (run / f'checkpoints/{STEPS}/manifest.json').exists():
        train_to(run, count, STEPS, devices=4)
    return faulty_runs.results(run, STEPS)


def print_table(trials: list[dict[str, Any]]) -> None:
    """Prints the named faults, and the sums of the random ones."""
    yes = {True: 'yes', False: 'NO'}
    named = [t for t in trials if 'right code' in t]
    if named:
        print(f'{"fault":<30}{"seconds":>9}  {"in time":<9}{"named":<7}{"right code":<12}codes')
    for t in named:
        seconds = 'never' if t['seconds'] is None else f'{t["seconds"]:.1f}'
        print(
            f'{t["fault"]:<30}{seconds:>9}  {yes[t["in time"]]:<9}{yes[t["named"]]:<7}'
            f'{yes[t["right code"]]:<12}{t["codes"]}'
        )
    drawn = [t for t in trials if 'seed' in t]
    if drawn:
        for key in ('ended', 'resumed', 'right'):
            print(f'{key}: {sum(t[key] for t in drawn)} of {len(drawn)} random faults')
        for t in drawn:
            if not (t['ended'] and t['right']):
                print(f'  seed {t["seed"]}: {t}')
    for t in trials:
        if 'apart' in t:
            same = '' if 'equal' not in t else f', equal: {yes[t["equal"]]}'
            print(f'{t["trial"]}: {t["apart"]:.1e} apart{same}')


# The same run with several numbers of processes.


def train_to(folder: Path, count: int, steps: int, devices: int = 8, **settings: Any) -> None:
    """Trains to a step with several processes."""
    ending = faulty_runs.run(folder, count, devices=devices // count, steps=steps, **settings)
    assert set(ending.codes) == {0}, ending.texts


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each step."""
    return {r['step']: r['train/loss'] for r in records(folder) if 'train/loss' in r}


def furthest(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest relative difference between the losses of two runs."""
    assert a.keys() == b.keys(), (sorted(a), sorted(b))
    return max(abs(a[step] - b[step]) / abs(b[step]) for step in a)


def count_trials(folder: Path) -> Iterator[Trial]:
    """Trials of the same run with several numbers of processes."""

    def whole(count: int) -> dict[int, float]:
        run = folder / f'whole-{count}'
        if not run.exists():
            train_to(folder / f'half-{count}', count, STEPS // 2)
            shutil.copytree(folder / f'half-{count}', run)
            train_to(run, count, STEPS)
        return losses(run)

    def compare(count: int) -> dict[str, Any]:
        found = whole(count)
        return {'apart': furthest(found, whole(1)), 'equal': found == whole(2)}

    def change(count: int, other: int) -> dict[str, Any]:
        expected, run = whole(count), folder / f'from-{count}-to-{other}'
        shutil.copytree(folder / f'half-{count}', run)
        train_to(run, other, STEPS)
        return {'apart': furthest(losses(run), expected)}

    def kill() -> dict[str, Any]:
        expected, run = whole(4), folder / 'killed'
        killed = {'fault': 'SIGKILL', 'moment': 'step 6'}
        ending = faulty_runs.run(run, 4, 3, devices=2, steps=STEPS, **killed)
        train_to(run, 2, STEPS, devices=4, mesh=1)
        # What determines the rows of each step.
        data = [json.loads((f / 'data.json').read_text()) for f in (run, folder / 'whole-4')]
        apart = furthest(losses(run), expected)
        return {'apart': apart, 'equal': data[0] == data[1], 'codes': ending.codes}

    for count in COUNTS:
        yield f'{count} processes', functools.partial(compare, count)
    for count, other in itertools.permutations(COUNTS, 2):
        yield f'{count} -> {other} processes', functools.partial(change, count, other)
    yield '4 processes, one killed, then 2 with 4 devices and other meshes, and its data', kill


def main() -> None:
    # nohup and background jobs of shells ignore these, and the processes would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--results', type=Path, required=True)
    parser.add_argument('--named', action='store_true', help='run the named faults')
    parser.add_argument('--random', type=int, default=0, help='how many random faults to run')
    parser.add_argument('--folder', type=Path, help='where the runs are (a temporary folder)')
    parser.add_argument('--counts', action='store_true', help='compare numbers of processes')
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        named: list[Trial] = [(f.name, functools.partial(run_named, f, folder)) for f in NAMED]
        drawn: list[Trial] = [
            (f'seed {seed}', functools.partial(run_random, seed, folder))
            for seed in range(options.random)
        ]
        counts = count_trials(folder) if options.counts else ()
        trials = itertools.chain(named if options.named else (), drawn, counts)
        done = run_trials(options.results, trials)
    print_table(done)


if __name__ == '__main__':
    main()
