"""What to change first: the changes of exchanges and the findings of a forecast, in one order.

A program whose attention sums over the wrong dimension, and that donates nothing, has

    model.py:18: write with_sharding_constraint(x, ...) at model.py:18 (confirmed by ...)
    model.py:40: train_step returns a new params and keeps the old, ...

Devices that compute the same come first, because every exchange around them follows from it. Then
come the changes that are known to save much, by the forecast time that they save, the bytes, and
the peak; then layouts that waste memory, and at the end what concerns the call.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from meshwright.causes import Cause
from meshwright.causes.cause import ASKED, CodeChange, JoinedChange, LayoutChange, StateChange
from meshwright.report.forecasts import Forecast, ForecastFinding
from meshwright.report.tried import tried_text
from partitioning.amounts import share_str

SUGGESTED = 3  # so many are shown
_MUCH = 0.02  # the share of the time or of what a device sends
_MOST = 0.5  # the share that a compiled change saves, which then comes before what has no figures
_MUCH_MEMORY = 0.1  # the share of the peak
_ALIKE = ('whole shard_map', 'whole batch')  # devices compute the same
_IN_SHARD_MAP = 'in the shard_map at '  # how the changes of specs begin
_OF_CALLS = ('changed layout', 'changed type', 'weak type', 'not donated', 'callback', 'transfer')
_UNKNOWN = 0.25  # the share of its exchanges that a change without figures may save


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change of a function, or a finding about it.

    Attributes:
      where: the 'file:line' of the user's code, or the path of an argument.
      text: what to write, and what that is known to do.
      faster: the share of the forecast time that it saves; 0.0 if that is not known.
      saved: the share of the bytes that a device sends which it saves.
      smaller: the share of the peak that it saves.
    """

    where: str
    text: str
    faster: float = 0.0
    saved: float = 0.0
    smaller: float = 0.0

    @property
    def gains(self) -> tuple[float, float, float]:
        """What counts first in the order of the changes: per cents of the time, then the rest."""
        return round(self.faster, 2), self.saved, self.smaller

    @property
    def is_much(self) -> bool:
        """Whether it is known to save much."""
        return max(self.faster, self.saved) >= _MUCH or self.smaller >= _MUCH_MEMORY

    def __str__(self) -> str:
        return f'{self.where}: {self.text}' if self.where else self.text


def list_suggestions(forecast: Forecast) -> tuple[Suggestion, ...]:
    """The changes and findings of a forecast, the one to begin with first."""
    ranked = [*_of_exchanges(forecast), *_of_findings(forecast)]
    ranked.sort(key=lambda pair: (pair[0], [-gain for gain in pair[1].gains]))
    found, places = list[Suggestion](), set[str]()
    for _, one in ranked:  # a place that needs another change may be right after the first one
        if one.where not in places or not one.where:
            found.append(one)
            places.add(one.where)
    return tuple(found)


def refer_to(suggestions: Sequence[Suggestion], line: str) -> str:
    """A line of a list that ends with a change, which is written out above it already."""
    for one in suggestions:
        if line.endswith(f'; {one.text}'):
            return f'{line.removesuffix(one.text)}the change of {one.where} above'
    return line


def nothing_to_change(forecast: Forecast) -> str:
    """Says of a forecast without suggestions whether its exchanges are needed; '' if not known."""
    causes = [(c, cause) for c, cause in forecast.collectives if cause is not None]
    if not causes:
        return ''
    traded = next((cause for _, cause in causes if cause.traded), None)
    if traded is not None:
        tried = tried_text(traded, forecast.most_bytes)
        return f'nothing without a price: {traded.traded} ({tried})'
    still_open = [(c, cause) for c, cause in causes if not cause.needed]
    if not still_open:
        written = any(cause.why.startswith(ASKED) for _, cause in causes)
        own = ', or the program asks for it itself' if written else ''
        return f'nothing: the mathematics and the layout of the parameters need every exchange{own}'
    total = sum(c.total_bytes for c, _ in causes)
    nbytes = sum(c.total_bytes for c, _ in still_open)
    largest, cause = max(still_open, key=lambda pair: pair[0].total_bytes)
    count = 'an exchange' if len(still_open) == 1 else f'{len(still_open):,} exchanges'
    at = f' at {cause.source}' if cause.source else ''
    them = 'it' if len(still_open) == 1 else 'them'
    which = 'it is' if len(still_open) == 1 else 'the largest is'
    return (
        f'nothing that was tried helps; of {count} with {forecast.show_bytes(nbytes)} '
        f'({share_str(nbytes / total)} of what a device sends) it is open whether anything needs '
        f'{them}: {which} the {largest.kind} over {", ".join(largest.axes)} of {cause.array}{at}'
    )


def _of_exchanges(forecast: Forecast) -> Iterator[tuple[int, Suggestion]]:
    """The changes of exchanges, without those that nobody tried and that could not save much."""
    total = sum(c.total_bytes for c, _ in forecast.collectives)
    bytes_of: dict[str, float] = collections.defaultdict(float)
    causes: dict[str, Cause] = {}
    for collective, cause in forecast.collectives:
        if cause is not None and cause.change:
            bytes_of[cause.change] += collective.total_bytes
            causes.setdefault(cause.change, cause)
    exposed = _exposed(forecast)
    for change, cause in causes.items():
        of_author = cause.effect is None or isinstance(cause.all_changes[0], CodeChange)
        if of_author and not cause.confirmed and bytes_of[change] < _MUCH * total:
            continue
        saved, smaller, seconds = _UNKNOWN * bytes_of[change] / total, 0.0, None
        if cause.effect is not None:
            saved, smaller = _share(cause.effect.sent), _share(cause.effect.peak)
            seconds = cause.effect.seconds
        text = f'{change} ({tried_text(cause, forecast.most_bytes)})'
        where = cause.array if _is_of_arguments(cause) else cause.source or cause.array
        faster = _share(seconds) if seconds is not None else exposed * saved
        one = Suggestion(where=where, text=text, faster=faster, saved=saved, smaller=smaller)
        yield 1 if one.is_much else 3, one


def _share(figures: tuple[float, float]) -> float:
    """The share of a figure that a change saves, from the figure before and after."""
    before, after = figures
    return (before - after) / before if before else 0.0


def _exposed(forecast: Forecast) -> float:
    """The share of the time in which a device only exchanges data; 1.0 if it is not known."""
    if forecast.time is None or not forecast.time.seconds:
        return 1.0
    exchanging = sum(part.exposed for part in forecast.time.parts if ' over ' in part.name)
    return exchanging / forecast.time.seconds


def _is_of_arguments(cause: Cause) -> bool:
    """Whether the change of a cause lays out arguments, whose path says more than a line."""
    first = cause.all_changes[0] if cause.all_changes else None
    first = first.parts[0] if isinstance(first, JoinedChange) else first
    of_layouts = isinstance(first, StateChange | LayoutChange)
    of_layouts |= isinstance(first, CodeChange) and not first.source
    return of_layouts and bool(cause.array)


def _of_findings(forecast: Forecast) -> Iterator[tuple[int, Suggestion]]:
    tried = {
        cause.source: cause
        for _, cause in forecast.collectives
        if cause is not None and cause.change.startswith(_IN_SHARD_MAP)
    }
    for finding in forecast.findings:
        text, cause = finding.message, tried.get(finding.where)
        if cause is not None and finding.kind in _ALIKE:
            text += f' ({tried_text(cause, forecast.most_bytes)})'
        yield _rank(finding, forecast), Suggestion(where=finding.where, text=text)


def _rank(finding: ForecastFinding, forecast: Forecast) -> int:
    if finding.kind in _ALIKE:
        causes = (cause for _, cause in forecast.collectives if cause is not None)
        shown = (c.effect for c in causes if c.confirmed and c.effect is not None)
        return 1 if any(_share(effect.sent) >= _MOST for effect in shown) else 0
    return 4 if finding.kind in _OF_CALLS else 2
