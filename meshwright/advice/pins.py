"""Constraints that formulas cannot judge, because the compiler sends what no layout needs.

If a program sends far more than its layouts need, a layout has spread in the compiler to where it
does not fit: from a residual that is split along the sequence into the products of attention, for
example. A constraint on one of these products stops it. Only compiling shows whether it does. The
same holds for other layouts of the arrays between two products of experts, which all constraints on
them have to state together.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

from meshwright.advice.constraint_candidates import add_constraints
from meshwright.advice.surroundings import Candidate, Surroundings, make_constraint
from meshwright.causes.cause import Change, JoinedChange
from meshwright.causes.explaining import Explanation
from meshwright.causes.layouts import axes_of_row
from meshwright.jaxpr.values import Axes, Value

_MOST = 3  # of each kind
_MOVES = ('all-gather', 'all-to-all', 'collective-permute')


def find_pins(around: Surroundings, explanation: Explanation) -> tuple[Candidate, ...]:
    """Constraints that are worth compiling, the best first.

    Args:
      around: the arrays of the function.
      explanation: the causes of what the compiled program sends.
    """
    moved: dict[str, float] = collections.defaultdict(float)
    for (c, _), evidence in zip(explanation.collectives, explanation.evidence, strict=True):
        value = None if evidence is None else evidence.value
        if evidence is not None and value is not None and c.kind in _MOVES and not value.argument:
            for line in {evidence.made_at, evidence.used_at, value.line}:
                moved[line] += c.total_bytes
    added = [
        one
        for _, one in add_constraints(around, tensors_first=True)
        if _source(one.change) in moved
    ]
    added.sort(key=lambda one: -moved[_source(one.change)])
    return tuple(added[:_MOST])


def _source(change: Change) -> str:
    return str(getattr(change, 'source', ''))


def lay_out_experts(around: Surroundings) -> Iterator[Candidate]:
    """All constraints of one shape, with the experts over the axis of their kernels."""
    groups: dict[tuple[tuple[int, ...], object], list[Value]] = collections.defaultdict(list)
    for _, value in around.constraints():
        groups[value.shape, value.layout].append(value)
    for (count, axes), (shape, group) in (
        (stack, (value[0], found))
        for stack in dict.fromkeys(_stacks(around))
        for value, found in groups.items()
    ):
        layout = list(group[0].layout or ())
        rows = next((d for d, own in enumerate(layout) if {*axes} <= {*own}), None)
        number = next((d for d, n in enumerate(shape) if n == count and d != rows), None)
        if rows is None or number is None or layout[number] or len(shape) < 3:
            continue
        layout[rows] = tuple(a for a in layout[rows] if a not in axes)
        layout[number] = axes
        if around.fits(tuple(layout), shape):
            parts = [make_constraint(one, tuple(layout), replaces=True) for one in group]
            whole = parts[0] if len(parts) == 1 else JoinedChange(parts=tuple(parts))
            yield Candidate(whole)


def _stacks(around: Surroundings) -> Iterator[tuple[int, Axes]]:
    """The number of experts, and the mesh axes of their kernels, of products stacked along them."""
    for value in around.traced.values:
        if value.primitive != 'dot_general' or value.backward or value.maker is None:
            continue
        _, batches = value.maker.params['dimension_numbers']
        for operand, numbers in zip(value.maker.inputs[:2], batches, strict=True):
            row = around.rows.get(operand.argument)
            if (
                row is not None
                and row.role == 'parameters'
                and len(row.shape) == len(operand.shape)
            ):
                yield from (
                    (row.shape[d], axes_of_row(row)[d]) for d in numbers if axes_of_row(row)[d]
                )
