"""Signals that end a run: SIGTERM, SIGINT (Ctrl-C) and SIGHUP, and the error that they raise.

While there is nothing to save, a signal raises `Interrupted` at once. Later it is only noted, and
the training loop asks for it after each step. In a run of several processes, a signal to any of
them is forwarded to the hub, which stops all of them at the same place; see `member.py`. It is then
delivered to each of them there.

Python runs handlers of signals between two of its own instructions, in the main thread. A program
of another language, such as a compiler, would delay them for minutes. A command therefore also has
a thread that receives the number of each signal at once, and ends the process if the main thread
does not.

This module is imported before all others, so it imports nothing that takes time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from train.processes import output

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The exit codes of a command that a signal has ended with work left. 75 is EX_TEMPFAIL of
# sysexits.h, by which schedulers know to start it again; 130 is what shells report after Ctrl-C.
RESTARTABLE, AFTER_CTRL_C = 75, 130
# When a run ends, as messages say it.
NOTHING_TO_SAVE = 'with nothing new to save'
AT_ONCE = 'at once, because it is the second signal'


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


def how_to_resume() -> str:
    """What one does to resume, as the end of a line."""
    return f'; resume with: {handling.command}' if handling.command else ''


# ---- the state of this process

# Programs such as GNU timeout, and terminals that close, send a signal twice. That counts as one.
SECONDS_OF_ONE_REQUEST = 0.5
# How long a command with nothing to save may take to remove its unfinished files.
SECONDS_TO_CLEAN_UP = 5.0
# How long after an error that Python has ignored a signal is sent again: after the destructor.
SECONDS_UNTIL_AGAIN = 0.05


class Handling:
    """How this process handles signals.

    Attributes:
      command: the command that this process runs, as one would type it again, or None.
      watched: whether the thread watches the signals of a command.
      forward: tells the other processes of a run of a signal, and whether it is the second one.
      leave: waits until all processes of a run are done.
      final_code: the exit code of a command that is done.
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
        self.command: str | None = None
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


# ---- what the run calls


def received() -> signal.Signals | None:
    """The signal that asks the run to end, or None, also where signals are not handled."""
    return handling.received if handling.active else None


@contextlib.contextmanager
def handle() -> Iterator[None]:
    """Handles signals in a context, and afterwards leaves them to the earlier handlers.

    It has no effect outside the main thread. Another such context may be around it. Raises an
    Interrupted if a signal arrives while there is nothing to save.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if handling.active:
        with _without_disguise():
            yield
        return
    previous, hook = _install(), sys.unraisablehook
    sys.unraisablehook = _raise_again(hook)
    try:
        with _without_disguise():
            yield
    finally:
        handling.active = False
        sys.unraisablehook = hook
        for signum, handler in previous.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def _without_disguise() -> Iterator[None]:
    """Raises `Interrupted` again where a library has turned it into another error.

    Modules that are not written in Python do so while they are imported, for example.
    """
    try:
        yield
    except Exception as error:
        number = received()
        if number is not None and not handling.saves:
            raise Interrupted(number) from error
        raise


def handle_until_exit() -> None:
    """Handles signals in the rest of a process that runs one command."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handling.watched = True
    threading.Thread(target=_watch, args=(reader,), name='signals', daemon=True).start()
    _install()
    sys.unraisablehook = _raise_again(sys.unraisablehook)


def share(forward: Callable[[int, bool], None], leave: Callable[[], None]) -> None:
    """Forwards signals from now on, instead of acting on them, in a run of several processes.

    Args:
      forward: receives the number of a signal, and whether it is the second one.
      leave: waits until all processes are done, before the process of a command ends.
    """
    handling.forward, handling.leave = forward, leave


def deliver(signum: int, receiver: int) -> None:
    """Acts on a signal that one of the processes has received. The main thread calls it.

    Raises an Interrupted if there is nothing to save, or the caller can be interrupted.
    """
    if handling.active and handling.received is None:
        handling.received, handling.receiver = signal.Signals(signum), receiver
    if handling.interruptible or not handling.saves:
        _raise_if_received()


def saves() -> bool:
    """Whether there is a state to save, so that a signal is only noted."""
    return handling.active and handling.saves


def leave_to_others() -> None:
    """Ends the handling of signals, in a process that was forked."""
    if handling.active:
        signal.set_wakeup_fd(-1)
        handling.active = handling.watched = False
        for signum in SIGNALS:
            if signal.getsignal(signum) is _note:
                is_ctrl_c = signum == signal.SIGINT
                signal.signal(signum, signal.default_int_handler if is_ctrl_c else signal.SIG_DFL)


# A child, such as a worker that reads data, does not handle the signals of the run.
os.register_at_fork(after_in_child=leave_to_others)


def defer() -> None:
    """Notes signals from now on, because there is a state to save.

    Raises an Interrupted if there was a signal already.
    """
    if handling.active:
        handling.saves = True
        _raise_if_received()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets a signal end the body of a context, also after `defer`.

    Raises an Interrupted if there is a signal during the body, or was one before it.
    """
    if not handling.active:
        yield
        return
    _raise_if_received()
    handling.interruptible = True
    try:
        yield
    finally:
        handling.interruptible = False


def end_process(code: int) -> int:
    """Ends the process of a command with an exit code, or returns the code in any other process.

    It does not wait for threads that nothing can stop, such as the threads of a compiler.
    """
    if not handling.watched:
        return code
    if handling.leave is not None:
        handling.leave()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def finish(code: int) -> None:
    """Ignores signals from now on in a command whose work is done, and will end with this code."""
    if handling.watched:
        handling.final_code = code
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)


def _install() -> dict[int, Any]:
    """Installs the handlers, and returns the previous ones. What `nohup` ignores stays ignored."""
    handling.reset()
    handling.active = True
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return {s: signal.signal(s, _note) for s in SIGNALS if s != signal.SIGHUP or not is_ignored}


def _note(signum: int, frame: FrameType | None) -> None:
    """Handles a signal in the main thread."""
    now, is_first = time.monotonic(), handling.received is None
    if signum == signal.SIGHUP:
        for fd in handling.terminals:
            if not os.isatty(fd):  # It has been closed, so printing to it would be an error.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, fd)
                os.close(nowhere)
    if handling.forward is not None:
        if not handling.watched:
            # Another thread, because this one may be interrupted while it sends something else.
            threading.Thread(target=forward_signal, args=(signum,), daemon=True).start()
        return
    if is_first or handling.lost:
        if is_first:
            handling.received, handling.received_at = signal.Signals(signum), now
        handling.lost = False
        if handling.interruptible or not handling.saves:
            _raise_if_received()
    elif not handling.watched and now - handling.received_at >= SECONDS_OF_ONE_REQUEST:
        raise KeyboardInterrupt(str(Interrupted(signum, AT_ONCE)))


def _raise_again(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A hook for errors that Python ignores: `Interrupted` is raised again, outside of the place.

    Such places are destructors, and functions that are called when garbage is collected.
    """

    def note(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, Interrupted):
            handling.lost = True
            main, signum = threading.main_thread().ident, unraisable.exc_value.signal
            again = threading.Timer(SECONDS_UNTIL_AGAIN, signal.pthread_kill, (main, signum))
            again.daemon = True
            again.start()
        else:
            hook(unraisable)

    return note


def _raise_if_received() -> None:
    if handling.received is not None:
        raise Interrupted(handling.received, by=handling.receiver)


# ---- the thread


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

    `reader` is the file descriptor from which the number of each signal can be read, a byte each.
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
