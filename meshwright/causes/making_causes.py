"""Causes from what an exchange moves, and the words for values and mesh axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.causes.advice import Advisor
from meshwright.causes.cause import Cause
from meshwright.causes.changes import Change
from meshwright.causes.evidence import Evidence
from meshwright.causes.known_layouts import Axes
from meshwright.jaxpr.values import Value


@dataclasses.dataclass(frozen=True)
class Move:
    """An exchange of a value that was found in the traced function.

    Attributes:
      evidence: what the exchange moves.
      value: the value that it moves.
      advisor: knows the rules, the layouts and the constraints.
    """

    evidence: Evidence
    value: Value
    advisor: Advisor

    @property
    def name(self) -> str | None:
        """The logical axis of the dimension that is exchanged."""
        return self.evidence.moved.name if self.evidence.moved else None

    @property
    def split(self) -> str:
        """How the value is laid out before, for people."""
        along = f' along {self.name!r}' if self.name else ''
        return f'{what_is(self.value)} is sharded over {over(self.evidence.axes)}{along}'

    def standard_rule(self) -> list[Change]:
        """The change to the standard rule of the dimension, if its rule is another one."""
        layouts = self.advisor.layouts
        if self.name and layouts.is_unusual(self.name):
            return [layouts.to_standard(self.name)]
        return []

    def cause(
        self,
        reason: str,
        changes: Sequence[Change] = (),
        *,
        rule: str | None = None,
        avoidable: bool = True,
        asked_for: bool = False,
        source: str = '',
    ) -> Cause:
        """The cause of the exchange. Rules and layouts around it come before, if they are odd.

        Args:
          reason: why it is there.
          changes: what may help.
          rule: the rule that decides it; by default that of the dimension that is exchanged.
          avoidable: whether it is not what the layout needs.
          asked_for: whether the program itself asks for it.
          source: the user's line; by default the one that needs the result.
        """
        advisor, evidence = self.advisor, self.evidence
        around = () if asked_for else (self.value, *evidence.taken_by)
        rule = advisor.layouts.rule_for(self.name) if rule is None else rule
        if odd := advisor.odd_rules(*around):
            rule = advisor.layouts.rule_for(odd[0].after[0][0])
            reason += f'; {rule} is not as in the standard rules'
        if misplaced := advisor.odd_layouts(*around):
            reason += f'; the layout of {misplaced[0].path} does not fit its uses'
        distinct = tuple(dict.fromkeys([*odd, *misplaced, *changes]))
        return Cause(
            source=source or evidence.used_at or evidence.made_at,
            array=what_is(self.value),
            logical_axes=self.value.names,
            rule=rule,
            reason=reason,
            change=str(distinct[0]) if distinct else '',
            avoidable=avoidable or bool(odd or misplaced),
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
