"""The main figures of forecasts: of several in a table, or of one in large type."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from meshwright.report.figures import (
    COMPUTATION,
    MACHINE,
    MEMORY,
    SENT,
    TIME,
    Row,
    figure_of,
    heading,
    machine_name,
    network_name,
    source_name,
    sum_exchanges,
    table_rows,
    verdict as verdict_words,
)
from meshwright.report.forecasts import Forecast
from meshwright.report.page.markup import Child, Html, tag
from meshwright.report.page.memory_section import meter
from meshwright.report.page.time_section import no_time
from partitioning.amounts import bytes_str, flops_str, share_str
from partitioning.rules import describe_axes


def comparison(forecasts: Sequence[Forecast], ids: Sequence[str]) -> Html:
    """Returns a table with one column for each forecast.

    Args:
      forecasts: the forecasts.
      ids: the ids of their parts of the page, which the headings lead to.
    """
    head = [
        tag(
            'th',
            tag('a', machine_name(f), href=f'#{name}'),
            tag('small', describe_axes(f.mesh)),
            scope='col',
        )
        for f, name in zip(forecasts, ids, strict=True)
    ]
    bodies = []
    for section, rows in itertools.groupby(table_rows(forecasts), lambda row: row.section):
        sources = [tag('td', tag('small', heading(section, forecast))) for forecast in forecasts]
        part = tag('tr', tag('th', section, scope='rowgroup'), *sources, class_='part')
        drawn = [_row(row, forecasts) for row in rows]
        bodies.append(tag('tbody', None if section == MACHINE else part, *drawn))
    table = tag(
        'table',
        tag('caption', 'the machines, next to each other', class_='hidden'),
        tag('thead', tag('tr', tag('td'), *head)),
        *bodies,
    )
    return tag('section', tag('div', table, class_='plain compare', tabindex='0'))


def _row(row: Row, forecasts: Sequence[Forecast]) -> Html:
    cells: list[Child] = [*row.texts]
    if (row.section, row.label) == (MACHINE, 'fits'):
        cells = [verdict(forecast) for forecast in forecasts]
    elif (row.section, row.label) == (MEMORY, 'peak'):
        cells = [
            [f'{text} ', meter(forecast.memory)]
            for text, forecast in zip(row.texts, forecasts, strict=True)
        ]
    label = tag('th', row.label, scope='row', class_=f'depth{row.depth}')
    return tag('tr', label, *(tag('td', cell) for cell in cells))


def verdict(forecast: Forecast) -> Html:
    """Returns whether a forecast fits, as a word with a sign."""
    sign, kind = {True: ('✓', 'yes'), False: ('✕', 'no'), None: ('?', 'unknown')}[forecast.fits]
    words = f' {verdict_words(forecast.fits)}'
    if forecast.is_close:
        sign, kind, words = '?', 'unknown', ' close to the limit'
    return tag('span', tag('span', sign, aria_hidden='true'), words, class_=f'verdict {kind}')


def tiles(forecast: Forecast) -> Html:
    """Returns the figures of a forecast that matter most, each with where it comes from."""
    executed = f'the program executes {flops_str(forecast.program_flops)}'
    limit, peak = forecast.memory.limit, forecast.memory.peak
    share = '' if limit is None else f'{share_str(peak / limit)} of {bytes_str(limit)}'
    sums: dict[str, float] = {}
    for sent in sum_exchanges(forecast):
        name = network_name(forecast, sent.network, sent.axes)
        sums[name] = sums.get(name, 0) + sent.bytes
    networks = ', '.join(f'{name} {forecast.show_bytes(size)}' for name, size in sums.items())
    shown = [
        _tile(forecast, 'peak memory', MEMORY, 'peak', share),
        _tile(forecast, 'step time', TIME, 'forecast', _time_note(forecast)),
        _tile(forecast, 'sent per step', SENT, 'all', networks),
        _tile(forecast, 'model FLOPs', COMPUTATION, 'of the model', executed),
    ]
    return tag('div', *shown, class_='tiles')


def _tile(forecast: Forecast, name: str, section: str, label: str, note: str) -> Html:
    figure = figure_of(forecast, section, label)
    return tag(
        'div',
        tag('span', name, class_='name'),
        tag('strong', figure.text),
        tag('span', note, class_='note') if note else None,
        tag('span', source_name(figure.source, forecast), class_='origin'),
        class_='tile',
    )


def _time_note(forecast: Forecast) -> str:
    if forecast.time is None:
        return no_time(forecast)
    bounds = figure_of(forecast, TIME, 'range').text
    mfu = figure_of(forecast, TIME, 'MFU')
    return bounds if mfu.value is None else f'{bounds}, MFU {mfu.text}'
