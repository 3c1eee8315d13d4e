"""Tables of plans and audits as plain text, and with rich where it is installed."""

from __future__ import annotations

import math
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
