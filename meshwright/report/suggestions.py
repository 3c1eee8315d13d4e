"""What to change first: the changes of exchanges and the findings of a forecast, in one order.

A program whose attention sums over the wrong dimension, and that donates nothing, has

    model.py:18: write with_sharding_constraint(x, ...) at model.py:18 (confirmed by ...)
    model.py:40: train_step returns a new params and keeps the old, ...

Devices that compute the same come first, because every exchange around them follows from it. Then
come the changes that are known to save much of what a device sends, then layouts that waste memory,
and at the end what concerns the call.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from meshwright.causes import Cause
from meshwright.causes.cause import ASKED, JoinedChange, LayoutChange, StateChange
from meshwright.report.forecasts import Forecast, ForecastFinding
from meshwright.report.tried import tried_text
from partitioning.amounts import bytes_str, share_str

SUGGESTED = 3  # so many are shown
_MUCH = 0.02  # the share of what a device sends
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
      saved: the share of the bytes that a device sends which it saves; 0.0 if that is not known.
    """

    where: str
    text: str
    saved: float = 0.0

    def __str__(self) -> str:
        return f'{self.where}: {self.text}' if self.where else self.text


def list_suggestions(forecast: Forecast) -> tuple[Suggestion, ...]:
    """The changes and findings of a forecast, the one to begin with first."""
    ranked = [*_of_exchanges(forecast), *_of_findings(forecast)]
    ranked.sort(key=lambda pair: (pair[0], -pair[1].saved))
    found, places = list[Suggestion](), set[str]()
    for _, one in ranked:  # a place that needs another change may be right after the first one
        if one.where not in places or not one.where:
            found.append(one)
            places.add(one.where)
    return tuple(found)


def nothing_to_change(forecast: Forecast) -> str:
    """Says of a forecast without suggestions whether its exchanges are needed; '' if not known."""
    causes = [(c, cause) for c, cause in forecast.collectives if cause is not None]
    if not causes:
        return ''
    traded = next((cause for _, cause in causes if cause.traded), None)
    if traded is not None:
        return f'nothing without a price: {traded.traded} ({tried_text(traded)})'
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
        f'nothing that was tried helps; of {count} with {bytes_str(nbytes)} '
        f'({share_str(nbytes / total)} of what a device sends) it is open whether anything needs '
        f'{them}: {which} the {largest.kind} over {", ".join(largest.axes)} of {cause.array}{at}'
    )


def _of_exchanges(forecast: Forecast) -> Iterator[tuple[int, Suggestion]]:
    total = sum(c.total_bytes for c, _ in forecast.collectives)
    bytes_of: dict[str, float] = collections.defaultdict(float)
    causes: dict[str, Cause] = {}
    for collective, cause in forecast.collectives:
        if cause is not None and cause.change:
            bytes_of[cause.change] += collective.total_bytes
            causes.setdefault(cause.change, cause)
    for change, cause in causes.items():
        saved = _UNKNOWN * bytes_of[change] / total
        if cause.effect is not None:
            sent, sends = cause.effect.sent
            saved = (sent - sends) / sent if sent else 0.0
        text = f'{change} ({tried_text(cause)})'
        where = cause.array if _is_of_arguments(cause) else cause.source or cause.array
        yield 1 if saved >= _MUCH else 3, Suggestion(where=where, text=text, saved=saved)


def _is_of_arguments(cause: Cause) -> bool:
    """Whether the change of a cause lays out arguments, whose path says more than a line."""
    first = cause.all_changes[0] if cause.all_changes else None
    first = first.parts[0] if isinstance(first, JoinedChange) else first
    return isinstance(first, StateChange | LayoutChange) and bool(cause.array)


def _of_findings(forecast: Forecast) -> Iterator[tuple[int, Suggestion]]:
    tried = {
        cause.source: cause
        for _, cause in forecast.collectives
        if cause is not None and cause.change.startswith(_IN_SHARD_MAP)
    }
    for finding in forecast.findings:
        text, cause = finding.message, tried.get(finding.where)
        if cause is not None and finding.kind in _ALIKE:
            text += f' ({tried_text(cause)})'
        yield _rank(finding), Suggestion(where=finding.where, text=text)


def _rank(finding: ForecastFinding) -> int:
    if finding.kind in _ALIKE:
        return 0
    return 4 if finding.kind in _OF_CALLS else 2
