"""Says why a function sends what it sends, and holds what it holds."""

from __future__ import annotations

from typing import Any

from meshwright.forecasting import forecast
from meshwright.report.explained import Explained, explain_forecast
from partitioning.tracebacks import hide_own_frames


@hide_own_frames
def explain(fn: Any, *args: Any, **settings: Any) -> Explained:
    """Returns the exchanges and largest buffers of a call, with their lines and what to change.

    Usage:
      found = mw.explain(train_step, state, batch)
      print(found)                       # or the last line of a cell in a notebook
      for row in found.exchanges:
          print(row.kind, row.axes, row.nbytes, row.line, row.why, row.change)

    Args:
      fn, *args: a function and the arguments of a call, as for `forecast`.
      **settings: more arguments of `forecast`, such as topology='v5p:4x4x4', or axes.

    Raises:
      ValueError: as in `forecast`.
    """
    return explain_forecast(forecast(fn, *args, **settings))
