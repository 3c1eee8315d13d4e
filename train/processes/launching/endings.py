"""How the processes of a run have ended, and which one is the cause."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Sequence

from train.processes.output import enumerated
from train.processes.signals import RESTARTABLE

# How many lines of a process are repeated at the end to explain its failure.
_MOST_LINES, _FEW_LINES = 40, 3
# What a process does when another one has failed: it ends itself with 75, or jax aborts it.
_CONSEQUENCES = (RESTARTABLE, -signal.SIGABRT)


@dataclasses.dataclass(frozen=True)
class ProcessEnd:
    """The end of one process.

    Attributes:
      process: its index.
      code: its exit code, or the negative number of the signal that killed it.
      sent: the last signal that the launcher had sent to it in order to end it, if any.
      lines: its last lines.
    """

    process: int
    code: int
    sent: signal.Signals | None = None
    lines: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether it failed although the launcher had not stopped it."""
        return self.code != 0 and self.sent is None

    def __str__(self) -> str:
        if self.code >= 0:
            return f'ended with exit code {self.code}'
        by = ' by the launcher' if self.sent == -self.code else ''
        names = {int(s): s.name for s in signal.Signals}
        return f'was killed by {names.get(-self.code, f"signal {-self.code}")}{by}'


@dataclasses.dataclass(frozen=True)
class Attempt:
    """How all processes of a run have ended.

    Attributes:
      ends: the ends in their order.
      stopped_by: the signal with which the user has stopped the launcher, if any.
    """

    ends: tuple[ProcessEnd, ...]
    stopped_by: signal.Signals | None = None


def find_cause(ends: Sequence[ProcessEnd]) -> ProcessEnd | None:
    """Returns the failure from which the others follow, or None if none has failed.

    This is usually the first failure. But a process that ends because another one has failed can be
    seen to end before it.
    """
    own = [end for end in ends if end.is_own] or [end for end in ends if end.code != 0]
    return min(own, key=lambda end: end.code in _CONSEQUENCES, default=None)


def lost_processes(ends: Sequence[ProcessEnd]) -> list[int]:
    """Returns the processes that were killed from outside or do not answer, by their index.

    The others would work: they ended because others did, or had not noticed that others had ended.
    """
    cause = find_cause(ends)
    if cause is None:
        return []
    killed = {end.process for end in ends if end.is_own and end.code == -signal.SIGKILL}
    if cause.code < 0:
        killed.add(cause.process)
    elif cause.code == RESTARTABLE and not killed:
        killed = {end.process for end in ends if end.sent == signal.SIGKILL}
    return sorted(killed)


def describe_failure(ends: Sequence[ProcessEnd]) -> str:
    """Returns what failed first, with its last lines, and how the others ended."""
    cause = find_cause(ends)
    assert cause is not None
    lines = failure_lines(cause.lines)
    how = f'with exit code {cause.code}' if cause.code >= 0 else str(cause).removeprefix('was ')
    text = f'error: process {cause.process} failed first, {how}'
    if lines and lines[0].startswith('error: '):
        text += f': {lines[0].removeprefix("error: ")}'
        lines = lines[1:]
    ways: dict[str, list[int]] = {}
    for end in ends:
        if end is not cause:
            ways.setdefault(str(end), []).append(end.process)
    others = []
    for way, some in ways.items():
        if len(some) > 1:
            numbers = enumerated(list(map(str, sorted(some))))
            others.append(f'processes {numbers} {way.replace("was ", "were ", 1)}')
        else:
            others.append(f'process {some[0]} {way}')
    return '\n'.join([text, *(f'  {line}' for line in lines), *others])


def failure_lines(lines: Sequence[str]) -> list[str]:
    """Returns the last lines of a process that explain why it failed.

    They are an error with its details, or a traceback, or else just the last lines.
    """
    starts = [i for i, line in enumerate(lines) if line.startswith(('error: ', 'Traceback '))]
    if not starts:
        return list(lines[-_FEW_LINES:])
    found = list(lines[starts[-1] :])
    if found[0].startswith('error: '):
        return found[:_MOST_LINES]
    # The message of an exception is the first line that is not indented.
    ends = (i for i, line in enumerate(found[1:], 1) if line and not line[0].isspace())
    return found[: next(ends, len(found)) + _FEW_LINES][-_MOST_LINES:]
