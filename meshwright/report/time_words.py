"""What bounds a step, its tokens per second and their cost, and what its range means."""

from __future__ import annotations

import collections
import math

from meshwright.report.forecasts import Forecast
from meshwright.time import StepTime
from meshwright.time.domain import domain_of
from partitioning.amounts import share_str

# How parts of a time are called where they are added up. Exchanges have the names of their kinds.
_WORDS = {
    'matrix products': 'matrix products',
    'other operations': 'operations besides products',
    'kernels': 'kernels',
    'copies to and from the host': 'copies to and from the host',
    'waiting for the slowest slice or GPU': 'waiting for the slowest slice or GPU',
}
_EXCHANGES = 'exchanges that nothing hides'
_HOUR = 3600.0


def bounds_of(time: StepTime) -> dict[str, float]:
    """What the time of a step consists of, in words, as shares of it; the largest comes first."""
    sums: dict[str, float] = collections.defaultdict(float)
    for part in time.parts:
        sums[_WORDS.get(part.name, _EXCHANGES)] += part.exposed
    whole = math.fsum(sums.values())
    if not whole:
        return {}
    return {name: n / whole for name, n in sorted(sums.items(), key=lambda pair: -pair[1])}


def bound_sentence(time: StepTime) -> str:
    """What bounds a step, as a sentence; '' if the step takes no time."""
    shares = [f'{name} {share_str(share)}' for name, share in bounds_of(time).items()]
    if not shares:
        return ''
    first, *others = shares
    rest = f', then {", ".join(others[:2])}' if others else ''
    return f'What takes the most of the step: {first}{rest}.'


def range_sentence(forecast: Forecast) -> str:
    """What the range of a time means; '' if there is no time."""
    if forecast.time is None or forecast.chip is None:
        return ''
    domain, name = domain_of(forecast.chip), forecast.chip.name
    if name in domain.chips:
        return (
            f'the range: of {domain.steps} published steps on {name}, each forecast without the '
            'steps of its model, about nine in ten were in such a range'
        )
    return (
        f'the range: no step on {name} was measured, so it is half as wide again as for the steps '
        f'on {", ".join(domain.chips)}'
    )


def count_tokens(forecast: Forecast) -> int | None:
    """The tokens of a call: the size of the largest table of integers among its arguments.

    None if there is none, as for functions of images.
    """
    tables = [
        math.prod(row.shape)
        for row in forecast.arrays
        if row.role == 'other' and len(row.shape) == 2 and 'int' in row.dtype
    ]
    return max(tables, default=None)


def tokens_per_second(forecast: Forecast) -> float | None:
    """The tokens of all devices per second, or None if they or the time are not known."""
    tokens = count_tokens(forecast)
    if not tokens or forecast.time is None or not forecast.time.seconds:
        return None
    return tokens / forecast.time.seconds


def cost_per_million(forecast: Forecast) -> float | None:
    """What a million tokens cost, in the currency of the price; None if the price is not given."""
    rate = tokens_per_second(forecast)
    if rate is None or forecast.price is None or forecast.chip is None:
        return None
    chips = forecast.num_devices / forecast.chip.devices
    return chips * forecast.price / _HOUR / rate * 1e6
