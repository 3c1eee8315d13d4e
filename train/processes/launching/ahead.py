"""Compiles the programs for fewer processes while a run is under way, in case it loses some.

The restart then finds them among the compiled programs that the run keeps. Each number of processes
is tried by as many processes, as a restart would start them: on CPUs, the key of a program contains
the devices of its process. They have the lowest priority, and hold no array.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO

from train.processes.launching.endings import LineReader, failure_lines
from train.processes.launching.spares import FIRST_STEP, ONLY_COMPILES, Child

_LOWEST_PRIORITY = 19


class ProgramsAhead:
    """Compiles the programs for some numbers of processes, one number after the other.

    Args:
      counts: the numbers of processes, the likeliest first.
      start: a context that yields what each of as many processes runs, given their number.
      say: prints a line.
    """

    def __init__(
        self,
        counts: Iterable[int],
        start: Callable[[int], contextlib.AbstractContextManager[Sequence[Child]]],
        say: Callable[[str], None],
    ):
        self._counts, self._start, self._say = list(counts), start, say
        self._under_way = False
        self._running: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._open = contextlib.ExitStack()
        self._since = 0.0

    def begin(self, count: int) -> None:
        """Notes that an attempt begins with `count` processes."""
        self._counts = [one for one in self._counts if one < count]
        self._under_way = False

    def note(self, lines: Iterable[str]) -> None:
        """Notes what the run prints: nothing is compiled before its first step."""
        self._under_way = self._under_way or any(one.startswith(FIRST_STEP) for one in lines)

    def go_on(self) -> None:
        """Starts what is next, and says what is done. It does not wait."""
        if self._running:
            codes = [process.poll() for process, _ in self._running]
            if None not in codes or any(codes):
                self._finish(codes)
        elif self._counts and self._under_way:
            self._since = time.monotonic()
            for child in self._open.enter_context(self._start(self._counts[0])):
                output = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
                self._running.append((_start_in_background(child, output), output))

    def stop(self) -> None:
        """Ends what is not done, because the processors are needed, or the run has ended."""
        self._under_way = False
        for process, _ in self._running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running = []
        self._open.close()

    def _finish(self, codes: Sequence[int | None]) -> None:
        count = self._counts.pop(0)
        name = f'programs for {count} {"process" if count == 1 else "processes"}'
        if any(codes):
            failed = next(index for index, code in enumerate(codes) if code)
            why = _last_words(failed, self._running[failed][1])
            self._say(f'{name} cannot be compiled ahead: {why}')
        else:
            seconds = time.monotonic() - self._since
            self._say(f'{name} are compiled, in case others are lost ({seconds:.0f} s)')
        under_way = self._under_way
        self.stop()
        self._under_way = under_way


def _start_in_background(child: Child, output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Starts a process that only compiles. What it prints goes to a file."""
    process = subprocess.Popen(
        [*child.command, *child.arguments],
        env={**child.environment, ONLY_COMPILES: '1'},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # Threads that it starts later inherit the priority.
        os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
    return process


def _last_words(index: int, output: IO[bytes]) -> str:
    """The line of a process that explains why it failed."""
    output.seek(0)
    reader = LineReader(index)
    reader.feed(output.read())
    reader.close()
    lines = failure_lines(list(reader.last))
    if not lines:
        return 'it says nothing'
    return lines[0].removeprefix('error: ') if lines[0].startswith('error: ') else lines[-1]
