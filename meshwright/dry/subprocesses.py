"""Reports programs that a script starts. They run unchanged on this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

from meshwright.dry.ending import EndOfRun, Ends
from meshwright.dry.lines import line_of_script
from meshwright.user_lines import short_source

# Programs that start training scripts; others, such as `git`, do not use the machine.
_LAUNCHERS = ('python', 'torchrun', 'accelerate', 'srun', 'mpirun', 'bash', 'sh')
_WORDS = 4  # of a command that are shown

_listeners: list[Callable[[str, tuple[Any, ...]], None]] = []


@functools.cache
def _listen() -> None:
    """Starts to listen to Python's audit events; a process does it once, and cannot stop."""

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if _listeners and event in ('subprocess.Popen', 'os.exec', 'os.system'):
            _listeners[-1](event, args)

    sys.addaudithook(on_event)


@contextlib.contextmanager
def watch_programs(note: Callable[[str], None], ends: Ends) -> Iterator[None]:
    """Notes the programs that a script starts, and ends the run if one takes its place."""

    def on_event(event: str, args: tuple[Any, ...]) -> None:
        if not ends.in_script():
            return
        command = _command_of(event, args)
        source = short_source(line_of_script(sys._getframe(2)))
        if event == 'os.exec':
            ends.end(
                EndOfRun(
                    'refused',
                    message=f'{source}: os.exec cannot be imitated: give `{command}` to this '
                    'command in place of the script',
                )
            )
        if os.path.basename(command.split(' ')[0]).startswith(_LAUNCHERS):
            note(f'{source}: {command}')

    _listen()
    _listeners.append(on_event)
    try:
        yield
    finally:
        _listeners.remove(on_event)


def _command_of(event: str, args: tuple[Any, ...]) -> str:
    if event == 'os.system':
        words = os.fsdecode(args[0]).split()
    else:
        given = [args[1]] if isinstance(args[1], str | bytes) else list(args[1])
        words = [os.fsdecode(word) for word in given]
    if words:
        words[0] = os.path.basename(words[0])
    more = ' ...' if len(words) > _WORDS else ''
    return shlex.join(words[:_WORDS]) + more
