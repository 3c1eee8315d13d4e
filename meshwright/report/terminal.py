"""Forecasts as plain text: one table with a column for each machine, and lists below it."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence

from meshwright.causes import Cause
from meshwright.program.collectives import Collective
from meshwright.report.figures import (
    MACHINE,
    hanging,
    heading,
    machine_name,
    outside_words,
    source_name,
    table_rows,
    verdict,
)
from meshwright.report.forecasts import Forecast, Replicated
from meshwright.report.suggestions import (
    SUGGESTED,
    Suggestion,
    list_suggestions,
    nothing_to_change,
    refer_to,
)
from meshwright.report.time_words import range_sentence
from meshwright.report.tried import tried_text

WIDTH = 100  # columns of a terminal
_LABEL = 30  # characters of the labels, and of the column of a machine, at least
_LEAST = 20
_GAP = 2
_FEW = 5  # exchanges
_SUMS = ('all-reduce', 'reduce-scatter')
_LISTED = 8  # replicated arrays, buffers and warnings


def terminal_width(otherwise: int = WIDTH) -> int:
    """The columns of the terminal, or another number if the output goes to a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else otherwise


def forecast_table(forecasts: Sequence[Forecast], *, width: int = WIDTH) -> str:
    """Returns forecasts side by side, with what is replicated, what is largest, and notes below.

    Args:
      forecasts: the forecasts, usually of one function on several machines.
      width: the characters of a line.
    """
    at_once = max(1, (width - _LABEL) // (_LEAST + _GAP))
    blocks = []
    for start in range(0, len(forecasts), at_once):
        shown = forecasts[start : start + at_once]
        blocks += ['\n'.join(_columns(shown, width)), *_lists_below(shown, width)]
    return '\n\n'.join(blocks) + '\n'


def _columns(forecasts: Sequence[Forecast], width: int) -> Iterator[str]:
    lines = list(_lines(forecasts))
    column = (width - _LABEL) // len(forecasts) - _GAP
    column = min(column, max(_LEAST, *(len(cell) for _, cells in lines for cell in cells)))
    labels = width - (column + _GAP) * len(forecasts)
    labels = min(labels, max(_LABEL, *(len(label) for label, _ in lines)))
    for label, cells in lines:
        shown = (_shortened(cell, column).rjust(column) for cell in cells)
        line = _shortened(label, labels).ljust(labels) + (' ' * _GAP).join(['', *shown])
        yield line.rstrip()
        if label and not label.startswith(' '):
            yield '-' * (labels + (_GAP + column) * len(forecasts))


def _lines(forecasts: Sequence[Forecast]) -> Iterator[tuple[str, list[str]]]:
    """The labels and cells of the table; an empty line and a heading begin each section."""
    section = ''
    for row in table_rows(forecasts):
        if row.section != section:
            if section:
                yield '', []
            section = row.section
            names = ', '.join(dict.fromkeys(f.function for f in forecasts))
            title = names if section == MACHINE else section
            yield title, [heading(section, forecast) for forecast in forecasts]
        yield '  ' * row.depth + row.label, row.texts


def _lists_below(forecasts: Sequence[Forecast], width: int) -> Iterator[str]:
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
    found = list_suggestions(forecast)
    yield 'what to change first', list(_suggestions(forecast, found))
    yield 'replicated', list(_replicated(forecast))
    exchanges = itertools.islice(_exchanges(forecast), _FEW)
    yield 'largest exchanges', [refer_to(found[:SUGGESTED], line) for line in exchanges]
    origin = source_name(forecast.memory.buffers_from, forecast)
    yield f'largest buffers ({origin})', list(_buffers(forecast))
    yield 'what would make it fit', list(_changes(forecast))
    yield 'warnings of the compiler', [_shortened(w, 300) for w in forecast.warnings]
    about_time = [range_sentence(forecast), outside_words(forecast.time)]
    yield 'notes', [*forecast.notes, *filter(None, about_time)]


def _section(title: str, lines: Sequence[str], where: str, width: int) -> Iterator[str]:
    if lines:
        rest = len(lines) - _LISTED
        shown = [*lines[:_LISTED], *([f'and {rest} more'] if rest > 0 else [])]
        yield '\n'.join([title + where, *map(hanging(width).fill, shown)])


def _suggestions(forecast: Forecast, found: Sequence[Suggestion]) -> Iterator[str]:
    yield from map(str, found[:SUGGESTED])
    if len(found) > SUGGESTED:
        yield f'and {len(found) - SUGGESTED} more'
    if not found and (none := nothing_to_change(forecast)):
        yield none


def _replicated(forecast: Forecast) -> Iterator[str]:
    """A line for all arrays that are replicated for the same reason; the largest sum first."""
    groups: dict[tuple[str, str], list[Replicated]] = {}
    for array in forecast.replicated:
        groups.setdefault((', '.join(array.axes), array.reason), []).append(array)
    sums = {key: sum(a.nbytes for a in arrays) for key, arrays in groups.items()}
    for key in sorted(groups, key=lambda k: -sums[k]):
        (axes, reason), arrays = key, groups[key]
        others = f' and {len(arrays) - 1} more' if len(arrays) > 1 else ''
        size = f'{forecast.show_bytes(sums[key]):>10}'
        # The shortest path is the path of a parameter, and not of its optimizer state.
        path = min((array.path for array in arrays), key=lambda path: (path.count('/'), path))
        yield f'{size}  {path}{others} over {axes}: {reason}'


def _exchanges(forecast: Forecast) -> Iterator[str]:
    """A line for all exchanges of the same arrays at the same place; the largest sum first.

    The phases of one sum over devices, such as a reduce-scatter and an all-reduce, are one line.
    """
    groups: dict[tuple[str, str], list[Collective]] = {}
    for c, cause in forecast.collectives:
        kind = 'sum' if cause is not None and c.kind in _SUMS else c.kind
        groups.setdefault((kind, _exchange(c, cause, forecast.most_bytes)), []).append(c)
    sums = {key: sum(c.total_bytes for c in group) for key, group in groups.items()}
    for key in sorted(groups, key=lambda key: -sums[key]):
        several = f'{len(groups[key])} x ' if len(groups[key]) > 1 else ''
        kinds = ' and '.join(sorted({c.kind for c in groups[key]}, reverse=True))
        size = forecast.show_bytes(sums[key])
        yield f'{size:>10}  {several}{kinds} {key[1]}'


def _exchange(collective: Collective, cause: Cause | None, beside: float) -> str:
    """Over which axes and where it is exchanged: by its cause, or by its array and line."""
    text = f'over {", ".join(collective.axes)}'
    source = cause.source if cause else collective.source
    others = len(collective.arrays) - 1  # compilers put exchanges together
    more = f' and {others} more' if others > 0 else ''
    if cause is not None:
        at = f', {source}' if source else ''
        found = f'{text} of {cause.array}{more}{at}: {cause.why}'
        found = f'{found} (avoidable)' if cause.avoidable else found
        tried = f'; {cause.change} ({tried_text(cause, beside)})' if cause.change else ''
        return f'{found}{tried}'
    operation = collective.op_name.rpartition('/')[2]
    operation = '' if operation == collective.kind else operation
    named = f'{text} of {collective.arrays[0]}{more}' if collective.arrays else text
    return ', '.join(part for part in (named, operation, source) if part)


def _buffers(forecast: Forecast) -> Iterator[str]:
    for array, cause in forecast.memory.buffers:
        several = f'{array.count} x ' if array.count > 1 else ''
        operation = array.op_name.rpartition('/')[2]
        axes = cause.logical_axes if cause is not None else ()
        names = [f'[{", ".join(map(str, axes))}]'] if any(axes) else []
        source = cause.source if cause else array.source
        parts = [p for p in (*names, operation, source) if p]
        size = forecast.show_bytes(array.nbytes)
        yield f'{size:>10}  {several}{array.array} {", ".join(parts)}'.rstrip()


def _changes(forecast: Forecast) -> Iterator[str]:
    for change in forecast.changes:
        peak = forecast.show_bytes(change.peak)
        figure = f'{peak}, {verdict(change.fits)}'
        yield f'{change.setting}: {figure} ({source_name(change.peak_from, forecast)})'


def _shortened(text: str, width: int) -> str:
    """Returns a text in `width` characters; '…' stands for an end that was cut off."""
    return text if len(text) <= width else text[: width - 1] + '…'
