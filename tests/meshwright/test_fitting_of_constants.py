"""The fit of the step-time model, and the scores of forecasts: synthetic steps and hand counts."""

import dataclasses
import math

import pytest

from benchmarks.measured_steps.fitting import (
    FREE,
    FREE_OF_COMPILED,
    USUAL,
    Case,
    Fit,
    Free,
    fit_constants,
)
from benchmarks.measured_steps.scoring import (
    forecast_families,
    forecast_with,
    is_left_out,
    naive_forecast,
    rank_correlation,
    score,
)
from meshwright.time.loads import ExchangeLoad, Loads
from partitioning.hardware import CHIPS

TRUE = dataclasses.replace(USUAL['v5e'], matmul_efficiency=0.8, hidden_share=0.75, host_delay=0.05)
FREE_OF_V5E = [
    Free(name, 1.0, ('v5e',)) for name in ('matmul_efficiency', 'hidden_share', 'host_delay')
]


def a_case(number, products, exchange, *, seconds=None, software=''):
    """A step of v5e; by default, its measured time is what the true constants say."""
    gather = ExchangeLoad(name='gather', slow=False, seconds=exchange, count=0, hops=0)
    loads = Loads(
        chip='v5e',
        products=products,
        estimated_products=None,
        memory=0.0,
        estimated_others=None,
        kernels=0.0,
        kernel_memory=0.0,
        exchanges=(gather,),
        host_bytes=0.0,
        num_granules=1,
        num_processes=2,
    )
    # The rate of products, what is not hidden of the exchange at 90% of the links, the overhead.
    true = products / 0.8 + exchange / 0.9 * 0.25 + 0.05
    return Case(
        name=f'row {number}',
        chip='v5e',
        platform='tpu',
        group=f'group {number}',
        family=f'family {number % 3}',
        software=software,
        seconds=true if seconds is None else seconds,
        flops=products * 197e12,
        peak=197e12,
        loads=loads,
        dense=True,
        superseded=False,
        origin='jaxpr',
    )


CASES = [
    a_case(n, products, exchange)
    for n, (products, exchange) in enumerate(
        [(1.0, 0.1), (2.0, 1.5), (0.1, 0.05), (4.0, 0.2), (0.5, 1.0), (0.03, 0.01)]
    )
]


def fit(cases, start=None):
    return fit_constants(cases, {'v5e': USUAL['v5e']}, FREE_OF_V5E, {}, start)


def test_the_fit_finds_the_constants_of_synthetic_steps():
    found, _ = fit(CASES)
    constants = found.constants['v5e']
    assert constants.matmul_efficiency == pytest.approx(0.8, rel=0.02)
    assert 1 - constants.hidden_share == pytest.approx(0.25, rel=0.05)
    assert constants.host_delay == pytest.approx(0.05, rel=0.1)
    assert constants.kernel_efficiency == USUAL['v5e'].kernel_efficiency, 'it is not free'
    for case in CASES:
        assert found.predict(case) == pytest.approx(case.seconds, rel=0.02)


def test_one_wrong_measurement_does_not_move_the_others():
    wrong = dataclasses.replace(CASES[0], name='wrong', seconds=3 * CASES[0].seconds)
    found, _ = fit([*CASES, wrong])
    assert found.constants['v5e'].matmul_efficiency == pytest.approx(0.8, rel=0.1)


def test_software_has_a_factor():
    slower = [
        a_case(10 + n, c.loads.products, 0.1, software='other') for n, c in enumerate(CASES[:3])
    ]
    slower = [dataclasses.replace(c, seconds=1.6 * c.seconds) for c in slower]
    found, _ = fit_constants([*CASES, *slower], {'v5e': USUAL['v5e']}, FREE_OF_V5E, {'other': 1.2})
    assert found.software['other'] == pytest.approx(1.6, rel=0.05)


def test_naive_forecasts_use_the_median_mfu():
    """MFU of 0.5, 0.25 and 0.8: the median step takes twice its FLOPs at the peak rate."""
    rows = [a_case(n, 1.0, 0.0, seconds=s) for n, s in enumerate((2.0, 4.0, 1.25))]
    assert naive_forecast(a_case(9, 3.0, 0.0), rows) == pytest.approx(6.0)


def test_rank_correlation():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [40, 30, 20, 10]) == pytest.approx(-1)
    # Differences of ranks 1, 1, 0, 0: 1 - 6 x 2 / (4 x 15).
    assert rank_correlation([2, 1, 3, 4], [1, 2, 3, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2], [1, 2]) is None


def test_scores():
    constants = Fit({'v5e': TRUE}, {})
    rows = [
        dataclasses.replace(case, seconds=case.seconds * factor)
        for case, factor in zip(CASES[:2], (1 / 1.1, 1 / 0.8), strict=True)
    ]
    found = score(forecast_with(rows, constants))
    assert found.mean == pytest.approx((0.1 + 0.2) / 2)
    assert found.worst == pytest.approx(0.2)
    assert score([]) is None


def test_families_are_forecast_by_others():
    """The rows of family 0 take twice as long as the constants of the others say."""
    rows = [
        dataclasses.replace(case, seconds=2 * case.seconds) if case.family == 'family 0' else case
        for case in CASES
    ]
    found = {f.case.name: f for f in forecast_families(rows, fit)}
    assert len(found) == len(rows) and not any(f.fitted for f in found.values())
    assert found['row 0'].error == pytest.approx(-0.5, abs=0.1)


def test_groups_are_left_out_as_a_whole():
    rows = [a_case(n, 1.0, 0.0) for n in range(300)]
    left_out = [case for case in rows if is_left_out(case)]
    assert 70 < len(left_out) < 130, 'about a third'
    again = [dataclasses.replace(case, name='other', seconds=9.0) for case in left_out]
    assert all(is_left_out(case) for case in again)


def test_every_free_constant_is_one_of_the_model():
    fields = {field.name for field in dataclasses.fields(TRUE)}
    for free in (*FREE, *FREE_OF_COMPILED):
        assert free.name in fields and set(free.chips) <= set(CHIPS)
        assert free.spread > 0 and math.isfinite(free.spread)
    assert set(USUAL) == set(CHIPS)
