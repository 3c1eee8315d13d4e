"""Suggests path rules for states without names, and shows which arrays path rules match.

`dimension_names` chooses a name for each dimension from the paths, and `suggested_rules` writes the
rules with their regular expressions. `rule_matches` is a dry run of path rules.
"""
