"""Why an activation, a gradient or an update is gathered or divided anew."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from partitioning.aot.blame.advice import Advisor
from partitioning.aot.blame.cause import Cause
from partitioning.aot.blame.changes import Change, ConstraintRemoval, LayoutChange
from partitioning.aot.blame.evidence import Evidence
from partitioning.aot.blame.known_layouts import Axes
from partitioning.aot.blame.making_causes import make_cause, over, what_is
from partitioning.aot.blame.value_graph import lacks
from partitioning.aot.blame.values import Value
from partitioning.aot.blame.whole_dimensions import written_for, written_otherwise
from partitioning.aot.user_lines import user_line
from partitioning.plan.rows import PlanRow
from partitioning.rules import sharding_axes

_NEAR = 8  # the number of products that are looked at


def explain_moved_value(evidence: Evidence, value: Value, advisor: Advisor) -> Cause:
    """Says why a value that is not an argument is gathered or divided anew.

    Args:
      evidence: what the exchange moves.
      value: the value that it moves.
      advisor: knows the rules, the layouts and the constraints.
    """
    layouts, axes, moved = advisor.layouts, evidence.axes, evidence.moved
    name = moved.name if moved else None
    what = what_is(value)
    split = f'{what} is sharded over {over(axes)}' + (f' along {name!r}' if name else '')
    rule = layouts.rule_for(name)
    changes: list[Change] = []
    if value.gradient_of or value.update_of:
        path = value.gradient_of or value.update_of
        reason = (
            f'{split}, but its array is not'
            if evidence.result is None
            else (f'{split}, but the function returns it in another layout')
        )
        row = layouts.rows.get(path)
        for constraint in advisor.graph.constraints_after(value):
            if lacks(constraint, axes):
                changes.append(ConstraintRemoval(source=user_line(constraint.stack)))
        changes += advisor.like_its_uses(row) if row is not None else ()
        changes += advisor.other_layouts(path)
        changes += advisor.like_parameter(path)
        wanted = () if row is None else tuple(sharding_axes(d.mesh_axes) for d in row.dimensions)
        if evidence.result is not None and _is_within(evidence.layout, wanted):
            change = LayoutChange(path=path, layout=wanted, result=evidence.result)
            changes.insert(0, change)
        return make_cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
    for user in evidence.taken_by:
        if otherwise := list(written_for(user, value, evidence.dim)):
            line = otherwise[0].source
            reason = f'{split}, but the operation at {line} needs all of it'
            changes += otherwise
            changes += advisor.relax(evidence)
            return make_cause(
                advisor, evidence, reason, rule=rule, changes=changes, avoidable=True, source=line
            )
    if (parameter := _conflicting_parameter(evidence, value, advisor)) is not None:
        row = layouts.rows[parameter.argument]
        reason = (
            f'{split}, but the dimension of {row.path} that it is multiplied with is not: '
            f'{row.reason}'
        )
        changes = [*advisor.like_its_uses(row), *advisor.leave_out(value, axes), *changes]
        found = make_cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
        return dataclasses.replace(
            found, array=row.path, logical_axes=tuple(row.logical_axes), source=evidence.used_at
        )
    conflicting = list(_conflicts(evidence, value, advisor))
    conflicting = (
        conflicting
        or advisor.misplaced_constraints(value, axes)
        or advisor.needless_constraints(value, axes)
    )
    if conflicting:
        constraint = conflicting[0]
        line = user_line(constraint.stack)
        changes += advisor.replace_constraints(conflicting, value, evidence.layout)
        changes.append(ConstraintRemoval(source=line))
        reason = f'{split}, and the constraint at {line} asks for another layout'
        if name and layouts.is_unusual(name):
            changes.append(layouts.to_standard(name))
        return make_cause(
            advisor, evidence, reason, rule=rule, changes=changes, avoidable=True, source=line
        )
    if evidence.result is not None and not evidence.taken_by:
        reason = f'{split}, but the function returns it in another layout'
        wanted = layouts.wanted(value.dims, value.shape)
        changes.append(LayoutChange(path='', layout=wanted, result=evidence.result))
        return make_cause(advisor, evidence, reason, rule=rule, changes=changes, avoidable=True)
    reason = f'{split}, but {evidence.used_at} needs another layout'
    changes += written_otherwise(value, evidence.used_at, layouts)
    if name and layouts.is_unusual(name):
        changes.append(layouts.to_standard(name))
    changes += advisor.lay_out(value, evidence.layout)
    return make_cause(
        advisor,
        evidence,
        reason,
        rule=rule,
        changes=changes,
        avoidable=True,
        source=evidence.made_at,
    )


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
