"""When a dry run ends: after enough steps, or after a long time without anything new."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Literal

from meshwright.dry.compiling import CompiledFunction
from meshwright.dry.lines import line_of_script

# 'steps': the largest training step was called often enough. 'script': the script came to its end.
# 'memory': a function does not fit, so that the layout of its results is not known. 'waited':
# nothing was compiled for a long time. 'refused': a call cannot be imitated.
Ending = Literal['steps', 'script', 'exit', 'memory', 'waited', 'refused', 'error']

# A script that only evaluates a model ends after more calls: its training step may come later.
_CALLS_WITHOUT_TRAINING = 500
_AGAIN = 5.0  # seconds until a run is told again that it ends


class EndOfRun(BaseException):
    """Ends a script from inside; it is no Exception, so that scripts do not catch it.

    Attributes:
      ending: why.
      at: the function whose call ended the run, if one did.
      message: the line of the script that waited, or what cannot be imitated.
    """

    def __init__(self, ending: Ending, at: CompiledFunction | None = None, message: str = ''):
        super().__init__(message or ending)
        self.ending = ending
        self.at = at
        self.message = message


class Ends:
    """Decides when a run ends.

    Args:
      steps: after how many calls of the largest training step. It is the function with the most
        FLOPs of those that were called and that train, with gradients if one has some; a run
        without one ends after 500 times as many calls of its largest function.
      wait: after how many seconds in which nothing was compiled.
    """

    def __init__(self, steps: int, wait: float):
        self._steps = steps
        self._wait = wait
        self._process = os.getpid()
        self._end: EndOfRun | None = None

    def in_script(self) -> bool:
        """Whether this is the process of the script, and not a copy of it that the script made."""
        return os.getpid() == self._process

    def end(self, end: EndOfRun) -> None:
        """Ends the run from any thread of the script."""
        if not self.in_script():
            return
        if threading.current_thread() is threading.main_thread():
            raise end
        self._end = end
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        raise SystemExit  # ends this thread without a word

    def on_call(self, found: CompiledFunction, functions: Sequence[CompiledFunction]) -> None:
        """Ends the run if a function was called often enough."""
        called = [one for one in functions if one.calls and one.flops]
        trained = [one for one in called if one.trains]
        with_gradients = [one for one in called if one.has_backward_pass]
        counted = with_gradients or trained or called
        if found not in counted or found.flops < max(one.flops for one in counted):
            return
        needed = self._steps * (1 if trained else _CALLS_WITHOUT_TRAINING)
        if trained and not with_gradients:
            # What makes a state of loaded parameters returns them, too, but is called only once.
            needed = max(needed, 2)
        if sum(one.calls for one in called if one.source == found.source) >= needed:
            self.end(EndOfRun('steps', found))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Ends what is inside if it waits too long; for the main thread of a process."""
        before = signal.signal(signal.SIGALRM, self._on_alarm)
        self._start_to_wait()
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """What is inside takes as long as it takes, and the waiting starts again after it."""
        if not self.in_script():
            yield
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            yield
        finally:
            self._start_to_wait()

    def _start_to_wait(self) -> None:
        # Python ignores what is raised in some places, such as the collection of garbage.
        signal.setitimer(signal.ITIMER_REAL, self._wait, _AGAIN)

    def _on_alarm(self, _: int, frame: FrameType | None) -> None:
        raise self._end or EndOfRun('waited', message=line_of_script(frame))
