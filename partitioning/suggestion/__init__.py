"""Suggests path rules for states without names, and shows which arrays path rules match.

The files, from the ground up: `path_words` reads the words of a path; `structure` finds the width
of each part of a model, and which matrices follow which; `dimension_names` names each dimension;
`path_patterns` writes regular expressions; `notes` says what stays on every device.
`rule_matches` is a dry run of path rules, and `suggested_rules` puts all of them together.
"""
