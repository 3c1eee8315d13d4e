"""Tables of the candidates of a search, and of the machines that a model fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from partitioning.amounts import bytes_str, seconds_str, share_str
from partitioning.hardware.chips import GIB
from train.planning.candidates import Workload
from train.planning.fits import Fit
from train.planning.huggingface.models import FoundModel
from train.planning.searching import Found, SearchResult, Status

_COLUMNS = ('step', 'range', 'memory', 'by formulas', 'compiled in')
# The most candidates to list that were not compiled.
_MOST_OTHERS = 5
_MEANINGS: dict[Status, str] = {
    'not compiled': 'could still be faster, and were not compiled',
    'too slow': 'would be slower than the winner even at the peak rate of the chip',
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
            f'the winner is within {result.gap:.1%} of the best possible in this space: no '
            f'candidate is below {result.bound:.3f} s, even with all products at the peak rate, '
            'kernels and overheads as in the forecast, and exchanges of data that take no time'
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


def fits_table(fits: Sequence[Fit], work: Workload) -> Table:
    """Returns a table with a row for each machine."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for name in ('machine', 'devices', 'fits', 'GiB', 'limit', 'layout'):
        table.add_column(name, justify='right' if name in ('devices', 'GiB', 'limit') else 'left')
    for name in ('step', 'range', 'tokens/s', 'MFU'):
        table.add_column(name, justify='right')
    for fit in fits:
        table.add_row(*_cells(fit, work), style=None if fit.fits else 'red')
    return table


def _cells(fit: Fit, work: Workload) -> list[str]:
    start = [str(fit.machine), f'{fit.machine.num_devices:,}']
    if fit.forecast is None:
        return [*start, 'no', '', '', fit.problem, '', '', '', '']
    memory, time = fit.forecast.memory, fit.forecast.time
    limit = '?' if memory.limit is None else f'{memory.limit / GIB:.2f}'
    shown = [*start, 'yes' if fit.fits else 'no', f'{memory.peak / GIB:.2f}', limit]
    shown.append(str(fit.candidate))
    if time is None or not fit.fits:
        return [*shown, '', '', '', '']
    return [
        *shown,
        seconds_str(time.seconds),
        f'{seconds_str(time.low)} to {seconds_str(time.high)}',
        f'{work.batch_tokens / time.seconds:,.0f}',
        share_str(fit.forecast.mfu or 0.0),
    ]


def as_dict(fit: Fit, work: Workload) -> dict[str, Any]:
    """Returns the figures of one machine, not rounded, for JSON."""
    forecast = fit.forecast
    time = forecast.time if forecast else None
    return {
        'machine': str(fit.machine),
        'num_devices': fit.machine.num_devices,
        'fits': fit.fits,
        'peak': forecast.memory.peak if forecast else None,
        'limit': forecast.memory.limit if forecast else None,
        'layout': str(fit.candidate) if fit.candidate else None,
        'problem': fit.problem,
        'seconds': time.seconds if time else None,
        'low': time.low if time else None,
        'high': time.high if time else None,
        'tokens_per_second': work.batch_tokens / time.seconds if time else None,
        'mfu': forecast.mfu if forecast else None,
        'back_end': forecast.back_end if forecast else None,
    }
