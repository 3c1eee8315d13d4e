"""Draws what devices exchange: the bytes over each axis, and each collective with its cause."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from meshwright.causes import Cause
from meshwright.program.collectives import Collective
from meshwright.report.figures import SENT, figure_of, network_name, sum_exchanges
from meshwright.report.forecasts import Forecast
from meshwright.report.page.bars import Part, color_of, legend, stacked_bar
from meshwright.report.page.cause_lines import cause_markup
from meshwright.report.page.html_tables import Cell, Column, sortable_table
from meshwright.report.page.markup import Html, tag

_COLUMNS = (
    Column(key='exchange', title='exchange'),
    Column(key='axes', title='over'),
    Column(key='bytes', title='bytes sent', number=True),
    Column(key='count', title='times', number=True),
    Column(key='schedule', title='in the program'),
    Column(key='cause', title='where it comes from', wide=True),
)
_SMALL = 0.001  # an axis with a smaller share of the largest axis has no bar
_LONGEST = 120  # characters of the names of arrays

_Exchange = tuple[Collective, Cause | None]


def show_exchanges(forecast: Forecast, name: str) -> Html:
    """Returns the bytes by network and axis, and a table of the collectives.

    Args:
      forecast: the forecast.
      name: the name of the table within the page.
    """
    heading = tag('h3', 'Exchanged data')
    if not forecast.collectives:
        known = forecast.back_end != 'none' or forecast.num_devices == 1
        words = 'Devices exchange nothing.' if known else 'Not known: nothing was compiled.'
        nothing = tag('p', words, class_='none')
        return tag('section', heading, nothing, class_='exchanges')
    total = figure_of(forecast, SENT, 'all').text
    caption = 'collectives, with the bytes that a device sends in one call'
    rows = [_row(forecast, group) for group in _alike(forecast.collectives)]
    return tag(
        'section',
        heading,
        tag('p', f'Each device sends {total} per call.', class_='words'),
        _by_axis(forecast),
        sortable_table(name, caption, _COLUMNS, rows),
        class_='exchanges',
    )


def _by_axis(forecast: Forecast) -> Html:
    totals: dict[tuple[str, str], dict[str, float]] = {}
    exchanges = sum_exchanges(forecast)
    for sent in exchanges:
        key = (network_name(forecast, sent.network, sent.axes), _axes(sent.axes))
        held = totals.setdefault(key, {})
        held[sent.kind] = held.get(sent.kind, 0) + sent.bytes
    kinds = sorted({sent.kind for sent in exchanges})
    most = max(sum(held.values()) for held in totals.values()) or 1.0
    drawn: list[Html] = []
    small = []
    for (network, axes), held in sorted(totals.items(), key=lambda t: -sum(t[1].values())):
        figure = forecast.show_bytes(sum(held.values()))
        if sum(held.values()) < _SMALL * most:
            small.append(f'{axes} {figure}')
            continue
        parts = [
            Part(
                name=kind,
                size=held[kind],
                figure=forecast.show_bytes(held[kind]),
                color=color_of(number),
            )
            for number, kind in enumerate(kinds)
            if kind in held
        ]
        drawn += [
            tag('h4', axes, tag('small', f' {network}, {figure}')),
            stacked_bar(parts, most, f'{figure} over {axes}'),
            legend(parts),
        ]
    if small:
        drawn.append(tag('p', f'In addition, over {", over ".join(small)}.', class_='key'))
    return tag('div', *drawn, class_='axes')


def _alike(exchanges: Iterable[_Exchange]) -> list[list[_Exchange]]:
    """Groups exchanges that differ only in their arrays, the group with the most bytes first."""
    groups: dict[object, list[_Exchange]] = collections.defaultdict(list)
    for collective, cause in exchanges:
        c = collective
        groups[c.kind, c.network, c.axes, c.source, c.asynchronous, cause].append((c, cause))
    return sorted(groups.values(), key=lambda group: -sum(c.total_bytes for c, _ in group))


def _row(forecast: Forecast, group: Sequence[_Exchange]) -> list[Cell]:
    collective, cause = group[0]
    sent = sum(c.total_bytes for c, _ in group)
    times = sum(c.count for c, _ in group)
    arrays = ', '.join(dict.fromkeys(array for c, _ in group for array in c.arrays))
    shown = arrays if len(arrays) <= _LONGEST else f'{arrays[: _LONGEST - 1]}…'
    network = network_name(forecast, collective.network, collective.axes)
    within = f'{network}, {collective.group_size} each'
    schedule = {True: 'next to others', False: 'by itself', None: '-'}[collective.asynchronous]
    return [
        Cell(content=[tag('b', collective.kind), tag('small', shown, class_='code')]),
        Cell(content=[_axes(collective.axes), tag('small', within, class_='short')]),
        Cell(content=forecast.show_bytes(sent), value=sent),
        Cell(content=f'{times:,}', value=times),
        Cell(content=schedule),
        Cell(content=cause_markup(cause, collective.source, collective.op_name)),
    ]


def _axes(axes: Sequence[str]) -> str:
    return ' x '.join(axes) or 'unnamed axes'
