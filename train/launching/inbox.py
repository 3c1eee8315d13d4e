"""The signals of the launcher, as numbers that its loop reads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from train.processes.interrupted import SIGNALS


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
    """Returns the signals since the last call, except those of children."""
    with contextlib.suppress(BlockingIOError):
        return [signum for signum in os.read(reader, 4096) if signum in SIGNALS]
    return []
