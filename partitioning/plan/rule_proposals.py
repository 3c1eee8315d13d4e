"""Rules for the names that a state has, tried by laying the state out before they are proposed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from partitioning.plan.by_rules import build_plan
from partitioning.plan.layouts import RuleSet
from partitioning.plan.plan import Plan
from partitioning.rules import (
    STANDARD_MESH_AXES,
    USUAL_BATCH_AXES,
    AxisRules,
    MeshAxes,
    MeshLike,
    Problem,
    Rule,
    as_tuple,
    axis_sizes,
    describe_axes,
    from_tuple,
    standard_logical_axis_rules,
)

_MOST_RULES = 12  # a longer list is not a line to write


def batch_axes(mesh: MeshLike, rules: Sequence[Rule] = ()) -> MeshAxes:
    """The mesh axes that may shard a batch without a rule.

    They are those with usual names, or else the first axis of several devices that no rule uses.
    """
    sizes = {axis: size for axis, size in axis_sizes(mesh).items() if size > 1}
    usual = tuple(axis for axis in sizes if axis in USUAL_BATCH_AXES)
    used = {axis for _, axes in rules for axis in as_tuple(axes)}
    free = [axis for axis in sizes if axis not in used]
    return from_tuple(usual or tuple((free or [*sizes])[:1]))


def propose_rules(state: Any, given: RuleSet, mesh: MeshLike) -> list[Rule] | None:
    """The shortest rules known here that lay out a state and a batch over every axis of a mesh.

    Returns:
      The rules, with which every array of the state has been laid out; None if none fit.
    """
    for rules in _candidates(state, given, mesh):
        plan = _try(state, given, mesh, AxisRules(rules))
        if plan is not None and not _unused_axes(plan, rules, mesh):
            return rules if len(rules) <= _MOST_RULES else None
    return None


def with_proposal(error: ValueError, state: Any, given: RuleSet, mesh: MeshLike) -> ValueError:
    """The error, with rules that lay out this state in place of its advice, if there are any.

    It is for errors about mesh axes that the rules do not use, or that the mesh lacks.
    """
    said, _, hint = str(error).partition(' Did you mean')
    about_defaults = ', so every array would' in said
    if hint and not about_defaults:
        return error  # a misspelt axis
    found = propose_rules(state, given, mesh)
    if found is None:
        return error
    said = said.partition(', so every array would')[0].partition(' Write ')[0].rstrip('.')
    return ValueError(
        f'{said}. For the names of this state and the mesh {describe_axes(mesh)}, write '
        f'layout={found!r}' + (f'. Did you mean{hint}' if hint else '')
    )


def _candidates(state: Any, given: RuleSet, mesh: MeshLike) -> Iterator[list[Rule]]:
    axes = batch_axes(mesh)
    batch: Rule = ('batch', axes)
    yield [batch]
    # The names of the state by the standard rules, where another axis may stand for 'model'.
    anything = AxisRules([batch], on_unmatched='replicate')
    plan = _try(state, given, mesh, anything)
    names = {d.name for row in plan.rows for d in row.dimensions} if plan is not None else set()
    sizes = axis_sizes(mesh)
    others = [a for a in sizes if sizes[a] > 1 and a not in as_tuple(axes)]
    known = tuple(axis for axis in sizes if axis in STANDARD_MESH_AXES)
    table = dict(reversed(standard_logical_axis_rules(mesh_axes=('model', *known))))
    for model in others:
        found = [(n, model if a == 'model' else a) for n, a in table.items() if n in names]
        yield [batch, *(rule for rule in reversed(found) if rule[0] != 'batch')]


def _try(state: Any, given: RuleSet, mesh: MeshLike, rules: AxisRules) -> Plan | None:
    problems: list[Problem] = []
    try:
        plan = build_plan(
            state,
            dataclasses.replace(given, rules=rules, are_defaults=False),
            mesh,
            lambda path, problem: problems.append(problem),
        )
    except ValueError:
        return None
    return None if problems else plan


def _unused_axes(plan: Plan, rules: Sequence[Rule], mesh: MeshLike) -> set[str]:
    """The mesh axes of several devices that shard neither an array nor the batch."""
    used = {axis for name, axes in rules if name == 'batch' for axis in as_tuple(axes)}
    used |= {a for row in plan.rows for d in row.dimensions for a in as_tuple(d.mesh_axes)}
    return {axis for axis, size in axis_sizes(mesh).items() if size > 1} - used
