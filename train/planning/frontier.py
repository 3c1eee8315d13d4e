"""The candidates of a search as a picture: the time of a step against the memory it needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from partitioning.hardware.chips import GIB
from partitioning.pictures.figures import new_figure
from train.planning.searching import Found, SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = ('#31688e', '#35b779', '#e07b39', '#7b5ea7', '#c8a415', '#d1495b', '#4d4d4d')
_LIMIT_COLOR = '#b3261e'
_PALE = '#b9b9b9'
_MOST_TIMES = 3.0  # the range of times that is drawn, as a multiple of the winner's


class Point(NamedTuple):
    """A candidate in the picture: GiB of memory, seconds, and the candidate."""

    memory: float
    seconds: float
    found: Found


def list_points(found: Iterable[Found]) -> tuple[list[Point], list[Point]]:
    """The candidates with figures of the compiler, and those with figures by formula."""
    compiled, predicted = [], []
    for one in found:
        outcome, prediction = one.outcome, one.prediction
        if outcome and outcome.peak and outcome.seconds:
            compiled.append(Point(outcome.peak / GIB, outcome.seconds, one))
        elif prediction is not None:
            predicted.append(Point(prediction.peak / GIB, prediction.seconds, one))
    return compiled, predicted


def find_frontier(points: Iterable[Point]) -> list[Point]:
    """The points that no other one beats in both memory and time, by growing memory."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (p.memory, p.seconds)):
        if not kept or point.seconds < kept[-1].seconds:
            kept.append(point)
    return kept


def draw_search(
    result: SearchResult, png: str | os.PathLike[str] | None = None, *, title: str = ''
) -> Figure:
    """Draws the time of a step against memory: compiled candidates, and those by formula.

    Args:
      result: what the search has found.
      png: a file to draw into; its suffix decides the format.
      title: the line above.

    Returns:
      The matplotlib Figure.

    Raises:
      RuntimeError: if matplotlib is not installed.
    """
    compiled, predicted = list_points(result.found)
    figure = new_figure((8.5, 5))
    axes = figure.add_subplot()
    axes.set_title(title, loc='left')
    axes.set_xlabel('memory of a device at its fullest, GiB')
    axes.set_ylabel('forecast time of a step, s')
    axes.grid(color='#eeeeee')
    axes.set_axisbelow(True)
    presets = list(dict.fromkeys(p.found.candidate.layout.preset for p in (*compiled, *predicted)))
    colors = {preset: _COLORS[i % len(_COLORS)] for i, preset in enumerate(presets)}
    _draw_predicted(axes, predicted, colors)
    _draw_compiled(axes, compiled, colors)
    _draw_limits(axes, result)
    _choose_ranges(axes, result, compiled, predicted)
    axes.legend(loc='upper left', bbox_to_anchor=(1.01, 1), frameon=False, fontsize=8)
    if png is not None:
        figure.savefig(png)
    return figure


def _draw_predicted(axes: Any, points: Sequence[Point], colors: dict[str, str]) -> None:
    """Hollow rings, by formula: grey for those that cannot win, else in the preset's colour."""
    ruled_out = [p for p in points if p.found.status in ('too slow', 'too large')]
    _scatter(axes, ruled_out, 'ruled out by formulas', edgecolors=_PALE)
    left = [p for p in points if p.found.status == 'not compiled']
    for preset, color in colors.items():
        some = [p for p in left if p.found.candidate.layout.preset == preset]
        _scatter(axes, some, f'{_name(preset)}, not compiled', edgecolors=color)


def _scatter(axes: Any, points: Sequence[Point], label: str, **style: Any) -> None:
    if points:
        marks = [p.memory for p in points], [p.seconds for p in points]
        hollow: dict[str, Any] = {'s': 26, 'facecolors': 'none'}
        axes.scatter(*marks, label=f'{label}: {len(points)}', **hollow | style)


def _draw_compiled(axes: Any, points: Sequence[Point], colors: dict[str, str]) -> None:
    """Filled dots in the colour of the preset, and a line through those that nothing beats."""
    for preset, color in colors.items():
        some = [p for p in points if p.found.candidate.layout.preset == preset]
        label = f'{_name(preset)}, compiled'
        _scatter(axes, some, label, s=52, facecolors=color, zorder=3)
    frontier = find_frontier(p for p in points if p.found.seconds is not None)
    if frontier:
        xs, ys = [p.memory for p in frontier], [p.seconds for p in frontier]
        axes.step(xs, ys, where='post', color='#333333', linewidth=1, zorder=2, label='frontier')
        winner = frontier[-1]
        axes.annotate(
            f'{winner.found.candidate}\n{winner.seconds:.3f} s, {winner.memory:.1f} GiB',
            (winner.memory, winner.seconds),
            xytext=(0, -14),
            textcoords='offset points',
            ha='center',
            va='top',
            fontsize=8,
        )


def _name(preset: str) -> str:
    return preset or 'the layout of the run'


def _draw_limits(axes: Any, result: SearchResult) -> None:
    limit = result.limit / GIB
    axes.axvline(limit, color=_LIMIT_COLOR, linewidth=1.2, label=f'usable: {limit:.1f} GiB')
    if result.bound is not None:
        label = f'no candidate is below {result.bound:.3f} s'
        axes.axhline(result.bound, color='#777777', linewidth=1, linestyle='--', label=label)


def _choose_ranges(
    axes: Any, result: SearchResult, compiled: Sequence[Point], predicted: Sequence[Point]
) -> None:
    """Leaves out candidates that are far too slow or far too large, and says how many."""
    points = [*compiled, *predicted]
    if not points or result.winner is None or result.winner.seconds is None:
        return
    slowest, largest = _MOST_TIMES * result.winner.seconds, 1.5 * result.limit / GIB
    inside = [p for p in points if p.seconds <= slowest and p.memory <= largest]
    bottom = min(result.bound or result.winner.seconds, *(p.seconds for p in inside))
    top = max(1.05 * bottom, *(p.seconds for p in inside))
    axes.set_ylim(bottom - 0.16 * (top - bottom), top + 0.06 * (top - bottom))
    right = max(result.limit / GIB, *(p.memory for p in inside))
    axes.set_xlim(0, 1.05 * right)
    if outside := len(points) - len(inside):
        text = f'{outside} slower or larger ones are not shown'
        axes.text(0.995, 0.985, text, transform=axes.transAxes, ha='right', va='top', fontsize=8)
