"""The settings of a partitioner by rules: their checks, and the rules that follow from them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast, get_args

from jax.sharding import AbstractMesh, Mesh

from partitioning.partitioner.partitioner_object import describe_rules
from partitioning.plan import Plan
from partitioning.plan.layouts import Layout, LayoutWord, RuleLayout, WordLayout
from partitioning.plan.partition_rules import PartitionRules, check_partition_rules
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    MeshLike,
    as_tuple,
    axis_sizes,
    describe_axes,
    from_tuple,
    nearest,
)

_LOGGER = logging.getLogger(__name__)
LayoutSetting = LayoutWord | PartitionRules

_WORDS = get_args(LayoutWord)
# The logical axes of activations that a word shards: the batch, by the names that models give it.
_BATCH_NAMES = ('batch', 'activation_batch')
# The mesh axes that shard the batch if no rule says it. EasyLM, FJFormer and Levanter use them.
_DATA_AXES = ('replica', 'data', 'fsdp', 'dp', 'batch', 'expert')


def check_layout(
    layout: Any, settings: Mapping[str, Any], with_words: Mapping[str, Any]
) -> LayoutSetting | None:
    """Checks the setting `layout`; partition rules are returned as pairs of texts and tuples.

    Args:
      layout: the setting, or None.
      settings: the settings of the partitioner that any layout replaces.
      with_words: further settings that a word replaces.

    Raises:
      ValueError: if the layout is malformed, or if a setting that it replaces is given.
    """
    if layout is None:
        return None
    if isinstance(layout, str):
        if layout not in _WORDS:
            raise ValueError(
                f"layout={layout!r} must be 'fsdp', 'data_parallel' or partition rules such as "
                f"[('.*/kernel', PartitionSpec('data')), ...].{nearest(layout, _WORDS)}"
            )
        settings = {**settings, **with_words}
        checked, shown = cast(LayoutSetting, layout), f'layout={layout!r}'
    else:
        checked, shown = check_partition_rules(layout), 'layout='
    if given := ', '.join(name for name, value in settings.items() if value):
        raise ValueError(f'{shown} already determines what {given} would: remove {given} or layout')
    return checked


def layout_on_mesh(
    layout: LayoutSetting | None, mesh: MeshLike, slice_axis: str | None, policies: AxisRules
) -> Layout | None:
    """The layout of states on a mesh.

    'fsdp' shards arrays within a slice and replicates them over slices: they are gathered in every
    layer, and the data centre network between slices is too slow for that. Only gradients cross it.

    Args:
      layout: the checked setting.
      mesh: the mesh.
      slice_axis: the mesh axis over slices, if there is one.
      policies: the policies of partition rules.
    """
    if layout is None:
        return None
    if not isinstance(layout, str):
        return RuleLayout(layout, policies)  # type: ignore[arg-type]
    sharding = (a for a, size in axis_sizes(mesh).items() if size > 1 and a != slice_axis)
    return WordLayout(layout, tuple(sharding))


def activation_rules(layout: LayoutSetting, mesh: MeshLike, policies: AxisRules) -> AxisRules:
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
    known = tuple(axis for axis in sizes if axis in _DATA_AXES)
    return policies.with_rules([('batch', from_tuple(known))] if known else ())


def check_plan(plan: Any, settings: dict[str, Any]) -> None:
    """Raises ValueError if `plan` is not a Plan, or if settings that it replaces are given too."""
    if plan is None:
        return
    if not isinstance(plan, Plan):
        raise ValueError(
            f'plan= takes a Plan, not a {type(plan).__name__}: pass Plan.load(path) or the '
            'result of resolve'
        )
    if given := ', '.join(name for name, value in settings.items() if value):
        raise ValueError(f'plan= already determines what {given} would: remove {given}')


def over_slices(rule: tuple[str, MeshAxes], slices: str) -> tuple[str, MeshAxes]:
    """Adds the axis over slices, in front, to a rule that shards the batch over 'data'."""
    name, axes = rule[0], as_tuple(rule[1])
    if name != 'batch' or slices in axes or 'data' not in axes:
        return rule
    return name, (slices, *axes)


def check_batch_rule(
    rules: LogicalAxisRules, mesh: Mesh | AbstractMesh, layout: LayoutSetting | None
) -> None:
    """Raises ValueError if nothing says how the batch is sharded, but the user wanted it to be.

    Under partition rules, a rule or the name of a mesh axis must shard the batch. Other rules may
    omit 'batch' on purpose, but a name close to it is a mistake.
    """
    if layout is not None and not rules:
        axis = next(iter(axis_sizes(mesh)))
        raise ValueError(
            f'no axis of the mesh {describe_axes(mesh)} has a usual name for the batch '
            f"({', '.join(_DATA_AXES)}): add logical_axis_rules=[('batch', {axis!r})] next to the "
            'partition rules'
        )
    names = {name for name, _ in rules}
    if 'batch' in names or mesh.size == 1:
        return
    if hint := nearest('batch', names):
        raise ValueError(
            f"no rule for 'batch', so each device would compute all rows.{hint} Write "
            "('batch', 'data'), or ('batch', None) to replicate it on purpose"
        )
    _LOGGER.warning("no rule for 'batch': each device computes all of its rows")


def describe_settings(
    rules: AxisRules | None, policies: AxisRules, others: Mapping[str, Any]
) -> list[tuple[str, str]]:
    """The settings of a partitioner by rules, as its repr shows them.

    Args:
      rules: the rules, or None if these are the standard rules for a mesh that is not built yet.
      policies: rules with the policies.
      others: the settings 'plan', 'layout', 'overrides' and 'optimizer rules'.
    """
    standard = 'standard_logical_axis_rules for the axes of the mesh'
    if others['layout'] is not None:
        standard = 'made by the layout, for activations'
    rows = [('rules', standard if rules is None else describe_rules(rules))]
    if others['optimizer rules'] is not None:
        rows.append(('optimizer rules', describe_rules(others['optimizer rules'])))
    on_unmatched, on_indivisible = policies.on_unmatched, policies.on_indivisible
    rows.append(('policies', f'{on_unmatched=!r}, {on_indivisible=!r}'))
    if others['overrides']:
        shown = '; '.join(f'{path} -> {names}' for path, names in others['overrides'])
        rows.append(('overrides', shown))
    for name in ('plan', 'layout'):
        if others[name] is not None:
            rows.append((name, f'{others[name]!r} lays out the state, not the rules'))
    return rows
