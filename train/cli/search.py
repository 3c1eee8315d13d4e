"""`meshwright forecast --search`: the fastest settings of a run on a machine."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING

from train.cli.training import find_gin_file

if TYPE_CHECKING:
    from train.planning.forecasting import Machine
    from train.planning.searching.predicting import Source


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a search to those of `meshwright forecast`."""
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


def check(options: argparse.Namespace) -> None:
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


def search(options: argparse.Namespace, machine: Machine, defaults: str) -> int:
    """Searches the settings of the runs in `options`, and prints what was found.

    Args:
      options: the flags of `meshwright forecast`, which `check` accepts.
      machine: the machine.
      defaults: a gin file that is read before those of the run.

    Returns:
      0, or 1 if no compiled candidate fits.
    """
    from train.cli.checkpoint_tables import show
    from train.paths import as_folder
    from train.planning.searching.runs import search_run
    from train.planning.searching.tables import search_table

    source = source_of(options, defaults)
    with _folder(options.out) as out:
        found = search_run(
            source,
            machine,
            as_folder('--out', out),
            best=options.best,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
        if options.json:
            print(found.files['search'].read_text(), end='')
            return int(found.result.winner is None)
        show(search_table(found.result))
        if options.out is None:
            if 'winner' in found.files:
                print(f'\n{found.files["winner"].read_text()}', end='')
        else:
            for name, file in found.files.items():
                print(f'{name}: {file}')
    return int(found.result.winner is None)


def source_of(options: argparse.Namespace, defaults: str) -> Source:
    """The gin settings of the runs in `options`.

    Args:
      options: the flags of `meshwright forecast`.
      defaults: a gin file that is read before those of the run.
    """
    from train.planning.searching.predicting import Source

    folders, packages = (
        [entry for value in values for entry in value.split(',') if entry]
        for values in (options.gin_search_paths, options.gin_allow)
    )
    return Source(
        files=[*(find_gin_file(one) for one in options.runs), *options.gin_file],
        bindings=options.gin_bindings,
        defaults=[defaults],
        search_paths=[os.path.abspath(folder) for folder in folders],
        allow=packages,
    )


@contextlib.contextmanager
def _folder(out: str | None) -> Iterator[str]:
    """The folder of --out, or a temporary one."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder
