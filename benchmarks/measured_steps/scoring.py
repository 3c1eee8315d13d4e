"""How far forecasts are from measurements, next to those of a naive forecast."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from .fitting import Case, Fit

# Fits constants on cases, from some start; see `fit_constants`.
Fitter = Callable[[Sequence[Case], np.ndarray | None], tuple[Fit, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Forecasted:
    """A measured step and its forecasts.

    Attributes:
      case: the measured step.
      seconds: the forecast.
      naive: the naive forecast: the model's FLOPs at the median MFU of the fitted rows of the chip.
      fitted: whether the constants were fitted on the row.
    """

    case: Case
    seconds: float
    naive: float
    fitted: bool

    @property
    def error(self) -> float:
        """The relative error of the forecast."""
        return self.seconds / self.case.seconds - 1

    @property
    def naive_error(self) -> float:
        """The relative error of the naive forecast."""
        return self.naive / self.case.seconds - 1


@dataclasses.dataclass(frozen=True)
class Score:
    """The errors of some forecasts.

    Attributes:
      rows: the number of rows.
      mean: the mean absolute relative error.
      worst: the largest absolute relative error.
      naive: the mean absolute relative error of the naive forecast.
      rank: the rank correlation of forecasts and measurements, or None; see `rank_correlation`.
    """

    rows: int
    mean: float
    worst: float
    naive: float
    rank: float | None


def is_left_out(case: Case) -> bool:
    """Whether a row is in the fixed part of groups that are left out of the fit.

    It was decided before anything was fitted: groups with a hash in the first third of all hashes.
    Models with experts fit nothing.
    """
    return not case.dense or hashlib.sha256(case.group.encode()).digest()[0] < 256 // 3


def forecast_with(cases: Sequence[Case], constants: Fit) -> list[Forecasted]:
    """Forecasts all rows with constants that are fitted on those that are not left out."""
    fitted = [case for case in cases if not is_left_out(case)]
    return [_forecast(case, constants, fitted, not is_left_out(case)) for case in cases]


def forecast_families(cases: Sequence[Case], fit: Fitter) -> list[Forecasted]:
    """Forecasts the rows of each family with constants that are fitted on all other families."""
    found: dict[tuple[str, str], Forecasted] = {}
    _, start = fit(cases, None)
    for family in sorted({case.family for case in cases}):
        fitted = [case for case in cases if case.family != family]
        constants, _ = fit(fitted, start)
        for case in cases:
            if case.family == family:
                found[case.name, case.origin] = _forecast(case, constants, fitted, fitted=False)
    return [found[case.name, case.origin] for case in cases]


def _forecast(case: Case, constants: Fit, rows: Sequence[Case], fitted: bool) -> Forecasted:
    return Forecasted(case, constants.predict(case), naive_forecast(case, rows), fitted)


def naive_forecast(case: Case, rows: Sequence[Case]) -> float:
    """The FLOPs of a model at the median MFU of rows of the chip, or of its platform if none."""
    each = {row.name: row for row in rows}.values()  # rows can have several programs
    alike = [r for r in each if r.chip == case.chip] or [
        r for r in each if r.platform == case.platform
    ]
    mfu = statistics.median(r.flops / (r.seconds * r.peak) for r in alike)
    return case.flops / (case.peak * mfu)


def score(forecasts: Iterable[Forecasted]) -> Score | None:
    """Returns the errors of forecasts, or None if there are none."""
    found = list(forecasts)
    if not found:
        return None
    errors = [abs(f.error) for f in found]
    return Score(
        rows=len(found),
        mean=statistics.fmean(errors),
        worst=max(errors),
        naive=statistics.fmean(abs(f.naive_error) for f in found),
        rank=rank_correlation([f.seconds for f in found], [f.case.seconds for f in found]),
    )


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with mean ranks for equal values.

    It is None for fewer than 3 values, or if all are equal.
    """
    if len(first) < 3 or min(len(set(first)), len(set(second))) < 2:
        return None
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    return below + (equal - 1) / 2
