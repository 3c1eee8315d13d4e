"""Runs a script as if a described machine were there, and records what it compiles."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import runpy
import sys
from collections.abc import Iterator

import jax

from meshwright import jax_private
from meshwright.dry.compiling import CompiledFunction, Compiling
from meshwright.dry.ending import Ending, EndOfRun, Ends
from meshwright.dry.imitating import Imitation
from meshwright.dry.libraries import library_hooks
from meshwright.dry.lines import find_refusal, line_of_script
from meshwright.dry.machine import Machine
from meshwright.dry.replacing import Replaced
from meshwright.dry.stand_in import StandIn
from meshwright.dry.stores import Stores
from meshwright.dry.subprocesses import watch_programs
from partitioning.temporary import temporary_folder

WAIT_SECONDS = 300.0


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
    """What a script did on a machine that is only described.

    Attributes:
      functions: the functions that it compiled for the machine, in this order.
      ending: why it ended.
      ended_at: the function whose call ended it, if one did.
      message: the line that waited, or the call that cannot be imitated.
      error: the error that ended it.
      imitated: what it asked jax for that was imitated, and how often.
      reads: the lines that read values of arrays, and how often; they read zeros.
      programs: other programs that it started, and how often; they ran on this machine.
      refused: the files that it would have written or removed.
    """

    functions: tuple[CompiledFunction, ...]
    ending: Ending
    ended_at: CompiledFunction | None
    message: str
    error: BaseException | None
    imitated: dict[str, int]
    reads: dict[str, int]
    programs: dict[str, int]
    refused: tuple[str, ...]


def run_script(
    machine: Machine, script: Script, *, steps: int = 2, wait: float = WAIT_SECONDS
) -> DryRun:
    """Runs a script as if a machine were there.

    Args:
      machine: the machine, and which of its processes the script is.
      script: the script.
      steps: after how many calls of the largest training step the run ends. It is the function with
        the most FLOPs of those that were called and that train.
      wait: the run also ends after so many seconds in which nothing was compiled.

    Raises:
      FileNotFoundError: if there is no such script.
    """
    script.check()
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)

    def on_no_memory(found: CompiledFunction) -> None:
        ends.end(EndOfRun('memory', found))

    ends = Ends(steps, wait)
    compiling = Compiling(
        machine,
        ends.compiling,
        lambda found: ends.on_call(found, compiling.functions),
        on_no_memory,
    )
    imitation = Imitation(machine, lambda what: counts['imitated'].update([what]))
    jax_private.register_array_type(StandIn)
    with temporary_folder('meshwright-dry-') as folder:
        stores = Stores(folder)
        replacements = [
            *compiling.replacements(),
            *imitation.replacements(),
            *stores.replacements(),
            (StandIn, 'on_read', lambda array: counts['reads'].update([line_of_script()])),
        ]
        here = jax.devices('cpu')[0]
        with (
            _environment(),
            watch_programs(lambda what: counts['programs'].update([what]), ends),
            Replaced(replacements, library_hooks(stores)),
            jax.default_device(here),
            ends.waiting(),
        ):
            end, error = _run(script)
        if not ends.in_script():
            os._exit(0)  # a copy of the process, which the script made, has nothing to report
    return DryRun(
        functions=tuple(compiling.functions),
        ending=end.ending,
        ended_at=end.at,
        message=end.message,
        error=error,
        imitated=dict(counts['imitated']),
        reads=dict(counts['reads']),
        programs=dict(counts['programs']),
        refused=tuple(stores.refused),
    )


def _run(script: Script) -> tuple[EndOfRun, BaseException | None]:
    """Runs a script; returns why it ended, and its error."""
    try:
        script.run()
    except EndOfRun as end:
        return end, None
    except SystemExit as end:
        failed = end.code not in (None, 0)
        return EndOfRun('exit' if failed else 'script'), end if failed else None
    except BaseException as error:
        refusal = find_refusal(error)
        return EndOfRun('refused' if refusal else 'error', message=refusal or ''), error
    return EndOfRun('script'), None


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
