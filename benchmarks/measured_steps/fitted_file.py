"""Writes the file of constants that the step-time model reads, with ranges and domains."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshwright.time.constants import FITTED, constants_of
from meshwright.time.domain import DOMAINS, Domain, find_distance
from partitioning.hardware import CHIPS

from .fitting import FREE, FREE_OF_COMPILED, GPUS, SOFTWARE, USUAL, Bias, Case, Fit
from .scoring import Forecasted, range_of

_ERRORS = {'error': 'jaxpr', 'compiled_error': 'compiler'}
_FAR = 0.5  # doublings outside of a domain, from which the growth of errors can be seen
_LEAST_GROWTH = 0.05  # nobody has seen that errors do not grow outside of what was measured
_SOFTWARE_KEY = 'biases of frameworks'
# Chips without measured rows have the error of those with rows, and half as much again.
_WIDER = 1.5


def write_fit(fit: Fit, cases: Sequence[Case], left_out: Sequence[Forecasted]) -> None:
    """Writes constants for all chips.

    `cases` are the rows that they were fitted on. The errors of `left_out`, forecasts of rows
    without their families, give the ranges.
    """
    traced = collections.Counter(c.chip for c in cases if c.origin == 'jaxpr')
    compiled = collections.Counter(c.chip for c in cases if c.origin == 'compiler')
    entries: dict[str, Any] = {}
    for name, constants in fit.constants.items():
        figures = {k: round_to(value, 4) for k, value in dataclasses.asdict(constants).items()}
        wider = 1.0 if traced[name] else _WIDER
        for field, origin in _ERRORS.items():
            alike = [f for f in left_out if f.case.origin == origin]
            figures[field] = round_to(wider * range_of(name, CHIPS[name].platform, alike), 2)
        entries[name] = {}
        for field, value in figures.items():
            rows = compiled if field == 'cycles_factor' else traced
            entries[name][field] = {'value': value, 'source': _source(name, field, rows)}
    entries[_SOFTWARE_KEY] = {
        name: {'factor': round_to(bias.factor, 4), 'seconds': round_to(bias.seconds, 3)}
        for name, bias in fit.software.items()
    }
    entries[DOMAINS] = domains_of(fit, cases, left_out)
    FITTED.write_text(json.dumps(entries, indent=1) + '\n')


def read_fit() -> Fit:
    """Reads the constants of all chips, and the biases of frameworks."""
    entries = json.loads(FITTED.read_text())
    constants = {name: constants_of(chip) for name, chip in CHIPS.items()}
    return Fit(constants, {name: Bias(**entries[_SOFTWARE_KEY][name]) for name in SOFTWARE})


def round_to(value: float, digits: int) -> float:
    """Rounds to some significant digits."""
    return float(f'{value:.{digits}g}')


def domains_of(
    fit: Fit, cases: Sequence[Case], left_out: Sequence[Forecasted]
) -> dict[str, dict[str, Any]]:
    """The domain of each chip: its fitted rows, or all fitted rows of its platform if it has none.

    Rows whose family was left out say how much errors grow outside: the row decides whose error
    grew the most, among the rows that are far outside of the domain of all other families.
    """
    traced = [case for case in cases if case.origin == 'jaxpr']
    growth = {
        platform: _growth(fit, platform, traced, left_out)
        for platform in sorted({case.platform for case in traced})
    }
    domains = {}
    for name, chip in CHIPS.items():
        found = _domain_of(fit, _alike(traced, name, chip.platform), growth[chip.platform])
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
    """The largest growth of the logarithm of an error with each doubling outside of a domain.

    Rows of experts or 8 bits do not count, because their errors come from their kinds.
    """
    far = [0.0]
    by_formula = [one for one in left_out if one.case.origin == 'jaxpr']
    for one in by_formula:
        case = one.case
        if case.platform != platform or not case.dense:
            continue
        others = [other for other in traced if other.family != case.family]
        domain = _domain_of(fit, _alike(others, case.chip, platform), 0.0)
        distance = find_distance(domain, case.loads, fit.busy(case), case.layers).doublings
        usual = math.log1p(range_of(case.chip, platform, by_formula, case.family))
        if distance >= _FAR:
            far.append((abs(math.log1p(one.error)) - usual) / distance)
    return max(round_to(max(far), 2), _LEAST_GROWTH)


def _source(chip: str, field: str, rows: Mapping[str, int]) -> str:
    """Where the value of a constant comes from."""
    shared = [
        free.chips
        for free in (*FREE, *FREE_OF_COMPILED)
        if free.name == field and chip in free.chips
    ]
    fitted_on = sorted({name for chips in shared for name in chips if rows[name]})
    if field in _ERRORS:
        on = 'GPUs' if chip in GPUS else 'TPUs'
        if rows[chip]:
            return (
                f'nine in ten of the errors on rows of {chip}, and with less weight on other {on}, '
                'whose family was left out'
            )
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
    'host_interference': 'assumed: a tenth of what is copied',
    'network_efficiency': 'assumed: exposed seconds are fitted as hidden_network_share',
    'exchange_latency': 'assumed: the start of one exchange',
    'hop_latency': f'about 1 us per hop of ICI ({_BOOK})',
    'cycles_factor': 'assumed: the estimates as they are',
    'memory_efficiency': 'a copy of a large array on H100 and H200: 3.0 of 3.35 TB/s',
}
assert set(USUAL) == set(CHIPS)
