"""What the processes of a run print, as whole lines, how they end, and which one is the cause."""

from __future__ import annotations

import collections
import dataclasses
import os
import select
import signal
from collections.abc import Sequence

from partitioning.untrusted_text import printable
from train.processes.output import enumerated
from train.processes.signals import RESTARTABLE

# A longer line is printed in pieces.
MAX_LINE_BYTES = 64 * 1024
# Children are not read while more than this waits to be printed.
MAX_PENDING_BYTES = 256 * 1024
# What is kept of each process, to explain its end.
LAST_LINES = 200
# cyan, yellow, green, magenta, blue, and their bright forms
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class LineReader:
    """Puts the output of one process together, line by line. `last` has the last lines.

    Lines may begin with the index of the process, such as `[2] `; it is removed.
    """

    def __init__(self, process: int) -> None:
        self._begun, self._prefix = b'', f'[{process}] '
        self.last: collections.deque[str] = collections.deque(maxlen=LAST_LINES)

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that these bytes complete."""
        *whole, self._begun = (self._begun + data).split(b'\n')
        while len(self._begun) > MAX_LINE_BYTES:
            whole.append(self._begun[:MAX_LINE_BYTES])
            self._begun = self._begun[MAX_LINE_BYTES:]
        return self._note(whole)

    def close(self) -> list[str]:
        """Returns the line that has no end, if there is one."""
        begun, self._begun = self._begun, b''
        return self._note([begun] if begun else [])

    def _note(self, lines: list[bytes]) -> list[str]:
        """Keeps what a terminal would show of lines, without control characters except tabs."""
        texts = []
        for line in lines:
            # A carriage return starts the line anew, as progress bars do.
            shown = line.rstrip(b'\r').rpartition(b'\r')[2].decode(errors='replace')
            shown = '\t'.join(map(printable, shown.split('\t')))
            texts.append(shown.removeprefix(self._prefix))
        self.last.extend(texts)
        return texts


def prefixed(process: int, line: str, colour: bool = False) -> str:
    """Returns a line that begins with the index of its process, such as `[2] `.

    `colour` says whether the index has the colour of its process.
    """
    index = f'[{process}]'
    if colour:
        index = f'\x1b[{_COLOURS[process % len(_COLOURS)]}m{index}\x1b[0m'
    return f'{index} {line}'.rstrip()


class Printer:
    """Prints lines without ever waiting for the terminal or the pipe that receives them."""

    def __init__(self, fd: int = 1):
        self.fd = fd
        self._colour = os.isatty(fd) and 'NO_COLOR' not in os.environ
        self._pending = bytearray()
        self._closed = False

    @property
    def is_busy(self) -> bool:
        """Whether something waits to be printed."""
        return bool(self._pending)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that the children should wait, too."""
        return len(self._pending) > MAX_PENDING_BYTES

    def add(self, process: int, lines: list[str]) -> None:
        if not self._closed:
            text = ''.join(f'{prefixed(process, line, self._colour)}\n' for line in lines)
            self._pending += text.encode()

    def say(self, line: str) -> None:
        """Prints a line of the launcher itself."""
        if not self._closed:
            self._pending += f'{line}\n'.encode()

    def write(self) -> None:
        """Prints some of it. Call it when the file descriptor can be written."""
        try:
            written = os.write(self.fd, self._pending[: select.PIPE_BUF])
        except BlockingIOError:
            return
        except OSError:  # The terminal has been closed, or the program that reads has ended.
            self.discard()
            return
        del self._pending[:written]

    def discard(self) -> None:
        """Prints nothing any more, so that the run can save its state."""
        self._closed = True
        self._pending.clear()


# How many lines of a process are repeated at the end to explain its failure.
_MOST_LINES, _FEW_LINES = 40, 3
# What a process does when another one has failed: it ends itself with 75, or jax aborts it.
_CONSEQUENCES = (RESTARTABLE, -signal.SIGABRT)


@dataclasses.dataclass(frozen=True)
class ProcessEnd:
    """The end of one process.

    Attributes:
      code: its exit code, or the negative number of the signal that killed it.
      sent: the last signal that the launcher had sent to it in order to end it, if any.
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
      stopped_by: the signal with which the user has stopped the launcher, if any.
      failed_at: when the first failure was seen, by `time.monotonic`.
    """

    ends: tuple[ProcessEnd, ...]
    stopped_by: signal.Signals | None = None
    failed_at: float | None = None


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
