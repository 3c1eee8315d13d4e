"""Suggests path rules for states without names, and shows which arrays path rules take.

`suggested_rules` writes the rules and their regular expressions: `dimension_names` reads the paths
and chooses a name for each dimension. `rule_matches` is the dry run.
"""

from partitioning.suggestion.rule_matches import (
    RuleMatches as RuleMatches,
    explain_rules as explain_rules,
)
from partitioning.suggestion.suggested_rules import (
    SuggestedRules as SuggestedRules,
    suggest_rules as suggest_rules,
)
