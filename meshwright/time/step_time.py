"""The time of a step, as a figure with a range, and what it is made of."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant:
    """A constant of the step-time model.

    Attributes:
      name: what it is.
      value: its value.
      unit: its unit, such as 'bytes/s'; '' for a ratio.
      source: where it comes from, for example a page, or the rows that it was fitted on.
    """

    name: str
    value: float
    unit: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimePart:
    """A part of the time of a step.

    Attributes:
      name: what takes the time, for example 'matrix products' or 'all-gather over fsdp (ICI)'.
      seconds: how long it takes by itself.
      exposed: the part that is not overlapped. The exposed times add up to the time of the step.
    """

    name: str
    seconds: float
    exposed: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """The time of a step.

    Attributes:
      seconds: the forecast.
      low, high: its range in seconds, from the errors that the model made on measured steps of the
        chip.
      parts: what the time is made of, the largest exposed part first.
      constants: the constants that the model used.
    """

    seconds: float
    low: float
    high: float
    parts: tuple[TimePart, ...]
    constants: tuple[Constant, ...]
