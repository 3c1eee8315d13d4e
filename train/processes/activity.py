"""Records what this process is doing, for its watchdog and for the hub of its run.

Code that calls a compiler, or waits for other processes, marks this with a context manager:

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
    """What a run is doing now. The run writes it, and the thread of the watchdog reads it.

    `place` is the title until the first phase or step begins.
    """

    def __init__(self, place: str = 'the start of the run') -> None:
        self.signs = self.steps = 0
        self.in_loop = False
        self._place = place
        self._phases: list[str] = []
        self._marks: list[tuple[int, str]] = []  # (thread, what it does), for all threads
        self._thread = threading.get_ident()

    @property
    def title(self) -> str:
        """The innermost phase; outside of phases, the step, or the start or end of the run."""
        phases = self._phases[-1:]  # a copy, because the other thread may change the list
        return phases[0] if phases else self._place

    @property
    def is_waiting(self) -> bool:
        """Whether the run waits for other processes, or for a thread that waits for them."""
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
        """Makes the body a phase with this title. In threads other than the run's, does nothing."""
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
        """Marks what the body does, in any thread. In the run's thread, its end is progress."""
        thread = threading.get_ident()
        self._marks.append((thread, what))
        try:
            yield
        finally:
            self._marks.remove((thread, what))
            if thread == self._thread:
                self.signs += 1

    def _is_marked(self, what: str) -> bool:
        """Whether the run's thread has this mark, or awaits threads and any thread has it."""
        marks = self._marks[:]
        awaits = (self._thread, _AWAITS_THREADS) in marks
        return any(mark == what and (awaits or of == self._thread) for of, mark in marks)

    def progress(self) -> None:
        """Counts a sign of progress of the current phase."""
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
    """Returns the activity of the run that began last in this process."""
    return _current[0]


def begin_activity(activity: Activity) -> None:
    """Makes an activity the current one."""
    _current[0] = activity


def waiting() -> contextlib.AbstractContextManager[None]:
    """Marks that the body waits for other processes, or for the devices of all processes."""
    return _current[0].marking(_WAITS)


def calling_compiler() -> contextlib.AbstractContextManager[None]:
    """Marks that the body compiles a program, or calls one that may have to be compiled first."""
    return _current[0].marking(_COMPILES)


def awaiting_threads() -> contextlib.AbstractContextManager[None]:
    """Marks that the body waits for other threads. If one waits or compiles, so does the run."""
    return _current[0].marking(_AWAITS_THREADS)


def wait_for_devices(arrays: Any) -> Any:
    """Calls `jax.block_until_ready`, and marks that the run waits."""
    with waiting():
        return jax.block_until_ready(arrays)
