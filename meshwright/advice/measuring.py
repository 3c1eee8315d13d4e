"""A compiled function in figures, next to the same function with a change."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping

from meshwright.program.collectives import Collective
from meshwright.program.costs import ProgramCosts

# A change lowers a figure to this share, so that it is worth a person's time, and raises others to
# this one.
_LESS, MORE = 0.97, 1.01

Key = tuple[str, tuple[str, ...], tuple[str, ...], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A compiled function, per device and call.

    Attributes:
      sent: the bytes that a device sends.
      peak: the peak of its memory, in bytes.
      seconds: the forecast time; None if the chip has no model.
      exchanges: the bytes of its exchanges.
      returned: the bytes of what its exchanges return.
    """

    sent: float
    peak: int
    seconds: float | None
    exchanges: Mapping[Key, float]
    returned: float = 0.0

    def is_better(self, before: Measured) -> bool:
        """Whether it lowers a figure of another one by 3%, and raises none by more than 1%."""
        pairs = [(self.sent, before.sent), (self.peak, before.peak)]
        if self.seconds is not None and before.seconds is not None:
            pairs.append((self.seconds, before.seconds))
        lower = any(after < _LESS * figure for after, figure in pairs)
        return lower and all(after <= MORE * figure for after, figure in pairs)

    def gone(self, before: Measured) -> frozenset[Key]:
        """The exchanges of another one that are gone, and not only there with other arrays."""
        mine, theirs = self._by_line(), before._by_line()
        return frozenset(
            key
            for key, nbytes in before.exchanges.items()
            if self.exchanges.get(key, 0.0) < nbytes / 2
            and theirs[_line_of(key)] - mine[_line_of(key)] > nbytes / 2
        )

    def _by_line(self) -> Mapping[tuple[object, ...], float]:
        sums: dict[tuple[object, ...], float] = collections.defaultdict(float)
        for key, nbytes in self.exchanges.items():
            sums[_line_of(key)] += nbytes
        return sums


def _line_of(key: Key) -> tuple[object, ...]:
    """The axes and the line of an exchange, whatever its arrays and its kind."""
    _, axes, _, source = key
    return axes, source


def measure_costs(costs: ProgramCosts, seconds: float | None) -> Measured:
    """The figures of a compiled function.

    Args:
      costs: its costs.
      seconds: its forecast time.
    """
    exchanges: dict[Key, float] = collections.defaultdict(float)
    for one in costs.collectives:
        exchanges[key_of(one)] += one.total_bytes
    return Measured(
        sent=sum(exchanges.values()),
        peak=costs.memory.peak if costs.memory is not None else costs.at_peak.nbytes,
        seconds=seconds,
        exchanges=dict(exchanges),
        returned=sum(one.result_bytes for one in costs.collectives),
    )


def key_of(collective: Collective) -> Key:
    """What an exchange of one compilation has in common with the same of another one."""
    return collective.kind, collective.axes, collective.arrays, collective.source
