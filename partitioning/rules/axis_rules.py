"""Logical axis rules and path rules: the mesh axes of logical axes, and the names of arrays."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from partitioning.rules.checks import MeshAxes, either
from partitioning.rules.names import LogicalAxisRules, OnIndivisible, OnUnmatched
from partitioning.short_help import ShortHelp
from partitioning.values import value_str

_UNMATCHED, _INDIVISIBLE = get_args(OnUnmatched), get_args(OnIndivisible)


class AxisRules(tuple, metaclass=ShortHelp):
    """Logical axis rules, with their policies, names by path, and rules for the optimizer.

    Usage:
      AxisRules([('embed', 'data'), ('mlp', 'model')], on_indivisible='drop_axis')
      AxisRules(names=[('.*/kernel', ('embed', 'mlp')), ('.*/bias', ('mlp',))])
      AxisRules(rules, optimizer=fsdp_logical_axis_rules(rules))  # ZeRO stage 1

    Args:
      rules: (logical axis, mesh axis or axes or None) pairs in order of priority. By default a
        partitioner takes `standard_logical_axis_rules` for the axes of its mesh.
      on_unmatched: the policy for a dimension whose name has no rule: 'error' or 'replicate'.
      on_indivisible: the policy for a size that its mesh axes do not divide: 'error', 'replicate',
        'drop_axis' or 'pad'; see `resolve_axes`.
      names: (regular expression, names) pairs that name parameters by their whole paths, such as
        'decoder/mlp/kernel'; see `override_params_axes_names`.
      optimizer: the rules for the optimizer's state, if they differ.

    The default of the last four is what `rules` have, if these are AxisRules. The default of a
    policy is then 'error', and `optimizer` takes the policies of the rules. The sum with
    other rules, on either side, keeps everything.

    Raises:
      ValueError: if a rule is malformed or a policy does not exist.
    """

    on_unmatched: OnUnmatched
    on_indivisible: OnIndivisible
    names: PathRules
    optimizer: AxisRules | None
    are_defaults: bool

    def __new__(
        cls,
        rules: LogicalAxisRules | None = None,
        on_unmatched: OnUnmatched | None = None,
        on_indivisible: OnIndivisible | None = None,
        names: PathRules | None = None,
        optimizer: LogicalAxisRules | None = None,
    ) -> AxisRules:
        made = tuple.__new__(cls, check_rules(() if rules is None else rules))
        for policy, allowed, given in (
            ('on_unmatched', _UNMATCHED, on_unmatched),
            ('on_indivisible', _INDIVISIBLE, on_indivisible),
        ):
            value = getattr(rules, policy, 'error') if given is None else given
            if value not in allowed:
                raise ValueError(f'{policy} must be {either(allowed)}, not {value!r}')
            setattr(made, policy, value)
        inherited = getattr(rules, 'names', ())
        made.names = inherited if names is None else check_path_rules(names)
        chosen = getattr(rules, 'optimizer', None) if optimizer is None else optimizer
        if chosen is not None and not isinstance(chosen, AxisRules):
            chosen = AxisRules(chosen, made.on_unmatched, made.on_indivisible)
        made.optimizer = chosen
        # Whether a partitioner chooses the rules, for the axes of its mesh.
        made.are_defaults = getattr(rules, 'are_defaults', rules is None)
        return made

    def with_rules(self, rules: LogicalAxisRules) -> AxisRules:
        """Other rules, with the same policies, names and rules for the optimizer."""
        return AxisRules(tuple(rules), *self._others)

    @property
    def _others(self) -> tuple[Any, ...]:
        return self.on_unmatched, self.on_indivisible, self.names, self.optimizer

    def __add__(self, other: Any) -> AxisRules:
        return self.with_rules((*self, *other))

    def __radd__(self, other: Any) -> AxisRules:
        return self.with_rules((*other, *self))

    def __eq__(self, other: object) -> bool:
        """Pairs are equal to rules with the same pairs, and AxisRules if everything is equal."""
        same = not isinstance(other, AxisRules) or self._others == other._others
        return same and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __getnewargs__(self) -> tuple:
        return None if self.are_defaults else tuple(self), *self._others

    def __repr__(self) -> str:
        shown = [] if self.are_defaults else [repr(list(self))]
        for name in ('on_unmatched', 'on_indivisible'):
            if (policy := getattr(self, name)) != 'error':
                shown.append(f'{name}={policy!r}')
        if self.names:
            shown.append(f'names={list(self.names)!r}')
        if self.optimizer is not None:
            shown.append(f'optimizer={self.optimizer!r}')
        return f'AxisRules({", ".join(shown)})'


def check_rules(rules: Iterable[Any]) -> tuple[tuple[str, MeshAxes], ...]:
    """Rules as pairs; lists of mesh axes, as configuration files write them, become tuples.

    Raises:
      ValueError: if a rule is not a pair of a name and a mesh axis, several axes, or None.
    """
    if isinstance(rules, set | frozenset | Mapping):
        raise ValueError(
            f'rules must be ordered, because the first match wins: write {value_str(rules)} as '
            'a list of pairs'
        )
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(
            f"rules={value_str(rules)} must be a list, [('logical axis', 'mesh axis'), ...]"
        )
    given = tuple(rules)
    try:
        return _check_hashable(given)
    except TypeError:  # a list, as configuration files write rules and mesh axes
        return _check_each(given)


def _check_each(rules: tuple[Any, ...]) -> tuple[tuple[str, MeshAxes], ...]:
    checked: list[tuple[str, MeshAxes]] = []
    for rule in rules:
        match rule:
            case (str(name), None | str() as axes):
                checked.append((name, axes))
            case (str(name), [*several]) if all(isinstance(a, str) for a in several):
                if len(set(several)) < len(several):
                    raise ValueError(f'rule {rule!r} names a mesh axis twice: use each axis once')
                checked.append((name, tuple(several)))
            case _:
                raise ValueError(
                    f"rule {value_str(rule)} is malformed: write ('logical axis', 'mesh axis'), "
                    "('logical axis', ('one axis', 'another')) or ('logical axis', None); the "
                    'names of an array by its path belong in AxisRules(names=...)'
                )
    return tuple(checked)


# Partitioners are made in numbers with the same few tables.
_check_hashable = functools.lru_cache(maxsize=128)(_check_each)


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
