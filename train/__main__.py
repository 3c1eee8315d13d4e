"""`python -m train`: reads gin files and runs what they configure: training, or an evaluation.

python -m train --gin_file=configs/runs/quickstart.gin --gin.MODEL_DIR="'/tmp/run'"
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from absl import app, flags, logging

from train.errors import first_line

_GIN_FILE = flags.DEFINE_multi_string(
    'gin_file', [], 'A gin file. Repeatable: later files override earlier ones.'
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    'gin_bindings', [], 'A binding over the files; --gin.NAME=value is short for it.'
)
_SEARCH_PATHS = flags.DEFINE_multi_string(
    'gin_search_paths', [], 'Folders, with commas between, to look for gin files and includes in.'
)
_ALLOW = flags.DEFINE_multi_string(
    'gin_allow', [], 'Packages of your own, with commas between, that gin files may name.'
)
_CPU_DEVICES = flags.DEFINE_integer(
    'cpu_devices', None, 'Virtual devices where there is nothing but a CPU; 8.', lower_bound=1
)
_MULTIHOST = flags.DEFINE_bool(
    'multihost',
    False,
    'One of several processes, found out from the environment (TPU pods, Slurm).',
)
_COORDINATOR = flags.DEFINE_string(
    'coordinator_address', None, 'host:port of process 0, for one of several processes.'
)
_PROCESS_COUNT = flags.DEFINE_integer('process_count', None, 'With --coordinator_address.')
_PROCESS_INDEX = flags.DEFINE_integer('process_index', None, 'With --coordinator_address.')
_TRACEBACK = flags.DEFINE_bool('traceback', False, 'Show the whole traceback of an error.')


def rewrite_gin_flags(argv: list[str]) -> list[str]:
    """`--gin.NAME=value` -> `--gin_bindings=NAME=value`."""
    return [
        f'--gin_bindings={a.removeprefix("--gin.")}' if a.startswith('--gin.') else a for a in argv
    ]


def _listed(values: list[str]) -> list[str]:
    """The entries of a repeatable flag, each with commas between several."""
    return [entry for value in values for entry in value.split(',') if entry]


def run() -> None:
    """Configures and runs, by the flags."""
    from train import machine  # jax and all else load after the flags are known to be right
    from train.config import check_complete, find_entry, load_config

    machine.use_virtual_devices(_CPU_DEVICES.value)
    machine.join_processes(
        _COORDINATOR.value, _PROCESS_COUNT.value, _PROCESS_INDEX.value, _MULTIHOST.value
    )
    load_config(
        _GIN_FILE.value, _GIN_BINDINGS.value, _listed(_SEARCH_PATHS.value), _listed(_ALLOW.value)
    )
    entry = find_entry()
    check_complete(entry)
    entry()


def explain(error: Exception) -> str | None:
    """The one line that says what is wrong, for errors that this project raises for its users.

    Their messages are written to be read alone. An error from deeper down keeps its traceback.
    """
    if isinstance(error, TypeError) and 'No values supplied by Gin' in str(error):
        return f'a gin file gives no value: {first_line(error)}'
    if isinstance(error, TypeError) and 'In call to configurable' in str(error):
        missing = str(error).split('\n')[0].partition(' missing ')[2]
        name = str(error).partition("In call to configurable '")[2].partition("'")[0]
        return f'{name} is missing {missing}: give a value in a gin file' if missing else None
    if not isinstance(error, ValueError | OSError | FloatingPointError):
        return None
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    root = Path(__file__).parents[1]
    if not any(raised_in.is_relative_to(root / package) for package in ('partitioning', 'train')):
        return None
    # gin adds lines that say which configurable was being called.
    message = str(error).split('\n  In call to configurable')[0]
    return ' '.join(message.split())


def main(argv: list[str]) -> int:
    if len(argv) > 1:
        print(f'error: {argv[1]!r} is no flag; see python -m train --help', file=sys.stderr)
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
    app.run(main, argv=rewrite_gin_flags(sys.argv))
