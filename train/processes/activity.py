"""What this process does, for its watchdog and for the hub of its run.

Whoever calls a compiler, or waits for other processes, says so where it does:

  with calling_compiler():
    program = lowered.compile()

The hub can then tell a process that keeps the others waiting from the processes that wait.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

_WAITS, _COMPILES, _AWAITS_THREADS = 'waits', 'compiles', 'awaits threads'


class Activity:
    """What a run does at the moment. The thread of the run writes it, and the watchdog reads it.

    Args:
      place: what it does before anything else is known.

    Attributes:
      signs: the number of signs of progress so far.
      steps: how many of them were steps of the training loop.
      in_loop: whether the run is in the training loop.
    """

    def __init__(self, place: str = 'the start of the run') -> None:
        self.signs = self.steps = 0
        self.in_loop = False
        self._place = place
        self._phases: list[str] = []
        self._marks: list[tuple[int, str]] = []  # a thread, and what it does; of all threads
        self._thread = threading.get_ident()

    @property
    def title(self) -> str:
        """The innermost phase, or else the step."""
        phases = self._phases[-1:]  # a copy, because the other thread may change the list
        return phases[0] if phases else self._place

    @property
    def is_waiting(self) -> bool:
        """Whether the run waits for other processes, or for a thread that does."""
        return self._is_marked(_WAITS)

    @property
    def is_compiling(self) -> bool:
        """Whether the run waits for a compiler, which may take any time."""
        return self._is_marked(_COMPILES)

    @property
    def in_step(self) -> bool:
        """Whether the run is in a step of the training loop, and in no other phase."""
        return self.in_loop and not self._phases

    @contextlib.contextmanager
    def doing(self, title: str) -> Iterator[None]:
        """Names what the body does. Phases of other threads have no names."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._phases.append(title)
        self.signs += 1
        try:
            yield
        finally:
            self._phases.pop()
            self.signs += 1

    @contextlib.contextmanager
    def marking(self, what: str) -> Iterator[None]:
        """Marks what the body does, in any thread. Its end is a sign of progress of the run."""
        thread = threading.get_ident()
        self._marks.append((thread, what))
        try:
            yield
        finally:
            self._marks.remove((thread, what))
            if thread == self._thread:
                self.signs += 1

    def _is_marked(self, what: str) -> bool:
        """Whether the thread of the run does something, or awaits a thread that does it."""
        marks = self._marks[:]
        awaits = (self._thread, _AWAITS_THREADS) in marks
        return any(mark == what and (awaits or of == self._thread) for of, mark in marks)

    def progress(self) -> None:
        """Notes that the current phase makes progress."""
        self.signs += 1

    def begin_step(self, step: int) -> None:
        """Notes that the training loop begins a step."""
        self._place, self.in_loop = f'step {step}', True
        self.steps += 1
        self.signs += 1

    def end_loop(self) -> None:
        """Notes that the training loop has ended."""
        self._place, self.in_loop = 'the end of the run', False
        self.signs += 1


_current = [Activity('the start of the process')]


def current_activity() -> Activity:
    """What this process does: the activity of the run that has begun last."""
    return _current[0]


def begin_activity(activity: Activity) -> None:
    """Makes an activity the current one."""
    _current[0] = activity


def waiting() -> contextlib.AbstractContextManager[None]:
    """Says that the body waits for other processes, or for the devices of all of them."""
    return _current[0].marking(_WAITS)


def calling_compiler() -> contextlib.AbstractContextManager[None]:
    """Says that the body compiles a program, or calls one that may have to be compiled first."""
    return _current[0].marking(_COMPILES)


def awaiting_threads() -> contextlib.AbstractContextManager[None]:
    """Says that the body waits for other threads: the run waits or compiles if one of them does."""
    return _current[0].marking(_AWAITS_THREADS)


def wait_for_devices(arrays: Any) -> Any:
    """Waits for arrays like `jax.block_until_ready`, and says that it waits."""
    with waiting():
        return jax.block_until_ready(arrays)
