"""Logical axis names, and the rules that map them to mesh axes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from partitioning.rules.axes import MeshAxes

LogicalAxisRules = Sequence[tuple[str, MeshAxes]]
OnUnmatched = Literal['error', 'replicate']
OnIndivisible = Literal['error', 'replicate', 'drop_axis', 'pad']

_UNMATCHED, _INDIVISIBLE = get_args(OnUnmatched), get_args(OnIndivisible)


class AxisNames(tuple):
    """The logical axis names of one array, one name or None per dimension.

    As a class, it is one leaf of a pytree for jax; a plain tuple would be a node.
    """

    __slots__ = ()

    def __new__(cls, *names: str | None) -> AxisNames:
        return tuple.__new__(cls, names)

    def __getnewargs__(self) -> tuple:
        return tuple(self)

    def __repr__(self) -> str:
        return f'AxisNames{super().__repr__()}'


def add_axis(names: Sequence[str | None], index: int, name: str | None) -> AxisNames:
    """The names of an array that gains a dimension, as `nn.scan` adds one for its layers.

    Args:
      names: the names before.
      index: the number of the new dimension in the new array. Dimensions between the end of
        `names` and the index get no name. A negative index counts from the end of the new array.
      name: the name of the new dimension.

    Raises:
      ValueError: if a negative index lies before the first dimension.
    """
    place = index if index >= 0 else len(names) + 1 + index
    if place < 0:
        raise ValueError(f'index {index} is out of range for adding a dimension to {tuple(names)}')
    padded = [*names, *[None] * (place - len(names))]
    return AxisNames(*padded[:place], name, *padded[place:])


def remove_axis(names: Sequence[str | None], index: int, name: str | None) -> AxisNames:
    """The names of an array that loses the dimension `name` at `index`; the inverse of `add_axis`.

    Raises:
      ValueError: if there is no such dimension, or if it has another name.
    """
    place = index if index >= 0 else len(names) + index
    if not 0 <= place < len(names):
        raise ValueError(f'{tuple(names)} has no dimension {index}, so {name!r} cannot be removed')
    if names[place] != name:
        raise ValueError(
            f'dimension {index} of {tuple(names)} is {names[place]!r}, not {name!r}: give its '
            'own name to remove it'
        )
    return AxisNames(*names[:place], *names[place + 1 :])


class AxisRules(tuple):
    """Logical axis rules together with their policies.

    Usage:
      AxisRules([('embed', 'data'), ('mlp', 'model')], on_indivisible='drop_axis')

    Args:
      rules: (logical axis, mesh axis or axes or None) pairs in order of priority.
      on_unmatched: the policy for a dimension whose name has no rule. By default it is the policy
        of `rules` if these are AxisRules, and otherwise 'error'.
      on_indivisible: the policy for a size that its mesh axes do not divide, with the same default;
        see `resolve_axes`.

    The sum with other rules, on either side, keeps the policies.

    Raises:
      ValueError: if a rule is malformed or a policy does not exist.
    """

    on_unmatched: OnUnmatched
    on_indivisible: OnIndivisible

    def __new__(
        cls,
        rules: LogicalAxisRules = (),
        on_unmatched: OnUnmatched | None = None,
        on_indivisible: OnIndivisible | None = None,
    ) -> AxisRules:
        made = tuple.__new__(cls, check_rules(rules))
        for policy, allowed, given in (
            ('on_unmatched', _UNMATCHED, on_unmatched),
            ('on_indivisible', _INDIVISIBLE, on_indivisible),
        ):
            value = getattr(rules, policy, 'error') if given is None else given
            if value not in allowed:
                *others, last = map(repr, allowed)
                raise ValueError(f'{policy} must be {", ".join(others)} or {last}, not {value!r}')
            setattr(made, policy, value)
        return made

    def with_rules(self, rules: LogicalAxisRules) -> AxisRules:
        """Other rules with the same policies."""
        return AxisRules(rules, self.on_unmatched, self.on_indivisible)

    def __add__(self, other: Any) -> AxisRules:
        return self.with_rules((*self, *other))

    def __radd__(self, other: Any) -> AxisRules:
        return self.with_rules((*other, *self))

    def __getnewargs__(self) -> tuple:
        return tuple(self), self.on_unmatched, self.on_indivisible

    def __repr__(self) -> str:
        return (
            f'AxisRules({list(self)!r}, on_unmatched={self.on_unmatched!r}, '
            f'on_indivisible={self.on_indivisible!r})'
        )


def check_rules(rules: Iterable[Any]) -> tuple[tuple[str, MeshAxes], ...]:
    """Rules as pairs; lists of mesh axes, as configuration files write them, become tuples.

    Raises:
      ValueError: if a rule is not a pair of a name and a mesh axis, several axes, or None.
    """
    given = rules if isinstance(rules, tuple) else tuple(_check_ordered(rules))
    try:
        return _check_hashable(given)
    except TypeError:  # a list, as configuration files write rules and mesh axes
        return _check_each(given)


def _check_ordered(rules: Any) -> Iterable[Any]:
    if isinstance(rules, set | frozenset | Mapping):
        raise ValueError(
            f'rules must be ordered, because the first match wins: write {rules!r} as '
            'a list of pairs'
        )
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(f"rules={rules!r} must be a list, [('logical axis', 'mesh axis'), ...]")
    return rules


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
                    f"rule {rule!r} is malformed: write ('logical axis', 'mesh axis'), "
                    "('logical axis', ('one axis', 'another')) or ('logical axis', None)"
                )
    return tuple(checked)


# Partitioners are made in numbers with the same few tables.
_check_hashable = functools.lru_cache(maxsize=128)(_check_each)
