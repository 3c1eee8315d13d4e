"""Meshes as drawings and as text: devices at their places, coloured by position on an axis."""

from __future__ import annotations

import collections
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from partitioning.mesh.order import Placement, axis_rings, find_placement
from partitioning.pictures.figures import new_figure
from partitioning.pictures.shards import is_dark, shade

_GAP = 0.6  # the space between planes, slices and hosts, in devices
_NUMBERED = 512  # the most devices whose numbers fit into a panel
_PANEL_INCHES = 4.2


def draw_mesh(
    mesh: Mesh,
    path: str | os.PathLike[str],
    *,
    title: str = '',
    wrap: Sequence[bool] | None = None,
    granule_size: int | None = None,
) -> None:
    """Draws a mesh into a file, one panel for each axis of more than one device.

    TPUs are at their x and y, with planes of equal z next to each other and slices below each
    other. On other machines, each row is a process. Colours and numbers show the position along the
    axis. The line is the ring of the axis through the first device, and its last step is dotted.

    Args:
      path: the file, whose extension decides the format ('.png').
      title: a line above the panels.
      wrap, granule_size: as in `axis_rings`.

    Raises:
      RuntimeError: if matplotlib is not installed.
    """
    places, side, captions = places_on_paper(mesh)
    rings = axis_rings(mesh, wrap=wrap, granule_size=granule_size)
    axes = [i for i, ring in enumerate(rings) if ring.size > 1] or [len(rings) - 1]
    width, height = np.ptp(places.reshape(-1, 2), axis=0) + 1
    # Put the panels of wide machines below each other.
    columns = len(axes) if width <= 2 * height else 1
    rows = math.ceil(len(axes) / columns)
    inches = _PANEL_INCHES * (1 if columns > 1 or width <= 2 * height else 1.8)
    figure = new_figure((columns * inches, rows * (inches * height / width + 0.35) + 0.35))
    for number, axis in enumerate(axes, start=1):
        panel = figure.add_subplot(rows, columns, number)
        _draw_squares(panel, mesh, places, side, axis)
        if rings[axis].size > 1:
            first = tuple(slice(None) if i == axis else 0 for i in range(places.ndim - 1))
            style: dict[str, Any] = {'color': 'crimson', 'linewidth': 1.6, 'alpha': 0.8}
            dot = min(8.0, 40 * inches / width)
            panel.plot(*places[first].T, marker='o', markersize=dot, **style)
            panel.plot(*places[first][[-1, 0]].T, linestyle=':', **style)
        for x, y, caption in captions:
            panel.text(x, y, caption, size=5, color='gray', va='bottom')
        ring = rings[axis]
        hops = '' if ring.mean_hops is None else f', mean hops {ring.mean_hops:.2f}'
        panel.set_title(f'{ring.axis} {ring.size}: {ring.network}{hops}', fontsize=9)
        panel.set_aspect('equal')
        panel.margins(0.01)
        panel.autoscale_view()
        panel.invert_yaxis()
        panel.axis('off')
    if title:
        figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def _draw_squares(panel: Any, mesh: Mesh, places: np.ndarray, side: float, axis: int) -> None:
    from matplotlib.collections import PolyCollection

    size = mesh.devices.shape[axis]
    position = np.indices(mesh.devices.shape)[axis].ravel()
    corners = places.reshape(-1, 1, 2) + 0.46 * np.array(
        [(-side, -1), (side, -1), (side, 1), (-side, 1)]
    )
    squares = PolyCollection(list(corners), cmap='viridis', linewidths=0)
    squares.set_array(position)
    panel.add_collection(squares)
    if mesh.size <= _NUMBERED:
        for (x, y), number in zip(places.reshape(-1, 2), position, strict=True):
            color = 'white' if number < 0.6 * (size - 1) else 'black'
            panel.text(x, y, number, ha='center', va='center', size=6.5, color=color, zorder=3)


def places_on_paper(mesh: Mesh) -> tuple[np.ndarray, float, list[tuple[float, float, str]]]:
    """The x and y of every device, of shape `(*mesh, 2)`, and the rest as `arrange` returns it."""
    places, ratio, captions = arrange(find_placement(mesh))
    return places.reshape(*mesh.devices.shape, 2), ratio, captions


def arrange(
    placement: Placement, across: int | None = None, gap: float = _GAP
) -> tuple[np.ndarray, float, list[tuple[float, float, str]]]:
    """Returns where to draw the devices of a placement, and captions.

    `across` planes of equal z are next to each other, by default all if they are few. The gap
    between planes and between slices is in devices.

    Returns:
      The x and y of every device, of shape `(devices, 2)`; the ratio of a device's width to its
      height; and the captions with their x and y.
    """
    found = np.array(placement.places)
    if not placement.bounds:
        domain, row, column = found.T
        return np.stack([column, row + gap * domain], axis=-1), 1.0, []
    slices, x, y, z, core = found.T
    cores = int(core.max()) + 1
    planes = placement.bounds[2]
    across = across or _across(planes)
    down = math.ceil(planes / across)
    wide, high = placement.bounds[0] + gap, placement.bounds[1] + gap
    plane_x, plane_y = z % across * wide, (z // across + slices * down) * high
    places = np.stack([x + (core + 0.5) / cores - 0.5 + plane_x, y + plane_y], axis=-1)
    several = {'slice': bool(slices.max()), 'z': planes > 1}
    captions = {
        (
            float(left) - 0.46,
            float(top) - 0.5,
            ', '.join(f'{what} {n}' for what, n in (('slice', s), ('z', depth)) if several[what]),
        )
        for left, top, s, depth in zip(plane_x, plane_y, slices, z, strict=True)
    }
    return places, 1 / cores, sorted(captions)


def _across(planes: int) -> int:
    """How many planes are next to each other on paper."""
    return math.ceil(math.sqrt(planes)) if planes > 8 else planes


_TEXT_GAP = 2  # the spaces between planes


def mesh_picture(mesh: Mesh, *, color: bool = False, columns: int | None = None) -> str:
    """Draws a mesh as lines of text.

    Devices are placed as by `draw_mesh`. `3.1` is the device that is number 3 on the first axis of
    more than one device, and number 1 on the second.

    Args:
      color: whether each device is colored by its position on the last axis, with escape codes.
      columns: the characters of a line. Planes that do not fit next to each other are below each
        other; a single plane that is wider is drawn whole.
    """
    axes = [i for i, size in enumerate(mesh.devices.shape) if size > 1] or [0]
    positions = np.indices(mesh.devices.shape)[axes].reshape(len(axes), -1).T.tolist()
    labels = ['.'.join(map(str, position)) for position in positions]
    width = max(map(len, labels)) + 2
    placement = find_placement(mesh)
    places, _, captions = arrange(placement)
    if columns is not None and placement.bounds:
        across = _across(placement.bounds[2])
        plane = width * len({round(x, 2) for x, _ in places.tolist()}) // across
        fitting = max(1, (columns + _TEXT_GAP) // (plane + _TEXT_GAP))
        down = math.ceil(across / min(fitting, across))
        places, _, captions = arrange(placement, math.ceil(across / down))
    xy = [(round(x, 2), round(y, 2)) for x, y in places.tolist()]
    # The column of text at which each x begins; there is a gap between planes.
    begins: dict[float, int] = {}
    xs, column = sorted({x for x, _ in xy}), 0
    for before, x in itertools.pairwise([xs[0], *xs]):
        column += _TEXT_GAP * (x - before > 1)
        begins[x] = column
        column += width
    rows = collections.defaultdict[float, list[tuple[int, str, int | None]]](list)
    for (x, y), label, position in zip(xy, labels, positions, strict=True):
        rows[y].append((begins[x], f'{label:^{width}}', position[-1]))
    for left, top, caption in captions:
        first = min(x for x in begins if x >= left)
        rows[top].append((begins[first], f' {caption}', None))
    lines = [f'each device, as {".".join(mesh.axis_names[axis] for axis in axes)}:']
    for above, y in itertools.pairwise([min(rows), *sorted(rows)]):
        lines += [''] * (y - above > 1)
        lines.append(_line(sorted(rows[y]), mesh.devices.shape[axes[-1]] if color else None))
    return '\n'.join(line for n, line in enumerate(lines) if line or n > 1)


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
