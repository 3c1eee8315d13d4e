"""The checks of the settings of a partitioner by rules, and the rule for the batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from partitioning.partitioner.partitioner_object import describe_rules
from partitioning.plan import Plan
from partitioning.rules import AxisRules, LogicalAxisRules, MeshAxes, as_tuple, nearest

_LOGGER = logging.getLogger(__name__)


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


def check_shardy(use_shardy_partitioner: bool | None) -> None:
    """Raises ValueError for a value that would turn Shardy off."""
    if use_shardy_partitioner not in (None, True):
        raise ValueError(
            f'use_shardy_partitioner={use_shardy_partitioner!r} has no effect, because JAX '
            'partitions every program with Shardy: remove it'
        )


def over_slices(rule: tuple[str, MeshAxes], slices: str | None) -> tuple[str, MeshAxes]:
    """Adds the axis over slices, in front, to a rule that shards the batch over 'data'."""
    name, axes = rule[0], as_tuple(rule[1])
    if name != 'batch' or slices is None or slices in axes or 'data' not in axes:
        return rule
    return name, (slices, *axes)


def check_batch_rule(rules: LogicalAxisRules, mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError if no rule is for 'batch' but one is for a similar name.

    Rules may omit 'batch' on purpose, but a name close to it is a mistake.
    """
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
