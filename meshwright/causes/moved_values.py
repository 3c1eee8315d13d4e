"""Why an activation, a gradient or an update is gathered or divided anew."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from meshwright.causes.advice import Advisor
from meshwright.causes.cause import Cause
from meshwright.causes.changes import Change, ConstraintRemoval, LayoutChange
from meshwright.causes.evidence import Evidence
from meshwright.causes.known_layouts import Axes
from meshwright.causes.making_causes import Move
from meshwright.causes.value_graph import lacks
from meshwright.causes.whole_dimensions import written_for, written_otherwise
from meshwright.jaxpr.values import Value
from meshwright.user_lines import user_line
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

_NEAR = 8  # the number of products that are looked at


def explain_moved_value(move: Move) -> Cause:
    """Says why a value that is not an argument is gathered or divided anew."""
    explanations = (_of_a_parameter, _used_whole, _multiplied, _constrained, _returned)
    found = (explain(move) for explain in explanations)
    return next((cause for cause in found if cause is not None), None) or _needed_otherwise(move)


def _of_a_parameter(move: Move) -> Cause | None:
    """The cause for the gradient or the update of a parameter."""
    value, evidence, advisor = move.value, move.evidence, move.advisor
    path = value.gradient_of or value.update_of
    if not path:
        return None
    row = advisor.layouts.rows.get(path)
    changes: list[Change] = [
        ConstraintRemoval(source=user_line(constraint.stack))
        for constraint in advisor.graph.constraints_after(value)
        if lacks(constraint, evidence.axes)
    ]
    changes += advisor.like_its_uses(row) if row is not None else ()
    changes += advisor.other_layouts(path)
    changes += advisor.like_parameter(path)
    if evidence.result is None:
        return move.cause(f'{move.split}, but its array is not', changes)
    wanted = () if row is None else tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
    if _is_within(evidence.layout, wanted):
        changes.insert(0, LayoutChange(path=path, layout=wanted, result=evidence.result))
    return move.cause(f'{move.split}, but the function returns it in another layout', changes)


def _used_whole(move: Move) -> Cause | None:
    """The cause for an operation that needs all of a dimension and can be written otherwise."""
    evidence, advisor = move.evidence, move.advisor
    for user in evidence.taken_by:
        if otherwise := list(written_for(user, move.value, evidence.dim)):
            line = otherwise[0].source
            changes: list[Change] = [*otherwise, *advisor.relax(evidence)]
            reason = f'{move.split}, but the operation at {line} needs all of it'
            return move.cause(reason, changes, source=line)
    return None


def _multiplied(move: Move) -> Cause | None:
    """The cause for a product with a parameter that is laid out otherwise."""
    evidence, advisor = move.evidence, move.advisor
    parameter = _conflicting_parameter(evidence, move.value, advisor)
    if parameter is None:
        return None
    row = advisor.layouts.rows[parameter.argument]
    reason = (
        f'{move.split}, but the dimension of {row.path} that it is multiplied with is not: '
        f'{row.reason}'
    )
    changes: list[Change] = [
        *advisor.like_its_uses(row),
        *advisor.leave_out(move.value, evidence.axes),
    ]
    return dataclasses.replace(
        move.cause(reason, changes),
        array=row.path,
        logical_axes=tuple(row.logical_axes),
        source=evidence.used_at,
    )


def _constrained(move: Move) -> Cause | None:
    """The cause for a constraint that asks for another layout."""
    value, evidence, advisor = move.value, move.evidence, move.advisor
    conflicting = (
        list(_conflicts(evidence, value, advisor))
        or advisor.misplaced_constraints(value, evidence.axes)
        or advisor.needless_constraints(value, evidence.axes)
    )
    if not conflicting:
        return None
    line = user_line(conflicting[0].stack)
    changes: list[Change] = [
        *advisor.replace_constraints(conflicting, value, evidence.layout),
        ConstraintRemoval(source=line),
        *move.standard_rule(),
    ]
    reason = f'{move.split}, and the constraint at {line} asks for another layout'
    return move.cause(reason, changes, source=line)


def _returned(move: Move) -> Cause | None:
    """The cause for a value that the function only returns."""
    value, evidence = move.value, move.evidence
    if evidence.result is None or evidence.taken_by:
        return None
    wanted = move.advisor.layouts.wanted(value.dims, value.shape)
    change = LayoutChange(path='', layout=wanted, result=evidence.result)
    return move.cause(f'{move.split}, but the function returns it in another layout', [change])


def _needed_otherwise(move: Move) -> Cause:
    """The cause where nothing more is known than the line that needs the value."""
    value, evidence, advisor = move.value, move.evidence, move.advisor
    changes: list[Change] = [
        *written_otherwise(value, evidence.used_at, advisor.layouts),
        *move.standard_rule(),
        *advisor.lay_out(value, evidence.layout),
    ]
    reason = f'{move.split}, but {evidence.used_at} needs another layout'
    return move.cause(reason, changes, source=evidence.made_at)


def _conflicting_parameter(evidence: Evidence, value: Value, advisor: Advisor) -> Value | None:
    """The parameter in a product with a value whose dimension for it is laid out otherwise."""
    for product in advisor.graph.products_of(value):
        for other in product.operands:
            row = advisor.layouts.rows.get(other.argument)
            if (
                row is not None
                and row.role == 'parameters'
                and _conflicts_with_uses(row, evidence.axes, advisor)
            ):
                return other
    return None


def _is_within(layout: Sequence[Axes], wanted: Sequence[Axes]) -> bool:
    """Whether one layout shards no dimension over axes that another does not use for it."""
    if len(layout) != len(wanted):
        return False
    return all(set(mine) <= set(theirs) for mine, theirs in zip(layout, wanted, strict=True))


def _conflicts_with_uses(row: PlanRow, axes: Axes, advisor: Advisor) -> bool:
    """Whether constraints shard a dimension of a parameter over mesh axes, and its layout not."""
    wanted = advisor.links.axes_of(row.path, len(row.shape))
    now = [sharding_axes(d.mesh_axes) for d in row.dimensions]
    return any(
        set(theirs) & set(axes) and not set(theirs) <= set(mine)
        for theirs, mine in zip(wanted, now, strict=True)
    )


def _conflicts(evidence: Evidence, value: Value, advisor: Advisor) -> Iterator[Value]:
    """Constraints that fix another layout than the value has before the exchange."""
    found = [*advisor.graph.constraints_after(value)]
    products = itertools.islice(advisor.graph.products_of(value), _NEAR)
    for user in (*evidence.taken_by, *products):
        if user.shape == value.shape or (evidence.moved and evidence.moved in user.dims):
            found += advisor.graph.constraints_after(user)
    for constraint in found:
        same_shape = constraint.shape == value.shape
        if lacks(constraint, evidence.axes) or (
            same_shape and constraint.layout != evidence.layout
        ):
            wanted = advisor.layouts.wanted(constraint.dims, constraint.shape)
            if constraint.layout != wanted and any(wanted):
                yield constraint
