"""`meshwright forecast`: the train step of a run on described machines."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from train.cli import searching
from train.cli.command import CommandParser, configure, gin_settings, run_command
from train.cli.training import add_runs, find_gin_file

if TYPE_CHECKING:
    from etils import epath

    from meshwright.report.forecasts import Forecast
    from train.planning.forecasts import Subject
    from train.planning.machines import Machine

_SECONDS_BETWEEN_LINES = 30.0  # in a file or a pipe
_DESCRIPTION = """\
Says whether the train step of a run fits into the memory of machines that you do not have, what its
devices exchange, and how long a step takes. No data is opened, and nothing is trained:

  {prog} pretrain configs/models/8b.gin configs/partitioning/fsdp.gin --topology=v5p:4x4x4
  {prog} pretrain configs/models/1b.gin --topology=v5e:4x4 --topology=v6e-16 --json
  {prog} my_run.gin --topology=2xv5e:16x16 --out=forecasts --gin.BATCH_SIZE=1024
  {prog} pretrain configs/models/8b.gin --topology=v5p:4x4x4 --search --out=search

A TOPOLOGY is a chip and its arrangement (v5e:16x16, v5p:4x4x4; hosts and GPUs per host, h100:2x8),
or a cloud's name of it (v5p-128, v5litepod-16). 2xv5e:16x16 has two slices. Every RUN is a run of
this package, a gin file, or the folder of a run; the mesh of the run is moved to the machine.

The exit status is 0 if no step is known to be too large, 1 if one is or differs from its golden
file, 2 after an error, and 75 or 130 after a signal.
"""


def forecast(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright forecast`, and returns its exit status."""
    options = _make_parser(prog).read(arguments)
    return run_command(lambda: _answer(options, prog), options)


def _make_parser(prog: str) -> CommandParser:
    parser = CommandParser(prog, 'RUN ... --topology=TOPOLOGY [...]', _DESCRIPTION)
    parser.epilog = None  # the description has its exit codes
    add_runs(parser, '*')
    add_topologies(parser)
    parser.add_argument(
        '--json', action='store_true', help='print exact figures as JSON, and nothing else'
    )
    parser.add_argument('--out', metavar='DIR', help='write the forecasts and programs to DIR')
    parser.add_argument(
        '--no_compile',
        action='store_true',
        help='compile nothing: figures by formula, within seconds',
    )
    parser.add_argument(
        '--confirm',
        action='store_true',
        help='compile the changes that send least by formula, and where it does not fit, what '
        'would make it fit, until the compiler agrees',
    )
    parser.add_argument(
        '--on_cpu',
        action='store_true',
        help='compile for virtual CPU devices in place of the machines, whose compilers need not '
        'be installed',
    )
    parser.add_argument(
        '--price',
        type=float,
        metavar='N',
        help='what a chip costs per hour: adds what a million tokens cost',
    )
    parser.add_argument(
        '--golden',
        metavar='DIR',
        help='compare with the golden files in DIR; missing ones are written, but not in '
        'continuous integration, where CI is set',
    )
    parser.add_argument(
        '--update', action='store_true', help='with --golden: replace the golden files'
    )
    searching.add_flags(parser)
    return parser


def _answer(options: argparse.Namespace, prog: str) -> int:
    """Forecasts the runs on the machines, or searches their settings, and returns the status."""
    leave_devices_alone()
    from train.errors import ConfigError, os_errors_as
    from train.paths import as_path

    if options.price is not None and not 0 < options.price < math.inf:
        raise ConfigError(
            f'--price={options.price:g} must be the price of a chip per hour, above 0'
        )
    if options.update and not options.golden:
        raise ConfigError('--update replaces golden files: name their folder, --golden=DIR')
    if not options.runs and not options.gin_file:
        raise ConfigError(f'no run: name one, such as `{prog} pretrain --topology=v5p:4x4x4`')
    files = [find_gin_file(one) for one in options.runs]
    check_topologies(options.topology)
    from meshwright import forecast_table
    from meshwright.report.terminal import terminal_width
    from partitioning.hardware import drawing_devices
    from train.planning.machines import check_compilers, parse_machine

    machines = [parse_machine(name, on_cpu=options.on_cpu) for name in options.topology]
    if options.search:
        searching.check_flags(options)
    if not options.no_compile:
        check_compilers(machines)
    if options.search:
        return searching.search_settings(options, machines[0])
    folder = None
    if options.out:  # before anything takes long
        folder = as_path('--out', options.out)
        with os_errors_as(f'--out={options.out} cannot be created:'):
            folder.mkdir(parents=True, exist_ok=True)
    configure(options, [searching.DEFAULTS, *files])
    with drawing_devices() if options.no_compile else contextlib.nullcontext():
        forecasts, programs, subject = _forecast_all(machines, options)
    if options.json:
        print(_to_json(forecasts, subject))
    else:
        width = terminal_width(160)
        for name, text in subject.lines():
            print(textwrap.fill(f'{name:<12}{text}', width, subsequent_indent=' ' * 12))
        print()
        print(forecast_table(forecasts, width=width))
    if folder is not None:
        written = _write_files(forecasts, programs, folder, subject)
        print(f'wrote {", ".join(written)}', file=sys.stderr)
    unchanged = options.golden is None or _is_unchanged(forecasts, options)
    return int(not unchanged or any(one.fits is False for one in forecasts))


def add_topologies(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that names the machines."""
    parser.add_argument(
        '--topology',
        action='append',
        required=True,
        metavar='TOPOLOGY',
        help='a machine, such as v5p:4x4x4; repeat the flag for more',
    )


def check_topologies(names: Sequence[str]) -> None:
    """Checks the names of machines before anything is imported that takes long.

    Raises a ConfigError if there is no such machine.
    """
    from partitioning.hardware.topology import check_shape, split_slices
    from train.errors import ConfigError

    for name in names:
        try:
            check_shape(split_slices(name)[0])
        except ValueError as error:
            raise ConfigError(f'--topology={name}: {error}') from error


@contextlib.contextmanager
def show_progress(name: str) -> Iterator[Callable[[str], None]]:
    """Shows on standard error what is done for a machine. Yields what to call with each stage.

    A file or a pipe gets a line at the end, and one in each 30 seconds until then. `name` is the
    machine.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from train.reporting.console import SafeConsole
    from train.reporting.reports import format_seconds

    console, started = SafeConsole(stderr=True), time.monotonic()
    bar = Progress(
        SpinnerColumn(),
        TextColumn('{task.description}', markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task, ended = bar.add_task(name), threading.Event()

    def report() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LINES):
            past = format_seconds(time.monotonic() - started)
            console.print(f'{bar.tasks[task].description}, {past}', style='dim', soft_wrap=True)

    if not console.is_terminal:
        threading.Thread(target=report, daemon=True).start()
    try:
        with bar:
            yield lambda text: bar.update(task, description=f'{name}: {text}')
    finally:
        ended.set()
    seconds = format_seconds(time.monotonic() - started)
    console.print(f'{name}: {seconds}', style='dim', soft_wrap=True)


def leave_devices_alone() -> None:
    """Keeps jax from using the accelerators of this computer. Call it before jax finds devices."""
    os.environ['JAX_PLATFORMS'] = 'cpu'
    if 'jax' in sys.modules:
        import jax

        jax.config.update('jax_platforms', 'cpu')


def _forecast_all(
    machines: Sequence[Machine], options: argparse.Namespace
) -> tuple[list[Forecast], dict[str, str], Subject]:
    """The forecasts of the run that gin has loaded, the programs by machine, and what it is.

    The run is planned on all machines before it is compiled for any.
    """
    from train.errors import ConfigError
    from train.gin.load import find_config
    from train.planning.changes import keep_helpful, list_changes
    from train.planning.forecasts import describe_subject, forecast_step, plan_on
    from train.planning.machines import NotInstalledError

    try:
        planned = [plan_on(machine, find_config) for machine in machines]
    except NotInstalledError as error:
        raise ConfigError(
            f'{error}, or add --on_cpu to compile for virtual CPU devices, or --no_compile for '
            'figures by formula'
        ) from error
    forecasts, programs = [], dict[str, str]()
    for machine, step in zip(machines, planned, strict=True):
        with show_progress(str(machine)) as progress:
            one = forecast_step(
                step,
                machine,
                compile=not options.no_compile,
                changes=list(list_changes(step, machine)),
                confirm=options.confirm,
                on_program=functools.partial(programs.__setitem__, str(machine)),
                progress=progress,
            )
        one, remat = keep_helpful(one), step.run.remat
        notes = (*one.notes, *([remat] if remat else []))
        forecasts.append(dataclasses.replace(one, price=options.price, notes=notes))
    names, settings = [*options.runs, *options.gin_file], gin_settings(options)[0]
    return forecasts, programs, describe_subject(planned[0].run, names, settings)


def _to_json(forecasts: Sequence[Forecast], subject: Subject) -> str:
    """The forecasts as JSON, in their order: the contract that meshwright/report/answers.py has."""
    from meshwright.report.answers import answer_of, answers_json

    answers = [answer_of(one) for one in forecasts]
    return answers_json('forecast', answers, {'subject': subject.to_json()})


def _write_files(
    forecasts: Sequence[Forecast],
    programs: Mapping[str, str],
    folder: epath.Path,
    subject: Subject,
) -> list[str]:
    """Writes `forecast.json`, `forecast.html`, and the compiled programs as `*.hlo.txt`.

    Returns the paths of what it has written.
    """
    written = [folder / 'forecast.json', folder / 'forecast.html']
    from meshwright.report.page import write_page
    from train.errors import os_errors_as

    with os_errors_as(f'{folder} cannot be written:'):
        written[0].write_text(_to_json(forecasts, subject) + '\n')
        write_page(forecasts, written[1], subject=dict(subject.lines()))
        for machine, text in programs.items():
            written.append(folder / f'{machine.replace(":", "-")}.hlo.txt')
            written[-1].write_text(text)
    return list(map(str, written))


def _is_unchanged(forecasts: Sequence[Forecast], options: argparse.Namespace) -> bool:
    """Compares forecasts with their golden files, and says on stderr what differs."""
    from meshwright import check_golden

    runs = '-'.join(Path(one).stem for one in [*options.runs, *options.gin_file])
    try:
        written = check_golden(forecasts, options.golden, name=runs, update=options.update or None)
    except AssertionError as difference:
        print(difference, file=sys.stderr)
        return False
    for file in written:
        print(f'wrote {file}', file=sys.stderr)
    return True
