"""`python -m train` reads gin files and starts the training or evaluation that they configure.

Usage:
  python -m train --gin_file=configs/runs/quickstart.gin --gin.MODEL_DIR="'runs/quickstart'"
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from absl import app, flags, logging

from train.errors import first_line

_GIN_FILE = flags.DEFINE_multi_string(
    'gin_file', [], 'A gin file. Repeat the flag to add files; later files override earlier ones.'
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    'gin_bindings',
    [],
    'A gin binding, which overrides the files. --gin.NAME=value is the short form.',
)
_SEARCH_PATHS = flags.DEFINE_multi_string(
    'gin_search_paths', [], 'Folders with gin files and includes, separated by commas.'
)
_ALLOW = flags.DEFINE_multi_string(
    'gin_allow', [], 'Your own packages that gin files may import, separated by commas.'
)
_CPU_DEVICES = flags.DEFINE_integer(
    'cpu_devices',
    None,
    'Number of virtual devices on a machine with only a CPU. The default is 8.',
    lower_bound=1,
)
_MULTIHOST = flags.DEFINE_bool(
    'multihost',
    False,
    'Connect to other processes, auto-detected from the environment (TPU pods, Slurm).',
)
_COORDINATOR = flags.DEFINE_string(
    'coordinator_address', None, 'host:port of process 0, in a run with several processes.'
)
_PROCESS_COUNT = flags.DEFINE_integer('process_count', None, 'Number of processes.')
_PROCESS_INDEX = flags.DEFINE_integer('process_index', None, 'Index of this process.')
_TRACEBACK = flags.DEFINE_bool('traceback', False, 'Show the traceback of every error.')


def rewrite_gin_flags(argv: list[str]) -> list[str]:
    """Turns `--gin.NAME=value` into `--gin_bindings=NAME=value`."""
    return [
        f'--gin_bindings={a.removeprefix("--gin.")}' if a.startswith('--gin.') else a for a in argv
    ]


def _split(values: list[str]) -> list[str]:
    """Returns the entries of a repeatable flag whose values are separated by commas."""
    return [entry for value in values for entry in value.split(',') if entry]


def run() -> None:
    """Runs what the flags configure."""
    # These import jax, so they wait until the flags have been checked.
    from train import machine
    from train.config import check_complete, find_entry, load_config

    machine.use_virtual_devices(_CPU_DEVICES.value)
    machine.join_processes(
        _COORDINATOR.value, _PROCESS_COUNT.value, _PROCESS_INDEX.value, _MULTIHOST.value
    )
    load_config(
        _GIN_FILE.value, _GIN_BINDINGS.value, _split(_SEARCH_PATHS.value), _split(_ALLOW.value)
    )
    entry = find_entry()
    check_complete(entry)
    entry()


def explain(error: Exception) -> str | None:
    """Returns the message of an error that this project raises for its users, in one line.

    Such messages explain themselves. For all other errors it returns None, and the traceback is
    shown.
    """
    if isinstance(error, TypeError) and 'No values supplied by Gin' in str(error):
        return f'a gin file is missing a value: {first_line(error)}'
    if isinstance(error, TypeError) and 'In call to configurable' in str(error):
        missing = str(error).split('\n')[0].partition(' missing ')[2]
        name = str(error).partition("In call to configurable '")[2].partition("'")[0]
        return f'{name} lacks {missing}: set each in a gin file' if missing else None
    if not isinstance(error, ValueError | OSError | FloatingPointError):
        return None
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    root = Path(__file__).parents[1]
    if not any(raised_in.is_relative_to(root / package) for package in ('partitioning', 'train')):
        return None
    # gin appends lines that name the configurable it was calling.
    message = str(error).split('\n  In call to configurable')[0]
    return ' '.join(message.split())


def parse_flags(argv: list[str]) -> list[str]:
    """Returns the arguments that are not flags, and exits with one line if a flag is invalid."""
    try:
        return flags.FLAGS(argv)
    except flags.UnrecognizedFlagError as error:
        line = (
            f'unknown flag --{error.flagname}: settings are written --gin.NAME=value, and '
            'python -m train --help lists all flags'
        )
    except flags.Error as error:
        line = f'{first_line(error)}; see python -m train --help'
    print(f'error: {line}', file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        print(f'error: {argv[1]!r} is not a flag; see python -m train --help', file=sys.stderr)
        return 2
    try:
        run()
    except KeyboardInterrupt:
        print(
            'interrupted: the same command resumes from the last checkpoint, if one was saved',
            file=sys.stderr,
        )
        return 130
    except Exception as error:
        line = None if _TRACEBACK.value else explain(error)
        if line is None:
            raise
        print(f'error: {line}', file=sys.stderr)
        return 2
    return 0


if __name__ == '__main__':
    logging.set_verbosity(logging.WARNING)
    app.run(main, argv=rewrite_gin_flags(sys.argv), flags_parser=parse_flags)
