"""How the programs of a run are compiled: with which options, and where they are kept.

jax keeps compiled programs in a folder, so that a later start need not compile them. jax's keys
contain the program, its options, the devices, and the versions of jaxlib and the compiler, so all
of them can share a folder. A program is code that runs in the process that reads it, so each has a
seal, which only processes with the secret of its user can make. Others are not read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from etils import epath
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractMesh, Mesh

from partitioning.hardware import (
    FLAG_VARIABLES,
    CompilerOption,
    OptionValue,
    change_options,
    default_options,
)
from partitioning.hardware.jax_private import keep_programs_of_this_process, seal_kept_programs
from train.errors import ConfigError
from train.paths import as_path, is_remote


def choose_options(
    setting: Literal['auto'] | Mapping[str, OptionValue | None], mesh: Mesh | AbstractMesh
) -> tuple[CompilerOption, ...]:
    """Returns the options with which the programs of a run are compiled.

    The chips of `mesh` decide the default options. Raises a ConfigError if a default option is to
    be removed that the chips do not have.
    """
    options = () if isinstance(mesh, AbstractMesh) else default_options(mesh.devices.flat)
    if setting == 'auto':
        return options
    if not setting:
        return ()
    try:
        return change_options(options, setting, 'set by TrainConfig.compiler_options')
    except ValueError as error:
        raise ConfigError(f'TrainConfig.compiler_options: {error}') from None


def describe_options(options: Sequence[CompilerOption]) -> Iterator[str]:
    """Yields a line for each compiler option, and for each variable from which more are read."""
    for option in options:
        yield f'compiler option {option}'
    for name in FLAG_VARIABLES:
        if value := os.environ.get(name, '').strip():
            yield f'compiler options of the environment: {name}={value}'


CacheSetting = Literal['auto'] | str | os.PathLike[str] | None

# Most programs of a start take longer to compile than to read. jax's default is one second.
_WORTH_KEEPING_SECONDS = 0.2
_MOST_BYTES = 4 * 2**30  # of the user's folder, and of the folder of a run
_THRESHOLD = 'jax_persistent_cache_min_compile_time_secs'


class _Folders:
    """The folder that the user gave to jax, and the one that a run has put in its place."""

    of_user: str | None = None
    of_run: str | None = None


def use_compilation_cache(
    setting: CacheSetting,
    run_directory: epath.Path,
    secret: bytes | None,
    say: Callable[[str], None],
) -> None:
    """Makes jax keep the programs that it compiles from now on, in this whole process.

    `run_directory` is the folder of the run. Several processes share a cache there, because all
    accelerators find the programs of process 0, and the user's folder may be on each host. Programs
    are sealed with `secret`; without one, none are kept. Raises a ConfigError if the folder of the
    setting cannot be written.
    """
    keeps = jax.process_index() == 0
    if jax.process_count() > 1 and jax.default_backend() == 'cpu':
        keep_programs_of_this_process()
        keeps = True
    config: Any = jax.config  # whose types lack the folder in some versions of jax
    configured = config.jax_compilation_cache_dir
    if configured != _Folders.of_run:
        _Folders.of_user = configured
    if secret is None:
        folder = None
    elif setting == 'auto':
        folder = _Folders.of_user or _automatic(run_directory, say)
    else:
        folder = None if setting is None else str(as_path('TrainConfig.compilation_cache', setting))
        if folder is not None and (problem := _unwritable(folder)):
            raise ConfigError(f'TrainConfig.compilation_cache {folder}: {problem}')
    _Folders.of_run = folder
    if folder is not None and secret is not None:
        remove = functools.partial(_remove_strange, say, folder) if keeps else _do_nothing
        seal_kept_programs(secret, functools.partial(_note_use, folder), remove)
    if folder == configured:
        return
    jax.config.update('jax_compilation_cache_dir', folder)
    compilation_cache.reset_cache()  # jax opens its folder once
    if folder != _Folders.of_user and _THRESHOLD.upper() not in os.environ:
        jax.config.update(_THRESHOLD, _WORTH_KEEPING_SECONDS)


def user_folder() -> Path:
    """`meshwright/programs` in the user's cache directory; for CPUs, a folder in it.

    A program for CPUs may use instructions that another kind of CPU lacks, and a home directory may
    be on several kinds of machines.
    """
    root = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    folder = Path(root).expanduser() / 'meshwright' / 'programs'
    return folder / f'cpu-{_kind_of_cpu()}' if jax.default_backend() == 'cpu' else folder


@functools.cache
def _kind_of_cpu() -> str:
    """A short text that differs between CPUs with different instructions."""
    kind = platform.machine()
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        kind += next((line for line in lines if line.startswith(('flags', 'Features'))), '')
    except OSError:  # not on Linux
        kind += platform.processor()
    return hashlib.sha256(kind.encode()).hexdigest()[:12]


def _automatic(run_directory: epath.Path, say: Callable[[str], None]) -> str | None:
    """The folder that suits the processes of this run, or None if it cannot be written."""
    if jax.process_count() > 1:
        folder = run_directory / 'programs'
        if jax.process_index() == 0:
            _remove_oldest(folder)
        return str(folder)
    folder = epath.Path(user_folder())
    if problem := _unwritable(str(folder)):
        say(f'compiled programs are not kept: {folder}: {problem}')
        return None
    _remove_oldest(folder)
    return str(folder)


def _unwritable(folder: str) -> str:
    """Why programs cannot be written to a local folder, or ''."""
    if is_remote(folder):
        return ''
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return '' if os.access(folder, os.W_OK) else 'it cannot be written'


def _remove_oldest(folder: epath.Path, most_bytes: int = _MOST_BYTES) -> None:
    """Removes the programs that were not used for longest, until the folder is small enough.

    In a store, only the time at which they were compiled is known.
    """
    found = []
    with contextlib.suppress(OSError):  # There is no such folder yet.
        for file in folder.glob('*-cache'):
            with contextlib.suppress(OSError):  # Another process has removed it.
                about = file.stat()
                found.append((about.mtime, about.length, file))
    excess = sum(size for _, size, _ in found) - most_bytes
    for _, size, file in sorted(found):
        if excess <= 0:
            return
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        excess -= size


def _note_use(folder: str, name: str) -> None:
    """Gives a local program the time of its last use."""
    if not is_remote(folder):
        with contextlib.suppress(OSError):
            os.utime(Path(folder) / f'{name}-cache')


def _do_nothing(name: str) -> None:
    """Process 0 removes it."""


def _remove_strange(say: Callable[[str], None], folder: str, name: str) -> None:
    """Removes a program that is not read, so that jax keeps what it compiles instead."""
    file = epath.Path(folder) / f'{name}-cache'
    say(f'a compiled program was damaged or is not yours, and is compiled again: {file}')
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)
