"""Compiles a function for a forecast: the program, its warnings, or the memory that it lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshwright.calls.moved_jaxpr import in_place_of_callers
from meshwright.jax_private import TracedCall
from partitioning.hardware import OptionValue, check_options
from partitioning.hardware.compilers import OutOfMemoryError, own_compiler_errors
from partitioning.rules import MeshLike
from partitioning.untrusted_text import printable

# Lines of compilers begin with their level, the date and the time: 'W0823 12:34:56.789012'.
_LINE = re.compile(rb'^([IWEF])\d{4} \d\d:\d\d:\d\d')
_PREFIX = re.compile(r'^[IWEF]\d{4} \S+\s+\d+ [^\]]*\] ?')
# Warnings that say something about the host, not about the program.
_NOT_ABOUT_PROGRAMS = (
    'slow_operation_alarm',
    'cpu_feature_guard',
    'TfrtCpuClient',
    'computation_p',
)
# Receives a text when a stage begins: 'tracing train_step', 'compiling train_step for v5p:4x4x4'.
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function after tracing, and after compiling.

    Attributes:
      traced: the traced function.
      compiled: the compiled program; None if it was not compiled, or needs too much memory.
      out_of_memory: how much memory it needs, if the compiler says that a device has less.
      warnings: the warnings of the compiler, each once.
      seconds: how long the compiler took, without what it waited for other processes.
    """

    traced: TracedCall
    compiled: jax.stages.Compiled | None = None
    out_of_memory: OutOfMemoryError | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    """Compiles inside without jax's folder of programs, from which no warning of a compiler comes.

    Besides, programs for described devices can be kept there, but not read.
    """
    config: Any = jax.config  # whose types lack the folder in some versions of jax
    folder = config.jax_compilation_cache_dir
    if folder is None:
        yield
        return
    jax.config.update('jax_compilation_cache_dir', None)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update('jax_compilation_cache_dir', folder)
        compilation_cache.reset_cache()


def peak_rss() -> int:
    """The most memory that the process had in use, in bytes."""
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def compile_traced(
    program: Program, name: str, mesh: MeshLike, options: Mapping[str, OptionValue] | None
) -> Program:
    """Compiles a traced function.

    Args:
      program: the traced function.
      name: the name of the function, for messages.
      mesh: the mesh.
      options: compiler options in addition to the function's own.

    Raises:
      ValueError: if the compiler does not know an option, or cannot read its value.
    """
    checked: Any = check_options(options)
    compiled, exceeded, started = None, None, (time.perf_counter(), time.process_time())
    with read_compiler_log() as found, _without_cache():
        with in_place_of_callers(mesh):
            lowered = program.traced.lower()
        try:
            with own_compiler_errors(name, mesh):
                compiled = lowered.compile(compiler_options=checked)
        except OutOfMemoryError as error:
            exceeded = error
    return dataclasses.replace(
        program,
        compiled=compiled,
        out_of_memory=exceeded,
        warnings=tuple(found),
        seconds=min(time.perf_counter() - started[0], time.process_time() - started[1]),
    )


@contextlib.contextmanager
def read_compiler_log() -> Iterator[list[str]]:
    """Collects the warnings and errors of a compiler, which writes them past Python.

    Everything else that the process writes to its standard error passes through.

    Yields:
      A list, which holds the warnings when the context has ended, each once.
    """
    found: list[str] = []
    try:
        sys.stderr.flush()
        original = os.dup(2)
    except (OSError, ValueError, AttributeError):  # there is no standard error
        yield found
        return
    reading, writing = os.pipe()
    reader = threading.Thread(target=_read, args=(reading, original, found), daemon=True)
    reader.start()
    os.dup2(writing, 2)
    os.close(writing)
    try:
        yield found
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os.dup2(original, 2)  # closes the last end of the pipe, so the reader ends
        reader.join()
        os.close(original)
        found[:] = list(dict.fromkeys(found))


def _read(reading: int, original: int, found: list[str]) -> None:
    """Sorts lines until the pipe is closed: warnings into a list, others to the standard error."""
    with os.fdopen(reading, 'rb', buffering=0) as pipe:
        rest = b''
        while chunk := pipe.read(65536):
            *lines, rest = (rest + chunk).split(b'\n')
            for line in lines:
                _sort(line + b'\n', original, found)
            if rest and not rest.startswith((b'I', b'W', b'E', b'F')):  # an unfinished line of
                os.write(original, rest)  # a progress bar
                rest = b''
        if rest:
            _sort(rest, original, found)


def _sort(line: bytes, original: int, found: list[str]) -> None:
    if (level := _LINE.match(line)) is None:
        os.write(original, line)
    elif level[1] == b'F':
        reason = _PREFIX.sub('', line.decode(errors='replace').strip())
        hint = ': remove them' if 'flag' in reason.lower() else ''
        os.write(original, f'error: the compiler gave up: {printable(reason)}{hint}\n'.encode())
        os._exit(2)
    elif level[1] != b'I':
        text = _PREFIX.sub('', line.decode(errors='replace').strip())
        if text and not any(word in line.decode(errors='replace') for word in _NOT_ABOUT_PROGRAMS):
            found.append(text)
