"""`meshwright launch`: several JAX processes of one run on this machine."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from partitioning.command_line import OneLineParser
from train.cli.command import add_traceback, run_command
from train.cli.commands import COMMANDS as ALL_COMMANDS
from train.cli.interruption import EXIT_CODES, line_of_process
from train.errors import ConfigError
from train.processes import signals
from train.processes.launching.attempts import (
    LaunchConfig,
    child_environment,
    devices_per_process,
    run_attempts,
    visible_gpus,
)
from train.processes.launching.spares import Child
from train.processes.secret import secret_of_one_run

_DESCRIPTION = """\
Starts several JAX processes of one run on this machine, to try what a cluster does. What follows --
are the arguments of `meshwright train`, or another command with its arguments:

  {prog} --processes=4 --devices_per_process=2 -- quickstart --gin.TRAIN_STEPS=40
  {prog} --processes=4 --restarts=3 --min_processes=2 -- pretrain my.gin
  {prog} --processes=2 -- eval runs/quickstart

Each line of a process begins with its index, such as [2]. When a process fails, all are ended, and
the first failure is explained at the end. A signal stops the run in all processes.
"""
# Those that work in several processes.
COMMANDS = ('train', 'precompile', 'eval', 'predict', 'generate')
# The launcher sets these, and what to write instead.
_TAKEN = {
    '--coordinator_address': 'remove it',
    '--process_count': 'write --processes before --',
    '--process_index': 'remove it',
    '--multihost': 'remove it',
    '--cpu_devices': 'write --devices_per_process before --',
}


def start_processes(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright launch`, and returns its exit status."""
    parser = _make_parser(prog)
    own, rest = _split(parser, list(arguments))
    options = parser.parse_args(own)
    if not rest:
        parser.error(f'what to run is missing: {prog} --processes=4 -- quickstart')
    command = _command_of(parser, rest)
    if options.log_dir is not None:
        command.append(f'--log_dir={options.log_dir}')

    def start() -> int:
        gpus = visible_gpus(os.environ)
        config = LaunchConfig(
            processes=options.processes,
            devices_per_process=devices_per_process(
                options.devices_per_process, options.processes, gpus
            ),
            restarts=options.restarts,
            min_processes=options.min_processes,
            grace_seconds=options.grace_seconds,
            spares=options.spares,
            compile_ahead=options.compile_ahead,
        )
        if config.compile_ahead:
            _check_compile_ahead(command, gpus)
        line = line_of_process('meshwright')
        signals.leave_to_others()  # From here on, they are the launcher's.

        def children(count: int, port: int) -> list[Child]:
            return make_children(command, count, port, config.devices_per_process, gpus, line)

        return run_attempts(config, children, line)

    return run_command(start, options)


def make_children(
    command: Sequence[str],
    count: int,
    port: int,
    devices: int,
    gpus: Sequence[str],
    line: str,
    environment: Mapping[str, str] = os.environ,
) -> list[Child]:
    """Returns what each process runs.

    Args:
      command: the name of the command, and its arguments.
      devices: the number of devices of each process.
      gpus: all GPUs, divided evenly among the processes; without any, they use virtual devices.
      line: the command that starts all processes again, as one types it.
    """
    # -P: a train.py in the current folder must not hide this package.
    program = [sys.executable, '-P', '-m', 'train.cli']
    shared = [] if gpus else [f'--cpu_devices={devices}']
    if count > 1:
        shared += [f'--coordinator_address=127.0.0.1:{port}', f'--process_count={count}']
    secret = secret_of_one_run()
    each = [gpus[index * devices : (index + 1) * devices] for index in range(count)]
    return [
        Child(
            # A single process joins no others, so that its collectives are faster.
            program,
            child_environment(environment, line, each[index], secret),
            [*command, *shared, *([f'--process_index={index}'] if count > 1 else [])],
        )
        for index in range(count)
    ]


def _make_parser(prog: str) -> OneLineParser:
    usage = '--processes N [--restarts R] [...] -- RUN ...'
    parser = OneLineParser(prog, usage, _DESCRIPTION, epilog=EXIT_CODES)
    add = parser.add_argument
    add('--processes', type=int, required=True, metavar='N', help='the number of processes')
    add(
        '--devices_per_process',
        type=int,
        metavar='D',
        help='GPUs, or virtual devices of the CPU, of each (all GPUs, or 8 devices, divided by N)',
    )
    add('--restarts', type=int, default=0, metavar='R', help='start again after a fault (0)')
    add(
        '--min_processes',
        type=int,
        metavar='M',
        help='after a process was lost, restart with those that remain, if there are M',
    )
    add(
        '--spares',
        action='store_true',
        help='keep processes ready for a restart, which have imported everything',
    )
    add(
        '--compile_ahead',
        action='store_true',
        help='compile the programs of a restart with fewer processes during the run (CPUs only)',
    )
    add(
        '--grace_seconds',
        type=float,
        default=5.0,
        metavar='S',
        help='how long the others may take to end after a failure (5)',
    )
    add(
        '--log_dir',
        metavar='DIR',
        help='for output of C++ libraries (the temporary folder of the system)',
    )
    add_traceback(parser)
    return parser


def _check_compile_ahead(command: Sequence[str], gpus: Sequence[str]) -> None:
    if command[0] != 'train':
        raise ConfigError(f'--compile_ahead needs meshwright train, and not {command[0]}')
    if gpus:
        raise ConfigError(
            f'--compile_ahead needs devices to compile for, and the run uses all {len(gpus)} GPUs: '
            'remove it, or set JAX_PLATFORMS=cpu for virtual devices'
        )


def _split(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns what is before and after `--`."""
    if '--' in arguments:
        place = arguments.index('--')
        return arguments[:place], arguments[place + 1 :]
    _, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [argument for argument in arguments if argument not in unknown]
        line = shlex.join([*parser.prog.split(), *known, '--', *unknown])
        parser.error(f'write -- before what runs in each process: {line}')
    return arguments, []


def _command_of(parser: argparse.ArgumentParser, rest: Sequence[str]) -> list[str]:
    """Returns the name of the command that each process runs, with its arguments."""
    for argument in rest:
        flag = argument.partition('=')[0]
        if flag in _TAKEN:
            parser.error(f'{flag} is set by the launcher: {_TAKEN[flag]}')
    if rest[0] in ALL_COMMANDS and rest[0] not in COMMANDS:
        parser.error(
            f'meshwright {rest[0]} needs one process only: start it without the launcher, or write '
            f'one of {", ".join(COMMANDS)} after --'
        )
    return list(rest) if rest[0] in COMMANDS else ['train', *rest]
