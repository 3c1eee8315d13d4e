"""`meshwright forecast --search`: the fastest settings of a run on a machine.

`python -m train.cli.searching` reads a pickled request from its standard input, compiles one
candidate, and writes what came out to its standard output as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.cli.command import gin_settings
from train.cli.training import find_gin_file

if TYPE_CHECKING:
    from train.config import TrainConfig
    from train.planning.candidates import Candidate
    from train.planning.machines import Machine
    from train.planning.searching import Outcome

# A gin file for settings that a forecast does not need, which is read before the files of a run.
DEFAULTS = 'configs/forecasting/defaults.gin'


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a search to the flags of `meshwright forecast`."""
    parser.add_argument(
        '--search',
        action='store_true',
        help='look for the mesh, the rules, the microbatches, the remat and the compiler options '
        'with which the step is fastest; the winner is a gin file in DIR',
    )
    parser.add_argument(
        '--best',
        type=int,
        default=8,
        metavar='K',
        help='with --search: compile at most K candidates (8)',
    )


def check_flags(options: argparse.Namespace) -> None:
    """Raises ConfigError if flags of `meshwright forecast` contradict --search."""
    from train.errors import ConfigError, check_counts

    check_counts(**{'--best': options.best})
    if options.no_compile:
        raise ConfigError('--search compiles its best candidates: remove --no_compile')
    for flag in ('golden', 'confirm', 'on_cpu'):
        if getattr(options, flag):
            raise ConfigError(f'--{flag} has no effect on --search: remove one of them')
    if len(options.topology) != 1:
        raise ConfigError(
            f'--search is given {len(options.topology)} topologies: search on one at a time'
        )


def search_settings(options: argparse.Namespace, machine: Machine) -> int:
    """Searches the settings of runs, prints what was found, and returns 0, or 1 if nothing fits."""
    from train.cli.checkpoint_tables import show
    from train.paths import as_folder
    from train.planning.candidates import sizes_of
    from train.planning.gin_text import write_gin
    from train.planning.search_runs import search_run
    from train.planning.tables import search_table

    bindings, folders, packages = gin_settings(options)
    source = Source(
        files=[*(find_gin_file(one) for one in options.runs), *options.gin_file],
        bindings=bindings,
        search_paths=[os.path.abspath(folder) for folder in folders],
        allow=packages,
    )
    config = source.read(machine)
    run = sizes_of(config, machine.num_devices, machine.num_slices)

    def write(candidate: Candidate, comment: Sequence[str]) -> str:
        return write_gin(candidate, run, source.files, source.bindings, comment)

    temporary = tempfile.TemporaryDirectory() if options.out is None else None
    with temporary or contextlib.nullcontext(options.out) as out:
        searched = search_run(
            config,
            machine,
            as_folder('--out', out),
            best=options.best,
            compile_candidate=compile_in_new_process(source, machine),
            write=write,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        if options.json:
            print(searched.files['search'].read_text(), end='')
            return int(searched.result.winner is None)
        show(search_table(searched.result))
        if options.out is None:
            if 'winner' in searched.files:
                print(f'\n{searched.files["winner"].read_text()}', end='')
        else:
            for name, file in searched.files.items():
                print(f'{name}: {file}')
    return int(searched.result.winner is None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where the settings of a run come from, as `load_config` takes them.

    Attributes:
      files: the gin files of the run, after `DEFAULTS`.
      bindings: the gin bindings, which override them.
      search_paths: folders with gin files.
      allow: packages that gin files may import.
    """

    files: Sequence[str]
    bindings: Sequence[str] = ()
    search_paths: Sequence[str] = ()
    allow: Sequence[str] = ()

    def read(self, machine: Machine) -> TrainConfig:
        """Reads the settings for a machine. gin forgets what it has read before.

        Raises:
          ConfigError, ValueError: if a setting is invalid.
        """
        import gin

        from train.gin.load import find_config, load_config
        from train.planning.machines import stand_in

        gin.clear_config()
        load_config([DEFAULTS, *self.files], self.bindings, self.search_paths, self.allow)
        with stand_in(machine):
            return find_config()


def compile_in_new_process(source: Source, machine: Machine) -> Callable[[Candidate], Outcome]:
    """Returns a function that compiles a candidate in a new process.

    A compiler can take gigabytes, and can end its process. The new process reads the settings of
    the run from gin, and changes them as the candidate says.
    """
    from train.planning.searching import Outcome

    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get('PYTHONPATH')])]
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': os.pathsep.join(paths)}
    # Without -P, a train.py in the current folder would hide this package.
    command = [sys.executable, '-P', '-m', 'train.cli.searching']

    def compile_candidate(candidate: Candidate) -> Outcome:
        request = pickle.dumps((source, machine, candidate))
        started = time.monotonic()
        done = subprocess.run(command, input=request, capture_output=True, env=environment)
        seconds = time.monotonic() - started
        if done.returncode == 0:
            return Outcome(**json.loads(done.stdout) | {'compile_seconds': seconds})
        printed = done.stderr.decode(errors='replace').strip()
        lines = printed.splitlines() or [f'exit status {done.returncode}']
        error = f'the process of the compiler failed: {lines[-1]}'
        return Outcome(fits=False, compile_seconds=seconds, error=error)

    return compile_candidate


def answer(source: Source, machine: Machine, candidate: Candidate) -> Outcome:
    """Compiles a candidate in this process."""
    from train.errors import first_line
    from train.planning.search_runs import compile_changed
    from train.planning.searching import Outcome

    try:
        return compile_changed(source.read(machine), candidate, machine)
    except ValueError as error:
        return Outcome(fits=False, error=first_line(error))


def main() -> None:
    """Answers the request on standard input."""
    sys.path.append(os.getcwd())  # the packages of `allow` may be there
    answers = os.fdopen(os.dup(1), 'w')
    os.dup2(2, 1)  # so that what a compiler prints is not taken for an answer
    outcome = answer(*pickle.load(sys.stdin.buffer))
    with answers:
        json.dump(dataclasses.asdict(outcome), answers)


if __name__ == '__main__':
    main()
