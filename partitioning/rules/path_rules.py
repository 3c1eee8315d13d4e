"""Path rules: logical axis names by regular expressions on the paths of arrays."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from partitioning.values import value_str

# For each dimension a name, a tuple of mesh axes, or None.
PathNames = Sequence[str | tuple[str, ...] | None]
PathRules = Sequence[tuple[str, PathNames]]


def check_path_rules(rules: Iterable[Any]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Checks path rules and returns them as (regular expression, tuple of names) pairs.

    Raises:
      ValueError: if a rule is not such a pair, or its regular expression is invalid.
    """
    if isinstance(rules, Mapping):
        pair = next(iter(rules.items()), ('.*/kernel', ('embed', 'mlp')))
        raise ValueError(
            f'path rules must be a list of pairs, not a dict, as in [{pair!r}, ...]: write '
            'list(rules.items())'
        )
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(
            "path rules must be a list such as [('.*/kernel', ('embed', 'mlp')), ...], not "
            f'{value_str(rules)}'
        )
    checked: list[tuple[str, tuple[Any, ...]]] = []
    for rule in rules:
        match rule:
            case (str(pattern), [*names]) if all(
                isinstance(name, str | None)
                or (isinstance(name, tuple) and all(isinstance(axis, str) for axis in name))
                for name in names
            ):
                compiled(pattern)
                checked.append((pattern, tuple(names)))
            case _:
                raise ValueError(
                    "a path rule must be ('regular expression', ('name', None, ...)), with a name, "
                    f'a tuple of mesh axes or None for each dimension, not {rule!r}'
                )
    return tuple(checked)


@functools.cache
def compiled(pattern: str, rule: str = '') -> re.Pattern[str]:
    """The regular expression of a rule, which is named `rule` if that is not valid."""
    try:
        return re.compile(pattern)
    except re.error as error:
        named = rule or f'path rule {pattern!r}'
        hint = f". For any text, write '.*', as in '.{pattern}'" if pattern.startswith('*') else ''
        raise ValueError(f'{named} is not a valid regular expression: {error}{hint}') from None
