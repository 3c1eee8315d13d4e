"""Traces of some steps of a run, for TensorBoard or Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import jax


class Profiler:
    """Traces a range of steps. It stops the trace if the run ends inside the range.

    Args:
      directory: the folder of the trace.
      steps: the first and the last step to trace, or None.
    """

    def __init__(self, directory: Any, steps: Sequence[int] | None):
        self._directory, self._steps, self._tracing = directory, steps, False

    def before(self, step: int) -> None:
        """Starts the trace before its first step."""
        if self._steps is not None and step == self._steps[0]:
            jax.profiler.start_trace(str(self._directory))
            self._tracing = True

    def after(self, step: int, state: Any) -> None:
        """Ends the trace after its last step, whose work it waits for."""
        if self._tracing and self._steps is not None and step == self._steps[1]:
            jax.block_until_ready(state)
            self._stop()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tracing:
            self._stop()

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._tracing = False
