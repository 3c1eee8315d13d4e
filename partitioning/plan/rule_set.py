"""The rules of a partitioner, together."""

from __future__ import annotations

import dataclasses

from partitioning.plan.by_pattern import RuleLayout
from partitioning.plan.by_size import WordLayout
from partitioning.rules import AxisRules
from partitioning.state import PathRules, Role

Layout = WordLayout | RuleLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleSet:
    """The rules of a partitioner.

    Attributes:
      rules: the logical axis rules.
      optimizer_rules: the rules for the optimizer's state; None if they are the same.
      overrides: path rules that name parameters.
      layout: lays out states instead of the rules, which then lay out only activations.
      are_defaults: whether the user chose no rules, so that unused ones are no surprise.
    """

    rules: AxisRules
    optimizer_rules: AxisRules | None = None
    overrides: PathRules = ()
    layout: Layout | None = None
    are_defaults: bool = False

    def of_role(self, role: Role) -> AxisRules:
        """The rules for arrays of a role."""
        if role == 'optimizer' and self.optimizer_rules is not None:
            return self.optimizer_rules
        return self.rules
