"""Runs a command of the trainer: parses its flags, and prints an error in one line."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import logging

from partitioning.command_line import OneLineParser
from partitioning.library_files import is_library_file
from partitioning.untrusted_text import printable
from train.cli.interruption import EXIT_CODES
from train.errors import USER_ERRORS, ConfigError, describe_error, first_line
from train.processes import output, signals
from train.processes.signals import handling

if TYPE_CHECKING:
    from train.processes.environment import ProcessAddress

# The packages whose errors say why gs:// and s3:// cannot be used, such as missing credentials.
_OF_STORES = ('aiohttp', 'botocore', 'gcsfs', 'google')
# The modules that an extra of this package installs.
_EXTRAS = {
    **dict.fromkeys(
        ('etils', 'orbax', 'grain', 'rich', 'tensorboardX', 'xxhash', 'fsspec', 'psutil'), 'train'
    ),
    **dict.fromkeys(('pyarrow', 'backports'), 'data'),
    **dict.fromkeys(('sentencepiece', 'tokenizers'), 'tokenizers'),
    **dict.fromkeys(('sacrebleu', 'rouge_score'), 'metrics'),
    **dict.fromkeys(('s3fs', 'boto3'), 's3'),
    **dict.fromkeys(('gcsfs', 'google'), 'gcs'),
    'flatbuffers': 'export',
    'wandb': 'wandb',
    'libtpu': 'aot',
    'matplotlib': 'plot',
}
# The packages whose errors explain themselves.
_PACKAGES = ('partitioning', 'meshwright', 'train')


def number(kind: type[float], least: float, most: float = math.inf) -> Callable[[str], float]:
    """Returns what reads the value of a flag, an int or a float within bounds."""
    bounds = f'>= {least:g}' if most == math.inf else f'from {least:g} to {most:g}'

    def read(text: str) -> float:
        try:
            if least <= (value := kind(text)) <= most:
                return value
        except ValueError:
            pass
        what = 'an integer' if kind is int else 'a number'
        raise argparse.ArgumentTypeError(f'{text!r} must be {what} {bounds}')

    return read


def _seconds(what: str) -> dict[str, Any]:
    return {'type': float, 'metavar': 'S', 'help': f'how long {what}'}


_LIMITS = ('init_seconds', 'heartbeat_seconds', 'watchdog_seconds')
_MANY: dict[str, Any] = {'action': 'append', 'default': [], 'metavar': '...'}
_SWITCH: dict[str, Any] = {'action': 'store_true'}
_FLAGS: dict[str, dict[str, Any]] = {
    'gin_file': _MANY | {'help': 'a gin file; later files override earlier ones'},
    'gin_bindings': _MANY
    | {'help': 'overrides the files; short: --gin.NAME=value; --name=value sets the macro NAME'},
    'gin_search_paths': _MANY | {'help': 'folders with gin files, separated by commas'},
    'gin_allow': _MANY | {'help': 'your own packages that gin files may import'},
    'cpu_devices': {
        'type': number(int, 1),
        'metavar': 'N',
        'help': 'virtual devices if there is only a CPU (8)',
    },
    'multihost': _SWITCH | {'help': 'join the processes of a pod, Slurm, Open MPI or Kubernetes'},
    'coordinator_address': {
        'metavar': 'ADDRESS',
        'help': 'host:port of process 0, to join several processes',
    },
    'process_count': {'type': number(int, 1), 'metavar': 'N', 'help': 'their number'},
    'process_index': {'type': int, 'metavar': 'N', 'help': 'the index of this process'},
    'init_seconds': _seconds('all processes may take to start (60)'),
    'heartbeat_seconds': _seconds('a process may give no sign of life (30)'),
    'watchdog_seconds': _seconds('a process may keep others waiting without progress (120)'),
    'log_dir': {
        'metavar': 'DIR',
        'help': "for the output of C++ libraries (the system's temporary folder)",
    },
    'traceback': _SWITCH | {'help': 'show the traceback of every error'},
}


def add_traceback(parser: argparse.ArgumentParser) -> None:
    """Adds the flag of `run_command` to a parser."""
    parser.add_argument('--traceback', **_FLAGS['traceback'])


class CommandParser(OneLineParser):
    """Reads the flags that the commands of the trainer share, and the arguments of one command."""

    def __init__(self, prog: str, usage: str, description: str):
        super().__init__(prog, usage, description, epilog=EXIT_CODES)
        flags = self.add_argument_group('flags of all commands')
        for name, settings in _FLAGS.items():
            flags.add_argument(f'--{name}', **settings)

    def _nearest(self, argument: str) -> str:
        """The flag that a misspelled one is close to, or ''."""
        flags = [flag for action in self._actions for flag in action.option_strings]
        name = argument.partition('=')[0]
        return next(iter(difflib.get_close_matches(name, flags, n=1, cutoff=0.8)), '')

    def read(self, arguments: Iterable[str]) -> argparse.Namespace:
        """Returns the arguments and flags by name. An invalid one exits with one line."""
        short, long = '--gin.', '--gin_bindings='
        options, unknown = self.parse_known_intermixed_args(
            [long + a.removeprefix(short) if a.startswith(short) else a for a in arguments]
        )
        # --model_dir=runs/two sets MODEL_DIR.
        macros = [a for a in unknown if _is_macro_flag(a) and not self._nearest(a)]
        options.gin_bindings = [*options.gin_bindings, *map(_as_macro, macros)]
        unknown = [one for one in unknown if one not in macros]
        if unknown and unknown[0].startswith('-'):
            name = unknown[0].split('=')[0]
            hint = self._nearest(name)
            if not hint and '=' in unknown[0] and _is_macro_flag(unknown[0].lower()):
                hint = name.lower()
            settings = 'settings are written --gin.NAME=value or --name=value'
            self.error(f'unknown flag {name}: {f"did you mean {hint}?" if hint else settings}')
        elif unknown:
            self.error(f'one argument too many: {unknown[0]!r}')
        return options


def _is_macro_flag(argument: str) -> bool:
    name, equals, _ = argument.partition('=')
    return bool(equals) and re.fullmatch('--[a-z][a-z0-9_]*', name) is not None


def _as_macro(argument: str) -> str:
    name, _, value = argument.removeprefix('--').partition('=')
    return f'{name.upper()}={value}'


def configure(options: argparse.Namespace, files: Sequence[str]) -> None:
    """Finds the devices, and loads gin files, and after them the gin files of the flags."""
    # These import jax, so they wait until the flags have been checked.
    from train.gin.load import load_config
    from train.machine import devices as machine
    from train.processes.joining import find_address, join_processes
    from train.processes.wire import Limits
    from train.t5x.modules import ALIASES

    machine.use_virtual_devices(options.cpu_devices)
    address = find_address(
        options.coordinator_address,
        options.process_count,
        options.process_index,
        options.multihost,
    )
    if address is not None:
        if handling.watched:  # This process was started for one command, which may change it.
            _begin_output(address, options.log_dir)
        given = {name: getattr(options, name) for name in _LIMITS}
        join_processes(address, Limits(**{k: v for k, v in given.items() if v is not None}))
    load_config([*files, *options.gin_file], *gin_settings(options), aliases=ALIASES)


def gin_settings(options: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    """The gin bindings, the folders with gin files, and the allowed packages of the flags."""
    folders, packages = (
        [entry for value in values for entry in value.split(',') if entry]
        for values in (options.gin_search_paths, options.gin_allow)
    )
    bindings = options.gin_bindings
    if bindings:
        from train.gin.parsing import quote_text

        bindings = [quote_text(one) for one in bindings]
    return bindings, folders, packages


def _begin_output(address: ProcessAddress, folder: str | None) -> None:
    """Prefixes the lines of a process, and sends the output of C++ libraries to a file."""
    try:
        file = output.begin(address.process_index, folder)
    except OSError as error:  # without --log_dir, only the name of the file says where it is
        why = describe_error(error)
        raise ConfigError(f'--log_dir={folder} cannot be written: {why}') from error
    print(
        f'process {address.process_index} of {address.process_count}, according to '
        f'{address.source}; the output of C++ libraries is in {file}'
    )


def run_command(command: Callable[[], Any], options: argparse.Namespace) -> int:
    """Runs a command, and returns its exit status: what it returns, if that is an integer, or 0."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.WARNING)
    try:
        with signals.handle():
            status = command()
    except Exception as error:
        if 'train.processes.together' in sys.modules:  # this process may have joined others
            from train.processes.together import report_failure

            report_failure(error)
        line = None if options.traceback else explain(error)
        if line is None:
            raise
        print(f'error: {printable(line)}', file=sys.stderr)
        for detail in getattr(error, 'details', '').splitlines():
            print(printable(detail), file=sys.stderr)
        return getattr(error, 'exit_code', 2)
    return status if isinstance(status, int) else 0


def explain_missing(error: ImportError) -> str | None:
    """Returns which extra installs a package that is missing, or None if no extra does."""
    package = (error.name or '').partition('.')[0]
    missing = isinstance(error, ModuleNotFoundError) and package in _EXTRAS
    if not missing:
        return None
    return f"this needs the package {package}: pip install 'meshwright[{_EXTRAS[package]}]'"


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
        if missing:
            return f'{name} lacks {missing}: set each in a gin file'
        frames = traceback.extract_tb(error.__traceback__)
        if frames and is_library_file(frames[-1].filename, ('optax',)):
            return f'{name}: {first_line(error)}: one of its settings has a wrong type'
        return None
    if isinstance(error, ImportError) and (line := explain_missing(error)):
        return line
    if type(error).__module__.partition('.')[0] in _OF_STORES:
        return f'the store cannot be used: {first_line(error)}'
    if not isinstance(error, USER_ERRORS):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    raised_in = Path(frames[-1].filename if frames else __file__)
    root = Path(__file__).parents[2]
    # gin appends lines that name the configurable it was calling.
    text, _, called = str(error).partition("\n  In call to configurable '")
    message, called = ' '.join(text.split()), called.partition("'")[0]
    explains_itself = getattr(error, 'explains_itself', False)  # gin's copy has no such entry
    if explains_itself or any(raised_in.is_relative_to(root / p) for p in _PACKAGES):
        from train.gin.parsing import find_place

        place = find_place(message)
        return f'{place}: {message}' if place else message
    if called and is_library_file(str(raised_in), ('optax',)):
        return f'{called}: {message}'
    return None
