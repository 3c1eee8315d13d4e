"""The rows of the batch over all axes that should divide them, where the program forgets some.

Under fully sharded training on data=4, fsdp=4, a batch that is laid out as PartitionSpec('data')
makes the devices along 'fsdp' compute parts of the same rows, and sum or gather activations.
"""

from __future__ import annotations

import dataclasses
import math

from meshwright.advice.surroundings import Candidate
from meshwright.advice.variants import Layout, Subject
from meshwright.causes.cause import (
    ConstraintChange,
    JoinedChange,
    SingleChange,
    StateChange,
    over,
)
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.row_axes import is_meant_for_rows
from meshwright.causes.wording import spec_text
from meshwright.jaxpr.naming import TracedValues
from meshwright.jaxpr.primitives import CONSTRAINTS
from meshwright.jaxpr.values import Axes, Value
from partitioning.plan.rows import PlanRow


@dataclasses.dataclass(frozen=True, kw_only=True)
class MissingRows:
    """Mesh axes that divide parameters and should divide the rows of the batch, too.

    Attributes:
      axes: the axes.
      array: the largest array of the batch.
      why: what the devices along them do.
      candidate: the batch, and the constraints on its rows, laid out over them, too.
    """

    axes: Axes
    array: str
    why: str
    candidate: Candidate


def find_missing_rows(
    subject: Subject, traced: TracedValues, sizes: dict[str, int]
) -> MissingRows | None:
    """Finds the axes that the batch lacks, or None if it has all or cannot be divided over them."""
    rows = subject.by_path.values()
    parameters = {row.path: row for row in rows if row.role == 'parameters'}
    batch = [row for row in rows if row.role == 'other' and row.shape]
    if not batch or not parameters:
        return None
    largest = max(batch, key=lambda row: math.prod(row.shape))
    now = axes_of_row(largest)[0]
    used = {a for row in parameters.values() for axes in axes_of_row(row) for a in axes}
    held = {a for row in batch for axes in axes_of_row(row) for a in axes}
    axes = tuple(
        axis
        for axis, size in sizes.items()
        if size > 1 and axis in used - held
        if is_meant_for_rows(axis, traced.values, parameters)
    )
    wanted = (*now, *axes)
    if not axes or largest.shape[0] % math.prod(sizes[a] for a in wanted):
        return None
    same = [r for r in batch if r.shape[0] == largest.shape[0] and axes_of_row(r)[0] == now]
    parts: list[SingleChange] = [_batch(same, wanted, axes), *_constraints(traced, now, wanted)]
    example = max(parameters.values(), key=lambda row: (_has(row, axes), math.prod(row.shape)))
    why = (
        f'parameters such as {example.path}, {spec_text(axes_of_row(example))}, are sharded over '
        f'{over(axes)}, and the {largest.shape[0]:,} rows of {largest.path}, '
        f'{spec_text(axes_of_row(largest))}, are not: the devices along {over(axes)} compute with '
        'the same rows, and exchange activations in place of parameters'
    )
    change = parts[0] if len(parts) == 1 else JoinedChange(parts=tuple(parts))
    return MissingRows(axes=axes, array=largest.path, why=why, candidate=Candidate(change))


def _batch(same: list[PlanRow], wanted: Axes, axes: Axes) -> StateChange:
    layouts = tuple((row.path, _over_rows(axes_of_row(row), wanted)) for row in same)
    named = ' and '.join(
        f'{path} as {spec_text(layout)}' for path, layout in dict(layouts[:3]).items()
    )
    more = f', and {len(layouts) - 3} more alike' if len(layouts) > 3 else ''
    text = f'shard the rows of the batch over {over(axes)}, too: lay out {named}{more}'
    return StateChange(layouts=layouts, results=(), text=text)


def _over_rows(layout: Layout, wanted: Axes) -> Layout:
    return (wanted, *layout[1:])


def _constraints(traced: TracedValues, now: Axes, wanted: Axes) -> list[ConstraintChange]:
    """The constraints that divide the rows as the batch does now, over all axes."""
    found: dict[tuple[str, tuple[int, ...]], ConstraintChange] = {}
    for value in traced.values:
        if value.primitive in CONSTRAINTS and not value.backward and _of_rows(value, now):
            layout = tuple(wanted if axes == now else axes for axes in value.layout or ())
            found[value.line, value.shape] = ConstraintChange(
                source=value.line,
                shape=value.shape,
                names=(None,) * len(value.shape),
                layout=layout,
                replaces=True,
            )
    return list(found.values())


def _of_rows(value: Value, now: Axes) -> bool:
    is_state = value.argument or value.gradient_of or value.update_of
    return bool(now) and not is_state and now in (value.layout or ())


def _has(row: PlanRow, axes: Axes) -> bool:
    return bool({a for own in axes_of_row(row) for a in own} & {*axes})
