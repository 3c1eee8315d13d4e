"""Seconds from the loss of a process to the next step, by phase.

  python benchmarks/recovery.py [--trees before=DIR,new+spares+tier=.] [--repeats 5]
      [--min_processes 4]

`meshwright launch` trains a tiny language model with 4 processes of 2 devices, and one of them is
killed after a step. A tree is a checkout; if its name contains `+spares`, the launcher keeps
spares, and with `+tier`, every second step is saved on the host, in addition to every tenth in
MODEL_DIR. The phases are read from the times at which lines are printed:

  ending    from the kill until the launcher starts the processes again
  joining   until process 0 prints its first line: imports, settings, and joining the others
  start     until the first step is done: data, layout, programs, restored state
  repeated  until the step is done that was under way at the kill

Each repetition runs every tree once, in turn, so that the load of the machine meets all alike. The
table has medians, and the seconds of processor time of the whole launch.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from benchmarks.campaigns import TINY_RUN

PROCESSES, DEVICES, STEPS, KILL_AT, VICTIM = 4, 2, 26, 18, 2
PERIOD = 10
PHASES = ('ending', 'joining', 'start', 'repeated', 'total')
RUN = f"""
{TINY_RUN}
MODEL_DIR = 'run'
TRAIN_STEPS = {STEPS}
EVAL_PERIOD = 0
CHECKPOINT_PERIOD = {PERIOD}
TransformerConfig.num_layers = 4
TrainConfig.log_every = 1
TrainConfig.evaluators = {{}}
"""
TIER = """
CheckpointConfig.local_dir = 'local'
CheckpointConfig.local_every = 2
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--trees', default=f'here={ROOT}', help='checkouts to compare, by name')
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--min_processes', type=int, default=PROCESSES)
    parser.add_argument('--show', action='store_true', help='print what the launches print')
    options = parser.parse_args()
    trees = dict(pair.split('=', 1) for pair in options.trees.split(','))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for repeat in range(options.repeats):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as folder:
                one = measure(Path(folder), name, tree, options.min_processes, options.show)
            found[name].append(one)
            print(repeat, name, {k: round(v, 2) for k, v in one.items()}, flush=True)
    print(f'{"tree":<12}' + ''.join(f'{phase:>10}' for phase in (*PHASES, 'cpu')))
    for name, each in found.items():
        medians = [statistics.median(one[phase] for one in each) for phase in (*PHASES, 'cpu')]
        print(f'{name:<12}' + ''.join(f'{seconds:>10.2f}' for seconds in medians))


def measure(folder: Path, name: str, tree: str, min_processes: int, show: bool) -> dict[str, float]:
    """Launches a run, kills a process, and returns the seconds of each phase."""
    (folder / 'texts').mkdir()
    for number in range(4):
        words = ' '.join(str(number * i) for i in range(4000))
        (folder / f'texts/{number}.txt').write_text(words)
    tier = TIER if '+tier' in name else ''
    (folder / 'run.gin').write_text(RUN + tier)
    command = [sys.executable, '-P', '-m', 'train.cli', 'launch', f'--processes={PROCESSES}']
    command += [f'--devices_per_process={DEVICES}', '--restarts=1', '--', 'run.gin']
    if min_processes < PROCESSES:
        command.insert(command.index('--'), f'--min_processes={min_processes}')
    if '+spares' in name:
        command.insert(command.index('--'), '--spares')
    environment = os.environ | {'PYTHONPATH': str(Path(tree).resolve()), 'JAX_PLATFORMS': 'cpu'}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    launch = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    events = watch(launch, show)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    marks = [events[name] for name in ('kill', 'restart', 'joined', 'stepped', 'regained')]
    seconds = [later - earlier for earlier, later in itertools.pairwise(marks)]
    return dict(zip(PHASES, [*seconds, marks[-1] - marks[0]], strict=True)) | {'cpu': cpu}


def watch(launch: subprocess.Popen[str], show: bool) -> dict[str, float]:
    """Kills a process after a step, and notes when the lines come that separate phases."""
    events: dict[str, float] = {}
    assert launch.stdout is not None
    guard = threading.Timer(600, launch.kill)
    guard.start()
    for line in launch.stdout:
        now = time.time()
        if show:
            print(f'{now - events.get("kill", now):6.2f} {line}', end='')
        step = re.search(r'\[0\] step (\d+)/', line)
        if step and int(step[1]) == KILL_AT and 'kill' not in events:
            events['kill'] = time.time()
            os.kill(find_child(launch.pid), signal.SIGKILL)
        elif 'kill' not in events:
            continue
        elif line.startswith('restart '):
            events['restart'] = now
        elif 'restart' in events and line.startswith('[0]'):
            events.setdefault('joined', now)
            if step:
                events.setdefault('stepped', now)
                if int(step[1]) > KILL_AT:
                    events.setdefault('regained', now)
    guard.cancel()
    if launch.wait() or 'regained' not in events:
        raise SystemExit(f'the launch ended with {launch.returncode} and {events}')
    return events


def find_child(launcher: int) -> int:
    """The process of the launcher that is to be killed."""
    for line in Path(f'/proc/{launcher}/task/{launcher}/children').read_text().split():
        words = Path(f'/proc/{line}/cmdline').read_bytes().split(b'\0')
        if f'--process_index={VICTIM}'.encode() in words:
            return int(line)
    raise SystemExit(f'process {VICTIM} is not running')


if __name__ == '__main__':
    main()
