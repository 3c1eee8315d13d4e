"""How far a step is from the measured steps that the constants of its chip were fitted on.

A *domain* is what those steps have in common: how long they took, how wide their products were, on
how many hosts they ran and which kinds of layers they had. Outside of it, a forecast is less
certain: each doubling of a size, and each kind that was not measured, widens its range.
"""

from __future__ import annotations

import dataclasses
import math

from meshwright.time.constants import read_fitted
from meshwright.time.layers import Layers
from meshwright.time.loads import Loads
from partitioning.amounts import seconds_str
from partitioning.hardware import Chip

DOMAINS = 'domains of measured steps'  # the entry of the file of constants

Range = tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
    """The measured steps that the constants of a chip were fitted on, from the least to the most.

    Attributes:
      steps: the number of measured steps.
      chips: the chips that they ran on: the chip itself, or all of its platform if it has none.
      busy: the seconds of a step without what slices wait for each other.
      width: the width of products, as in `Layers`.
      hosts: the number of hosts.
      growth: the logarithm by which the error grows with each doubling outside of a range.
    """

    steps: int
    chips: tuple[str, ...]
    busy: Range
    width: Range
    hosts: Range
    growth: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distance:
    """How far a step is outside of a domain.

    Attributes:
      doublings: the doublings of sizes outside of their ranges, with one for each other kind of
        layers.
      reasons: what is outside, for people.
    """

    doublings: float
    reasons: tuple[str, ...]


def domain_of(chip: Chip) -> Domain:
    """The domain of a chip."""
    entry = read_fitted()[DOMAINS][chip.name]
    ranges = {name: tuple(entry[name]) for name in ('busy', 'width', 'hosts', 'chips')}
    return Domain(**entry | ranges)


def find_distance(
    domain: Domain, loads: Loads, busy: float, layers: Layers | None = None
) -> Distance:
    """How far a step is outside of a domain.

    Args:
      busy: the seconds of the step, without what slices wait for each other.
      layers: its products, if they are known.
    """
    sizes = [
        ('the step takes', busy, domain.busy, seconds_str, ''),
        ('it runs on', loads.num_processes, domain.hosts, _count, ' host'),
    ]
    if layers is not None:
        sizes.append(('its products have a width of', layers.width, domain.width, _count, ''))
    doublings, reasons = 0.0, []
    for what, size, (least, most), show, unit in sizes:
        outside = max(_doublings(size, least), _doublings(most, size))
        if outside > 0.05:  # less is not visible in the range
            doublings += outside
            span = show(least) if least == most else f'{show(least)} to {show(most)}'
            plural = 's' if unit and show(size) != '1' else ''
            reasons.append(f'{what} {show(size)}{unit}{plural}, measured ones {span}')
    for kind in layers.kinds if layers else ():
        doublings += 1
        reasons.append(f'it has {kind}, which no measured one has')
    return Distance(doublings=doublings, reasons=tuple(reasons))


def _count(number: float) -> str:
    return f'{number:,.0f}'


def _doublings(less: float, more: float) -> float:
    """How many doublings lead from one size up to another one; 0 if none does."""
    return math.log2(more / less) if 0 < less < more else 0.0
