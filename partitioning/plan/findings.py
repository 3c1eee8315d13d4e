"""Lists everything that is wrong or suspicious in rules and in the rows of a plan."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from partitioning.amounts import bytes_str, share_str
from partitioning.plan.layouts import RuleLayout, RuleSet, WordLayout, rule_str
from partitioning.plan.rows import NO_NAMES, NOT_COVERED, OF_LAYERS, SMALL, PlanRow, policy_texts
from partitioning.rules import (
    AxisRules,
    MeshLike,
    ResolvedDimension,
    Rule,
    as_tuple,
    axis_sizes,
    nearest,
)
from partitioning.rules.checks import axis_problems


class Finding(NamedTuple):
    """One finding.

    Attributes:
      severity: 'error' if a layout cannot be decided, 'warning' if it may surprise.
      kind: for errors 'repeated name', 'rank', 'absent axis', 'conflict', 'unmatched',
        'indivisible', 'names', 'policy' or 'rules'; for warnings 'unused', 'shadowed', 'size 1',
        'idle axis', 'policy', 'no names' or 'few names'.
      where: the path of an array, or a rule as code.
      message: what is wrong, and what to write instead.
    """

    severity: Literal['error', 'warning']
    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f'{self.severity}: {self.where}: {self.message}'


def rule_findings(
    rules: RuleSet, mesh: MeshLike, rows: Sequence[PlanRow] = ()
) -> Iterator[Finding]:
    """What is wrong or suspicious in rules, for a mesh and, if there are rows, for these arrays."""
    sizes = axis_sizes(mesh)
    if isinstance(rules.layout, WordLayout):
        return  # it made the rules
    if isinstance(rules.layout, RuleLayout):
        yield from _of_partition_rules(rules.layout, sizes, rows)
    # Each set of rules, with its noun and the roles of the arrays that it lays out.
    sets: list[tuple[str, AxisRules, Sequence[str]]]
    sets = [('rule', rules.rules, ('parameters', 'optimizer', 'other'))]
    if rules.rules.optimizer is not None:
        of_optimizer = ('optimizer rule', rules.rules.optimizer, ('optimizer',))
        sets = [of_optimizer, ('rule', rules.rules, ('parameters', 'other'))]
    for noun, of_roles, roles in sets:
        found = [*_of_rules(noun, of_roles, sizes)]
        yield from found
        if rows and not rules.are_defaults and rules.layout is None:
            shadowed = {finding.where for finding in found if finding.kind == 'shadowed'}
            dimensions = [d for row in rows if row.role in roles for d in row.dimensions]
            unused = _unused(noun, of_roles, dimensions)
            yield from (finding for finding in unused if finding.where not in shadowed)
    yield from _idle_axes(rules, sizes, rows)


def row_findings(rows: Sequence[PlanRow], rules: RuleSet | None) -> Iterator[Finding]:
    """Arrays without names, and dimensions that a policy decided."""
    separate = rules is not None and rules.rules.optimizer is not None
    for row in rows:
        if any(d.reason == NO_NAMES for d in row.dimensions):
            message = f'this array of shape {row.shape} has no names, so it is replicated'
            yield Finding('warning', 'no names', row.path, message)
            continue
        if row.role == 'optimizer' and not separate:
            continue  # it follows a parameter, which is reported
        if few := [d.reason for d in row.dimensions if d.reason.startswith(f'{NOT_COVERED}: ')]:
            message = (
                f'{few[0]} of shape {row.shape}, so the others are not sharded; write '
                f'{tuple(row.logical_axes)}, with a name in place of None to shard a dimension; '
                f'{OF_LAYERS}'
            )
            yield Finding('warning', 'few names', row.path, message)
        for message in policy_texts(row):
            yield Finding('warning', 'policy', row.path, message)


def _of_rules(noun: str, rules: AxisRules, sizes: Mapping[str, int]) -> Iterator[Finding]:
    for place, rule in enumerate(rules):
        axes = as_tuple(rule[1])
        for problem in axis_problems(axes, sizes):
            yield Finding('error', problem.kind, f'{noun} {rule!r}', problem.message)
        if axes and all(sizes.get(axis) == 1 for axis in axes):
            yield _warn(noun, 'size 1', rule, 'a mesh axis of size 1 shards nothing')
        # If an earlier rule with some of these axes is skipped, so is this rule: they are taken.
        before = [r for r in rules[:place] if r[0] == rule[0] and {*as_tuple(r[1])} <= {*axes}]
        if before:
            message = f'it can never win, because {before[0]!r} comes before it: remove one'
            yield _warn(noun, 'shadowed', rule, message)


def _idle_axes(
    rules: RuleSet, sizes: Mapping[str, int], rows: Sequence[PlanRow]
) -> Iterator[Finding]:
    """Mesh axes over which neither the state nor the batch is sharded, and what they cost."""
    total = sum(row.bytes_total for row in rows)
    laid_out = [d.wanted or d.mesh_axes for row in rows for d in row.dimensions]
    named = {a for axes in laid_out if isinstance(axes, str | tuple) for a in as_tuple(axes)}
    if 'sequence' in sizes:
        named |= {'sequence'}  # the standard rules give it to activations only
    of_batch = {a for name, axes in rules.rules if name == 'batch' for a in as_tuple(axes)}
    idle = [a for a, size in sizes.items() if size > 1 and a not in named | of_batch]
    if not idle or total <= SMALL:
        return
    count = math.prod(sizes[axis] for axis in idle)
    whole = [row for row in rows if row.bytes_per_device == row.bytes_total]
    share = share_str(sum(row.bytes_total for row in whole) / total)
    what = f'mesh axis {idle[0]!r}' if len(idle) == 1 else f'the mesh axes {", ".join(idle)}'
    single = [a for a in sizes if a in named | of_batch and sizes[a] == 1]
    other = 'name dimensions that a rule maps to it'
    if single and _divides(rows, single[0], count):
        axes = {**sizes, **dict.fromkeys(idle, 1), single[0]: count}
        other = f'write mesh=MeshConfig(axes={axes}), because names and rules use {single[0]!r}'
    message = (
        f'no array of the state and no batch is sharded over it, so groups of {count} devices hold '
        f'and compute the same unless activations use it: {share} of the state '
        f'({bytes_str(total)}) is whole on every device. {other[0].upper()}{other[1:]}, or '
        "layout='fsdp'"
    )
    yield Finding('warning', 'idle axis', what, message)


def _divides(rows: Sequence[PlanRow], axis: str, size: int) -> bool:
    """Whether an axis of this size divides every dimension that is laid out over it."""
    return all(
        row.shape[dim] % size == 0
        for row in rows
        for dim, d in enumerate(row.dimensions)
        if axis in as_tuple(d.wanted or d.mesh_axes)
    )


def _unused(
    noun: str, rules: AxisRules, resolved: Sequence[ResolvedDimension]
) -> Iterator[Finding]:
    """Rules that decided nothing, and why."""
    won = {dimension.rule for dimension in resolved}
    names = {dimension.name for dimension in resolved}
    lost = {rule: why for dimension in resolved for rule, why in dimension.lost}
    for rule in rules:
        if rule in won or rule[0] == 'batch':  # the partitioner lays out the batch by it
            continue
        why = lost.get(rule, f'no array of the state has {rule[0]!r} (activations may have it)')
        if rule[0] not in names:
            why += nearest(rule[0], {name for name in names if isinstance(name, str)})
        yield _warn(noun, 'unused', rule, why)


def _of_partition_rules(
    layout: RuleLayout, sizes: Mapping[str, int], rows: Sequence[PlanRow]
) -> Iterator[Finding]:
    """Partition rules that no array on the mesh can have, and those that no array has."""
    arrays = [row.path for row in rows if math.prod(row.shape) > 1]
    used = {d.rule[0] for row in rows for d in row.dimensions if d.rule is not None}
    used |= {rule[0] for rule in map(layout.first_match, arrays) if rule is not None}
    for place, rule in enumerate(layout.rules):
        where = f'partition rule {rule_str(rule)}'
        for problem in axis_problems([a for axes in rule[1] for a in as_tuple(axes)], sizes):
            yield Finding('error', problem.kind, where, problem.message)
        same = [other for other in layout.rules[:place] if other[0] == rule[0]]
        if same:
            message = f'it can never win, because {rule_str(same[0])} comes before it: remove one'
            yield Finding('warning', 'shadowed', where, message)
        elif rows and rule[0] not in used and not re.search(rule[0], ''):  # '.*' is for the rest
            taken = [path for path in arrays if re.search(rule[0], path)]
            message = 'no path of the state matches it'
            if taken:
                message = f'earlier rules decide all that it matches, such as {taken[0]}'
            yield Finding('warning', 'unused', where, message)


def _warn(noun: str, kind: str, rule: Rule, message: str) -> Finding:
    return Finding('warning', kind, f'{noun} {rule!r}', message)
