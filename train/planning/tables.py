"""Tables and a picture of the candidates of a search, and tables of machines that a model fits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshwright.report.answers import Answer, answer_of
from partitioning.amounts import bytes_str, flops_str, seconds_str, share_str
from partitioning.hardware.chips import GIB
from partitioning.pictures.figures import new_figure
from train.planning.candidates import Workload
from train.planning.fits import Fit
from train.planning.huggingface.counted import ERROR, CountedFit, CountedModel
from train.planning.huggingface.models import FoundModel
from train.planning.searching import Found, SearchResult, Status

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLUMNS = ('step', 'range', 'memory', 'by formulas', 'compiled in')
_TIMES = ('step, range', 'tokens/s', 'MFU')
# The most candidates to list that were not compiled.
_MOST_OTHERS = 5
_MEANINGS: dict[Status, str] = {
    'not compiled': 'could still be faster, and were not compiled',
    'too slow': 'would be slower than the winner even with the least time that programs take',
    'too large': 'do not fit by formulas',
    'impossible': 'have settings that cannot be honoured',
}


def search_table(result: SearchResult) -> Group:
    """The table of a search: compiled candidates, the next ones by formula, and a summary."""
    table = Table(box=None, pad_edge=False, header_style='bold', padding=(0, 1))
    table.add_column('candidate', overflow='fold')
    for name in _COLUMNS:
        table.add_column(name, justify='right', no_wrap=True)
    compiled = [found for found in result.found if found.outcome is not None]
    others = [found for found in result.found if found.status == 'not compiled'][:_MOST_OTHERS]
    for found in compiled:
        table.add_row(*_row(found), style='bold' if found is result.winner else None)
    for found in others:
        table.add_row(*_row(found), style='dim')
    return Group(table, '', *[Text(line) for line in summary_lines(result)])


def summary_lines(result: SearchResult) -> list[str]:
    """Returns lines: what was left out and why, and how close the winner is to the bound."""
    total = len(result.found) + sum(result.dropped.values())
    lines = [f'{total:,} combinations, of which {result.num_compiled:,} were compiled']
    lines += [f'  {count:,}: {reason}' for reason, count in result.dropped.items()]
    for status, meaning in _MEANINGS.items():
        if count := result.count(status):
            lines.append(f'  {count:,} {meaning}')
    reasons = [found.reason for found in result.found if found.status == 'impossible']
    if reasons:
        lines.append(f'    the first of them: {reasons[0]}')
    if result.winner is None:
        lines.append('no compiled candidate fits: try more of them with --best')
    elif result.gap is not None and result.bound is not None:
        lines.append(
            f'the winner is at most {result.gap:.1%} slower than the best: no candidate is below '
            f'{result.bound:.3f} s, unless it takes less of its time by formula than all programs '
            'that were compared'
        )
    return lines


def _row(found: Found) -> list[str]:
    prediction, outcome = found.prediction, found.outcome
    formulas = ''
    if prediction is not None:
        formulas = f'{prediction.seconds:.3f} s, {bytes_str(prediction.peak)}'
    if outcome is None:
        return [str(found.candidate), '', '', '', formulas, '']
    step = '' if outcome.seconds is None else f'{outcome.seconds:.3f} s'
    spread = '' if outcome.low is None else f'{outcome.low:.3f} to {outcome.high:.3f}'
    memory = 'too much' if outcome.peak is None else bytes_str(outcome.peak)
    if not outcome.fits:
        step, spread = 'does not fit', ''
    took = f'{outcome.compile_seconds:.0f} s'
    return [str(found.candidate), step, spread, memory, formulas, took]


def describe_model(model: FoundModel, work: Workload) -> list[str]:
    """Returns lines that describe a model and its training batch."""
    count = model.num_parameters
    lines = [
        f'{model.kind} with {count / 1e9:,.2f} B parameters ({count:,}); '
        f'{work.config.batch_size:,} rows of {work.row_tokens:,} tokens in a step',
        'parameters and AdamW in float32, products in bfloat16; all figures are by formula',
    ]
    return lines + [f'our model differs: {text}' for text in model.differs]


def describe_counted(model: CountedModel, rows: int, length: int) -> list[str]:
    """Returns lines that describe a model that is counted, and what is not known of it."""
    whole, active = model.num_parameters, model.active_parameters
    flops = model.flops_per_token(length)
    return [
        f'{model.kind} with {whole / 1e9:,.2f} B parameters ({whole:,}), of which a token is '
        f'multiplied by {active / 1e9:,.2f} B; {rows:,} rows of {length:,} tokens in a step',
        f'{flops / 1e9:,.1f} GFLOP per token, forward and backward; parameters and AdamW in '
        'float32',
        f'the models here lack {model.has}, so there is no time, no layout and no gin file: '
        'run your own training code with `meshwright dry TOPOLOGY -- python train.py` for these',
        f'memory is about ±{share_str(ERROR)}, with parameters over all devices and layers that '
        'are computed again in the backward pass',
    ]


def counted_table(fits: Sequence[CountedFit]) -> Table:
    """Returns a table with a row for each machine, for a model that is counted."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for name in ('machine', 'devices', 'fits', 'GiB', 'limit', 'microbatches', 'per device'):
        table.add_column(name, justify='left' if name in ('machine', 'fits') else 'right')
    for fit in fits:
        limit = fit.machine.chip.hbm_bytes_per_device
        cells = [str(fit.machine), f'{fit.machine.num_devices:,}', fit.verdict]
        cells += [f'{fit.peak / GIB:.1f}', f'{limit / GIB:.2f}', str(fit.num_microbatches)]
        table.add_row(*cells, flops_str(fit.flops), style='red' if fit.verdict == 'no' else None)
    return table


def counted_answer(fit: CountedFit) -> Answer:
    """Returns the figures of one machine for a model that is counted; see `fit_answer`."""
    return Answer(
        function='train_step',
        machine=str(fit.machine),
        num_devices=fit.machine.num_devices,
        chip=fit.machine.chip.name,
        mesh=None,
        compiler='by formula',
        fits={'yes': True, 'no': False}.get(fit.verdict),
        peak=round(fit.peak),
        limit=fit.machine.chip.hbm_bytes_per_device,
        problem='' if fit.verdict != 'close' else 'close: the error of the formula decides',
        details={'layout': None, 'tokens_per_second': None, 'flops': fit.flops},
    )


def fits_table(fits: Sequence[Fit], work: Workload) -> Table:
    """Returns a table with a row for each machine. Only layouts and ranges are wrapped."""
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style='bold')
    for name in ('machine', 'devices', 'fits', 'GiB', 'limit', 'layout', *_TIMES):
        left = name in ('machine', 'fits', 'layout')
        wraps = name in ('layout', 'step, range')
        least = len('microbatches') if name == 'layout' else None
        justify: Literal['left', 'right'] = 'left' if left else 'right'
        table.add_column(name, justify=justify, no_wrap=not wraps, min_width=least)
    for fit in fits:
        table.add_row(*_cells(fit, work), style=None if fit.fits else 'red')
    return table


def _cells(fit: Fit, work: Workload) -> list[str]:
    start = [str(fit.machine), f'{fit.machine.num_devices:,}']
    if fit.forecast is None:
        return [*start, 'no', '', '', fit.problem, *[''] * len(_TIMES)]
    memory, time = fit.forecast.memory, fit.forecast.time
    limit = '?' if memory.limit is None else f'{memory.limit / GIB:.2f}'
    verdict = 'close' if fit.forecast.is_close else 'yes' if fit.fits else 'no'
    shown = [*start, verdict, f'{memory.peak / GIB:.2f}', limit]
    shown.append(str(fit.candidate))
    if time is None or not fit.fits:
        return [*shown, *[''] * len(_TIMES)]
    return [
        *shown,
        f'{seconds_str(time.seconds)}, {seconds_str(time.low)} to {seconds_str(time.high)}',
        f'{work.batch_tokens / time.seconds:,.0f}',
        share_str(fit.forecast.mfu or 0.0),
    ]


def fit_answer(fit: Fit, work: Workload) -> Answer:
    """Returns the figures of one machine, not rounded, in the contract for programs."""
    forecast, machine = fit.forecast, str(fit.machine)
    if forecast is None:
        return Answer(
            function='train_step',
            machine=machine,
            num_devices=fit.machine.num_devices,
            chip=fit.machine.chip.name,
            mesh=None,
            compiler='by formula',
            fits=False,
            peak=None,
            limit=fit.machine.chip.hbm_bytes_per_device,
            problem=fit.problem,
            details={'layout': None, 'tokens_per_second': None},
        )
    time = forecast.time
    details = {
        'layout': str(fit.candidate),
        'tokens_per_second': work.batch_tokens / time.seconds if time else None,
    }
    return dataclasses.replace(answer_of(forecast), machine=machine, details=details)


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
    """Returns a figure of time against memory: compiled candidates, and those by formula.

    Raises a RuntimeError if matplotlib is not installed.

    Args:
      png: a file to draw into; its suffix decides the format.
      title: the line above.
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
