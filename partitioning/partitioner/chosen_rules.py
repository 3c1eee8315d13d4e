"""The rules of a partitioner: those that were given, or those that follow from mesh and layout."""

from __future__ import annotations

import itertools
import logging
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from partitioning.partitioner.settings import OtherLayout
from partitioning.plan import batch_axes
from partitioning.plan.layouts import RuleLayout, rule_str
from partitioning.rules import (
    STANDARD_MESH_AXES,
    USUAL_BATCH_AXES,
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    MeshLike,
    as_tuple,
    axis_sizes,
    describe_axes,
    from_tuple,
    nearest,
    standard_logical_axis_rules,
)
from partitioning.rules.checks import axis_problems

_LOGGER = logging.getLogger(__name__)
# The names that models give the batch. A layout word shards these logical axes of activations.
_BATCH_NAMES = ('batch', 'activation_batch')


def axes_in_use(mesh: MeshLike) -> list[str]:
    """The mesh axes that default rules must use: all of several devices, and standard ones."""
    return [a for a, size in axis_sizes(mesh).items() if size > 1 or a in STANDARD_MESH_AXES]


def choose_rules(given: AxisRules | None, layout: OtherLayout | None, mesh: MeshLike) -> AxisRules:
    """The rules that were given, or the default rules of a layout on a mesh."""
    given = AxisRules() if given is None else given
    if not given.are_defaults:
        return given
    axes = axes_in_use(mesh)
    if not isinstance(layout, str | RuleLayout) and {*axes} <= {*STANDARD_MESH_AXES}:
        return given.with_rules(standard_logical_axis_rules(mesh_axes=axes))
    # Use no defaults that would leave a mesh axis unused: without any rules, plan and constrain
    # raise.
    return _activation_rules(layout, mesh, getattr(layout, 'policies', given))


def check_not_names_by_path(rules: LogicalAxisRules, mesh: MeshLike) -> None:
    """Raises ValueError if logical axis rules look like the argument `names` of AxisRules.

    Every rule has a tuple, and none of the tuples has an axis of the mesh. So does a rule whose
    mesh axis comes first.
    """
    sizes = axis_sizes(mesh)
    for name, axes in rules:
        listed = as_tuple(axes)
        if name in sizes and listed and not {*listed} & {*sizes}:
            raise ValueError(
                f'rule {(name, axes)!r}: the mesh {describe_axes(mesh)} has no axis {listed[0]!r}, '
                f'but it has {name!r}. The logical axis comes first: write {(listed[0], name)!r}'
            )
    if not rules or not all(isinstance(axes, tuple) for _, axes in rules):
        return
    named = [axis for _, axes in rules for axis in as_tuple(axes)]
    if named and not {*named} & {*sizes}:
        first = tuple(rules[0])
        raise ValueError(
            f'rule {first!r}: the mesh {describe_axes(mesh)} has no axis {named[0]!r}. If '
            f'{first[0]!r} is the path of an array and {named[0]!r} the name of a dimension, write '
            f'layout=AxisRules(names=[{first!r}, ...]); if it is a logical axis, write mesh axes'
        )


def with_slices(rules: AxisRules, slices: str) -> AxisRules:
    """The rules with the axis over slices in front where they shard the batch over 'data'."""
    changed: list[tuple[str, MeshAxes]] = []
    for name, axes in rules:
        sharding = as_tuple(axes)
        adds = name == 'batch' and slices not in sharding and 'data' in sharding
        changed.append((name, (slices, *sharding) if adds else axes))
    return rules.with_rules(changed)


def _activation_rules(layout: OtherLayout | None, mesh: MeshLike, policies: AxisRules) -> AxisRules:
    """The rules for activations if the user gives none.

    Under a word every mesh axis shards the batch, and all other dimensions are replicated, whatever
    their names. Under partition rules the batch is sharded over the mesh axes that have the usual
    names; without any of them there are no rules.
    """
    sizes = axis_sizes(mesh)
    if isinstance(layout, str):
        axes = tuple(axis for axis in sizes if sizes[axis] > 1) or tuple(sizes)[:1]
        rules: list[tuple[str, MeshAxes]] = [(name, from_tuple(axes)) for name in _BATCH_NAMES]
        return AxisRules(rules, on_unmatched='replicate')
    if layout is None:
        return policies.with_rules(())
    known = tuple(axis for axis in sizes if axis in USUAL_BATCH_AXES)
    return policies.with_rules([('batch', from_tuple(known))] if known else ())


def describe_layout(
    rules: AxisRules | None, layout: OtherLayout | None, *, chosen: bool
) -> list[tuple[str, str]]:
    """The lines of a partitioner's repr about its layout, each as a name and a text.

    `chosen` says whether `rules` are final: before the mesh is built, defaults are not.
    """
    shown = 'standard_logical_axis_rules for the axes of the mesh'
    if chosen:
        shown = describe_rules(rules)
    elif layout is not None:
        shown = 'made by the layout, for activations'
    rows = [('rules', shown)]
    policies = AxisRules() if rules is None else rules
    if isinstance(layout, RuleLayout):
        policies = layout.policies
    if policies.optimizer is not None:
        rows.append(('optimizer rules', describe_rules(policies.optimizer)))
    on_unmatched, on_indivisible = policies.on_unmatched, policies.on_indivisible
    rows.append(('policies', f'{on_unmatched=!r}, {on_indivisible=!r}'))
    if policies.names:
        rows.append(('names', '; '.join(f'{path} -> {n}' for path, n in policies.names)))
    if isinstance(layout, RuleLayout):
        rows.append(('layout', f'partition rules {", ".join(map(rule_str, layout.rules))}'))
    elif layout is not None:
        rows.append(('layout', f'{layout!r} lays out the state, not the rules'))
    return rows


def describe_rules(rules: Any) -> str:
    """Rules in their order: `batch -> data; mlp, heads -> model; kv -> replicated`."""
    groups = (
        f'{", ".join(name for name, _ in alike)} -> {" x ".join(as_tuple(axes)) or "replicated"}'
        for axes, alike in itertools.groupby(rules, key=lambda rule: rule[1])
    )
    return '; '.join(groups) or 'none'


def check_batch_rule(
    rules: LogicalAxisRules,
    mesh: Mesh | AbstractMesh,
    layout: OtherLayout | None,
    *,
    must_shard: bool = False,
) -> None:
    """Raises ValueError if the batch has no rule by mistake, and warns if that may be on purpose.

    Under partition rules, a rule or the name of a mesh axis must shard the batch. Other rules may
    omit 'batch', which is logged, unless the batch `must_shard`; a name similar to 'batch' is a
    mistake. A policy of rules can replicate names without a rule.
    """
    check_not_names_by_path(rules, mesh)
    axes = batch_axes(mesh, rules)
    if layout is not None and not rules:
        axis = next(iter(axis_sizes(mesh)))
        raise ValueError(
            f'no axis of the mesh {describe_axes(mesh)} has a usual name for the batch '
            f"({', '.join(USUAL_BATCH_AXES)}): add logical_axis_rules=[('batch', {axis!r})] next "
            'to the partition rules'
        )
    names = {name for name, _ in rules}
    if 'batch' not in names and mesh.size > 1 and (hint := nearest('batch', names)):
        raise ValueError(
            f"no rule for 'batch', so each device would compute all rows.{hint} Write "
            f"{('batch', axes)!r}, or ('batch', None) to replicate it on purpose"
        )
    for rule in rules:
        wrong = [*axis_problems(as_tuple(rule[1]), mesh)] if rule[0] == 'batch' else []
        if wrong:
            raise ValueError(
                f'rule {tuple(rule)!r}: {wrong[0].message.partition(". ")[0]}. Write '
                f'{("batch", axes)!r} in its place, and axes of this mesh in the other rules'
            )
    if 'batch' in names or mesh.size == 1:
        return
    text = "no rule for 'batch': each device computes all of its rows"
    replicates = getattr(rules, 'on_unmatched', 'error') == 'replicate'
    if replicates or not must_shard:
        _LOGGER.warning('%s. To shard them, add %r to the rules', text, ('batch', axes))
        return
    listed = ', '.join(map(repr, [('batch', axes), *map(tuple, rules)]))
    whole = f', as in layout=[{listed}],' if len(rules) < 8 else ' to the rules,'
    raise ValueError(
        f"no rule for 'batch', so each of the {mesh.size} devices of {describe_axes(mesh)} would "
        f'compute all rows. Add {("batch", axes)!r}{whole} or '
        "('batch', None) to replicate it on purpose"
    )
