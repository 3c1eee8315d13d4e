"""What a run prints about its mesh, data, layout and scores: plain data in, text out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh
from rich.progress_bar import ProgressBar
from rich.table import Table

from partitioning.amounts import bytes_str
from partitioning.plan import Audit, PlanRow
from partitioning.rules import as_tuple, boundary_spec

_MOST_PARAMETERS = 10  # in the table of the largest


def format_seconds(seconds: float) -> str:
    """Formats a duration for people: '1.2 s', '2:33' or '1:02:33'."""
    if round(seconds, 1) < 60:
        return f'{seconds:.1f} s'
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'


def format_scores(scores: Mapping[str, float]) -> str:
    """Formats scores for people: 'accuracy 0.95  loss 0.1234'."""
    return '  '.join(f'{name} {value:.4g}' for name, value in scores.items())


def describe_variables(rows: Sequence[PlanRow]) -> str:
    """Lists every array with its logical axes and its mesh axes side by side, as T5X does.

    The arrays of the optimizer and the number of updates follow the parameters.
    """
    parameters = [row for row in rows if row.role == 'parameters']
    others = [row for row in rows if row.role != 'parameters']
    count = sum(math.prod(row.shape) for row in parameters)
    total = f'Total number of parameters: {count}'
    return '\n'.join([*map(_variable, parameters), total, '', *map(_variable, others), ''])


def _variable(row: PlanRow) -> str:
    sizes = zip(row.logical_axes, row.shape, strict=True)
    named = ', '.join(str(size) if name is None else f'{name}={size}' for name, size in sizes)
    spec, size = tuple(boundary_spec(row.spec)), math.prod(row.shape)
    return (
        f'Variable    {row.path:<80} size {size:<12} shape {f"({named})":<40} partition spec {spec}'
    )


def describe_devices(mesh: Mesh) -> str:
    """Returns the number and kind of the devices, such as '8 CPU devices, 1 process'."""
    kinds = sorted({d.device_kind.replace('cpu', 'CPU') for d in mesh.devices.flat})
    processes = len({d.process_index for d in mesh.devices.flat})
    devices = count_str(mesh.size, f'{" and ".join(kinds)} device')
    return f'{devices}, {processes:,} process{"es" if processes > 1 else ""}'


def mesh_table(mesh: Mesh) -> Table:
    """Returns a table of the axes of a mesh."""
    table = Table(box=None, pad_edge=False, header_style='bold')
    table.add_column('mesh axis')
    table.add_column('size', justify='right')
    for axis, size in mesh.shape.items():
        table.add_row(str(axis), str(size))
    return table


def describe_data(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields a line for each part of the training data, as `OpenTask.record` describes it."""
    for part in parts:
        unit = 'example' if part['rows'].get('task') == 'Examples' else 'document'
        share = '' if len(parts) == 1 else f'{part["source"]} ({part["weight"]:.1%} of the rows): '
        yield (
            f'{share}training on {count_str(part["documents"], unit)} '
            f'({bytes_str(part["bytes"])}), {count_str(part["held_out_documents"], unit)} held out'
        )


def describe_epochs(steps_rows: int, rows_per_epoch: int) -> str:
    """Returns how often a run of `steps_rows` rows reads every training row."""
    epochs = steps_rows / rows_per_epoch
    count = f'{epochs:.2g}' if epochs < 1 else f'{epochs:,.1f}'
    return f'{count} epochs (1 epoch is {rows_per_epoch:,} rows)'


def count_str(number: int, unit: str) -> str:
    """Formats a number of things for people: '1 file' or '1,024 files'."""
    return f'{number:,} {unit}{"" if number == 1 else "s"}'


def describe_parameters(rows: Sequence[PlanRow]) -> tuple[str, Table]:
    """Returns a title with the size of all parameters, and a table of the largest ones."""
    largest = sorted(rows, key=lambda row: -row.bytes_total)[:_MOST_PARAMETERS]
    count = sum(math.prod(row.shape) for row in rows)
    total = bytes_str(sum(row.bytes_total for row in rows))
    per_device = bytes_str(sum(row.bytes_per_device for row in rows))
    number = f'{count / 1e6:,.2f} M' if count >= 1e5 else f'{count:,}'
    shown = f'; the {len(largest)} largest:' if len(largest) < len(rows) else ':'
    title = f'{number} parameters in {len(rows)} arrays, {total} ({per_device} per device){shown}'
    table = Table(box=None, pad_edge=False, header_style='bold')
    for name in ('parameter', 'shape', 'logical axis:mesh axis', 'shard'):
        table.add_column(name, overflow='fold')
    table.add_column('per device', justify='right')
    for row in largest:
        table.add_row(
            row.path.removeprefix('params/'),
            'x'.join(map(str, row.shape)),
            _axes(row),
            'x'.join(map(str, row.shard_shape)),
            bytes_str(row.bytes_per_device),
        )
    return title, table


def _axes(row: PlanRow) -> str:
    """Returns each logical axis with the mesh axes that shard it: `embed:data heads:model kv`."""
    return ' '.join(
        ':'.join(part for part in (name, '+'.join(as_tuple(dimension.mesh_axes))) if part) or '-'
        for dimension in row.dimensions
        for name in [dimension.name if isinstance(dimension.name, str) else '']
    )


# Less replication than this part of a device's memory is not worth a line.
_WORTH_A_LINE = 0.01


def describe_audit(audit: Audit, memory: int | None = None) -> Iterator[str]:
    """Yields lines on the bytes of the state per device, and how far they exceed an even split."""
    roles = ', '.join(f'{role} {bytes_str(size)}' for role, size in audit.by_role.items())
    above = audit.replicated_bytes_per_device
    even = audit.bytes_per_device - above
    split = f'{above / max(even, 1):,.1%} above an even split' if above else 'split evenly'
    state = f'state: {bytes_str(audit.bytes_per_device)} per device ({roles})'
    if memory is not None and 0 < above < _WORTH_A_LINE * memory:
        yield state
        return
    yield f'{state}, {split}'
    if audit.replicated:
        worst = audit.replicated[0]
        extra = bytes_str(worst.bytes_per_device)
        yield f'most replicated: {worst.row.path}, {extra} per device ({worst.reason})'
    for cost in audit.policies[:3]:
        extra = bytes_str(cost.bytes_per_device)
        yield f'policy: {cost.row.path} costs {extra} per device: {cost.reason}'


# The length of the longest bar, in characters. With names and figures, a chart fits 80 columns.
BAR_WIDTH = 48


def score_chart(scores: Mapping[str, float]) -> Table:
    """Returns a bar chart of the bits per byte of a model and of baselines, the best first.

    `scores` bits per byte, by name. The first is the model's, which a terminal highlights. Scores
    that are not finite are left out.
    """
    model = next(iter(scores))
    finite = {name: score for name, score in scores.items() if math.isfinite(score)}
    longest = max(finite.values())
    chart = Table.grid(padding=(0, 2))
    chart.title, chart.title_justify = 'bits per byte of held-out text (lower is better)', 'left'
    for name, score in sorted(finite.items(), key=lambda item: item[1]):
        colour = 'green' if name == model else 'cyan'
        half_characters = round(2 * BAR_WIDTH * score / longest)
        width = math.ceil(half_characters / 2)
        # The bars of rich end with half a character, and are plain dashes where output is ASCII.
        bar = ProgressBar(
            total=2 * width,
            completed=half_characters,
            width=width,
            complete_style=colour,
            finished_style=colour,
        )
        chart.add_row(name, f'{score:.3f}', bar, style='bold' if name == model else None)
    return chart
