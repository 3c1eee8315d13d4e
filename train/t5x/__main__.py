"""`python -m train.t5x report FILE.gin ...`: what each setting of T5X's gin files becomes here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from train.cli.command import CommandParser, configure, gin_settings, run_command

_DESCRIPTION = """\
Lists the settings of T5X's gin files: their values, what they become here, and which of them have
no equivalent and why. Nothing is trained.

  {prog} t5x/examples/t5/t5_1_1/base.gin t5x/configs/runs/pretrain.gin --gin_search_paths=~/t5x
"""


def _report(options: argparse.Namespace) -> None:
    from train.errors import ConfigError
    from train.gin import checks
    from train.gin.load import find_entry
    from train.gin.parsing import read_statements
    from train.reporting.console import SafeConsole
    from train.t5x.modules import ALIASES
    from train.t5x.report import describe_imports, print_report, report_rows

    files = [*options.files, *options.gin_file]
    bindings, folders, allow = gin_settings(options)
    if not files:
        raise ConfigError('no gin file: add FILE.gin')
    statements = read_statements(files, bindings, folders)
    checks.import_modules(statements, allow, ALIASES)
    notes = list(describe_imports(statements))
    rows = report_rows(statements, allow)
    try:
        options.gin_file = []
        configure(options, files)
        entry = find_entry()
        notes.append(f'The files start {entry.__module__}.{entry.__name__}')
    except ConfigError as error:
        notes.append(f'error: {error}')
    # A pipe gets lines of 100 characters without colours.
    width = None if sys.stdout.isatty() else int(os.environ.get('COLUMNS', 100))
    print_report(rows, notes, SafeConsole(width=width))


def main(arguments: Sequence[str]) -> int:
    """Runs `python -m train.t5x report`, and returns its exit status."""
    if arguments[:1] != ['report']:
        print('error: the command is: python -m train.t5x report FILE.gin ...', file=sys.stderr)
        return 2
    parser = CommandParser('python -m train.t5x report', 'FILE.gin ... [flags]', _DESCRIPTION)
    parser.add_argument('files', metavar='FILE.gin', nargs='*', help='later files override earlier')
    options = parser.read(arguments[1:])
    return run_command(lambda: _report(options), options)


if __name__ == '__main__':
    from train.cli.interruption import line_of_module, run_until_signal

    command = line_of_module('train.t5x', sys.argv[1:])
    sys.exit(run_until_signal(lambda: main(sys.argv[1:]), command))
