"""A mesh as text: each device at its place in the machine, with its position on the axes."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from partitioning.pictures.mesh_drawing import places_on_paper
from partitioning.pictures.shard_grid import is_dark, shade

_GAP = 2  # the spaces between planes


def mesh_picture(mesh: Mesh, *, color: bool = False) -> str:
    """Draws a mesh as lines of text.

    TPUs are at their x and y, with planes of equal z next to each other and slices below each
    other. On other machines, each row is a process. `3.1` is the device that is number 3 on the
    first axis of more than one device, and number 1 on the second.

    Args:
      mesh: the mesh, of real or described devices.
      color: whether to color each device by its position on the last axis, with escape codes.
    """
    axes = [i for i, size in enumerate(mesh.devices.shape) if size > 1] or [0]
    positions = np.indices(mesh.devices.shape)[axes].reshape(len(axes), -1).T.tolist()
    labels = ['.'.join(map(str, position)) for position in positions]
    width = max(map(len, labels)) + 2
    places, _, captions = places_on_paper(mesh)
    xy = [(round(x, 2), round(y, 2)) for x, y in places.reshape(-1, 2).tolist()]
    columns = _columns(sorted({x for x, _ in xy}), width)
    rows = collections.defaultdict[float, list[tuple[int, str, int | None]]](list)
    for (x, y), label, position in zip(xy, labels, positions, strict=True):
        rows[y].append((columns[x], f'{label:^{width}}', position[-1]))
    for left, top, caption in captions:
        first = min(x for x in columns if x >= left)
        rows[top].append((columns[first], f' {caption}', None))
    lines = [f'each device, as {".".join(mesh.axis_names[axis] for axis in axes)}:']
    for above, y in itertools.pairwise([min(rows), *sorted(rows)]):
        lines += [''] * (y - above > 1)
        lines.append(_line(sorted(rows[y]), mesh.devices.shape[axes[-1]] if color else None))
    return '\n'.join(line for n, line in enumerate(lines) if line or n > 1)


def _columns(xs: Sequence[float], width: int) -> dict[float, int]:
    """The column of text at which each x begins; there is a gap between planes."""
    columns, column = {}, 0
    for before, x in itertools.pairwise([xs[0], *xs]):
        column += _GAP * (x - before > 1)
        columns[x] = column
        column += width
    return columns


def _line(pieces: Sequence[tuple[int, str, int | None]], count: int | None) -> str:
    """Joins (column, text, number) pieces; numbers out of `count`, if it is given, have colors."""
    line, end = '', 0
    for column, text, number in pieces:
        line += ' ' * (column - end)
        end = max(column, end) + len(text)
        if count is not None and number is not None:
            red, green, blue = shade(number, count)
            ink = 97 if is_dark((red, green, blue)) else 30
            text = f'\033[{ink};48;2;{red};{green};{blue}m{text}\033[0m'
        line += text
    return line.rstrip()
