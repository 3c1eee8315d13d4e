"""Logical axis names, mesh axes, and the rules that join them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeGuard, get_args

import numpy as np
from jax.sharding import AbstractMesh, Mesh

MeshAxes = str | tuple[str, ...] | None
LogicalAxisRules = Sequence[tuple[str, MeshAxes]]
MeshLike = Mesh | AbstractMesh | Mapping[str, int]
OnUnmatched = Literal['error', 'replicate']
OnIndivisible = Literal['error', 'replicate', 'drop_axis', 'pad']


class AxisNames(tuple):
    """The logical axis names of one array, one name (or None) a dimension.

    A class of its own so that jax takes it for one leaf of a pytree, not for a node.
    """

    __slots__ = ()

    def __new__(cls, *names: str | None) -> AxisNames:
        return tuple.__new__(cls, names)

    def __getnewargs__(self) -> tuple:
        return tuple(self)

    def __repr__(self) -> str:
        return f'AxisNames{super().__repr__()}'


def add_axis(names: Sequence[str | None], index: int, name: str | None) -> AxisNames:
    """The names of an array that gets one more dimension, as a scan over layers adds it.

    Args:
      names: of the array as it is.
      index: where the new dimension is in the new array; past the end of `names`, dimensions in
        between have no name; negative, from the end of the new array.
      name: of the new dimension.

    Raises:
      ValueError: a negative index before the first dimension.
    """
    place = index if index >= 0 else len(names) + 1 + index
    if place < 0:
        raise ValueError(f'no dimension can be added at {index} of {tuple(names)}')
    padded = [*names, *[None] * (place - len(names))]
    return AxisNames(*padded[:place], name, *padded[place:])


def remove_axis(names: Sequence[str | None], index: int, name: str | None) -> AxisNames:
    """The names of an array that loses the dimension `name` at `index`: `add_axis` undone.

    Raises:
      ValueError: no dimension there, or one of another name.
    """
    place = index if index >= 0 else len(names) + index
    if not 0 <= place < len(names):
        raise ValueError(f'{tuple(names)} have no dimension {index} to remove {name!r} from')
    if names[place] != name:
        raise ValueError(
            f'dimension {index} of {tuple(names)} is {names[place]!r}, not the {name!r} to remove'
        )
    return AxisNames(*names[:place], *names[place + 1 :])


def as_tuple(mesh_axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Mesh axes of one dimension as a tuple, empty for None."""
    if mesh_axes is None:
        return ()
    return (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)


def axis_sizes(mesh: MeshLike) -> Mapping[str, int]:
    """The size of each axis of a mesh, which may be given as just that."""
    if not isinstance(mesh, Mesh | AbstractMesh | Mapping):
        raise ValueError(f'{mesh!r} is neither a mesh nor the sizes of its axes, by name')
    return mesh if isinstance(mesh, Mapping) else mesh.shape


def is_count(value: object) -> TypeGuard[int]:
    """True for a whole number of 1 or more, numpy's too."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 1  # type: ignore[operator]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint: ` Did you mean 'x'?` for the known name nearest to `name`, or nothing."""
    found = difflib.get_close_matches(str(name), [str(k) for k in known], n=1)
    return f' Did you mean {found[0]!r}?' if found else ''


def describe_axes(sizes: Mapping[str, int]) -> str:
    """Mesh axes in words: `data 4 x model 2`."""
    return ' x '.join(f'{name} {size}' for name, size in sizes.items())


class AxisRules(tuple):
    """Logical axis rules together with their policies.

    Usage:
      AxisRules([('embed', 'data'), ('mlp', 'model')], on_indivisible='drop_axis')

    Attributes:
      on_unmatched: what becomes of a dimension whose name has no rule.
      on_indivisible: of one whose size its mesh axes do not divide; see `resolve_axes`.
    """

    on_unmatched: OnUnmatched
    on_indivisible: OnIndivisible

    def __new__(
        cls,
        rules: LogicalAxisRules = (),
        on_unmatched: OnUnmatched | None = None,
        on_indivisible: OnIndivisible | None = None,
    ) -> AxisRules:
        """Args:
        rules: (logical axis, mesh axis or axes or None) pairs in order of priority.
        on_unmatched, on_indivisible: by default those of `rules`, if they have any, or 'error'.

        Raises:
          ValueError: what is no rule, and a policy that does not exist.
        """
        made = tuple.__new__(cls, check_rules(rules))
        own = rules if isinstance(rules, AxisRules) else None
        if on_unmatched is None:
            on_unmatched = 'error' if own is None else own.on_unmatched
        if on_indivisible is None:
            on_indivisible = 'error' if own is None else own.on_indivisible
        made.on_unmatched, made.on_indivisible = on_unmatched, on_indivisible
        for name, kind in (('on_unmatched', OnUnmatched), ('on_indivisible', OnIndivisible)):
            if getattr(made, name) not in get_args(kind):
                *others, last = map(repr, get_args(kind))
                raise ValueError(
                    f'{name} must be {", ".join(others)} or {last}, not {getattr(made, name)!r}'
                )
        return made

    def with_rules(self, rules: LogicalAxisRules) -> AxisRules:
        """Other rules with the same policies."""
        return AxisRules(rules, self.on_unmatched, self.on_indivisible)

    def __getnewargs__(self) -> tuple:
        return tuple(self), self.on_unmatched, self.on_indivisible

    def __repr__(self) -> str:
        return (
            f'AxisRules({list(self)!r}, on_unmatched={self.on_unmatched!r}, '
            f'on_indivisible={self.on_indivisible!r})'
        )


def check_rules(rules: Iterable[Any]) -> tuple[tuple[str, MeshAxes], ...]:
    """Rules as pairs, with lists of mesh axes (as configuration files write them) made tuples.

    Raises:
      ValueError: a rule that is no pair of a name and a mesh axis, several, or None.
    """
    if isinstance(rules, set | frozenset | Mapping):
        raise ValueError(f'{rules!r} have no order, which decides between rules: write a list')
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(f"{rules!r} are no rules: write [('logical axis', 'mesh axis'), ...]")
    checked: list[tuple[str, MeshAxes]] = []
    for rule in rules:
        match rule:
            case (str(name), None | str() as axes):
                checked.append((name, axes))
            case (str(name), [*several]) if all(isinstance(a, str) for a in several):
                if len(set(several)) < len(several):
                    raise ValueError(f'rule {rule!r} names a mesh axis twice: use each once')
                checked.append((name, tuple(several)))
            case _:
                raise ValueError(
                    f"{rule!r} is no rule: write ('logical axis', 'mesh axis'), ('logical axis', "
                    "('one', 'another')), or ('logical axis', None)"
                )
    return tuple(checked)
