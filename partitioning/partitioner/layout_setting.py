"""The setting `layout` of a partitioner: a word or partition rules, and the mesh axes they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from partitioning.plan.by_pattern import PartitionRules, RuleLayout, check_partition_rules
from partitioning.plan.by_size import LayoutWord, WordLayout
from partitioning.plan.rule_set import Layout
from partitioning.rules import (
    AxisRules,
    MeshAxes,
    MeshLike,
    axis_sizes,
    describe_axes,
    from_tuple,
    nearest,
)

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


def check_no_word(layout: LayoutSetting | None) -> None:
    """Raises ValueError if a partitioner with a word for its layout gets other rules."""
    if isinstance(layout, str):
        raise ValueError(
            f'layout={layout!r} already determines the rules: make a partitioner without layout, '
            'or with partition rules'
        )


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


def check_batch_is_known(rules: AxisRules, mesh: MeshLike) -> None:
    """Raises ValueError if neither a rule nor the name of a mesh axis shards the batch."""
    if not rules:
        axis = next(iter(axis_sizes(mesh)))
        raise ValueError(
            f'no axis of the mesh {describe_axes(mesh)} has a usual name for the batch '
            f"({', '.join(_DATA_AXES)}): add logical_axis_rules=[('batch', {axis!r})] next to the "
            'partition rules'
        )
