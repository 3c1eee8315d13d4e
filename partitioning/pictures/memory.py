"""Pictures of layouts: the blocks of an array by device, and what every device holds of a state."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from partitioning.pictures.shards import Panel, Range, ShardingPicture, is_dark, place_str
from partitioning.plan.audit import ROLES, Audit, check_bytes
from partitioning.rules import describe_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MISPLACED = 'not where the plan puts them'
_ROLE_COLORS = dict(
    zip((*ROLES, _MISPLACED), ('#31688e', '#35b779', '#c9c9c9', '#d1495b'), strict=True)
)
_BUDGET_COLOR = '#b3261e'
_GIB = 2**30
_LEAST_GIB = _GIB / 10  # what is less is said in bytes
_PANELS_ACROSS = 4
_TICKS = 16  # more places on an axis than these have not all a number
_POINTS = 72  # an inch
_SMALLEST_TEXT = 4.0  # points; smaller cannot be read


def sharding_figure(picture: ShardingPicture) -> Figure:
    """The blocks of an array, each in the colour and with the numbers of its devices.

    Blocks are drawn alike, whatever their sizes; the numbers at the sides are those of elements.

    Raises:
      RuntimeError: matplotlib is not installed.
    """
    downs, rights = (picture.ranges_along(dim) for dim in picture.drawn)
    across = min(len(picture.panels), _PANELS_ACROSS)
    down = math.ceil(len(picture.panels) / across)
    # Blocks get the room that their numbers need, as long as the picture fits a page.
    longest = max(map(len, map(picture.label, picture.devices)))
    width = min(max(len(rights) * max(0.45, 0.085 * longest + 0.1), 2.2), 9.0 / across)
    height = min(max(len(downs) * 0.36, 0.8), 8.0 / down)
    least = 0.075 * len(picture.title)
    figure = _figure((max(across * (width + 0.5) + 0.3, least), down * (height + 0.5) + 0.35))
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


def draw_audit(
    audit: Audit,
    png: str | os.PathLike[str] | None = None,
    *,
    budget: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draws what every device holds of a state: a bar a device, stacked by category.

    Usage:
      draw_audit(partitioner.audit(state), 'memory.png', budget=16 * 2**30)

    Args:
      audit: of a state.
      png: a file to draw into; its ending says the format.
      budget: bytes that a device may hold: a line, or a note where it is far above the bars.
      title: the line above; by default the mesh.

    Returns:
      The matplotlib Figure.

    Raises:
      TypeError: `audit` is none.
      ValueError: `budget` is no number of bytes above 0.
      RuntimeError: matplotlib is not installed.
    """
    if not isinstance(audit, Audit):
        raise TypeError(
            f'draw_audit takes an Audit, not a {type(audit).__name__}: give it '
            'partitioner.audit(state)'
        )
    if budget is not None:
        check_bytes(budget)
    ids = sorted(audit.bytes_by_device)
    figure = _figure((min(max(0.3 * len(ids) + 1.2, 5.0), 9.0), 3.4))
    plot = figure.add_subplot()
    unit, name = (_GIB, 'GiB') if audit.bytes_per_device >= _LEAST_GIB else (1, 'bytes')
    base = np.zeros(len(ids))
    for role, held in bytes_by_role(audit).items():
        top = base + np.array([held[device] for device in ids]) / unit
        if (top > base).any():
            label = f'{role}, {_amount(max(held.values()))}'
            _draw_bars(plot, base, top, _ROLE_COLORS[role], label)
        base = top
    high = max(float(np.max(base)), 1 / unit)
    plot.set_ylim(0, 1.12 * high)
    if budget is not None:
        _draw_budget(plot, budget / unit, high, _amount(budget))
    _number_devices(plot.xaxis, ids)
    plot.set_xlim(-0.6, len(ids) - 0.4)
    plot.set_xlabel('device')
    plot.set_ylabel(f'{name} held')
    plot.yaxis.set_tick_params(labelsize=8)
    plot.yaxis.set_major_formatter('{x:,.4g}' if unit > 1 else '{x:,.0f}')
    plot.spines[['top', 'right']].set_visible(False)
    figure.legend(loc='outside lower center', ncols=2, fontsize=8, frameon=False)
    figure.suptitle(describe_axes(audit.mesh.shape) if title is None else title, fontsize=10)
    if png is not None:
        figure.savefig(png)
    return figure


def bytes_by_role(audit: Audit) -> dict[str, dict[int, int]]:
    """Bytes that each device holds, by its id, of each category.

    Arrays that are not laid out as the rules say are a category of their own.
    """
    ids = audit.bytes_by_device
    mesh = {device.id for device in audit.mesh.devices.flat}
    held = {}
    wrong = {cost.row.path for cost in audit.misplaced}
    for role in ROLES:
        rows = (row for row in audit.rows if row.role == role and row.path not in wrong)
        each = sum(row.bytes_per_device for row in rows)
        held[role] = {device: each if device in mesh else 0 for device in ids}
    rest = {device: total - sum(h[device] for h in held.values()) for device, total in ids.items()}
    return {**held, _MISPLACED: rest}


def png_of(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format='png')
    return file.getvalue()


def _figure(inches: tuple[float, float]) -> Figure:
    return _figure_class()(figsize=inches, dpi=120, layout='constrained')


@functools.cache
def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise RuntimeError("drawing needs matplotlib: pip install 'meshwright[plot]'") from None

    class Picture(Figure):
        """A Figure that notebooks show, without pyplot."""

        _repr_png_ = png_of

    return Picture


def _draw_blocks(
    plot: Any, picture: ShardingPicture, panel: Panel, width: float, height: float
) -> None:
    """The blocks of a panel, each so many inches wide and high, with numbers if they fit."""
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


def _draw_bars(plot: Any, base: np.ndarray, top: np.ndarray, color: str, label: str) -> None:
    """One bar a device, all as one collection: thousands of artists would take seconds."""
    from matplotlib.collections import PolyCollection

    many = len(base) > 64
    half = 0.5 if many else 0.38
    x = np.arange(len(base))
    corners = [(x - half, base), (x - half, top), (x + half, top), (x + half, base)]
    bars = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    plot.add_collection(
        PolyCollection(list(bars), facecolor=color, linewidths=0, antialiased=not many, label=label)
    )


def _draw_budget(plot: Any, budget: float, high: float, amount: str) -> None:
    text = f'budget {amount}, {100 * high / budget:.3g}% held'
    if budget <= 4 * high:
        plot.axhline(budget, color=_BUDGET_COLOR, linestyle='--', linewidth=1.4, label=text)
        plot.set_ylim(0, 1.12 * max(budget, high))
    else:  # the bars would be too low to read
        style = {'size': 8, 'color': _BUDGET_COLOR, 'ha': 'right', 'va': 'top'}
        plot.text(0.995, 0.99, f'\u2191 {text}', transform=plot.transAxes, **style)


def _amount(held: float) -> str:
    return f'{held / _GIB:,.3g} GiB' if held >= _LEAST_GIB else f'{held:,.0f} bytes'


def _number_devices(axis: Any, ids: Sequence[int]) -> None:
    step = -(-len(ids) // _TICKS) if len(ids) > 2 * _TICKS else 1
    places = range(0, len(ids), step)
    axis.set_ticks(places, [str(ids[place]) for place in places], fontsize=8)


def _number_blocks(axis: Any, ranges: Sequence[Range | None], dim: int | None) -> None:
    """The first elements of the blocks beside their edges, and what dimension it is."""
    if dim is None:
        axis.set_ticks([])
        return
    known = [range_ for range_ in ranges if range_ is not None]
    edges = [*(start for start, _ in known), known[-1][1]]
    step = -(-len(ranges) // _TICKS)
    places = sorted({*range(0, len(ranges), step), len(ranges)})
    axis.set_ticks(places, [str(edges[place]) for place in places], fontsize=7)
    axis.set_label_text(f'dimension {dim}', fontsize=8)
    axis.set_tick_params(length=0)


def _text_size(labels: Sequence[Sequence[str]], width: float, height: float) -> float:
    """Points of the largest text that fits all blocks of so many inches."""
    longest = max(len(label) for row in labels for label in row)
    return min(9.0, 0.55 * height * _POINTS, 0.9 * width * _POINTS / (0.62 * longest))
