"""Tables of the page: the arrays of the arguments, replicated arrays, and the largest buffers."""

from __future__ import annotations

from collections.abc import Callable

from meshwright.report.forecasts import Forecast
from meshwright.report.page.cause_lines import cause_markup
from meshwright.report.page.html_tables import Cell, Column, sortable_table
from meshwright.report.page.markup import Html, tag
from partitioning.plan import PlanRow
from partitioning.plan.tables import count, shape_str, spec_or_padded_str

_ARRAYS = (
    Column(key='array', title='array'),
    Column(key='role', title='role'),
    Column(key='shape', title='shape'),
    Column(key='spec', title='spec'),
    Column(key='bytes', title='bytes per device', number=True),
    Column(key='reason', title='why', wide=True),
)
_BUFFERS = (
    Column(key='buffer', title='buffer'),
    Column(key='bytes', title='bytes', number=True),
    Column(key='count', title='arrays', number=True),
    Column(key='cause', title='where it comes from', wide=True),
)
_REPLICATED = (
    Column(key='array', title='array'),
    Column(key='axes', title='copies along'),
    Column(key='bytes', title='bytes per device', number=True),
    Column(key='reason', title='why', wide=True),
)


def show_arrays(forecast: Forecast, name: str) -> Html | None:
    """Returns the table of the arguments' arrays; the table gets the name `name`."""
    if not forecast.arrays:
        return None
    held = forecast.show_bytes(sum(row.bytes_per_device for row in forecast.arrays))
    words = f'{count(len(forecast.arrays), "array")}, {held} per device.'
    caption = 'arrays of the arguments, with their layouts'
    rows = [_array(row, forecast.show_bytes) for row in forecast.arrays]
    return _section('Arrays', words, sortable_table(name, caption, _ARRAYS, rows))


def show_replicated(forecast: Forecast, name: str) -> Html | None:
    """Returns the table of the arrays that several devices hold in full."""
    if not forecast.replicated:
        return None
    rows = [
        [
            Cell(content=tag('code', array.path)),
            Cell(content=', '.join(array.axes)),
            Cell(content=forecast.show_bytes(array.nbytes), value=array.nbytes),
            Cell(content=array.reason),
        ]
        for array in forecast.replicated
    ]
    held = forecast.show_bytes(sum(array.nbytes for array in forecast.replicated))
    words = f'{count(len(rows), "array")}, {held} per device.'
    caption = 'arrays that several devices hold in full'
    return _section('Replicated', words, sortable_table(name, caption, _REPLICATED, rows))


def show_buffers(forecast: Forecast, name: str) -> Html | None:
    """Returns the table of the largest arrays at the peak besides the arguments."""
    if not forecast.memory.buffers:
        return None
    rows = [
        [
            Cell(content=tag('code', buffer.array)),
            Cell(content=forecast.show_bytes(buffer.nbytes), value=buffer.nbytes),
            Cell(content=f'{buffer.count:,}', value=buffer.count),
            Cell(content=cause_markup(cause, buffer.source, buffer.op_name)),
        ]
        for buffer, cause in forecast.memory.buffers
    ]
    caption = 'the largest arrays in memory at the peak, besides the arguments'
    by_formula = forecast.memory.buffers_from == 'jaxpr'
    origin = 'By formula, from the traced function.' if by_formula else 'From the compiled program.'
    table = sortable_table(name, caption, _BUFFERS, rows)
    return _section('Largest buffers at the peak', origin, table)


def _section(title: str, words: str, table: Html) -> Html:
    return tag('section', tag('h3', title), tag('p', words, class_='words'), table)


def _array(row: PlanRow, show: Callable[[float], str]) -> list[Cell]:
    names = ', '.join(str(name) for name in row.logical_axes)
    shard = shape_str(row.shard_shape)
    spec = tag('code', spec_or_padded_str(row.spec))
    return [
        Cell(content=tag('code', row.path)),
        Cell(content=row.role),
        Cell(
            content=[f'{shape_str(row.shape)} ', tag('small', f'{row.dtype}, shard {shard}')],
            value=row.bytes_total,
        ),
        Cell(content=[spec, tag('small', names) if names else None]),
        Cell(content=show(row.bytes_per_device), value=row.bytes_per_device),
        Cell(content=row.reason),
    ]
