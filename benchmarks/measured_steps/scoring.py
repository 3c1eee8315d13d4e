"""The errors of forecasts of rows whose family was left out of the fit, and ranges that hold.

Nothing else is scored: a row of a family that was fitted says nothing about a new model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

from .fitting import Case, Fit

LEFT_OUT = Path(__file__).with_name('left_out.json')
# Fits constants on cases, from some start; see `fit_constants`.
Fitter = Callable[[Sequence[Case], np.ndarray | None], tuple[Fit, np.ndarray]]

_SHARE_WITHIN = 0.9  # of left-out forecasts, in the range of a forecast
# Rows of a chip count so many times as much for its range as other rows of the platform. From 8 to
# 12, and with 0.9 to 0.92 above, 80 to 95% of the left-out rows of each chip with at least ten are
# in their range; with 6, all rows of v6e are.
_OWN = 10
_FEW = 4  # families: a chip with fewer has at least the range of its platform


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecasted:
    """A measured step and its forecasts by the other families.

    Attributes:
      seconds: the forecast for its framework.
      unbiased: the same for a program of ours, as users see it.
      naive: the naive forecast: the model's FLOPs at the median MFU of the other families' rows of
        the chip.
    """

    case: Case
    seconds: float
    unbiased: float
    naive: float

    @property
    def error(self) -> float:
        """The relative error of the forecast."""
        return self.seconds / self.case.seconds - 1

    @property
    def naive_error(self) -> float:
        """The relative error of the naive forecast."""
        return self.naive / self.case.seconds - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """The relative errors of some forecasts.

    Attributes:
      mean, median, worst: the absolute errors.
      bias: the mean of the errors with their signs.
      naive: the mean absolute error of the naive forecasts.
      within: the share of rows in the range that the other families give.
      rank: the rank correlation with the measurements, without superseded rows; see
        `rank_correlation`.
    """

    rows: int
    families: int
    mean: float
    median: float
    worst: float
    bias: float
    naive: float
    within: float
    rank: float | None


def forecast_families(
    cases: Sequence[Case], fit: Fitter, others: Sequence[Case] = ()
) -> list[Forecasted]:
    """Forecasts the rows of each family with constants that are fitted on all other families.

    Args:
      others: rows that nothing is fitted on, such as rows of experts, which are forecast as well.
    """
    _, start = fit(cases, None)
    found = []
    for family in sorted({case.family for case in (*cases, *others)}):
        rest = [case for case in cases if case.family != family]
        fitted = fit(rest, start)[0]
        found += [
            forecast_one(case, fitted, rest) for case in (*cases, *others) if case.family == family
        ]
    return found


def forecast_one(case: Case, constants: Fit, rows: Sequence[Case]) -> Forecasted:
    """Forecasts a row with constants that were fitted on some other rows."""
    return Forecasted(
        case=case,
        seconds=constants.predict(case),
        unbiased=constants.unbiased(case),
        naive=naive_forecast(case, rows),
    )


def naive_forecast(case: Case, rows: Sequence[Case]) -> float:
    """The FLOPs of a model at the median MFU of rows of the chip, or of its platform if none."""
    each = {row.name: row for row in rows}.values()  # rows can have several programs
    alike = [r for r in each if r.chip == case.chip] or [
        r for r in each if r.platform == case.platform
    ]
    mfu = statistics.median(r.flops / (r.seconds * r.peak) for r in alike)
    return case.flops / (case.peak * mfu)


def score(forecasts: Iterable[Forecasted], everything: Sequence[Forecasted]) -> Score | None:
    """Returns the errors of forecasts, or None if there are none.

    Args:
      everything: all forecasts, from whose other families the range of each is found.
    """
    found = list(forecasts)
    if not found:
        return None
    current = [f for f in found if not f.case.superseded]
    ranges = {
        (f.case.family, f.case.chip): range_of(
            f.case.chip, f.case.platform, everything, f.case.family
        )
        for f in found
    }
    within = [
        abs(math.log1p(f.error)) <= math.log1p(ranges[f.case.family, f.case.chip]) for f in found
    ]
    errors, naive = [f.error for f in found], [f.naive_error for f in found]
    rank = rank_correlation([f.seconds for f in current], [f.case.seconds for f in current])
    families = len({f.case.family for f in found})
    return Score(families=families, rank=rank, **summarize_errors(errors, naive, within))


def summarize_errors(
    errors: Sequence[float], naive: Sequence[float], within: Sequence[bool]
) -> dict[str, Any]:
    """The figures of relative errors, and of naive forecasts, by the attributes of `Score`."""
    sizes = [abs(error) for error in errors]
    return {
        'rows': len(errors),
        'mean': statistics.fmean(sizes),
        'median': statistics.median(sizes),
        'worst': max(sizes),
        'bias': statistics.fmean(errors),
        'naive': statistics.fmean(map(abs, naive)),
        'within': statistics.fmean(within),
    }


def range_of(chip: str, platform: str, left_out: Iterable[Forecasted], without: str = '') -> float:
    """The error that nine in ten left-out forecasts of a chip stay below.

    Each family counts as much as any other of its chip, and families of the chip count more than
    others of its platform.

    Args:
      without: a family whose rows do not count.
    """
    alike = [f for f in left_out if f.case.platform == platform and f.case.family != without]
    sizes = Counter(f.case.family for f in alike)
    errors = [abs(math.log1p(f.error)) for f in alike]
    shares = [1 / sizes[f.case.family] for f in alike]
    own = [
        share * (_OWN if f.case.chip == chip else 1) for f, share in zip(alike, shares, strict=True)
    ]
    families = {f.case.family for f in alike if f.case.chip == chip}
    found = _quantile(errors, own)
    if len(families) < _FEW:
        found = max(found, _quantile(errors, shares))
    return math.expm1(found)


def _quantile(values: Sequence[float], weights: Sequence[float]) -> float:
    """The smallest value such that values up to it have nine tenths of the weight."""
    least, below = _SHARE_WITHIN * math.fsum(weights), 0.0
    for value, weight in sorted(zip(values, weights, strict=True)):
        below += weight
        if below >= least * (1 - 1e-9):
            return value
    raise AssertionError('a share of a sum is at most the sum')


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation, with mean ranks for equal values.

    It is None for fewer than 3 values, or if all are equal.
    """
    if len(first) < 3 or min(len(set(first)), len(set(second))) < 2:
        return None
    return float(scipy.stats.spearmanr(first, second).statistic)


def write_left_out(forecasts: Iterable[Forecasted]) -> None:
    """Writes the forecasts of left-out rows: their seconds with bias, without, and naive."""
    held = {
        f'{f.case.name} {f.case.origin}': [
            float(f'{x:.5g}') for x in (f.seconds, f.unbiased, f.naive)
        ]
        for f in forecasts
    }
    lines = [f'{json.dumps(name)}: {json.dumps(held[name])}' for name in sorted(held)]
    LEFT_OUT.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


def read_left_out(cases: Iterable[Case]) -> list[Forecasted]:
    """Reads the forecasts of left-out rows; cases without one are left out."""
    held: Mapping[str, Sequence[float]] = json.loads(LEFT_OUT.read_text())
    found = []
    for case in cases:
        if numbers := held.get(f'{case.name} {case.origin}'):
            seconds, unbiased, naive = numbers
            found.append(Forecasted(case=case, seconds=seconds, unbiased=unbiased, naive=naive))
    return found
