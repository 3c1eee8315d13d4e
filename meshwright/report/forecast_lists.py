"""The lists below a table of forecasts: what is replicated, what is largest, and what helps."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from meshwright.causes import Cause
from meshwright.program.collectives import Collective
from meshwright.report.forecasts import Forecast, Replicated
from meshwright.time.work import Origin
from partitioning.amounts import bytes_str

_FEW = 5  # exchanges
_LISTED = 8  # replicated arrays, buffers and warnings


def lists_below(forecasts: Sequence[Forecast], width: int) -> Iterator[str]:
    """The lists of each machine, in sections; those that are the same everywhere appear once."""
    made = [list(_sections(forecast)) for forecast in forecasts]
    for sections in zip(*made, strict=True):
        several = len(forecasts) > 1
        if several and all(section == sections[0] for section in sections):
            title, lines = sections[0]
            yield from _section(title, lines, ' on all machines', width)
            continue
        for forecast, (title, lines) in zip(forecasts, sections, strict=True):
            where = f' on {machine_name(forecast)}' if several else ''
            yield from _section(title, lines, where, width)


def _sections(forecast: Forecast) -> Iterator[tuple[str, list[str]]]:
    yield 'replicated', list(_replicated(forecast))
    yield 'largest exchanges', list(_exchanges(forecast))[:_FEW]
    yield _buffer_title(forecast), list(_buffers(forecast))
    yield 'what would make it fit', list(_changes(forecast))
    yield 'warnings of the compiler', [shortened(w, 300) for w in forecast.warnings]
    yield 'notes', list(forecast.notes)


def _section(title: str, lines: Sequence[str], where: str, width: int) -> Iterator[str]:
    if lines:
        rest = len(lines) - _LISTED
        shown = [*lines[:_LISTED], *([f'and {rest} more'] if rest > 0 else [])]
        yield '\n'.join([title + where, *(_wrapped(line, width) for line in shown)])


def _wrapped(line: str, width: int) -> str:
    return textwrap.fill(
        line,
        width=width,
        initial_indent='  ',
        subsequent_indent='      ',
        break_long_words=False,
        break_on_hyphens=False,
    )


def _replicated(forecast: Forecast) -> Iterator[str]:
    """A line for all arrays that are replicated for the same reason; the largest sum first."""
    groups: dict[tuple[str, str], list[Replicated]] = {}
    for array in forecast.replicated:
        groups.setdefault((', '.join(array.axes), array.reason), []).append(array)
    sums = {key: sum(a.nbytes for a in arrays) for key, arrays in groups.items()}
    for key in sorted(groups, key=lambda k: -sums[k]):
        (axes, reason), arrays = key, groups[key]
        others = f' and {len(arrays) - 1} more' if len(arrays) > 1 else ''
        size = f'{bytes_str(sums[key]):>10}'
        yield f'{size}  {_shortest(arrays)}{others} over {axes}: {reason}'


def _shortest(arrays: Sequence[Replicated]) -> str:
    """The path that says most about arrays: that of a parameter, not of what follows it."""
    return min((array.path for array in arrays), key=lambda path: (path.count('/'), path))


def _exchanges(forecast: Forecast) -> Iterator[str]:
    """A line for all exchanges of the same arrays at the same place; the largest sum first."""
    groups: dict[str, list[Collective]] = {}
    for collective, cause in forecast.collectives:
        groups.setdefault(_exchange(collective, cause), []).append(collective)
    sums = {text: sum(c.total_bytes for c in group) for text, group in groups.items()}
    for text in sorted(groups, key=lambda t: -sums[t]):
        several = f'{len(groups[text])} x ' if len(groups[text]) > 1 else ''
        yield f'{bytes_str(sums[text]):>10}  {several}{text}'


def _exchange(collective: Collective, cause: Cause | None) -> str:
    """What is exchanged, over which axes and where: by its cause, or by its array and line."""
    text = f'{collective.kind} over {", ".join(collective.axes)}'
    source = cause.source if cause else collective.source
    others = len(collective.arrays) - 1  # compilers put exchanges together
    more = f' and {others} more' if others > 0 else ''
    if cause is not None:
        found = f'{text} of {cause.array}{more}, {source}: {cause.reason}'
        return f'{found}; {cause.change}' if cause.change else found
    operation = collective.op_name.rpartition('/')[2]
    operation = '' if operation == collective.kind else operation
    named = f'{text} of {collective.arrays[0]}{more}' if collective.arrays else text
    return ', '.join(part for part in (named, operation, source) if part)


def _buffer_title(forecast: Forecast) -> str:
    return f'largest buffers ({origin_str(forecast.memory.buffers_from, forecast)})'


def origin_str(origin: Origin, forecast: Forecast) -> str:
    """Where a figure comes from: the name of the compiler, or 'by formula'."""
    return forecast.back_end_version if origin == 'compiler' else 'by formula'


def _buffers(forecast: Forecast) -> Iterator[str]:
    for array, cause in forecast.memory.buffers:
        several = f'{array.count} x ' if array.count > 1 else ''
        operation = array.op_name.rpartition('/')[2]
        axes = cause.logical_axes if cause is not None else ()
        names = [f'[{", ".join(map(str, axes))}]'] if any(axes) else []
        source = cause.source if cause else array.source
        parts = [p for p in (*names, operation, source) if p]
        yield f'{bytes_str(array.nbytes):>10}  {several}{array.array} {", ".join(parts)}'.rstrip()


def _changes(forecast: Forecast) -> Iterator[str]:
    for change in forecast.changes:
        fits = {True: 'fits', False: 'does not fit', None: ''}[change.fits]
        figure = f'{bytes_str(change.peak)}, {fits}' if fits else bytes_str(change.peak)
        yield f'{change.setting}: {figure} ({origin_str(change.peak_from, forecast)})'


def machine_name(forecast: Forecast) -> str:
    """The name of a machine, with the number of its slices: '2 x v5e:16x16'."""
    slices = f'{forecast.num_slices} x ' if forecast.num_slices > 1 else ''
    return slices + forecast.topology


def shortened(text: str, width: int) -> str:
    """Returns a text in `width` characters; '…' stands for an end that was cut off."""
    return text if len(text) <= width else text[: width - 1] + '…'
