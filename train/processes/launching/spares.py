"""Spare processes: they have imported everything, and wait until a run must be started again.

Most of the time between the loss of a process and the next step can go into imports. The launcher
starts spares when the run has been under way for a while. A spare reads one line: what it becomes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

# Tells a process that it is a spare.
_SPARE = 'MESHWRIGHT_SPARE'
# When the failure was seen after which a process is started, by `time.monotonic`.
LOST_AT = 'MESHWRIGHT_LOST_AT'
# When a spare has become a process of a run, by `time.monotonic`.
_BEGAN = 'MESHWRIGHT_BEGAN'
# Tells a process that it is only to compile its programs.
ONLY_COMPILES = 'MESHWRIGHT_ONLY_COMPILES'
# How the line begins that a run prints after its first step.
FIRST_STEP = 'first step '
# The processes of the run import at the same time, so spares wait until they are done.
SECONDS_BEFORE_SPARES = 30.0
_MODULES = (
    'train.running.training',
    'train.t5x.modules',
    'train.gin.load',
    'train.processes.joining',
    'train.checkpoints.orbax.writer',
    'train.checkpoints.local.tier',
    'train.data.feed',
    'grain',
)


@dataclasses.dataclass(frozen=True)
class Child:
    """What a process runs: a program, and its arguments, which a spare process can take over."""

    command: Sequence[str]
    environment: Mapping[str, str]
    arguments: Sequence[str] = ()


class Spares:
    """The spare processes of a launcher, at most `count`. They must be started in its main thread.

    Args:
      program: the command that becomes a process of the run, without its arguments.
      environment: the environment of all of them.
    """

    def __init__(self, program: Sequence[str], environment: Mapping[str, str], count: int):
        self._program, self._environment, self._count = program, environment, count
        self._ready: list[subprocess.Popen[bytes]] = []
        self._since = time.monotonic()

    def begin(self) -> None:
        """Notes that an attempt begins, during whose start no spares are started."""
        self._since = time.monotonic()

    def keep_ready(self) -> None:
        """Starts the spares that are missing, when it is time."""
        if time.monotonic() - self._since < SECONDS_BEFORE_SPARES:
            return
        self._ready = [one for one in self._ready if one.poll() is None]
        while len(self._ready) < self._count:
            self._ready.append(
                subprocess.Popen(
                    self._program,
                    env={**self._environment, _SPARE: '1'},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    bufsize=0,
                    start_new_session=True,
                )
            )

    def take(
        self, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | None:
        """Turns a spare into a process with these arguments, or returns None if there is none."""
        line = json.dumps({'arguments': list(arguments), 'environment': dict(environment)})
        while self._ready:
            one = self._ready.pop(0)
            assert one.stdin is not None
            with contextlib.suppress(OSError):  # It has ended.
                one.stdin.write(line.encode() + b'\n')
                one.stdin.close()
                return one
            one.wait()
        return None

    def close(self) -> None:
        """Ends the spares that are left."""
        for one in self._ready:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()
            for pipe in (one.stdin, one.stdout):
                if pipe is not None:
                    pipe.close()
        self._ready = []


def wait_as_spare() -> None:
    """Makes a spare wait until it is needed. In other processes it does nothing."""
    if os.environ.pop(_SPARE, None) is None:
        return
    for name in _MODULES:
        with contextlib.suppress(ImportError):  # The command says what is missing, if it needs it.
            importlib.import_module(name)
    line = sys.stdin.readline()
    if not line:  # The launcher has ended.
        os._exit(0)
    told = json.loads(line)
    os.environ.clear()
    os.environ.update(told['environment'] | {_BEGAN: str(time.monotonic())})
    sys.argv[1:] = told['arguments']
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def only_compiles() -> bool:
    """Whether this process is only to compile the programs of its run."""
    return ONLY_COMPILES in os.environ


def seconds_as_process() -> float | None:
    """How long ago this process has become one of a run, or None if it was never a spare."""
    began = os.environ.pop(_BEGAN, None)
    return None if began is None else time.monotonic() - float(began)


def seconds_since_loss() -> float | None:
    """How long ago the launcher saw the failure because of which it has started this process."""
    lost_at = os.environ.pop(LOST_AT, None)
    return None if lost_at is None else time.monotonic() - float(lost_at)
