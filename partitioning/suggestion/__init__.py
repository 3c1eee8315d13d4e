"""Suggests path rules for states without names, and shows which arrays path rules match.

`dimension_names` chooses a name for each dimension from the paths, and `suggested_rules` writes the
rules with their regular expressions. `rule_matches` is a dry run of path rules.
"""

from partitioning.suggestion.rule_matches import (
    RuleMatches as RuleMatches,
    explain_rules as explain_rules,
)
from partitioning.suggestion.suggested_rules import (
    SuggestedRules as SuggestedRules,
    suggest_rules as suggest_rules,
)
