"""How runs on many hosts end when processes, networks and clocks fail, alone and in combination.

  python benchmarks/pod_faults.py --results build/pod_faults.jsonl [--trials 100] [--first 0]
      [--hosts 8,64] [--seed 17] [--light]

The hosts are network namespaces of this machine, which needs Linux and root. A seed draws their
number, one or two faults, and the moments. The run is then resumed without a fault. Its state and
its metrics must equal a run that had no fault, bit by bit.

Each trial is a line of JSON in the file of results. The command can be stopped and started again:
it does the trials that are missing, from the seed `--first` on, and then prints the table. `--seed`
runs one trial, and if it fails, finds a smaller one that fails as well. With `--light`, processes
do not use jax: they only meet in each step, so that many hosts need little memory and time.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / 'tests/multiprocess'), str(ROOT / 'tests/train'), str(ROOT)]
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'  # Compiling would take most of the time.

import faulty_runs
from hosts import CUT, WHOLE, Cable, Network, why_not

from benchmarks.campaigns import run_trials

STEPS, HEARTBEAT, WATCHDOG = 8, 10.0, 60.0
# With more hosts for each core than this, the limits grow: all of them start and compile at once.
HOSTS_PER_CORE = 4
# Processes that only meet hardly compute, so they may be expected to be alive more often.
LIGHT_HEARTBEAT, LIGHT_HOSTS_PER_CORE = 4.0, 16
MOMENTS = ('step 1', 'step 4', 'step 7', 'the save', 'the eval', 'waiting for the compiler')
# What a fault may lead to: the run goes on to its end, or ends with one of these codes everywhere.
GOES_ON, ENDS, EITHER = 'goes on', 'ends', 'either'
CODES = {0, 1, 2, 75, 130}


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of a host: what it does, and what must follow.

    Attributes:
      expected: what the run does after it.
      happens: called with the network, the host's index, and its process.
    """

    expected: str
    happens: Callable[[Network, int, Any], None]


def send(signum: int) -> Callable[[Network, int, Any], None]:
    """A signal to the process of the host."""

    def happens(network: Network, host: int, process: Any) -> None:
        if process.is_alive():
            os.kill(process.pid, signum)

    return happens


def cut(seconds: float | None = None, **ways: bool) -> Callable[[Network, int, Any], None]:
    """All cables of a host are cut, for some seconds or forever, in both ways or in one."""

    def happens(network: Network, host: int, process: Any) -> None:
        network.isolate(host, CUT, **ways)
        if seconds is not None:
            threading.Timer(seconds, network.isolate, (host, WHOLE), ways).start()

    return happens


def cut_from_next(network: Network, host: int, process: Any) -> None:
    """Two hosts cannot reach each other, and the others reach both."""
    other = (host + 1) % len(network.hosts)
    network.set_cable(host, other, CUT)
    network.set_cable(other, host, CUT)


def worsen(cable: Cable) -> Callable[[Network, int, Any], None]:
    """The cables of a host become bad."""
    return lambda network, host, process: network.isolate(host, cable)


def slow_down(network: Network, host: int, process: Any) -> None:
    """The process computes for a quarter of each second, until it has ended."""

    def happens() -> None:
        while process.is_alive():
            for signum, seconds in ((signal.SIGSTOP, 0.75), (signal.SIGCONT, 0.25)):
                send(signum)(network, host, process)
                time.sleep(seconds)

    threading.Thread(target=happens, daemon=True).start()


FAULTS: Mapping[str, Fault] = {
    'killed': Fault(ENDS, send(signal.SIGKILL)),
    'stopped': Fault(ENDS, send(signal.SIGSTOP)),
    'SIGTERM': Fault(EITHER, send(signal.SIGTERM)),
    'SIGINT': Fault(EITHER, send(signal.SIGINT)),
    'SIGHUP': Fault(EITHER, send(signal.SIGHUP)),
    'slow': Fault(GOES_ON, slow_down),
    'cut off': Fault(ENDS, cut()),
    'cannot send': Fault(ENDS, cut(back=False)),
    'cannot receive': Fault(ENDS, cut(out=False)),
    'cut off for 3 s': Fault(EITHER, cut(3.0)),
    'cut off from the next': Fault(EITHER, cut_from_next),
    '100 ms late': Fault(GOES_ON, worsen(Cable(late=0.1))),
    '10% lost': Fault(EITHER, worsen(Cable(lost=0.1))),
}
# These happen inside the process.
INSIDE = {
    'clock ahead': GOES_ON,
    'clock behind': GOES_ON,
    'exception': ENDS,
    'other seed': ENDS,
    'other data': ENDS,
    'other jax': ENDS,
}
NEED_JAX = ('other seed', 'other data')


@dataclasses.dataclass(frozen=True)
class Trial:
    """A trial.

    Attributes:
      hosts: their number.
      moment: when the first fault happens, as what the process of its host does then.
      faults: (host, fault, seconds after the moment); only the first may be one of INSIDE.
    """

    hosts: int
    moment: str
    faults: tuple[tuple[int, str, float], ...]
    light: bool = False


def draw(seed: int, counts: tuple[int, ...], light: bool = False) -> Trial:
    """Draws a trial."""
    rng = random.Random(seed)
    hosts = rng.choice(counts)
    first = rng.choice([n for n in (*FAULTS, *INSIDE) if not (light and n in NEED_JAX)])
    names = [first] + ([rng.choice([*FAULTS])] if rng.random() < 0.3 else [])
    victims = rng.sample(range(hosts), len(names))
    delays = [0.0, rng.choice((0.0, 0.5, 3.0))]
    faults = tuple(zip(victims, names, delays, strict=False))
    return Trial(hosts, rng.choice(MOMENTS), faults, light)


def run_trial(trial: Trial, folder: Path, seed: int = 0) -> dict[str, Any]:
    """Runs a trial, and then the same run without faults."""
    run = folder / 'run'
    shutil.rmtree(run, ignore_errors=True)
    victim, first, _ = trial.faults[0]
    later: list[threading.Timer] = []
    with Network(trial.hosts, folder, seed) as network:

        def happen(processes: Mapping[int, Any]) -> None:
            for host, name, delay in trial.faults:
                if name in FAULTS:
                    arguments = (network, host, processes[host])
                    if delay:
                        later.append(threading.Timer(delay, FAULTS[name].happens, arguments))
                        later[-1].start()
                    else:
                        FAULTS[name].happens(*arguments)

        inside = first if first in INSIDE else 'from outside'
        how = {'from_outside': happen, 'fault': inside, 'moment': trial.moment}
        ending = train(trial, run, network, victim, **how)
        for fault in later:  # Nothing happens to the next run.
            fault.cancel()
        network.mend()
        found = judge(trial, ending)
        again = train(trial, run, network)
    whole = set(again.codes) == {0}
    right = whole and (trial.light or faulty_runs.results(run, STEPS) == undisturbed(trial, folder))
    why = {} if whole else {'again': again.codes, 'says again': last_lines(again.texts)}
    return {**dataclasses.asdict(trial), **found, 'resumed': whole, 'right': right, **why}


def train(trial: Trial, run: Path, network: Network, victim: int | None = None, **how: Any) -> Any:
    """Runs the processes of a trial until they end."""
    per_core = LIGHT_HOSTS_PER_CORE if trial.light else HOSTS_PER_CORE
    times = max(1.0, trial.hosts / (per_core * (os.cpu_count() or 1)))
    return faulty_runs.run(
        run,
        trial.hosts,
        victim,
        network=network,
        devices=1,
        steps=STEPS,
        rows=max(8, trial.hosts),
        only_meets=trial.light,
        heartbeat=(LIGHT_HEARTBEAT if trial.light else HEARTBEAT) * times,
        watchdog=WATCHDOG * times,
        init=600.0 * times,
        limit=1800.0 * times,
        stopped=[host for host, name, _ in trial.faults if name == 'stopped'] if how else [],
        **how,
    )


def judge(trial: Trial, ending: Any) -> dict[str, Any]:
    """What came of a run with faults."""
    victims = {host for host, _, _ in trial.faults}
    expected = {  # A later fault may come after the end of the run.
        name: EITHER if delay else FAULTS[name].expected if name in FAULTS else INSIDE[name]
        for _, name, delay in trial.faults
    }
    others = [code for i, code in enumerate(ending.codes) if i not in victims]
    went_on = set(others) == {0}
    culprits = victims | {
        (host + 1) % trial.hosts
        for host, name, _ in trial.faults
        if name == 'cut off from the next'
    }
    last = ['\n'.join(text.splitlines()[-12:]) for text in ending.survivors(*victims) if text]
    others_named = [x for x in last if not any(f'process {i}' in x for i in culprits)]
    outcomes = set(expected.values())
    return {
        'codes': ending.codes,
        'seconds': ending.seconds,
        'ended': None not in others and set(others) <= CODES,
        'as expected': EITHER in outcomes or went_on == (outcomes == {GOES_ON}),
        'named': went_on or not others_named,
        'says': last_lines(others_named or last[:1]),
    }


def last_lines(texts: list[str]) -> dict[str, int]:
    """The last lines of processes without their indices, and how many end with each."""
    lines = [text.splitlines()[-1].partition('] ')[2] for text in texts if text.strip()]
    return dict(collections.Counter(lines))


def undisturbed(trial: Trial, folder: Path) -> Any:
    """The results of a run without faults on as many hosts."""
    run = folder / f'undisturbed-{trial.hosts}'
    if not (run / f'checkpoints/{STEPS}/manifest.json').exists():
        with Network(trial.hosts, folder) as network:
            ending = train(trial, run, network)
        assert set(ending.codes) == {0}, ending.texts
    return faulty_runs.results(run, STEPS)


def is_good(found: Mapping[str, Any]) -> bool:
    """Whether a trial has no fault of ours."""
    return all(found[key] for key in ('ended', 'as expected', 'named', 'resumed', 'right'))


def smaller(trial: Trial) -> Iterator[Trial]:
    """Trials that are a little simpler than this one, the simplest first."""
    for hosts in (2, 4, 8):
        if hosts < trial.hosts and all(host < hosts for host, _, _ in trial.faults):
            yield dataclasses.replace(trial, hosts=hosts)
    for i in range(len(trial.faults) if len(trial.faults) > 1 else 0):
        yield dataclasses.replace(trial, faults=trial.faults[:i] + trial.faults[i + 1 :])
    if any(host >= 2 for host, _, _ in trial.faults):
        lower = tuple((i, name, delay) for i, (_, name, delay) in enumerate(trial.faults))
        yield dataclasses.replace(trial, faults=lower)
    if trial.moment != 'step 4':
        yield dataclasses.replace(trial, moment='step 4')


def shrink(trial: Trial, folder: Path) -> Trial:
    """The smallest trial that fails, found by steps of `smaller`."""
    for one in smaller(trial):
        if not is_good(run_trial(one, folder)):
            print(f'fails as well: {one}', flush=True)
            return shrink(one, folder)
    return trial


def print_table(trials: list[dict[str, Any]]) -> None:
    """Prints the sums, the time that each fault took to end the run, and what went wrong."""
    print(
        f'{len(trials)} trials on {", ".join(map(str, sorted({t["hosts"] for t in trials})))} hosts'
    )
    for key in ('ended', 'as expected', 'named', 'resumed', 'right'):
        print(f'{key}: {sum(t[key] for t in trials)}')
    for name in [*FAULTS, *INSIDE]:
        of = [t for t in trials if len(t['faults']) == 1 and t['faults'][0][1] == name]
        seconds = sorted(t['seconds'] for t in of if t['seconds'] is not None)
        if seconds:
            ends = f'{statistics.median(seconds):6.1f} s, at most {seconds[-1]:6.1f} s'
            print(f'{name:<24}{len(of):>4} times, until the end of the run {ends}')
    for t in trials:
        if not is_good(t):
            print(f'  {t}')


def main() -> None:
    """Runs the trials that are missing."""
    if reason := why_not():
        raise SystemExit(reason)
    # nohup and background jobs of shells ignore these, and the processes would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--results', type=Path, default=ROOT / 'build/pod_faults.jsonl')
    parser.add_argument('--trials', type=int, default=100)
    parser.add_argument('--first', type=int, default=0, help='the first seed (0)')
    parser.add_argument('--hosts', default='8', help='their numbers, separated by commas (8)')
    parser.add_argument('--seed', type=int, help='run this trial only, and make it smaller')
    parser.add_argument('--light', action='store_true', help='processes that only meet')
    options = parser.parse_args()
    counts = tuple(int(count) for count in options.hosts.split(','))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if options.seed is not None:
            trial = draw(options.seed, counts, options.light)
            found = run_trial(trial, folder, options.seed)
            print(json.dumps(found))
            print('nothing is wrong' if is_good(found) else shrink(trial, folder))
            return
        drawn = [
            (
                f'seed {seed}{" light" * options.light}',
                functools.partial(run_trial, draw(seed, counts, options.light), folder, seed),
            )
            for seed in range(options.first, options.first + options.trials)
        ]
        done = run_trials(options.results, drawn)
    print_table(done)


if __name__ == '__main__':
    main()
