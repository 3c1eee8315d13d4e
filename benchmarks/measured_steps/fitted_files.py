"""The file of fitted constants, which the step-time model reads."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Mapping, Sequence

from meshwright.time.constants import FITTED, constants_of
from partitioning.hardware import CHIPS

from .constants_to_fit import FREE, FREE_OF_COMPILED, GPUS, SOFTWARE, USUAL
from .fitting import Case, Fit
from .scoring import Forecasted, is_left_out

_SOFTWARE_KEY = 'software on GPUs'
# Chips without measured rows have the error of those with rows, and half as much again.
_WIDER = 1.5
_SHARE_BELOW = 0.9  # of forecasts, in the range of a forecast


def write_fit(fit: Fit, cases: Sequence[Case], left_out: Sequence[Forecasted]) -> None:
    """Writes constants for all chips.

    Args:
      fit: the constants.
      cases: all rows; those that are left out of the fit are not among the sources.
      left_out: forecasts of rows without their families, whose errors give the ranges.
    """
    fitted = [case for case in cases if not is_left_out(case)]
    traced = collections.Counter(c.chip for c in fitted if c.origin == 'jaxpr')
    compiled = collections.Counter(c.chip for c in fitted if c.origin == 'compiler')
    entries = {}
    for name, constants in fit.constants.items():
        figures = {
            field: round_to(getattr(constants, field), 4)
            for field in constants.__dataclass_fields__
            if field != 'error'
        }
        figures['error'] = round_to(_range_of(name, left_out), 2)
        sources = {
            field: _source(name, field, compiled if field == 'cycles_factor' else traced)
            for field in figures
        }
        entries[name] = {
            field: {'value': value, 'source': sources[field]} for field, value in figures.items()
        }
    entries[_SOFTWARE_KEY] = {
        name: {'value': round_to(value, 4), 'source': 'fitted on the rows of this software'}
        for name, value in fit.software.items()
    }
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
