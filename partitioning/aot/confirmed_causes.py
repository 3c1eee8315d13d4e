"""The changes that the causes in a forecast suggest, confirmed by compiling with them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

from partitioning.aot.blame import Cause, Change, CompiledFunction, try_change
from partitioning.aot.preparing.compiler_warnings import read_compiler_log
from partitioning.aot.preparing.compiling import without_cache
from partitioning.aot.report import Forecast
from partitioning.aot.user_lines import shorten_sources

_Subject = TypeVar('_Subject')
_MOST = 3  # compilations

Progress = Callable[[str], None]


def confirm_causes(forecast: Forecast, function: CompiledFunction, progress: Progress) -> Forecast:
    """Compiles with the changes of the largest avoidable causes, and notes whether they help.

    A change helps if it saves more exchanged bytes and memory than it costs.

    Args:
      forecast: the forecast of the function.
      function: the function.
      progress: receives a text when a compilation begins.

    Returns:
      The forecast, where each cause with a change that was compiled is confirmed or not.
    """
    confirmed: dict[Change, bool] = {}
    with read_compiler_log(), without_cache():
        for change in _largest_changes(forecast)[:_MOST]:
            progress(f'compiling {forecast.function} again: {shorten_sources(str(change))}')
            result = try_change(function, change)
            if result is not None:
                confirmed[change] = result.helps
    memory = dataclasses.replace(forecast.memory, buffers=_mark(forecast.memory.buffers, confirmed))
    collectives = _mark(forecast.collectives, confirmed)
    return dataclasses.replace(forecast, memory=memory, collectives=collectives)


def _largest_changes(forecast: Forecast) -> list[Change]:
    """The first change of each avoidable cause, that of most bytes first."""
    sizes: dict[Change, float] = collections.defaultdict(float)
    found = [(cause, collective.total_bytes) for collective, cause in forecast.collectives]
    for cause, nbytes in [*found, *((c, array.nbytes) for array, c in forecast.memory.buffers)]:
        if cause is not None and cause.avoidable and cause.candidates:
            sizes[cause.candidates[0]] += nbytes
    return sorted(sizes, key=lambda change: -sizes[change])


def _mark(
    pairs: tuple[tuple[_Subject, Cause | None], ...], confirmed: Mapping[Change, bool]
) -> tuple[tuple[_Subject, Cause | None], ...]:
    """Exchanges or buffers, whose causes know whether their change helps."""

    def mark(cause: Cause | None) -> Cause | None:
        if cause is None or not cause.candidates or cause.candidates[0] not in confirmed:
            return cause
        return dataclasses.replace(cause, confirmed=confirmed[cause.candidates[0]])

    return tuple((subject, mark(cause)) for subject, cause in pairs)
