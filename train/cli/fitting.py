"""`meshwright fits`: on which machines a Hugging Face model can be trained, and how fast."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partitioning.command_line import OneLineParser
from train.cli.command import add_traceback, run_command
from train.cli.forecasting import (
    add_topologies,
    check_topologies,
    leave_devices_alone,
    show_progress,
)
from train.cli.searching import DEFAULTS

if TYPE_CHECKING:
    from train.planning.candidates import Workload
    from train.planning.fits import Fit, Known
    from train.planning.huggingface.counted import CountedModel
    from train.planning.huggingface.models import FoundModel
    from train.planning.machines import Machine

_DESCRIPTION = """\
Says on which machines the model of a Hugging Face config.json can be trained from scratch, with
which layout, and how long a step takes. Without --compile, all figures are by formula.

  {prog} config.json --topology=v5e:4x4 --topology=v6e:8x8 --topology=h100:2x8 --batch_tokens=4M
  {prog} Qwen/Qwen3-8B --topology=v5p-128 --batch_tokens=1M --out=run.gin

--out writes the gin file of the fastest machine that fits, for `meshwright train` and `forecast`.
The exit status is 0 if the model fits everywhere, 1 if it does not fit somewhere, 2 after an error.
"""


def find_machines(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright fits`, and returns its exit status."""
    parser = OneLineParser(prog, 'CONFIG --topology=TOPOLOGY [...]', _DESCRIPTION)
    parser.add_argument(
        'config',
        metavar='CONFIG',
        help='a config.json, its folder, or the name of a model on the hub',
    )
    add_topologies(parser)
    parser.add_argument(
        '--batch_tokens', default='4M', metavar='N', help='tokens in a batch; 4M is 4 * 2**20 (4M)'
    )
    parser.add_argument(
        '--sequence_length',
        type=int,
        metavar='N',
        help='tokens in a row (what the model was made for, up to 4096)',
    )
    parser.add_argument('--json', action='store_true', help='print exact figures as JSON')
    parser.add_argument('--out', metavar='FILE', help='the gin file to write (printed)')
    parser.add_argument(
        '--compile', action='store_true', help='confirm the layouts by compiling their steps'
    )
    add_traceback(parser)
    options = parser.parse_args(arguments)

    def command() -> int:
        if options.compile:
            return _answer(options)
        from partitioning.hardware import drawing_devices

        with drawing_devices():  # all figures are by formula, so no compiler is needed
            return _answer(options)

    return run_command(command, options)


def _answer(options: argparse.Namespace) -> int:
    leave_devices_alone()
    check_topologies(options.topology)
    import jax

    from partitioning.hardware import stand_in_devices
    from train.gin.load import find_config, load_config
    from train.planning.candidates import Workload
    from train.planning.gin_text import PRETRAIN, write_pretraining
    from train.planning.huggingface.counted import count_model
    from train.planning.huggingface.models import (
        choose_rows,
        find_config_json,
        parse_tokens,
        read_model,
    )
    from train.planning.machines import check_compilers, parse_machine

    machines = [parse_machine(name) for name in options.topology]
    if options.compile:
        check_compilers(machines)
    tokens = parse_tokens(options.batch_tokens)
    settings = find_config_json(options.config)
    if (counted := count_model(settings)) is not None:
        return _answer_counted(counted, machines, tokens, options)
    model = read_model(settings, dtype='bfloat16')
    rows = choose_rows(model, tokens, options.sequence_length)
    lines = write_pretraining(model.config, **rows)
    load_config([DEFAULTS, PRETRAIN], [line for line in lines if line])
    with stand_in_devices(jax.devices()[:1]):  # the settings are made for one device
        config = find_config()
    work = Workload(config=config, num_parameters=model.num_parameters)
    found, smallest = _fit_all(work, machines, compile=options.compile)
    _show(model, work, lines, found, smallest, options)
    return int(not all(fit.fits for fit in found))


def _answer_counted(
    model: CountedModel, machines: Sequence[Machine], tokens: int, options: argparse.Namespace
) -> int:
    """Prints what is known of a model that the models here cannot compute."""
    from meshwright.report.answers import answers_json
    from train.errors import ConfigError
    from train.planning.huggingface.counted import fit_counted
    from train.planning.huggingface.models import divide_rows
    from train.planning.tables import counted_answer, counted_table, describe_counted
    from train.reporting.console import SafeConsole

    if options.compile or options.out:
        flag = '--compile' if options.compile else '--out'
        raise ConfigError(
            f'{flag} needs a model that the trainer has, and it lacks {model.has}: leave it out'
        )
    rows = divide_rows(tokens, options.sequence_length, model.max_length)
    sizes = rows['batch_size'], rows['sequence_length']
    found = [fit_counted(model, machine, *sizes) for machine in machines]
    if options.json:
        held = {
            'model': model.kind,
            'num_parameters': model.num_parameters,
            'active_parameters': model.active_parameters,
            'flops_per_token': model.flops_per_token(sizes[1]),
            'batch_tokens': tokens,
            'sequence_length': sizes[1],
            'smallest': {},
            'gin': None,
        }
        print(answers_json('fits', [counted_answer(fit) for fit in found], held))
    else:
        console = SafeConsole()
        if not console.is_terminal:
            console.width = 160
        for line in describe_counted(model, *sizes):
            console.print(line)
        console.print()
        console.print(counted_table(found))
    return int(any(fit.verdict == 'no' for fit in found))


def _fit_all(
    work: Workload, machines: Sequence[Machine], *, compile: bool
) -> tuple[list[Fit], dict[str, Fit | None]]:
    """Fits a run to each machine, and finds the smallest machine with each of their chips."""
    from train.planning.fits import find_smallest, fit_machine, forecast_fit

    found: list[Fit] = []
    known: Known = {}
    for machine in machines:
        with show_progress(str(machine)) as progress:
            fit = fit_machine(work, machine, progress, known)
            found.append(forecast_fit(work, fit, progress=progress) if compile else fit)
    smallest: dict[str, Fit | None] = {}
    for name, chip in {machine.chip.name: machine.chip for machine in machines}.items():
        with show_progress(f'the smallest {name}') as progress:
            smallest[name] = find_smallest(work, chip, progress, known)
    return found, smallest


def _show(
    model: FoundModel,
    work: Workload,
    lines: Sequence[str],
    found: Sequence[Fit],
    smallest: dict[str, Fit | None],
    options: argparse.Namespace,
) -> None:
    """Prints the answer, and writes or prints the gin file."""
    from meshwright.report.answers import answers_json
    from meshwright.report.plain_values import to_plain
    from train.errors import os_errors_as
    from train.planning.gin_text import write_fit
    from train.planning.tables import describe_model, fit_answer, fits_table
    from train.reporting.console import SafeConsole

    fitting = [fit for fit in (*found, *smallest.values()) if fit is not None and fit.fits]
    best = min(fitting, key=lambda fit: fit.seconds or math.inf, default=None)
    text = None if best is None else write_fit(model, best, lines, options.out or 'run.gin')
    if options.out and text is not None:
        with os_errors_as(f'--out={options.out} cannot be written:'):
            Path(options.out).write_text(text, encoding='utf-8')
    if options.json:
        held = {
            'model': model.kind,
            'num_parameters': model.num_parameters,
            'differs': list(model.differs),
            'batch_tokens': work.batch_tokens,
            'sequence_length': work.row_tokens,
            'smallest': {
                name: None if fit is None else to_plain(fit_answer(fit, work))
                for name, fit in smallest.items()
            },
            'gin': text,
        }
        print(answers_json('fits', [fit_answer(fit, work) for fit in found], held))
        return
    console = SafeConsole()
    if not console.is_terminal:
        console.width = 160
    for line in describe_model(model, work):
        console.print(line)
    console.print()
    console.print(fits_table(found, work))
    console.print('\nthe smallest machine of each chip that fits:')
    console.print(fits_table([fit for fit in smallest.values() if fit is not None], work))
    for name in (name for name, fit in smallest.items() if fit is None):
        console.print(f'{name}: none')
    if text is None or best is None:
        print('error: no machine fits, so there is no gin file', file=sys.stderr)
    elif options.out:
        console.print(f'\nwrote {options.out}, the run on {best.machine}', soft_wrap=True)
    else:
        console.print(f'\nthe gin file of the run on {best.machine}, to be saved as run.gin:\n')
        console.print(text, soft_wrap=True)
