"""Starts processes, prints what they print, and ends all of them when one fails."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from train.processes.launching.ahead import ProgramsAhead
from train.processes.launching.endings import Attempt, LineReader, Printer, ProcessEnd
from train.processes.launching.spares import Child, Spares
from train.processes.signals import SECONDS_OF_ONE_REQUEST, SIGNALS

# The time between SIGTERM and SIGKILL.
SECONDS_AFTER_SIGTERM = 5.0
# A signal or a line ends the wait of the loop; this is in case one is missed.
_SECONDS_TO_WAIT = 1.0
# How much is read at once, in bytes, and how often from a process that has ended: enough for all
# that it can have left in its pipe, and not forever if a program that it has started still writes.
_READ_BYTES, _LAST_READS = 64 * 1024, 16


def supervise(
    children: Sequence[Child],
    printer: Printer,
    inbox: int,
    *,
    grace_seconds: float,
    spares: Spares | None = None,
    ahead: ProgramsAhead | None = None,
) -> Attempt:
    """Runs processes until all have ended. Whatever happens, none of them is left behind.

    Args:
      inbox: where signals are read, as `signal_inbox` yields it. The first one is passed on to the
        first process that still runs, and is expected to end all; the second one kills all.
      grace_seconds: how long the others may take to end by themselves after a failure.
      spares: processes that are ready to become one of the run, and those for the next time.
      ahead: what is compiled during the run.
    """
    supervisor = _Supervisor(printer, inbox, grace_seconds, spares, ahead)
    try:
        if spares is not None:
            spares.begin()
        if ahead is not None:
            ahead.begin(len(children))
        for index, child in enumerate(children):
            spare = None if spares is None else spares.take(child.arguments, child.environment)
            supervisor.processes.append(_Process(index, child, spare))
        supervisor.run()
    finally:
        if ahead is not None:
            ahead.stop()
        for process in supervisor.processes:
            process.send(signal.SIGKILL)
            process.finish()
    return Attempt(tuple(supervisor.ends), supervisor.stopped_by, supervisor.failed_at)


class _Process:
    """A process that was started.

    `output` is the file descriptor of the pipe with its output, or None when that is closed.
    """

    def __init__(self, index: int, child: Child, spare: subprocess.Popen[bytes] | None = None):
        self.index = index
        self._popen = spare or subprocess.Popen(
            [*child.command, *child.arguments],
            env=child.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # one pipe, so that the order of all lines is kept
            bufsize=0,
            start_new_session=True,  # Ctrl-C in a terminal reaches the launcher only.
        )
        assert self._popen.stdout is not None
        self._pipe = self._popen.stdout
        os.set_blocking(self._pipe.fileno(), False)
        self._lines = LineReader(index)
        self.output: int | None = self._pipe.fileno()
        self.sent: signal.Signals | None = None
        self.end: ProcessEnd | None = None

    def read(self) -> list[str]:
        """Returns the lines that are complete by now. It does not wait."""
        if self.output is None:
            return []
        try:
            data = os.read(self.output, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            self._pipe.close()
            self.output = None
        return self._lines.feed(data)

    def has_ended(self) -> bool:
        """Whether the process has ended. No other one gets its number before `finish`."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.end is None and os.waitid(os.P_PID, self._popen.pid, flags) is not None

    def finish(self) -> list[str]:
        """Waits for the end, kills what the process has left behind, and returns its last lines."""
        if self.end is not None:
            return []
        os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOWAIT)
        self._kill_group()
        lines = [line for _ in range(_LAST_READS) for line in self.read()] + self._lines.close()
        self._pipe.close()
        self.output = None
        code = self._popen.wait()
        self.end = ProcessEnd(self.index, code, self.sent, tuple(self._lines.last))
        return lines

    def send(self, signum: signal.Signals) -> None:
        """Sends a signal, if the process runs. SIGKILL also reaches what it has started."""
        if self.end is not None:
            return
        if signum == signal.SIGKILL:
            self._kill_group()
        else:
            os.kill(self._popen.pid, signum)

    def _kill_group(self) -> None:
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # it has just begun, or ended
            os.killpg(self._popen.pid, signal.SIGKILL)


class _Supervisor:
    """The loop that watches the processes of one attempt."""

    def __init__(
        self,
        printer: Printer,
        inbox: int,
        grace_seconds: float,
        spares: Spares | None,
        ahead: ProgramsAhead | None,
    ):
        self._printer, self._inbox, self._grace = printer, inbox, grace_seconds
        self._spares, self._ahead = spares, ahead
        self.processes: list[_Process] = []
        self.ends: list[ProcessEnd] = []
        self.stopped_by: signal.Signals | None = None
        self._stopped_at = 0.0
        self.failed_at: float | None = None

    @property
    def _running(self) -> list[_Process]:
        return [process for process in self.processes if process.end is None]

    def run(self) -> None:
        """Returns when all processes have ended, and all of their lines are printed."""
        while self._running or self._printer.is_busy:
            self._pass_lines_on()
            for signum in read_inbox(self._inbox):
                self._obey(signal.Signals(signum))
            self._note_ends()
            self._end_others()
            goes_on = self.failed_at is None and self.stopped_by is None
            if self._spares is not None and goes_on:
                self._spares.keep_ready()
            if self._ahead is not None:
                (self._ahead.go_on if goes_on else self._ahead.stop)()

    def _pass_lines_on(self) -> None:
        """Waits until something happens, and reads and prints lines."""
        sources = {p.output: p for p in self._running if p.output is not None}
        if self._printer.is_full:
            sources = {}
        targets = [self._printer.fd] if self._printer.is_busy else []
        wait = _SECONDS_TO_WAIT
        if self.failed_at is not None:
            ends_at = (self.failed_at + self._grace + s for s in (0.0, SECONDS_AFTER_SIGTERM))
            left = (end - time.monotonic() for end in ends_at)
            wait = min([wait, *(seconds for seconds in left if seconds > 0)])
        readable, writable, _ = select.select([self._inbox, *sources], targets, [], wait)
        if writable:
            self._printer.write()
        for fd in readable:
            if fd in sources:
                lines = sources[fd].read()
                self._printer.add(sources[fd].index, lines)
                if self._ahead is not None:
                    self._ahead.note(lines)

    def _obey(self, signum: signal.Signals) -> None:
        """Stops the run after the first signal, and kills it after the second one."""
        now = time.monotonic()
        if self.stopped_by is None:
            self.stopped_by, self._stopped_at = signum, now
            for process in self._running[:1]:
                # The processes have no terminal, so SIGHUP reaches them as SIGTERM.
                process.send(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
        elif now - self._stopped_at >= SECONDS_OF_ONE_REQUEST:
            if not self._running:
                self._printer.discard()  # The lines are all that is left to wait for.
            self._end_all(signal.SIGKILL)

    def _note_ends(self) -> None:
        for process in self._running:
            if process.has_ended():
                self._printer.add(process.index, process.finish())
                assert process.end is not None
                self.ends.append(process.end)
                if process.end.code != 0 and self.failed_at is None:
                    self.failed_at = time.monotonic()

    def _end_others(self) -> None:
        """Ends the processes that do not end by themselves after a failure."""
        if self.failed_at is None:
            return
        seconds = time.monotonic() - self.failed_at - self._grace
        if seconds >= SECONDS_AFTER_SIGTERM:
            self._end_all(signal.SIGKILL)
        elif seconds >= 0:
            self._end_all(signal.SIGTERM)

    def _end_all(self, signum: signal.Signals) -> None:
        for process in self._running:
            if process.sent != signum:
                process.send(signum)
                process.sent = signum


# ---- signals


@contextlib.contextmanager
def signal_inbox() -> Iterator[int]:
    """Handles the signals that end a run, and the ends of children, in a context.

    A SIGHUP that is ignored, as under `nohup`, stays ignored. Use it in the main thread.

    Yields:
      A file descriptor that never blocks. Each byte that is read from it is a signal's number.
    """
    assert threading.current_thread() is threading.main_thread()
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    handled = [signal.SIGCHLD, *SIGNALS]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handled.remove(signal.SIGHUP)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    previous = {signum: signal.signal(signum, _pass) for signum in handled}
    try:
        yield reader
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _pass(signum: int, frame: FrameType | None) -> None:
    """Its presence alone makes Python write the number."""


def read_inbox(reader: int) -> list[int]:
    """Returns the signals since the last call, except signals about children."""
    with contextlib.suppress(BlockingIOError):
        return [signum for signum in os.read(reader, 4096) if signum in SIGNALS]
    return []
