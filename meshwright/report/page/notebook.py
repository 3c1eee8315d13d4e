"""A forecast as it draws itself in a notebook: without scripts, and with styles in its elements."""

from __future__ import annotations

from meshwright.report.figures import ITSELF, machine_name, table_rows, verdict
from meshwright.report.forecasts import Forecast
from meshwright.report.page.html_tables import plain_table
from meshwright.report.page.markup import Html, tag
from partitioning.amounts import share_str
from partitioning.rules import describe_axes

_ROLES = (
    ('parameters', '#3b6fb6'),
    ('optimizer', '#8a6fc1'),
    ('batch', '#4fa37a'),
    ('other', '#9a9a9a'),
)
_REST = '#d9a441'


def draw_forecast(forecast: Forecast) -> Html:
    """A bar of the memory and the table of figures."""
    title = (
        f'{forecast.function} on {machine_name(forecast)}, {describe_axes(forecast.mesh)}: '
        f'{verdict(forecast.fits)}'
    )
    rows = [
        [f'{row.section}: {row.label}' if row.depth == 1 else row.label, *row.texts]
        for row in table_rows([forecast])
        if row.section != ITSELF  # which differs from run to run
    ]
    return tag(
        'div',
        tag('p', tag('b', title)),
        _bar(forecast),
        plain_table(('figure', 'per device and call'), rows),
        style='max-width: 60em',
    )


def _bar(forecast: Forecast) -> Html:
    memory = forecast.memory
    whole = max(memory.limit or 0, memory.peak, 1)
    parts = [(role, getattr(memory, role), color) for role, color in _ROLES]
    parts.append(('temporaries', max(memory.peak - memory.arguments, 0), _REST))
    drawn = [
        tag(
            'span',
            title=f'{name}: {forecast.show_bytes(size)}',
            style=f'background: {color}; width: {100 * size / whole:.3g}%',
        )
        for name, size, color in parts
        if size
    ]
    limit = '' if memory.limit is None else f' of {forecast.show_bytes(memory.limit)}'
    share = '' if memory.limit is None else f' ({share_str(memory.peak / memory.limit)})'
    legend = ', '.join(f'{name} {forecast.show_bytes(size)}' for name, size, _ in parts if size)
    return tag(
        'div',
        tag(
            'div',
            *drawn,
            style='display: flex; height: 1.2em; background: #ececec; border-radius: 3px',
        ),
        tag('small', f'{forecast.show_bytes(memory.peak)}{limit}{share} at the peak: {legend}'),
    )
