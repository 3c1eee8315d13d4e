"""What a function sends and holds, and why: the exchanges and buffers of a forecast as rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal

from meshwright.causes import Cause
from meshwright.causes.cause import source_of
from meshwright.report.figures import hanging, machine_name, source_name
from meshwright.report.forecasts import Forecast
from meshwright.report.page.html_tables import plain_table
from meshwright.report.page.markup import Html, tag
from meshwright.report.suggestions import (
    SUGGESTED,
    Suggestion,
    list_suggestions,
    nothing_to_change,
    refer_to,
)
from meshwright.report.tried import tried_text
from partitioning.amounts import bytes_str
from partitioning.rules import describe_axes

_LISTED = 8  # exchanges, and buffers
_WIDTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedRow:
    """Exchanges or buffers with one cause.

    Attributes:
      what: 'exchange' or 'buffer'.
      kind: 'all-gather', ... for an exchange, and the type of the array for a buffer.
      axes: the mesh axes of an exchange.
      nbytes: what a device sends per call, or holds at the peak, in bytes.
      count: how often an exchange is executed, or how many such buffers there are.
      array: which array of the program it is: 'params/w', 'an activation'; '' if that is not known.
      line: the 'file:line' of the user's code; '' if the program does not say.
      why: why it exists; '' if the cause is not known.
      change: what to write instead; '' if no change is known.
      confirmed: whether compiling with the change has shown that it helps; None if not tried.
      tried: what is known of the change, in words: 'not tried; by formula, it saves ...'.
      avoidable: whether the change removes it and leaves the parameters as they are.
    """

    what: Literal['exchange', 'buffer']
    kind: str
    axes: tuple[str, ...]
    nbytes: float
    count: int
    array: str
    line: str
    why: str
    change: str
    confirmed: bool | None = None
    tried: str = ''
    avoidable: bool = False

    def __str__(self) -> str:
        return self.text()

    def text(self, beside: float = 0.0) -> str:
        """The row in words, in a list whose largest number of bytes is `beside`."""
        over = f' over {", ".join(self.axes)}' if self.axes else ''
        several = f'{self.count:,} x ' if self.count > 1 else ''
        named = f' of {self.array}' if self.what == 'exchange' and self.array else ''
        named = f', {self.array}' if self.what == 'buffer' and self.array else named
        at = f', {self.line}' if self.line else ''
        why = f': {self.why}' if self.why else ''
        why += ' (avoidable)' if self.avoidable else ''
        change = f'; {self.change} ({self.tried})' if self.change else ''
        size = f'{bytes_str(self.nbytes, beside):>10}'
        return f'{size}  {several}{self.kind}{over}{named}{at}{why}{change}'


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Explained:
    """The exchanges and the largest buffers of a call, each with its line, its why and its change.

    `print` shows what to change first, and the largest; `exchanges` and `buffers` have all.

    Attributes:
      forecast: the forecast that they are from.
      exchanges: the exchanges, those with the same cause as one row, the largest first.
      buffers: the largest buffers at the peak of the memory, the largest first.
    """

    forecast: Forecast
    exchanges: tuple[ExplainedRow, ...]
    buffers: tuple[ExplainedRow, ...]

    @property
    def suggestions(self) -> tuple[Suggestion, ...]:
        """What to change, the change to begin with first."""
        return list_suggestions(self.forecast)

    @property
    def rows(self) -> tuple[ExplainedRow, ...]:
        """The exchanges and the buffers."""
        return (*self.exchanges, *self.buffers)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return '\n'.join(_lines(self))

    def _repr_html_(self) -> str:
        return explained_tables(self)


def explain_forecast(forecast: Forecast) -> Explained:
    """The exchanges and buffers of a forecast as rows."""
    groups: dict[tuple[str, ...], list[ExplainedRow]] = {}
    for c, cause in forecast.collectives:
        row = _row(cause, 'exchange', c.kind, c.axes, c.total_bytes, c.count, c.source, forecast)
        key = row.kind, *row.axes, row.array, row.line, row.why, row.change
        groups.setdefault(key, []).append(row)
    exchanges = [_added_up(rows) for rows in groups.values()]
    buffers = [
        _row(cause, 'buffer', live.array, (), live.nbytes, live.count, live.source, forecast)
        for live, cause in forecast.memory.buffers
    ]
    return Explained(
        forecast=forecast,
        exchanges=tuple(sorted(exchanges, key=lambda row: -row.nbytes)),
        buffers=tuple(sorted(buffers, key=lambda row: -row.nbytes)),
    )


def _row(
    cause: Cause | None,
    what: Literal['exchange', 'buffer'],
    kind: str,
    axes: tuple[str, ...],
    nbytes: float,
    count: int,
    source: str,
    forecast: Forecast,
) -> ExplainedRow:
    return ExplainedRow(
        what=what,
        kind=kind,
        axes=axes,
        nbytes=nbytes,
        count=count,
        array=cause.array if cause else '',
        line=source_of(cause, source),
        why=cause.why if cause else '',
        change=cause.change if cause else '',
        confirmed=cause.confirmed if cause else None,
        tried=tried_text(cause, forecast.most_bytes) if cause and cause.change else '',
        avoidable=cause is not None and cause.avoidable,
    )


def _added_up(rows: Sequence[ExplainedRow]) -> ExplainedRow:
    nbytes, count = sum(row.nbytes for row in rows), sum(row.count for row in rows)
    return dataclasses.replace(rows[0], nbytes=nbytes, count=count)


def _heads(explained: Explained) -> tuple[str, str]:
    forecast = explained.forecast
    sent = sum(row.nbytes for row in explained.exchanges)
    where = f'{machine_name(forecast)}, {describe_axes(forecast.mesh)}'
    origin = source_name(forecast.memory.buffers_from, forecast)
    exchanges = (
        f'{forecast.function} on {where}: a device sends {forecast.show_bytes(sent)} per call'
        if explained.exchanges
        else f'{forecast.function} on {where}: nothing is sent'
    )
    peak = f'{forecast.show_bytes(forecast.memory.peak)} at the peak'
    return exchanges, f'the largest buffers of {peak} ({origin})'


def _lines(explained: Explained) -> Iterator[str]:
    titles = _heads(explained)
    if suggestions := explained.suggestions:
        yield 'what to change first'
        yield from (hanging(_WIDTH).fill(str(one)) for one in suggestions[:SUGGESTED])
        if len(suggestions) > SUGGESTED:
            yield f'  and {len(suggestions) - SUGGESTED} more'
        yield ''
    elif none := nothing_to_change(explained.forecast):
        yield from ('what to change first', hanging(_WIDTH).fill(none), '')
    lists = (explained.exchanges, explained.buffers)
    most = explained.forecast.most_bytes
    for title, rows in zip(titles, lists, strict=True):
        if title != titles[0]:
            yield ''
        yield title
        texts = (refer_to(suggestions[:SUGGESTED], row.text(most)) for row in rows[:_LISTED])
        yield from map(hanging(_WIDTH).fill, texts)
        if len(rows) > _LISTED:
            rest = sum(row.nbytes for row in rows[_LISTED:])
            yield f'  and {len(rows) - _LISTED} more, {bytes_str(rest, most)} together'


def explained_tables(explained: Explained) -> Html:
    """The exchanges and buffers as two tables of a page."""
    exchanges, buffers = _heads(explained)
    parts: list[Html | None] = []
    if suggestions := explained.suggestions:
        told = [[tag('code', one.where), one.text] for one in suggestions[:SUGGESTED]]
        parts += [tag('p', tag('b', 'what to change first')), plain_table(('where', 'what'), told)]
    elif none := nothing_to_change(explained.forecast):
        parts += [tag('p', tag('b', 'what to change first'), f': {none}')]
    lists = (exchanges, explained.exchanges), (buffers, explained.buffers)
    most = explained.forecast.most_bytes
    for title, rows in lists:
        cells = [
            [
                bytes_str(row.nbytes, most),
                f'{row.count:,} x {row.kind}'
                + (f' over {", ".join(row.axes)}' if row.axes else ''),
                tag('code', row.array) if row.array else '',
                tag('code', row.line) if row.line else '',
                row.why,
                [tag('code', row.change), f' {row.tried}'] if row.change else '',
            ]
            for row in rows[:_LISTED]
        ]
        head = ('bytes', 'what', 'array', 'line', 'why', 'change')
        parts += [tag('p', tag('b', title)), plain_table(head, cells) if cells else None]
    return tag('div', *parts)
