"""`meshwright train`, `python -m train` and `meshwright precompile`: runs of gin files."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence

from partitioning.spelling import nearest
from train.cli.command import CommandParser, configure, run_command

_DESCRIPTION = """\
Trains the model that gin files configure, or resumes the run in its MODEL_DIR.

RUN is a run of this package, your own gin file, or the folder of an earlier run. Later files
override earlier ones, and --gin.NAME=value overrides them all:

  {prog} quickstart
  {prog} pretrain configs/models/1b.gin --gin.TEXT='corpus/**/*.txt'
  {prog} runs/quickstart --gin.TRAIN_STEPS=500
"""
_PRECOMPILE = """\
Compiles the train step of a run and trains nothing. It writes the program, its memory, its
estimated computation and what its devices exchange to MODEL_DIR.

With the run forecast, the machine is described and need not exist:

  {prog} pretrain configs/models/8b.gin configs/partitioning/fsdp_tensor.gin forecast \\
    --gin.TOPOLOGY=v5p:4x4x4 --gin.BATCH_SIZE=128
"""


def train(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright train`, and returns its exit status."""
    parser = CommandParser(prog, '[RUN ...] [--gin.NAME=value ...]', _DESCRIPTION)
    add_runs(parser, '*')
    parser.add_argument(
        '--profile_steps',
        type=_first_and_last,
        metavar='FIRST,LAST',
        help='write a trace of these steps to MODEL_DIR/profile, for TensorBoard or Perfetto',
    )
    parser.add_argument(
        '--expect_plan',
        metavar='PLAN',
        help='a plan file, or the folder of a run: end with an error, before anything is compiled '
        'or written, if this run would be laid out differently',
    )
    options = parser.read(arguments)
    return run_command(lambda: _start(options), options)


def _first_and_last(text: str) -> str:
    if not re.fullmatch(r' *\d+ *, *\d+ *', text):
        raise argparse.ArgumentTypeError(
            f'{text!r} must be the first and the last step, such as 10,12'
        )
    return text


def precompile(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright precompile`, and returns its exit status."""
    parser = CommandParser(prog, 'RUN ... [--gin.NAME=value ...]', _PRECOMPILE)
    add_runs(parser, '+')
    options = parser.read(arguments)

    def command() -> None:
        from train.cli.early import check_folder

        files = [find_gin_file(run) for run in options.runs]
        check_folder(options, files)
        from train.gin.load import find_config
        from train.planning.precompiling import precompile

        configure(options, files)
        precompile(find_config())

    return run_command(command, options)


def _start(options: argparse.Namespace) -> None:
    from train.cli.early import check_run
    from train.errors import ConfigError
    from train.processes.launching.spares import only_compiles

    files = [find_gin_file(run) for run in options.runs]
    if not only_compiles():  # The run that it is for holds MODEL_DIR.
        check_run(options, files)
    from train.gin.load import find_config, find_entry
    from train.reporting.meter import note_start_of_process

    profile, expected = options.profile_steps, options.expect_plan
    if profile is not None:
        setting = f'TrainConfig.profile_steps=({profile})'
        options.gin_bindings = [*options.gin_bindings, setting]
    configure(options, files)
    if only_compiles():
        from train.running.programs import keep_programs

        keep_programs(find_config())
        return
    entry = find_entry()
    for flag, value in (('--profile_steps', profile), ('--expect_plan', expected)):
        if value is not None and entry.__module__ != 'train.running.training':
            raise ConfigError(
                f'{flag} needs a run of train.running.training, but the gin files configure '
                f'{entry.__module__}: remove the flag'
            )
    note_start_of_process()
    if expected is None:
        entry()
    else:
        entry(expect_plan=expected)


def add_runs(parser: CommandParser, nargs: str) -> None:
    """Adds the argument that names runs."""
    known = ', '.join(known_runs())
    parser.add_argument('runs', metavar='RUN', nargs=nargs, help=f'{known}, or a path')


def known_runs() -> list[str]:
    """Returns the names of the runs in configs/runs."""
    from train.gin.parsing import find_config_root

    files = (find_config_root() / 'configs/runs').glob('*.gin')
    return sorted(file.stem for file in files if file.stem != 'base')


def find_gin_file(run: str) -> str:
    """Returns the gin file of a run.

    `run` is a gin file, the folder of a run, or the name of a shipped run. Raises a ConfigError if
    it is none of these.
    """
    from train.errors import ConfigError
    from train.paths import as_path, file_of_run

    if (configuration := file_of_run(as_path('RUN', run), 'config.gin')).exists():
        return str(configuration)
    if run.endswith('.gin'):
        return run
    if run not in known_runs():
        if configuration.parent.is_dir():
            raise ConfigError(
                f'{run} is a folder without a config.gin, which has the settings of a run: name '
                f'its gin files, and --gin.MODEL_DIR={shlex.quote(run)}'
            )
        raise ConfigError(
            f'no run {run!r}.{nearest(run, known_runs())} The runs are {", ".join(known_runs())}; '
            'for others, give a gin file, or the folder of a run with a config.gin'
        )
    return f'configs/runs/{run}.gin'
