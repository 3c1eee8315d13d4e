"""Tables of plans and audits as plain text, and with rich where it is installed."""

from __future__ import annotations

import dataclasses
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from partitioning.plan.rows import PlanRow
from partitioning.rules import MeshLike, PaddedSpec, Spec, axis_sizes, describe_axes, spec_str

TextRows = Sequence[tuple[str, ...]]
# Columns of these names hold numbers, which are aligned to the right.
_NUMBERS = ('arrays', 'bytes', 'bytes per device', 'share', 'more than its share')


# What tables say of an array, by the name of the column.
_COLUMNS: dict[str, Callable[[PlanRow], str]] = {
    'array': lambda row: row.path,
    'shape': lambda row: shape_str(row.shape),
    'dtype': lambda row: row.dtype,
    'logical axes': lambda row: (
        ', '.join(n if isinstance(n, str) else 'None' for n in row.logical_axes) or '-'
    ),
    'spec': lambda row: spec_or_padded_str(row.spec),
    'shard shape': lambda row: shape_str(row.shard_shape),
    'bytes per device': lambda row: f'{row.bytes_per_device:,}',
    'reason': lambda row: row.reason,
}


class Table(NamedTuple):
    """A table to print: a title, the names of its columns, and its rows."""

    title: str
    head: tuple[str, ...]
    rows: TextRows


def layout_table(rows: Sequence[PlanRow], mesh: MeshLike) -> str:
    """The layout of every array as plain text, with the mesh above and the sums below."""
    head = ('array', 'shape', 'dtype', 'logical axes', 'spec', 'shard shape', 'bytes per device')
    total, held = sum(r.bytes_total for r in rows), sum(r.bytes_per_device for r in rows)
    devices = math.prod(axis_sizes(mesh).values())
    return '\n'.join(
        [
            f'mesh: {describe_axes(mesh)} ({count(devices, "device")})',
            '',
            *row_table(rows, head),
            '',
            f'{count(len(rows), "array")}, {total:,} bytes; {held:,} bytes per device '
            f'({held / max(total, 1):.1%} of the total; evenly sharded {1 / devices:.1%})',
            '',
        ]
    )


def row_table(rows: Sequence[PlanRow], head: tuple[str, ...]) -> list[str]:
    """The lines of a table with one line per array, and the columns of these names."""
    return text_table(head, [tuple(_COLUMNS[name](row) for name in head) for row in rows])


def text_tables(tables: Sequence[Table]) -> str:
    """Tables as plain text, each below its title."""
    return '\n'.join(
        '\n'.join([table.title, '', *text_table(table.head, table.rows), '']) for table in tables
    )


def rich_tables(tables: Sequence[Table]) -> Any:
    """Tables as a renderable of rich."""
    from rich.console import Group  # only rich calls this, so it is installed
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn: list[Any] = []
    for title, head, rows in tables:
        table = RichTable(box=None, pad_edge=False, header_style='dim')
        for name in head:
            table.add_column(name, justify='right' if name in _NUMBERS else 'left', overflow='fold')
        for row in rows:
            table.add_row(*row)
        drawn += [Text(title, style='bold'), table, '']
    return Group(*drawn[:-1])


def text_table(head: tuple[str, ...], rows: TextRows) -> list[str]:
    """The lines of a table with columns of equal width; columns of numbers align to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [
        '  '.join(
            cell.rjust(w) if head[i] in _NUMBERS else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in [head, tuple('-' * w for w in widths), *rows]
    ]
    return [line.rstrip() for line in lines]


def shape_str(shape: Sequence[int]) -> str:
    """A shape as text: `16 x 64`."""
    return ' x '.join(map(str, shape)) or 'scalar'


def spec_or_padded_str(spec: Spec) -> str:
    """A spec as code; for a padded array also the spec inside partitioned functions."""
    if isinstance(spec, PaddedSpec):
        return f'{spec_str(spec.outside)}, inside {spec_str(spec.inside)}'
    return spec_str(spec)


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 array`, `1,024 arrays`."""
    return f'{number:,} {noun}{"" if number == 1 else "s"}'


# A table that fits a terminal. Layers of one kind have the same shape and layout, and the arrays of
# the optimizer follow their parameter, so a few rows say what hundreds of arrays look like.

_NUMBER = re.compile(r'\d+')
# The columns that are left out of a narrow terminal, the first one first.
_OPTIONAL = ('reason', 'shard shape', 'shape')
_NARROWEST = 24  # of the first column


@dataclasses.dataclass
class FoldedRow:
    """Arrays that are alike.

    Attributes:
      row: the first of them.
      paths: the paths of the parameters, or of arrays that follow none.
      followers: how many arrays of the optimizer follow them.
      bytes_per_device: the bytes of all of them on a device.
    """

    row: PlanRow
    paths: list[str]
    followers: int = 0
    bytes_per_device: int = 0

    @property
    def label(self) -> str:
        """Their path, in which numbers that differ are a range: `params/layers_{0..11}/up`."""
        numbers = [[int(n) for n in _NUMBER.findall(path)] for path in self.paths]
        ranges = [sorted(set(column)) for column in zip(*numbers, strict=True)]
        shown = iter(map(_numbers, ranges))
        return _NUMBER.sub(lambda _: next(shown), self.paths[0])


def _numbers(found: Sequence[int]) -> str:
    """Numbers in ascending order as text: `3`, `{0..11}` or `{0,2}`."""
    if len(found) == 1:
        return str(found[0])
    if found[-1] - found[0] == len(found) - 1:
        return f'{{{found[0]}..{found[-1]}}}'
    few = found if len(found) <= 3 else (*found[:2], '...', found[-1])
    return f'{{{",".join(map(str, few))}}}'


def fold_rows(rows: Sequence[PlanRow]) -> list[FoldedRow]:
    """Returns the rows of a plan, those that are alike as one."""
    folded: dict[tuple[object, ...], FoldedRow] = {}
    by_end: dict[str, tuple[PlanRow, FoldedRow]] = {}
    for row in sorted(rows, key=lambda row: row.role != 'parameters'):
        follows = None if row.role == 'parameters' else _followed(row, by_end)
        if follows is not None:
            follows.followers += 1
            follows.bytes_per_device += row.bytes_per_device
            continue
        kind = _NUMBER.sub('#', row.path)
        key = (kind, row.shape, row.dtype, spec_or_padded_str(row.spec))
        found = folded.setdefault(key, FoldedRow(row, []))
        found.paths.append(row.path)
        found.bytes_per_device += row.bytes_per_device
        if row.role == 'parameters':
            by_end[row.path.removeprefix('params/')] = row, found
    return list(folded.values())


def _followed(row: PlanRow, by_end: dict[str, tuple[PlanRow, FoldedRow]]) -> FoldedRow | None:
    """The parameter that an array of the optimizer follows in its shape and layout, or None."""
    parts = row.path.split('/')
    for first in range(1, len(parts)):
        found = by_end.get('/'.join(parts[first:]))
        if found is not None:
            parameter, folded = found
            alike = (parameter.shape, parameter.spec) == (row.shape, row.spec)
            return folded if alike else None
    return None


def folded_table(rows: Sequence[PlanRow], mesh: MeshLike, width: int) -> str:
    """Returns the layout of a plan as a table of at most `width` columns."""
    folded = fold_rows(rows)
    columns = {
        'array': [one.label for one in folded],
        'arrays': [str(len(one.paths) + one.followers) for one in folded],
        'shape': [shape_str(one.row.shape) for one in folded],
        'spec': [spec_or_padded_str(one.row.spec) for one in folded],
        'shard shape': [shape_str(one.row.shard_shape) for one in folded],
        'bytes per device': [f'{one.bytes_per_device:,}' for one in folded],
        'reason': [one.row.reason for one in folded],
    }
    head = list(columns)

    def size(names: Sequence[str]) -> int:
        return sum(max(map(len, [name, *columns[name]])) + 2 for name in names) - 2

    for name in _OPTIONAL:
        if size(head) > width:
            head.remove(name)
    lines = list(zip(*(columns[name] for name in head), strict=True))
    rest = size(head) - max(map(len, columns['array']), default=0)
    if size(head) > width:
        lines = [part for line in lines for part in _wrapped(line, max(_NARROWEST, width - rest))]
    total = sum(row.bytes_per_device for row in rows)
    of_all = sum(row.bytes_total for row in rows)
    summary = (
        f'{count(len(rows), "array")} in {count(len(folded), "row")}, {of_all:,} bytes; {total:,} '
        f'bytes per device of the mesh {describe_axes(mesh)}. Arrays of the optimizer are in the '
        'row of their parameter, and numbers that differ are a range. --all shows every array.'
    )
    return '\n'.join([*text_table(tuple(head), lines), '', textwrap.fill(summary, width)])


def _wrapped(line: tuple[str, ...], width: int) -> list[tuple[str, ...]]:
    """A line whose first cell is wrapped at the slashes of the path."""
    first, *others = line
    blank = [''] * len(others)
    return [
        (piece, *(others if i == 0 else blank)) for i, piece in enumerate(wrap_path(first, width))
    ]


def wrap_path(path: str, width: int) -> list[str]:
    """Wraps a path after its slashes. The second line and the following are indented."""
    if len(path) <= width:
        return [path]
    first, *rest = textwrap.wrap(path.replace('/', '/ '), width - 2)
    return [line.replace('/ ', '/') for line in (first, *(f'  {piece}' for piece in rest))]
