"""The errors of forecasts next to a naive forecast, and the file of constants with their ranges."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy.stats

from meshwright.time.constants import FITTED, constants_of
from meshwright.time.domain import DOMAINS, Domain, find_distance
from partitioning.hardware import CHIPS

from .fitting import FREE, FREE_OF_COMPILED, GPUS, SOFTWARE, USUAL, Case, Fit

# Fits constants on cases, from some start; see `fit_constants`.
Fitter = Callable[[Sequence[Case], np.ndarray | None], tuple[Fit, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Forecasted:
    """A measured step and its forecasts.

    Attributes:
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
    """The absolute relative errors of some forecasts, and the mean error of the naive ones.

    `rank` is the rank correlation of forecasts and measurements; see `rank_correlation`.
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
    """Forecasts all rows with constants that are fitted on the rows that are not left out."""
    fitted = [case for case in cases if not is_left_out(case)]
    return [_forecast(case, constants, fitted, not is_left_out(case)) for case in cases]


def forecast_families(cases: Sequence[Case], fit: Fitter) -> list[Forecasted]:
    """Forecasts the rows of each family with constants that are fitted on all other families."""
    _, start = fit(cases, None)
    fits = {}
    for family in {case.family for case in cases}:
        others = [case for case in cases if case.family != family]
        fits[family] = fit(others, start)[0], others
    return [_forecast(case, *fits[case.family], fitted=False) for case in cases]


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
    return float(scipy.stats.spearmanr(first, second).statistic)


# The domains of measured steps. Forecasts of other steps are less certain.

_FAR = 0.5  # doublings outside of a domain, from which the growth of errors can be seen


def domains_of(
    fit: Fit, cases: Sequence[Case], left_out: Sequence[Forecasted]
) -> dict[str, dict[str, Any]]:
    """The domain of each chip: its fitted rows, or all fitted rows of its platform if it has none.

    Rows whose family was left out say how much errors grow outside: the row decides whose error
    grew the most, among the rows that are far outside of the domain of all other families.

    Args:
      cases: all rows.
      left_out: forecasts of rows without their families.
    """
    traced = [case for case in cases if case.origin == 'jaxpr']
    fitted = [case for case in traced if not is_left_out(case)]
    growth = {
        platform: _growth(fit, platform, traced, left_out)
        for platform in sorted({case.platform for case in traced})
    }
    domains = {}
    for name, chip in CHIPS.items():
        alike = _alike(fitted, name, chip.platform)
        found = _domain_of(fit, alike, growth[chip.platform])
        busy = [round_to(x, 3) for x in found.busy]
        domains[name] = dataclasses.asdict(found) | {'busy': busy}
    return domains


def _alike(cases: Iterable[Case], chip: str, platform: str) -> list[Case]:
    found = [case for case in cases if case.platform == platform]
    return [case for case in found if case.chip == chip] or found


def _domain_of(fit: Fit, cases: Sequence[Case], growth: float) -> Domain:
    def span(sizes: Iterable[float]) -> tuple[float, float]:
        found = list(sizes)
        return min(found), max(found)

    return Domain(
        steps=len(cases),
        chips=tuple(sorted({case.chip for case in cases})),
        busy=span(fit.busy(case) for case in cases),
        width=span(case.layers.width for case in cases if case.layers),
        hosts=span(case.loads.num_processes for case in cases),
        growth=growth,
    )


def _growth(
    fit: Fit, platform: str, traced: Sequence[Case], left_out: Sequence[Forecasted]
) -> float:
    """The largest growth of the logarithm of an error with each doubling outside of a domain."""
    near, far = [], []
    for one in left_out:
        case = one.case
        if case.platform != platform or case.origin != 'jaxpr':
            continue
        others = [other for other in traced if other.family != case.family]
        domain = _domain_of(fit, _alike(others, case.chip, platform), 0.0)
        distance = find_distance(domain, case.loads, fit.busy(case), case.layers).doublings
        error = abs(math.log1p(one.error))
        if distance >= _FAR:
            far.append((error, distance))
        elif not distance:
            near.append(error)
    usual = sorted(near)[math.ceil(_SHARE_BELOW * len(near)) - 1]
    return round_to(max((error - usual) / distance for error, distance in far), 2)


# The file of fitted constants, which the step-time model reads.

_SOFTWARE_KEY = 'software on GPUs'
# Chips without measured rows have the error of those with rows, and half as much again.
_WIDER = 1.5
_SHARE_BELOW = 0.9  # of forecasts, in the range of a forecast


def write_fit(fit: Fit, cases: Sequence[Case], left_out: Sequence[Forecasted]) -> None:
    """Writes constants for all chips.

    Args:
      fit: the constants.
      cases: all rows; the rows that are left out of the fit are not among the sources.
      left_out: forecasts of rows without their families, whose errors give the ranges.
    """
    fitted = [case for case in cases if not is_left_out(case)]
    traced = collections.Counter(c.chip for c in fitted if c.origin == 'jaxpr')
    compiled = collections.Counter(c.chip for c in fitted if c.origin == 'compiler')
    entries = {}
    for name, constants in fit.constants.items():
        figures = {k: round_to(value, 4) for k, value in dataclasses.asdict(constants).items()}
        figures['error'] = round_to(_range_of(name, left_out), 2)
        entries[name] = {}
        for field, value in figures.items():
            rows = compiled if field == 'cycles_factor' else traced
            entries[name][field] = {'value': value, 'source': _source(name, field, rows)}
    entries[_SOFTWARE_KEY] = {
        name: {'value': round_to(value, 4), 'source': 'fitted on the rows of this software'}
        for name, value in fit.software.items()
    }
    entries[DOMAINS] = domains_of(fit, cases, left_out)
    FITTED.write_text(json.dumps(entries, indent=1) + '\n')


def read_fit() -> Fit:
    """Reads the constants of all chips, and the factors of other software."""
    entries = json.loads(FITTED.read_text())
    constants = {name: constants_of(chip) for name, chip in CHIPS.items()}
    software = {name: entries[_SOFTWARE_KEY][name]['value'] for name in SOFTWARE}
    return Fit(constants, software)


def round_to(value: float, digits: int) -> float:
    """Rounds to some significant digits."""
    return float(f'{value:.{digits}g}')


def _range_of(chip: str, left_out: Sequence[Forecasted]) -> float:
    """The error that most forecasts stay below whose family was left out."""
    platform = CHIPS[chip].platform
    alike = [f for f in left_out if f.case.chip == chip]
    wider = 1.0 if alike else _WIDER
    alike = alike or [f for f in left_out if f.case.platform == platform]
    errors = sorted(abs(f.error) for f in alike)
    return wider * errors[min(len(errors) - 1, math.ceil(_SHARE_BELOW * len(errors)) - 1)]


def _source(chip: str, field: str, rows: Mapping[str, int]) -> str:
    """Where the value of a constant comes from."""
    shared = [
        free.chips
        for free in (*FREE, *FREE_OF_COMPILED)
        if free.name == field and chip in free.chips
    ]
    fitted_on = sorted({name for chips in shared for name in chips if rows[name]})
    if field == 'error':
        if rows[chip]:
            return f'nine in ten of the errors on rows of {chip} when their family is left out'
        on = 'GPUs' if chip in GPUS else 'TPUs'
        return f'no row of {chip}: half as much again as the errors of other {on}'
    if fitted_on:
        counts = ', '.join(f'{rows[name]} of {name}' for name in fitted_on)
        return f'fitted on measured rows: {counts}'
    return _ASSUMED.get(field, 'assumed')


_BOOK = 'scaling book, chapter on TPUs'
_ASSUMED = {
    'link_efficiency': f'45 of 50 GB/s per link ({_BOOK}); 360 of 450 GB/s of NVLink in ring '
    'collectives',
    'host_bandwidth': f'PCIe ({_BOOK})',
    'network_efficiency': 'assumed: exposed seconds are fitted as hidden_network_share',
    'hidden_network_share': 'assumed: exposed seconds are fitted as network_efficiency',
    'exchange_latency': 'assumed: the start of one exchange',
    'hop_latency': f'about 1 us per hop of ICI ({_BOOK})',
    'cycles_factor': 'assumed: the estimates as they are',
}
assert set(USUAL) == set(CHIPS)
