"""A plan as a table that fits a terminal: rows that are alike are one row.

Layers of one kind have the same shape and layout, and the arrays of the optimizer follow their
parameter, so a few rows say what hundreds of arrays look like.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence

from partitioning.plan.rows import PlanRow
from partitioning.plan.tables import count, shape_str, spec_or_padded_str, text_table
from partitioning.rules import MeshLike, describe_axes

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
    pieces = textwrap.wrap(first.replace('/', '/ '), width) or ['']
    pieces = [piece.replace('/ ', '/') for piece in pieces]
    blank = [''] * len(others)
    return [
        ((piece if i == 0 else f'  {piece}'), *(others if i == 0 else blank))
        for i, piece in enumerate(pieces)
    ]
