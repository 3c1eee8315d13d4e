"""The blocks of an array as a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioning.pictures.figures import TICKS, new_figure
from partitioning.pictures.shard_grid import Panel, Range, ShardGrid, is_dark, place_str

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS_ACROSS = 4
_POINTS = 72  # per inch
_SMALLEST_TEXT = 4.0  # points; smaller text cannot be read


def sharding_figure(picture: ShardGrid) -> Figure:
    """Draws the blocks of an array, each in the color and with the numbers of its devices.

    All blocks are drawn in one size. The numbers at the edges count elements.

    Raises:
      RuntimeError: if matplotlib is not installed.
    """
    downs, rights = (picture.ranges_along(dim) for dim in picture.drawn)
    across = min(len(picture.panels), _PANELS_ACROSS)
    down = math.ceil(len(picture.panels) / across)
    # Blocks get the space that their numbers need, as long as the picture fits a page.
    longest = max(map(len, map(picture.label, picture.devices)))
    width = min(max(len(rights) * max(0.45, 0.085 * longest + 0.1), 2.2), 9.0 / across)
    height = min(max(len(downs) * 0.36, 0.8), 8.0 / down)
    least = 0.075 * len(picture.title)
    figure = new_figure((max(across * (width + 0.5) + 0.3, least), down * (height + 0.5) + 0.35))
    for number, panel in enumerate(picture.panels, start=1):
        plot = figure.add_subplot(down, across, number)
        _draw_blocks(plot, picture, panel, width / len(rights), height / len(downs))
        plot.set_title(place_str(panel.place), fontsize=8)
        plot.invert_yaxis()
        _number_blocks(plot.xaxis, rights, picture.drawn[1])
        _number_blocks(plot.yaxis, downs, picture.drawn[0])
        plot.spines[:].set_visible(False)
    figure.suptitle(picture.title, fontsize=9)
    return figure


def _draw_blocks(plot: Any, picture: ShardGrid, panel: Panel, width: float, height: float) -> None:
    """Draws the blocks of a panel in the given size, in inches, with numbers if they fit."""
    colors = [[picture.color(block) for block in row] for row in panel.rows]
    plot.pcolormesh(
        np.arange(len(colors[0]) + 1),
        np.arange(len(colors) + 1),
        np.array(colors, np.uint8),
        edgecolor='white',
        linewidth=1.2 if min(width, height) > 0.1 else 0,
    )
    labels = [[picture.label(block) for block in row] for row in panel.rows]
    size = _text_size(labels, width, height)
    if size < _SMALLEST_TEXT:
        return
    for y, row in enumerate(labels):
        for x, label in enumerate(row):
            ink = 'white' if is_dark(colors[y][x]) else 'black'
            at = (x + 0.5, y + 0.5)
            plot.text(*at, label, size=size, color=ink, ha='center', va='center')


def _number_blocks(axis: Any, ranges: Sequence[Range | None], dim: int | None) -> None:
    """Labels the edges of blocks with their first elements, and with the dimension."""
    if dim is None:
        axis.set_ticks([])
        return
    known = [range_ for range_ in ranges if range_ is not None]
    edges = [*(start for start, _ in known), known[-1][1]]
    step = -(-len(ranges) // TICKS)
    places = sorted({*range(0, len(ranges), step), len(ranges)})
    axis.set_ticks(places, [str(edges[place]) for place in places], fontsize=7)
    axis.set_label_text(f'dimension {dim}', fontsize=8)
    axis.set_tick_params(length=0)


def _text_size(labels: Sequence[Sequence[str]], width: float, height: float) -> float:
    """The largest font size that fits all blocks, whose size is in inches."""
    longest = max(len(label) for row in labels for label in row)
    return min(9.0, 0.55 * height * _POINTS, 0.9 * width * _POINTS / (0.62 * longest))
