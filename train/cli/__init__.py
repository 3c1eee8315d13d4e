"""The command line `meshwright`. Each command imports only what it needs."""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence

from partitioning.spelling import nearest
from train.cli.commands import COMMANDS
from train.cli.interruption import line_of_module, line_of_process, run_until_signal
from train.processes import signals


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command of `meshwright`.

    `arguments` are the name of the command and its arguments, by default this process's. Returns
    the exit status: 0, 1 if plans differ, 2 after an error, 75 after SIGTERM or SIGHUP, or 130
    after Ctrl-C.
    """
    if arguments is None:
        signals.handle_until_exit()
        line = line_of_process('meshwright')
    else:
        line = shlex.join(['meshwright', *arguments])
    given = sys.argv[1:] if arguments is None else arguments
    return run_until_signal(lambda: _run(given), line)


def run_module(module: str, function: str, arguments: Sequence[str]) -> int:
    """Runs the command `python -m MODULE`, and returns the exit status, as in `main`.

    `function` is the function of train.cli that does the work, such as 'training.train'.
    """
    line = line_of_module(module, arguments)
    return run_until_signal(lambda: _find(function)(arguments, f'python -m {module}'), line)


def _run(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ['--help']
    if name in ('--help', '-h', 'help'):
        print(_help(bold=sys.stdout.isatty()))
        return 0
    if name not in COMMANDS:
        known = ', '.join(COMMANDS)
        print(
            f'error: no command {name!r}.{nearest(name, COMMANDS)} The commands are {known}',
            file=sys.stderr,
        )
        return 2
    # The packages of --gin_allow may be in the current folder. It comes last, so that a train.py
    # there does not hide this package.
    sys.path.append(os.getcwd())
    try:
        command = _find(COMMANDS[name][0])
    except ImportError as error:
        from train.cli.command import explain_missing

        if (line := explain_missing(error)) is None:
            raise
        print(f'error: {line}', file=sys.stderr)
        return 2
    return command(rest, f'meshwright {name}')


def _find(name: str) -> Callable[[Sequence[str], str], int]:
    """Imports a function of train.cli, such as 'training.train'."""
    module, function = name.split('.')
    return getattr(importlib.import_module(f'train.cli.{module}'), function)


def _help(bold: bool) -> str:
    """Lists the commands with an example of each."""
    on, off = ('\033[1m', '\033[0m') if bold else ('', '')
    lines = [f'{on}meshwright{off} trains on any mesh, and shows how every array is laid out.', '']
    for name, (_, text, example) in COMMANDS.items():
        lines += [f'  {on}{name:<12}{off}{text}', f'{"":14}$ meshwright {name} {example}']
    return '\n'.join([*lines, '', 'meshwright COMMAND --help lists the options of a command.'])
