"""Seconds from the loss of a process to the next step, by phase.

  python benchmarks/recovery.py [--trees before=DIR,new+spares+tier+ahead=.] [--repeats 5]
      [--min_processes 2]

`meshwright launch` trains a tiny language model with 4 processes of 2 devices, and one of them is
killed after a step. A tree is a checkout; if its name contains `+spares`, the launcher keeps
spares, with `+ahead`, it compiles ahead, and with `+tier`, every second step is saved on the host,
in addition to every tenth in MODEL_DIR. The kill waits for the programs. The phases are read from
the times at which lines are printed:

  ending    from the kill until the launcher starts the processes again
  joining   until process 0 prints its first line: imports, settings, and joining the others
  start     until the first step is done: data, layout, programs, restored state
  repeated  until the step is done that was under way at the kill

and from what the run says of its start: tracing, compiler and restore. Each repetition runs every
tree once, in turn, so that the load of the machine meets all alike. The table has medians; cpu is
the processor time of all processes from the kill to the regained step, and slower is the time of a
step while programs are compiled ahead, divided by the time of a step afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import re
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

PROCESSES, DEVICES, STEPS, VICTIM = 4, 2, 100_000, 2
# The kill comes after one of these steps, 8 steps after a checkpoint in MODEL_DIR.
PERIOD, KILL_AFTER, FIRST_KILL, SECONDS_UNTIL_SPARES = 10, 8, 18, 60.0
PHASES = ('ending', 'joining', 'start', 'repeated', 'total')
SAID = {
    'tracing': 'tracing the train step',
    'compiler': 'waiting for the compiler',
    'restore': 'restoring the state',
}
COLUMNS = (*PHASES, *SAID, 'cpu', 'slower')
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
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                one = measure(Path(folder), name, tree, options.min_processes, options.show)
            found[name].append(one)
            print(repeat, name, {k: round(v, 2) for k, v in one.items()}, flush=True)
    print(f'{"tree":<24}' + ''.join(f'{column:>9}' for column in COLUMNS))
    for name, each in found.items():
        medians = [statistics.median(one[column] for one in each) for column in COLUMNS]
        print(f'{name:<24}' + ''.join(f'{seconds:>9.2f}' for seconds in medians))


def measure(folder: Path, name: str, tree: str, min_processes: int, show: bool) -> dict[str, float]:
    """Launches a run, kills a process, and returns the figures of each column."""
    (folder / 'texts').mkdir()
    for number in range(4):
        words = ' '.join(str(number * i) for i in range(4000))
        (folder / f'texts/{number}.txt').write_text(words)
    tier = TIER if '+tier' in name else ''
    (folder / 'run.gin').write_text(RUN + tier)
    command = [sys.executable, '-P', '-m', 'train.cli', 'launch', f'--processes={PROCESSES}']
    command += [f'--devices_per_process={DEVICES}', '--restarts=1']
    command += [f'--min_processes={min_processes}'] if min_processes < PROCESSES else []
    command += ['--spares'] if '+spares' in name else []
    command += ['--compile_ahead'] if '+ahead' in name else []
    environment = os.environ | {'PYTHONPATH': str(Path(tree).resolve()), 'JAX_PLATFORMS': 'cpu'}
    launch = subprocess.Popen(
        [*command, '--', 'run.gin'],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    guard = threading.Timer(1800, launch.kill)
    guard.start()
    try:
        return watch(launch, name, show)
    finally:
        guard.cancel()
        launch.kill()  # The kernel kills its processes.
        launch.wait()


def watch(launch: subprocess.Popen[str], name: str, show: bool) -> dict[str, float]:
    """Kills a process after a step, and reads the figures from the lines that come."""
    events: dict[str, float] = {}
    steps, launched = list[float](), time.time()
    assert launch.stdout is not None
    for line in launch.stdout:
        now = time.time()
        if show:
            print(f'{now - events.get("kill", now):6.2f} {line}', end='')
        found = re.search(r'\[0\] step (\d+)/', line)
        step = int(found[1]) if found else 0
        if line.startswith('programs for '):
            events['ready'] = now
        if 'kill' not in events:
            steps += [now] if step else []
            ready = events.get('ready', launched if '+ahead' not in name else now)
            has_spares = '+spares' not in name or now - launched > SECONDS_UNTIL_SPARES
            after_ready = sum(one > ready for one in steps) > PERIOD and has_spares
            if after_ready and step >= FIRST_KILL and step % PERIOD == KILL_AFTER:
                before, killed_at = processor_time(launch.pid), step
                events['kill'] = time.time()
                os.kill(find_child(launch.pid), signal.SIGKILL)
        elif line.startswith('restart '):
            events['restart'] = now
        elif 'restart' in events and line.startswith('[0]'):
            events.setdefault('joined', now)
            if 'first step ' in line:
                said = {key: seconds_of(title, line) for key, title in SAID.items()}
            if step:
                events.setdefault('stepped', now)
            if step > killed_at:
                cpu = processor_time(launch.pid) - before
                marks = [events[key] for key in ('kill', 'restart', 'joined', 'stepped')] + [now]
                seconds = [later - earlier for earlier, later in itertools.pairwise(marks)]
                phases = dict(zip(PHASES, [*seconds, now - events['kill']], strict=True))
                return phases | said | {'cpu': cpu, 'slower': slowdown(steps, events.get('ready'))}
    raise SystemExit(f'the launch ended with {launch.wait()} and {events}')


def seconds_of(title: str, line: str) -> float:
    """The seconds that a line about the first step names for a phase."""
    found = re.search(rf'{title} (?:(\d+):)?([\d.]+)', line)
    return 60 * int(found[1] or 0) + float(found[2]) if found else 0.0


def slowdown(steps: list[float], ready: float | None) -> float:
    """The median time of a step before a moment, divided by the time afterwards."""
    times = [(later - earlier, later) for earlier, later in itertools.pairwise(steps)]
    early = [seconds for seconds, end in times if ready is not None and end < ready]
    late = [seconds for seconds, end in times if ready is not None and end >= ready]
    return statistics.median(early) / statistics.median(late) if early and late else math.nan


def processor_time(launcher: int) -> float:
    """The processor time of a launcher and its processes so far, in seconds."""
    children = Path(f'/proc/{launcher}/task/{launcher}/children').read_text().split()
    total = 0
    for process in (launcher, *children):
        fields = Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()
        total += sum(map(int, fields[11:15]))  # with the processes that it has waited for
    return total / os.sysconf('SC_CLK_TCK')


def find_child(launcher: int) -> int:
    """The process of the launcher that is to be killed."""
    for line in Path(f'/proc/{launcher}/task/{launcher}/children').read_text().split():
        words = Path(f'/proc/{line}/cmdline').read_bytes().split(b'\0')
        if f'--process_index={VICTIM}'.encode() in words:
            return int(line)
    raise SystemExit(f'process {VICTIM} is not running')


if __name__ == '__main__':
    main()
