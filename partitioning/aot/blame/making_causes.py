"""Causes from what an exchange moves, and the words for values and mesh axes."""

from __future__ import annotations

from collections.abc import Sequence

from partitioning.aot.blame.advice import Advisor
from partitioning.aot.blame.cause import Cause
from partitioning.aot.blame.changes import Change
from partitioning.aot.blame.evidence import Evidence
from partitioning.aot.blame.known_layouts import Axes
from partitioning.aot.blame.values import Value


def make_cause(
    advisor: Advisor,
    evidence: Evidence,
    reason: str,
    *,
    rule: str = '',
    changes: Sequence[Change] = (),
    avoidable: bool = False,
    asked_for: bool = False,
    source: str = '',
) -> Cause:
    """The cause of an exchange, which rules and layouts around it come before, if they are odd.

    Args:
      advisor: knows the rules, the layouts and the constraints.
      evidence: what the exchange moves.
      reason: why it is there.
      rule: the rule that decides it.
      changes: what may help.
      avoidable: whether it is not what the layout needs.
      asked_for: whether the program itself asks for it.
      source: the user's line; by default the one that needs the result.
    """
    value = evidence.value
    assert value is not None
    around = () if asked_for else (value, *evidence.taken_by)
    if odd := advisor.odd_rules(*around):
        rule = advisor.layouts.rule_for(odd[0].after[0][0])
        reason += f'; {rule} is not as in the standard rules'
    misplaced = advisor.odd_layouts(*around)
    if misplaced:
        reason += f'; the layout of {misplaced[0].path} does not fit its uses'
    distinct = tuple(dict.fromkeys([*odd, *misplaced, *changes]))
    avoidable = avoidable or bool(odd or misplaced)
    return Cause(
        source=source or evidence.used_at or evidence.made_at,
        array=what_is(value),
        logical_axes=value.names,
        rule=rule,
        reason=reason,
        change=str(distinct[0]) if distinct else '',
        avoidable=avoidable,
        candidates=distinct,
    )


def what_is(value: Value) -> str:
    """What a value is, for people: 'params/w', 'the gradient of params/w' or 'an activation'."""
    if value.argument:
        return value.argument
    if value.gradient_of:
        return f'the gradient of {value.gradient_of}'
    if value.update_of:
        return f'the update of {value.update_of}'
    return 'an activation' if not value.backward else 'the gradient of an activation'


def over(axes: Sequence[str] | Axes) -> str:
    """Mesh axes as a message shows them: "'data' and 'model'"."""
    return ' and '.join(repr(axis) for axis in axes) or 'all devices'
