"""What `meshwright fits` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from partitioning.amounts import seconds_str, share_str
from partitioning.hardware.chips import GIB
from train.planning.fitting.fits import Fit
from train.planning.fitting.tasks import Task


def describe_task(task: Task) -> list[str]:
    """Returns lines about the model and the batch."""
    count = task.model.num_parameters
    lines = [
        f'{task.model.kind} with {count / 1e9:,.2f} B parameters ({count:,}); '
        f'{task.batch_size:,} rows of {task.sequence_length:,} tokens in a step',
        'parameters and AdamW in float32, products in bfloat16; all figures are by formula',
    ]
    return lines + [f'our model differs: {text}' for text in task.model.differs]


def fits_table(fits: Sequence[Fit], task: Task) -> Table:
    """Returns a table with a row for each machine."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    for name in ('machine', 'devices', 'fits', 'GiB', 'limit', 'layout'):
        table.add_column(name, justify='right' if name in ('devices', 'GiB', 'limit') else 'left')
    for name in ('step', 'range', 'tokens/s', 'MFU'):
        table.add_column(name, justify='right')
    for fit in fits:
        table.add_row(*_cells(fit, task), style=None if fit.fits else 'red')
    return table


def _cells(fit: Fit, task: Task) -> list[str]:
    start = [str(fit.machine), f'{fit.num_devices:,}']
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
        f'{task.batch_tokens / time.seconds:,.0f}',
        share_str(fit.forecast.mfu or 0.0),
    ]


def as_dict(fit: Fit, task: Task) -> dict[str, Any]:
    """Returns a row of the table with exact figures."""
    forecast = fit.forecast
    time = forecast.time if forecast else None
    return {
        'machine': str(fit.machine),
        'num_devices': fit.num_devices,
        'fits': fit.fits,
        'peak': forecast.memory.peak if forecast else None,
        'limit': forecast.memory.limit if forecast else None,
        'layout': str(fit.candidate) if fit.candidate else None,
        'problem': fit.problem,
        'seconds': time.seconds if time else None,
        'low': time.low if time else None,
        'high': time.high if time else None,
        'tokens_per_second': task.batch_tokens / time.seconds if time else None,
        'mfu': forecast.mfu if forecast else None,
        'back_end': forecast.back_end if forecast else None,
    }
