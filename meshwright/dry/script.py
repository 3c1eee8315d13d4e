"""Runs a script as if a described machine were there, and records what it compiles."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from meshwright import jax_private
from meshwright.dry.compiling import CompiledFunction, Compiling
from meshwright.dry.imitating import Imitation
from meshwright.dry.machine import Machine
from meshwright.dry.stand_in import StandIn
from meshwright.dry.stores import Stores
from meshwright.user_lines import user_line

# 'steps': the largest function was called often enough. 'script': the script came to its end.
# 'memory': a function does not fit, so that the layout of its results is not known.
Ending = Literal['steps', 'script', 'exit', 'memory', 'error']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """A script or a module, with its arguments.

    Attributes:
      name: the path of the script, or the name of the module.
      arguments: its arguments.
      is_module: whether it is a module: `python -m package.module`.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def check(self) -> None:
        """Raises FileNotFoundError if there is no such script."""
        if not self.is_module and not os.path.isfile(self.name):
            raise FileNotFoundError(f'{self.name}: there is no such script')

    def run(self) -> None:
        """Runs it as `python` would."""
        sys.argv = [self.name, *self.arguments]
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self.name, run_name='__main__', alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(self.name)))
            runpy.run_path(self.name, run_name='__main__')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a script did on a machine that is not here.

    Attributes:
      functions: the functions that it compiled for the machine, in this order.
      ending: why it ended.
      ended_at: the function whose call ended it, if one did.
      error: the error that ended it.
      imitated: what it asked jax for that was imitated, and how often.
      reads: the lines that read values of arrays, and how often; they read zeros.
      refused: the files that it would have written or removed.
    """

    functions: tuple[CompiledFunction, ...]
    ending: Ending
    ended_at: CompiledFunction | None
    error: BaseException | None
    imitated: dict[str, int]
    reads: dict[str, int]
    refused: tuple[str, ...]


class _EndOfRun(BaseException):
    """Ends a script from inside; it is no Exception, so that scripts do not catch it."""

    def __init__(self, ending: Ending, at: CompiledFunction):
        super().__init__(ending)
        self.ending = ending
        self.at = at


def run_script(machine: Machine, script: Script, *, steps: int = 2) -> DryRun:
    """Runs a script as if a machine were there.

    Args:
      machine: the machine, and which of its processes the script is.
      script: the script.
      steps: after how many calls of the largest function the run ends. It is the function with the
        most FLOPs of those that were called.

    Raises:
      FileNotFoundError: if there is no such script.
    """
    script.check()
    imitated: collections.Counter[str] = collections.Counter()
    reads: collections.Counter[str] = collections.Counter()

    def on_call(found: CompiledFunction) -> None:
        called = [one for one in compiling.functions if one.calls and one.flops]
        if not found.flops or found.flops < max(one.flops for one in called):
            return
        if sum(one.calls for one in called if one.source == found.source) >= steps:
            raise _EndOfRun('steps', found)

    def on_no_memory(found: CompiledFunction) -> None:
        raise _EndOfRun('memory', found)

    compiling = Compiling(machine, on_call, on_no_memory)
    imitation = Imitation(machine, lambda what: imitated.update([what]))
    jax_private.register_array_type(StandIn)
    ending: Ending = 'script'
    ended_at: CompiledFunction | None = None
    error: BaseException | None = None
    with tempfile.TemporaryDirectory(prefix='meshwright-dry-') as folder:
        stores = Stores(Path(folder))
        replacements = [
            *compiling.replacements(),
            *imitation.replacements(),
            *stores.replacements(),
        ]
        replacements.append((StandIn, 'on_read', lambda array: reads.update([_line_of_script()])))
        here = jax.devices('cpu')[0]
        with _replaced(replacements), _environment(), jax.default_device(here):
            try:
                script.run()
            except _EndOfRun as end:
                ending, ended_at = end.ending, end.at
            except SystemExit as end:
                ending, error = ('exit', end) if end.code not in (None, 0) else ('script', None)
            except BaseException as raised:
                ending, error = 'error', raised
    return DryRun(
        functions=tuple(compiling.functions),
        ending=ending,
        ended_at=ended_at,
        error=error,
        imitated=dict(imitated),
        reads=dict(reads),
        refused=tuple(stores.refused),
    )


def _line_of_script() -> str:
    """The line of the script that is running."""
    frame, stack = sys._getframe(1), []
    while frame is not None:
        stack.append(f'{frame.f_code.co_filename}:{frame.f_lineno}')
        frame = frame.f_back  # type: ignore[assignment]
    return user_line(stack)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Sets what keeps other libraries from writing or from asking other machines."""
    known = {'WANDB_MODE': 'disabled'}
    before = {name: os.environ.get(name) for name in known}
    argv, path = sys.argv, list(sys.path)
    os.environ.update(known)
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _replaced(replacements: Sequence[jax_private.Replacement]) -> Iterator[None]:
    """Puts objects in the place of others, and puts those back at the end."""
    originals: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in replacements:
            originals.append((owner, name, vars(owner).get(name, getattr(owner, name, None))))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(originals):
            setattr(owner, name, value)
