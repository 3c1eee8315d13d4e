"""Bars of parts, with a legend that has their figures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.report.page.markup import Child, Html, tag

# All bars are 1000 wide in their own units, and as wide as the page allows.
WIDTH = 1000.0
_COLORS = 8  # c0 to c7 in page.css


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a bar.

    Attributes:
      name: what it is.
      size: its size, in the unit of the bar.
      figure: its size as text.
      color: the number of its color.
      note: what else the legend says about it.
    """

    name: str
    size: float
    figure: str
    color: int
    note: Child = None


def stacked_bar(parts: Sequence[Part], whole: float, label: str, *marks: Html) -> Html:
    """Returns parts next to each other, in a bar that is `whole` long, below marks."""
    drawn, start = [], 0.0
    for part in parts:
        size = WIDTH * part.size / whole
        title = tag('title', f'{part.name}: {part.figure}')
        drawn.append(
            tag('rect', title, x=start, y=0, width=size, height=28, class_=f'c{part.color}')
        )
        start += size
    return tag(
        'svg',
        tag('rect', x=0, y=0, width=WIDTH, height=28, class_='track'),
        drawn,
        marks,
        viewbox=f'0 -4 {WIDTH:g} 36',
        preserveaspectratio='none',
        class_='bar',
        role='img',
        aria_label=label,
    )


def lens(share: float) -> Html:
    """Returns lines from the first `share` of the bar above to the whole of the bar below."""
    points = f'0,0 {WIDTH * share:.6g},0 {WIDTH:g},20 0,20'
    return tag(
        'svg',
        tag('polygon', points=points),
        viewbox=f'0 0 {WIDTH:g} 20',
        preserveaspectratio='none',
        class_='lens',
        aria_hidden='true',
    )


def mark(place: float, kind: str, title: str) -> Html:
    """Returns a line across a bar, at a place from 0 to 1."""
    x = WIDTH * min(place, 1)
    return tag('line', tag('title', title), x1=x, x2=x, y1=-3, y2=31, class_=f'mark {kind}')


def span(low: float, high: float, title: str) -> Html:
    """Returns a range from `low` to `high`, from 0 to 1, along the middle of a bar."""
    left, right = WIDTH * low, WIDTH * high
    line = f'M{left:.6g} 6V22M{left:.6g} 14H{right:.6g}M{right:.6g} 6V22'
    return tag('path', tag('title', title), d=line, class_='range')


def legend(parts: Sequence[Part]) -> Html:
    """Returns the names and figures of parts, each with its color."""
    return tag(
        'ul',
        *(
            tag(
                'li',
                tag('span', class_=f'swatch c{part.color}', aria_hidden='true'),
                tag('span', part.name, class_='name'),
                tag('span', part.figure, class_='figure'),
                None if part.note is None else tag('span', part.note, class_='note'),
            )
            for part in parts
        ),
        class_='legend',
    )


def color_of(number: int) -> int:
    """The color of the part with this number; more parts than colors share the last one."""
    return min(number, _COLORS - 1)
