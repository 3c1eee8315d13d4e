"""How long a run takes to its first step, and what it does in that time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from train.reporting.reports import format_seconds

_WORTH_NAMING = 0.05  # seconds

# When the process began that a command runs in, on the clock of `time.perf_counter`. A program of
# someone's own that calls the trainer has its own beginning.
_began: list[float] = []


def note_start_of_process() -> None:
    """Notes that this process was started for one run, whose time therefore begins with it."""
    _began[:] = [time.perf_counter() - _age_of_process()]


class StartClock:
    """Measures the time from the start of a run to the end of its first step."""

    def __init__(self) -> None:
        now = time.perf_counter()
        self._began = _began.pop() if _began else now
        self._imports = now - self._began

    def report(self, phases: Mapping[str, float]) -> tuple[str, dict[str, float]]:
        """Returns the time until now as a line, and as metrics.

        Args:
          phases: the seconds of each phase of the start, in their order.
        """
        total = time.perf_counter() - self._began
        parts = {'imports': self._imports, **phases}
        rest = total - sum(parts.values())
        shown = [
            f'{name} {format_seconds(seconds)}'
            for name, seconds in {**parts, 'the rest': rest}.items()
            if seconds > _WORTH_NAMING
        ]
        metrics = {f'start/seconds_{n.replace(" ", "_")}': s for n, s in parts.items() if s}
        line = f'first step after {format_seconds(total)}'
        return ': '.join([line, ', '.join(shown)] if shown else [line]), {
            'start/seconds_to_first_step': total,
            **metrics,
        }


def _age_of_process() -> float:
    """The seconds since this process was started, or since Python noted a time, without Linux."""
    try:
        fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        booted = float(Path('/proc/uptime').read_text().split()[0])
        return booted - int(fields[19]) / os.sysconf('SC_CLK_TCK')
    except (OSError, ValueError, IndexError):
        return time.process_time()
