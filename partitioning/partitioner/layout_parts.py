"""Combines the layout with the arguments that set single parts of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from partitioning.partitioner.settings import OtherLayout, read_layout
from partitioning.plan import Plan
from partitioning.plan.layouts import RuleLayout
from partitioning.rules import AxisRules

# The argument of a partitioner, and the argument of AxisRules.
_PARTS = {
    'optimizer_axis_rules': 'optimizer',
    'params_axes_names_override': 'names',
    'on_unmatched': 'on_unmatched',
    'on_indivisible': 'on_indivisible',
}


def read_parts(
    layout: Any, settings: Mapping[str, Any]
) -> tuple[OtherLayout | None, AxisRules | None]:
    """The layout of states if it is not by rules, and the rules, from all arguments.

    Args:
      layout: the argument `layout`.
      settings: the other arguments of a partitioner, as in `T5xSettings`.

    Raises:
      ValueError: if one is malformed, or if they contradict each other.
    """
    plan = settings.get('plan')
    if plan is not None and not isinstance(plan, Plan):
        raise ValueError(
            f'plan= takes a Plan, not a {type(plan).__name__}: write Plan.load(path), or the '
            'result of partitioner.plan(...)'
        )
    if plan is not None and layout is not None:
        raise ValueError('plan= already determines what layout would: remove plan or layout')
    given = {name: settings[name] for name in _PARTS if settings.get(name) not in (None, ())}
    other, rules = read_layout(layout if plan is None else plan, settings.get('logical_axis_rules'))
    if not given:
        return other, rules
    parts = {_PARTS[name]: value for name, value in given.items()}
    if other is None:
        for name in given:
            if name != _PARTS[name] and getattr(rules, _PARTS[name], None):
                raise ValueError(
                    f'{name} and {_PARTS[name]}= of the rules are both given: remove {name}'
                )
        return None, AxisRules(rules, **parts)
    # A word leaves nothing open, and other layouts leave the policies.
    determined = [name for name in given if isinstance(other, str) or name != _PARTS[name]]
    if determined:
        by = f'layout={other!r}' if isinstance(other, str) else 'the layout'
        names = ', '.join(determined)
        raise ValueError(f'{by} already determines what {names} would: remove {names} or layout')
    if isinstance(other, RuleLayout):
        other = dataclasses.replace(other, policies=AxisRules(other.policies, **parts))
    return other, AxisRules(rules, **parts)
