"""`meshwright mesh` and `meshwright plan`: how devices and arrays are laid out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from partitioning.command_line import OneLineParser
from partitioning.pictures import mesh_command
from partitioning.plan import __main__ as plans


def show_mesh(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright mesh`, and returns its exit status."""
    from train.machine import devices as machine

    machine.use_virtual_devices(None)
    usage = '[--mesh data=4,model=2] [--topology v5p:4x4x4] [...]'
    return mesh_command.main(arguments, OneLineParser(prog, usage), with_picture=True)


def show_plan(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright plan show|diff`, and returns its exit status: 1 if two plans differ."""
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
