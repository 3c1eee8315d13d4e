"""Compiles functions with changes, each once, and no longer than somebody wants to wait."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

from meshwright.advice.figures import Measured
from meshwright.jax_private import TracedCall


class Trials:
    """Compiles functions with changes, as long as there is time.

    Args:
      compile: compiles a function; returns its figures, or None if it has none, and the seconds.
      expected: how long a function takes to compile, in seconds.
      seconds: how long all functions may take together. One that begins in time is finished.
    """

    def __init__(
        self,
        compile: Callable[[TracedCall], tuple[Measured | None, float]],
        expected: float,
        seconds: float,
    ):
        self._compile, self._expected, self._left = compile, expected, seconds
        self._known: dict[str, Measured | None] = {}

    @property
    def is_over(self) -> bool:
        """Whether there is too little time for another function."""
        return self._expected > self._left

    def measure(self, call: TracedCall) -> Measured | None:
        """The figures of a function; None if it has none."""
        key = ''
        with contextlib.suppress(Exception):  # an error belongs to compiling
            key = _digest(call)
        if not key or key not in self._known:
            self._known[key], seconds = self._compile(call)
            self._left -= seconds
        return self._known[key]


def _digest(call: TracedCall) -> str:
    """What two functions have in common if their programs are equal."""
    jaxpr = call.jaxpr.pretty_print(use_color=False)
    layouts = [repr(one) for one in (*call.arguments, *call.results)]
    return hashlib.sha256('\n'.join([jaxpr, *layouts]).encode()).hexdigest()
