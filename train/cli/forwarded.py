"""`meshwright dry`, `explain`, `mesh` and `plan`: commands whose work other packages do."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from partitioning.command_line import OneLineParser
from train.cli.command import add_traceback, run_command

_DESCRIPTION = """\
Says what a compiled program sends and needs, and from which lines, from what XLA has
written about it. Nothing is run or compiled, and no device is needed.

  XLA_FLAGS=--xla_dump_to=dump python train.py
  {prog} dump
  {prog} dump --module=train_step --mesh=data=4,model=2 --chip=h100

DUMP is a folder of --xla_dump_to or of JAX_DUMP_IR_TO, or one text: HLO at any stage
(compiled.as_text()), or StableHLO (lowered.as_text()).

The exit status is 0, 1 if the program does not fit the chip of --chip, and 2 after an
error.
"""


def explain_dump(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright explain`, and returns its exit status."""
    parser = OneLineParser(prog, 'DUMP [...]', _DESCRIPTION)
    parser.add_argument('dump', metavar='DUMP', help='a folder, or a text')
    parser.add_argument(
        '--module',
        metavar='NAME',
        help='the module of a folder, such as jit_step (the largest compiled one)',
    )
    parser.add_argument(
        '--mesh',
        metavar='AXES',
        help='the mesh axes in the order of the devices, such as data=4,model=2',
    )
    parser.add_argument('--chip', metavar='CHIP', help='compare the peak with a chip, such as v5e')
    parser.add_argument('--json', action='store_true', help='print exact figures as JSON')
    add_traceback(parser)
    options = parser.parse_args(arguments)
    return run_command(lambda: _answer(options), options)


def _answer(options: argparse.Namespace) -> int:
    from meshwright import dump_table, read_dump
    from meshwright.dumps.as_answer import dump_answer
    from meshwright.dumps.mesh_sizes import parse_mesh
    from meshwright.report.answers import answers_json, exit_status

    mesh = None if options.mesh is None else parse_mesh(options.mesh)
    program = read_dump(options.dump, module=options.module, mesh=mesh, chip=options.chip)
    answer = dump_answer(program)
    print(answers_json('explain', [answer]) if options.json else dump_table(program).rstrip('\n'))
    return exit_status([answer])


def run_dry(arguments: Sequence[str], prog: str) -> int:
    """Checks the arguments, and replaces this process by `python -m meshwright.dry`.

    There, nothing of the trainer is imported, whose package has the name of many a script: `train`.
    """
    from meshwright.dry import command

    try:
        command.check(arguments, prog)  # it prints the help, too
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, '-m', 'meshwright.dry', *arguments])


def show_mesh(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright mesh`, and returns its exit status."""
    from partitioning.pictures import mesh_command
    from train.machine import devices as machine

    machine.use_virtual_devices(None)
    usage = '[--mesh data=4,model=2] [--topology v5p:4x4x4] [...]'
    return mesh_command.main(arguments, OneLineParser(prog, usage), with_picture=True)


def show_plan(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright plan show|diff`, and returns its exit status: 1 if two plans differ."""
    from partitioning.plan import __main__ as plans

    parser = OneLineParser(prog, description='Shows plans: the layout of every array of a state.')
    verbs = parser.add_subparsers(required=True, metavar='show|diff')
    for verb, count, text in (
        ('show', 1, 'print a plan'),
        ('diff', 2, 'print what changes from one plan to another; exit with 1 if they differ'),
    ):
        one = verbs.add_parser(verb, help=text, description=text)
        if verb == 'show':
            one.add_argument('--all', action='store_true', help='a row for every array')
        one.add_argument('plans', nargs=count, metavar='PLAN', help='a plan file or a run folder')
    options = parser.parse_args(arguments or ['--help'])
    files = [
        p if p.endswith('.json') or Path(p).is_file() else f'{p}/plan.json' for p in options.plans
    ]
    return plans.main([*files, *(['--all'] if getattr(options, 'all', False) else [])])
