"""The signals that end a run, the error that they raise, and the thread that watches them.

Python runs handlers of signals between two of its own instructions, in the main thread. A program
of another language, such as a compiler, would delay them for minutes. The thread receives the
number of each signal at once, and ends the process if the main thread does not.

This module is imported before all others, so it imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from train.processes import output

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit codes of a command that a signal has ended with work left. 75 is EX_TEMPFAIL of
# sysexits.h, by which schedulers know to start it again; 130 is what shells report after Ctrl-C.
RESTARTABLE, AFTER_CTRL_C = 75, 130
# When a run ends, as messages say it.
NOTHING_TO_SAVE = 'with nothing new to save'
AT_ONCE = 'at once, because it is the second signal'

_command: list[str] = []


class Interrupted(KeyboardInterrupt):
    """A signal has ended a run that has work left.

    Args:
      signum: the signal.
      when: when it ended, and what has been saved.
      by: the process that received the signal, in a run of several.

    Attributes:
      signal: the signal.
      exit_code: the exit code of a command that ends with it.
    """

    def __init__(self, signum: int, when: str = NOTHING_TO_SAVE, by: int | None = None):
        self.signal = signal.Signals(signum)
        self.exit_code = exit_code_after(signum)
        to = '' if by is None else f' to process {by}'
        super().__init__(f'stopped by {self.signal.name}{to} {when}')


def exit_code_after(signum: int) -> int:
    """The exit code of a command that a signal has ended with work left."""
    return AFTER_CTRL_C if signum == signal.SIGINT else RESTARTABLE


def note_command(command: str) -> None:
    """Notes the command that this process runs, as one would type it again."""
    _command[:] = [command]


def how_to_resume() -> str:
    """What one does to resume, as the end of a line."""
    return f'; resume with: {_command[0]}' if _command else ''


# ---- the state of this process, and the thread

# Programs such as GNU timeout, and terminals that close, send a signal twice. That counts as one.
SECONDS_OF_ONE_REQUEST = 0.5
# How long a command with nothing to save may take to remove its unfinished files.
SECONDS_TO_CLEAN_UP = 5.0


class Handling:
    """How this process handles signals.

    Attributes:
      active: whether the handlers are installed.
      watched: whether the thread watches the signals of a command.
      forward: tells the other processes of a run of a signal, and whether it is the second one.
      leave: waits until all processes of a run are done.
      final_code: the exit code of a command that is done.
      received: the first signal, or None.
      received_at: its time on the clock of `time.monotonic`.
      receiver: the process that received it, in a run of several.
      forwarded_at: the time at which the first signal was forwarded, or None.
      saves: whether there is a state to save, so that a signal is only noted.
      interruptible: whether a signal raises `Interrupted` nevertheless.
      lost: whether `Interrupted` was raised where Python ignores errors, so that it comes again.
      terminals: the file descriptors of the output that are terminals.
    """

    def __init__(self) -> None:
        self.active = self.watched = False
        self.forward: Callable[[int, bool], None] | None = None
        self.leave: Callable[[], None] | None = None
        self.final_code: int | None = None
        self.reset()

    def reset(self) -> None:
        """Forgets the signals of an earlier run."""
        self.received: signal.Signals | None = None
        self.received_at = 0.0
        self.receiver: int | None = None
        self.forwarded_at: float | None = None
        self.saves = self.interruptible = self.lost = False
        self.terminals = [fd for fd in (1, 2) if os.isatty(fd)]


handling = Handling()


def watch_signals() -> None:
    """Starts the thread, which runs until the process ends."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handling.watched = True
    threading.Thread(target=_watch, args=(reader,), name='signals', daemon=True).start()


def forward_signal(signum: int) -> bool:
    """Tells the other processes of a signal, and returns whether it is the second one."""
    assert handling.forward is not None
    now, first = time.monotonic(), handling.forwarded_at
    if first is None:
        handling.forwarded_at = now
        handling.forward(signum, False)
    elif now - first >= SECONDS_OF_ONE_REQUEST:
        handling.forward(signum, True)
        return True
    return False


def _watch(reader: int) -> None:
    """Ends a command after a second signal, or if it does not end by itself after the first.

    Args:
      reader: the file descriptor from which the number of each signal can be read, a byte each.
    """
    first_at = None
    while True:
        signum = os.read(reader, 1)[0]
        if signum not in SIGNALS:
            continue
        if handling.forward is not None:
            if forward_signal(signum):
                # The hub ends all processes, but this one ends in any case.
                time.sleep(SECONDS_TO_CLEAN_UP)
                _end_now(Interrupted(signum, AT_ONCE))
        elif first_at is None:
            first_at = time.monotonic()
            threading.Thread(target=_end_soon, args=(signum,), daemon=True).start()
        elif time.monotonic() - first_at >= SECONDS_OF_ONE_REQUEST:
            _end_now(Interrupted(signum, AT_ONCE))


def _end_soon(signum: int) -> None:
    """Ends a command with nothing to save if the main thread does not, because it compiles."""
    time.sleep(SECONDS_TO_CLEAN_UP)
    if not handling.saves:
        _end_now(Interrupted(signum))


def _end_now(reason: Interrupted) -> NoReturn:
    if 1 in handling.terminals:
        with contextlib.suppress(OSError):
            os.write(1, b'\x1b[?25h\n')  # A progress bar has hidden the cursor.
    output.print_error(f'{reason}{how_to_resume()}')
    os._exit(reason.exit_code)
