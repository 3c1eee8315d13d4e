"""`meshwright dry`: runs an untouched script as if a described machine were there."""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partitioning.command_line import OneLineParser

_DESCRIPTION = """\
Runs a script, without changing it, as on a machine that you do not have. Its functions are compiled
for the machine, and not run: arrays have no values, and read as zeros. It says how much memory each
step needs, what its devices exchange, from which line and why, and how long it takes:

  {prog} v5e:4x4 -- python train.py --batch_size=64
  {prog} v5p:8x8x8 --process=3 --out=dry -- python -m my_package.train config.yaml

A TOPOLOGY is a chip and its arrangement (v5e:16x16, v5p:4x4x4; hosts and GPUs per host, h100:2x8),
or a cloud's name of it (v5p-128, v5litepod-16). 2xv5e:16x16 has two slices. Files that
the script writes, also with Orbax or TensorFlow, go to a folder that is removed at the end.

The exit status is 0 if all steps fit, 1 if one does not, and 2 if the script failed, or compiled
nothing for the machine.
"""


def main(arguments: Sequence[str], prog: str = 'meshwright dry') -> int:
    """Runs the command, and returns its exit status."""
    try:
        return _run(*check(arguments, prog))
    except (ValueError, FileNotFoundError, RuntimeError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 2


def check(arguments: Sequence[str], prog: str) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Returns the flags, and the script with its arguments.

    Raises:
      SystemExit: after the help, and if a flag is not known.
      ValueError: if there is no script, or a flag has no such value.
    """
    own, command = _split(list(arguments))
    options = _parser(prog).parse_args(own)
    if options.steps < 1:
        raise ValueError(f'--steps={options.steps} must be at least 1')
    if not 0 < options.wait < math.inf:
        raise ValueError(f'--wait={options.wait:g} must be more than 0 seconds')
    return options, read_command(command, prog)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if '--' not in arguments:
        return arguments, []
    at = arguments.index('--')
    return arguments[:at], arguments[at + 1 :]


def _parser(prog: str) -> argparse.ArgumentParser:
    usage = 'TOPOLOGY [--steps=N] [--process=N] ... -- python ...'
    parser = OneLineParser(prog, usage, _DESCRIPTION)
    parser.add_argument('topology', metavar='TOPOLOGY', help='the machine')
    parser.add_argument(
        '--steps',
        type=int,
        default=2,
        metavar='N',
        help='end the run after this number of calls of the largest training step (2)',
    )
    parser.add_argument(
        '--wait',
        type=float,
        default=300,
        metavar='SECONDS',
        help='end the run if so long nothing new is compiled (300)',
    )
    parser.add_argument(
        '--process',
        type=int,
        metavar='N',
        help="be this one of the machine's processes; by default, one process has all devices",
    )
    parser.add_argument('--json', action='store_true', help='print the forecasts as JSON')
    parser.add_argument('--out', metavar='DIR', help='write forecast.json and forecast.html to DIR')
    return parser


def _run(options: argparse.Namespace, script: dict[str, Any]) -> int:
    # The script's small computations run here; the machine is only compiled for.
    os.environ['JAX_PLATFORMS'] = 'cpu'
    os.environ.pop('JAX_COMPILATION_CACHE_DIR', None)
    from meshwright.dry.machine import Machine
    from meshwright.dry.reporting import find_steps, findings_text, forecast_function
    from meshwright.dry.script import Script, run_script
    from meshwright.dry.summary import summarize
    from meshwright.report.answers import answer_of, answers_json, exit_status
    from meshwright.report.page import write_page
    from meshwright.report.terminal import forecast_table, terminal_width
    from partitioning.hardware import check_flags, describe_topology, parse_topology
    from partitioning.hardware.topology import split_slices

    name, slices = split_slices(options.topology)
    check_flags(parse_topology(name)[0].platform)
    topology = describe_topology(name, num_slices=slices)
    machine = Machine(topology=topology, process=options.process)
    folder = Path(options.out).absolute() if options.out else None
    run = run_script(machine, Script(**script), steps=options.steps, wait=options.wait)
    sys.stdout.flush()
    if run.ending == 'refused':
        print(f'error: {run.message}', file=sys.stderr)
    elif run.ending == 'error' and run.error is not None:
        _print_error(run.error)
    steps = find_steps(run.functions)
    forecasts = [forecast_function(one) for one in steps]
    answers = [answer_of(forecast) for forecast in forecasts]
    figures = answers_json('dry', answers, {'ending': run.ending})
    if options.json:
        print(figures)
    else:
        print(f'\nDry run of {script["name"]} on {options.topology}\n')
        print(summarize(run))
        if found := findings_text(steps):
            print(f'\n{found}')
        if forecasts:
            print('\n' + forecast_table(forecasts[-1:], width=terminal_width()))
    if folder is not None and forecasts:
        folder.mkdir(parents=True, exist_ok=True)
        write_page(forecasts, folder / 'forecast.html')
        (folder / 'forecast.json').write_text(figures + '\n')
    if run.ending in ('error', 'exit', 'refused') or not run.functions:
        return 2
    return exit_status(answers)


def read_command(command: Sequence[str], prog: str) -> dict[str, Any]:
    """The script of a command such as `python -m package.module --flag`."""
    if not command:
        raise ValueError(
            f'no script: write it behind --, such as `{prog} v5e:4x4 -- python train.py`'
        )
    interpreter, *rest = command
    if interpreter.endswith('.py'):
        return {'name': interpreter, 'arguments': tuple(rest)}
    if not Path(interpreter).name.startswith('python'):
        raise ValueError(
            f'{interpreter} is no Python: write `python train.py` or `python -m package.module` '
            'behind --'
        )
    # A bare name stands for the Python of this command.
    prefix = Path(interpreter).absolute().parent.parent
    if os.sep in interpreter and prefix != Path(sys.prefix):
        raise ValueError(
            f'{interpreter} is not the Python of this command, {sys.executable}: install '
            'meshwright next to the script, and start `python -m meshwright.dry` there'
        )
    while rest and rest[0] in ('-u', '-O', '-B'):
        rest = rest[1:]
    if rest[:1] == ['-m'] and len(rest) > 1:
        return {'name': rest[1], 'arguments': tuple(rest[2:]), 'is_module': True}
    if not rest or rest[0].startswith('-'):
        raise ValueError(f'{" ".join(command)} names no script: write `python train.py`')
    return {'name': rest[0], 'arguments': tuple(rest[1:])}


def _print_error(error: BaseException) -> None:
    """Prints the script's own traceback, as Python would without this command."""
    frames = traceback.TracebackException.from_exception(error)
    own = f'{Path(__file__).parents[1]}{os.sep}'
    kept = [f for f in frames.stack if not f.filename.startswith((own, '<frozen runpy>'))]
    frames.stack = traceback.StackSummary.from_list(kept)
    print(''.join(frames.format()), file=sys.stderr, end='')
