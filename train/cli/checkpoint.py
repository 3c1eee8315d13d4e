"""`meshwright checkpoint inspect|diff|verify|convert`: checkpoints of any format."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from absl import logging

from partitioning.command_line import OneLineParser
from train.cli.command import add_traceback, run_command

if TYPE_CHECKING:
    from etils import epath

    from train.checkpoints.formats.opening import Checkpoint
    from train.checkpoints.steps.verifying import FoundStep

_FORMATS = ('meshwright', 't5x', 'orbax', 'safetensors', 'huggingface')
_DESCRIPTION = 'Looks into checkpoints of any format, compares, verifies and converts them.'
_PATHS = """\
PATH is a step or the folder of a run, a checkpoint of T5X or Orbax, a safetensors file or a folder
of them, or the folder of a Hugging Face model. No device is used.
"""


def main(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright checkpoint`, and returns its exit status.

    The status is 1 if two checkpoints differ, or if a file has changed since it was written.
    """
    parser = OneLineParser(prog, description=_DESCRIPTION, epilog=_PATHS)
    verbs = parser.add_subparsers(required=True, metavar='inspect|diff|verify|convert')

    def add(command: Callable[..., int], text: str, **paths: str) -> OneLineParser:
        one = verbs.add_parser(command.__name__, help=text, description=text, epilog=_PATHS)
        for name, shown in paths.items():
            one.add_argument(name, metavar=shown)
        add_traceback(one)
        if command is not diff:
            one.add_argument('--step', type=int, metavar='N', help='the step of a run')
        one.set_defaults(command=command)
        return one

    one = add(inspect, 'show what is in a checkpoint, or the steps of a run', path='PATH')
    one.add_argument('--arrays', metavar='REGEX', help='list each array whose name contains this')
    one.add_argument('--json', action='store_true', help='print exact numbers as JSON')

    one = add(diff, 'compare two checkpoints; exit with 1 if they differ', first='A', second='B')
    one.add_argument('--names', action='store_true', help='compare names, shapes and dtypes only')

    add(
        verify,
        'compare files with their checksums; exit with 1 unless a step is good and none is damaged '
        'or without a manifest',
        path='PATH',
    )

    one = add(convert, 'write a checkpoint in another format', source='FROM', target='TO')
    one.add_argument('--to', required=True, choices=_FORMATS, help='the format to write')
    one.add_argument(
        '--renames',
        action='append',
        default=[],
        metavar='PATTERN=NAME',
        help='rename the arrays whose whole name matches the regular expression; NAME may refer to '
        'its groups as \\1, and an empty NAME leaves them out; repeat the flag for more',
    )
    one.add_argument(
        '--dtype',
        choices=('float32', 'bfloat16', 'float16'),
        help='convert the floating-point parameters (their own)',
    )
    one.add_argument(
        '--like',
        metavar='FOLDER',
        help='with --to=huggingface: take config.json, the tokenizer and the dtypes of the model '
        'in FOLDER, from which the run has started (by default, config.json follows from the run)',
    )
    options = parser.parse_args(arguments or ['--help'])

    def run() -> int:
        # Orbax logs warnings that do not matter here, and tracebacks of errors that are raised.
        logging.set_verbosity(logging.FATAL)
        return options.command(options)

    return run_command(run, options)


def inspect(options: argparse.Namespace) -> int:
    """Shows what is in a checkpoint, or the steps of a run."""
    from train.checkpoints.formats.opening import choose_place, open_checkpoint
    from train.checkpoints.offline.summary import summarize, summarize_step
    from train.cli import checkpoint_tables as tables
    from train.paths import as_path

    path = as_path('PATH', options.path)
    exact: Any
    readable: object
    if steps := _list_steps(path, options.step):
        rows = [summarize_step(step) for step in steps]
        exact = [dataclasses.asdict(row) for row in rows]
        readable = tables.steps_table(path, rows)
    else:
        place, _ = choose_place(path, options.step)
        summary = summarize(open_checkpoint(place), options.arrays)
        exact, readable = dataclasses.asdict(summary), tables.summary_tables(summary)
    if options.json:
        print(json.dumps(exact, indent=1))
    else:
        tables.show(readable)
    return 0


def diff(options: argparse.Namespace) -> int:
    """Compares two checkpoints."""
    from train.checkpoints.offline.comparing import compare
    from train.checkpoints.offline.converting import with_names_of
    from train.cli import checkpoint_tables as tables

    first, second = (_open(path, None) for path in (options.first, options.second))
    arrays, others = first.arrays, with_names_of(first, second)
    total = sum(x.nbytes for name, x in arrays.items() if name in others)
    with tables.progress('comparing', 0 if options.names else total) as report:
        found = list(compare(arrays, others, report, values=not options.names))
    tables.show(tables.diff_table(found, len(arrays.keys() | others.keys()), not options.names))
    return 1 if found else 0


def verify(options: argparse.Namespace) -> int:
    """Compares the files of a checkpoint, or of all steps of a run, with their checksums."""
    from train.checkpoints.formats.opening import choose_place, examine_place
    from train.checkpoints.steps.verifying import all_good, size_to_read, verify
    from train.cli import checkpoint_tables as tables
    from train.paths import as_path

    path = as_path('PATH', options.path)
    steps = _list_steps(path, options.step)
    steps = steps or [examine_place(choose_place(path, options.step)[0])]
    started, results = time.perf_counter(), []
    with tables.progress('verifying', sum(size_to_read(step) for step in steps)) as report:
        for step in steps:
            results.append(verify(step, report))
    tables.show(tables.verified_table(results, time.perf_counter() - started))
    return 0 if all_good(results) else 1


def convert(options: argparse.Namespace) -> int:
    """Writes a checkpoint in another format."""
    import jax

    from train.checkpoints.offline.converting import plan_conversion, write
    from train.cli import checkpoint_tables as tables
    from train.errors import ConfigError
    from train.paths import as_folder, as_path

    # Orbax asks for the processes of a backend. An accelerator backend would look for devices.
    jax.config.update('jax_platforms', 'cpu')
    source = _open(options.source, options.step)
    like = None if options.like is None else as_path('--like', options.like)
    if like is not None and options.to != 'huggingface':
        raise ConfigError(f'--like needs --to=huggingface, not --to={options.to}: remove it')
    conversion = plan_conversion(
        source,
        as_folder('TO', options.target),
        options.to,
        renames=[_parse_rename(text) for text in options.renames],
        dtype=options.dtype,
        model=_find_model(source) if options.to == 'huggingface' and like is None else None,
        like=like,
    )
    started = time.perf_counter()
    with tables.progress('converting', conversion.num_bytes) as report:
        write(conversion, report)
    tables.show(tables.conversion_lines(conversion, time.perf_counter() - started))
    return 0


def _find_model(source: Checkpoint) -> Any:
    """The settings of the built-in model or T5 that a checkpoint of a run has, or None."""
    from train.checkpoints.steps.record import read_record
    from train.gin.load import find_model
    from train.models.config import TransformerConfig
    from train.models.t5 import T5Config
    from train.t5x.modules import ALIASES

    known = read_record(source.place.path)
    text = None if known is None else known.texts.get('config.gin')
    model = None if text is None else find_model(text, ALIASES)
    return model if isinstance(model, TransformerConfig | T5Config) else None


def _parse_rename(text: str) -> tuple[str, str]:
    """The pattern and the new name of one --renames."""
    from train.checkpoints import check_renames
    from train.errors import ConfigError

    pattern, separator, name = text.partition('=')
    if not separator:
        raise ConfigError(
            f"--renames={text!r} has no '=': write --renames='(.*)/kernel=\\1/weight'"
        )
    check_renames('--renames', [(pattern, name)])
    return pattern, name


def _list_steps(path: epath.Path, step: int | None) -> list[FoundStep]:
    """The steps in a folder of checkpoints; none if it is one checkpoint, or `step` chooses one."""
    from train.checkpoints.formats.opening import find_place, list_steps

    several = step is None and path.is_dir() and find_place(path) is None
    return list_steps(path) if several else []


def _open(path: str, step: int | None) -> Checkpoint:
    """Opens a checkpoint, and says which newer ones are skipped."""
    from train.checkpoints.formats.opening import choose_place, open_checkpoint
    from train.paths import as_path

    place, skipped = choose_place(as_path('PATH', path), step)
    for line in skipped:
        print(line, file=sys.stderr)
    return open_checkpoint(place)
