"""Compiles a function for a forecast, or finds how much memory it lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshwright.calls.compiler_warnings import read_compiler_log
from meshwright.calls.partitioned import PartitionedLike
from partitioning.hardware import OptionValue, check_options
from partitioning.hardware.compilers import OutOfMemoryError, own_compiler_errors
from partitioning.rules import MeshLike

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
    """

    traced: jax.stages.Traced
    compiled: jax.stages.Compiled | None
    out_of_memory: OutOfMemoryError | None
    warnings: tuple[str, ...]


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


def trace(fn: PartitionedLike, args: Sequence[Any]) -> Program:
    """Traces a partitioned function without compiling it."""
    return Program(traced=fn.trace(*args), compiled=None, out_of_memory=None, warnings=())


def compile_traced(
    program: Program, name: str, mesh: MeshLike, options: Mapping[str, OptionValue] | None
) -> Program:
    """Compiles a traced function.

    Args:
      program: what `trace` returned.
      name: the name of the function, for messages.
      mesh: the mesh.
      options: compiler options in addition to the function's own.

    Raises:
      ValueError: if the compiler does not know an option, or cannot read its value.
    """
    checked: Any = check_options(options)
    compiled, exceeded = None, None
    with read_compiler_log() as found, _without_cache():
        lowered = program.traced.lower()
        try:
            with own_compiler_errors(name, mesh):
                compiled = lowered.compile(compiler_options=checked)
        except OutOfMemoryError as error:
            exceeded = error
    return dataclasses.replace(
        program, compiled=compiled, out_of_memory=exceeded, warnings=tuple(found)
    )
