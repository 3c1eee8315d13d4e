"""Logical axis names, the rules that map them to mesh axes, and the dimensions that result."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from jax.sharding import PartitionSpec

from partitioning.rules.checks import MeshAxes, as_tuple, either, sharding_axes

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
                raise ValueError(f'{policy} must be {either(allowed)}, not {value!r}')
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
    if isinstance(rules, set | frozenset | Mapping):
        raise ValueError(
            f'rules must be ordered, because the first match wins: write {rules!r} as '
            'a list of pairs'
        )
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(f"rules={rules!r} must be a list, [('logical axis', 'mesh axis'), ...]")
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
                    f"rule {rule!r} is malformed: write ('logical axis', 'mesh axis'), "
                    "('logical axis', ('one axis', 'another')) or ('logical axis', None)"
                )
    return tuple(checked)


# Partitioners are made in numbers with the same few tables.
_check_hashable = functools.lru_cache(maxsize=128)(_check_each)


Rule = tuple[str, MeshAxes]
Policy = OnIndivisible | OnUnmatched


@dataclasses.dataclass(frozen=True)
class ResolvedDimension:
    """Why one dimension of an array is laid out as it is.

    Attributes:
      name: the logical axis name, or None if the dimension has none.
      mesh_axes: the mesh axes that shard the dimension, or None if it is replicated.
      rule: the rule that decided, if a rule did.
      lost: the rules for this name that did not apply, each with the reason.
      reason: one phrase that says why `mesh_axes` is what it is.
      policy: the policy that was applied to a name without a rule or to a size that does not
        divide; None if no policy was needed.
      wanted: the mesh axes that the rules give before any policy. Under 'pad' these shard the
        dimension inside partitioned functions.
      fits: the nearest sizes, below and above, that need no policy.
    """

    name: str | None
    mesh_axes: MeshAxes
    rule: Rule | None
    lost: tuple[tuple[Rule, str], ...]
    reason: str
    policy: Policy | None = None
    wanted: MeshAxes = None
    fits: tuple[int, ...] = ()

    @property
    def fitting_sizes(self) -> str:
        """The sizes that need no policy, as the end of a message: `; 96 or 104 would need ...`."""
        return f'; {" or ".join(map(str, self.fits))} would need no policy' if self.fits else ''

    def __str__(self) -> str:
        lost = ''.join(f', rule {rule!r} lost: {why}' for rule, why in self.lost)
        fits = ' or '.join(map(str, self.fits))
        policy = f', policy {self.policy!r}{f" ({fits} would fit)" if fits else ""}'
        return f'{self.reason}{lost}{policy if self.policy else ""}'


@dataclasses.dataclass(frozen=True)
class PaddedSpec:
    """The spec of an array with a size that its mesh axes do not divide, under the policy 'pad'.

    jax accepts no such layout at a jit boundary. The array is therefore whole along that dimension
    outside, and padded and sharded inside the functions of `PjitPartitioner.partition`.

    Attributes:
      outside: the spec of the array in a state.
      inside: the spec of the array inside a partitioned function.
    """

    outside: PartitionSpec
    inside: PartitionSpec


Spec = PartitionSpec | PaddedSpec


def boundary_spec(spec: Any) -> Any:
    """The spec at a jit boundary: `outside` of a PaddedSpec, and any other value unchanged."""
    return spec.outside if isinstance(spec, PaddedSpec) else spec


def dimension_axes(spec: PartitionSpec, rank: int) -> tuple[Any, ...]:
    """For each of `rank` dimensions the tuple of its mesh axes, or None if it is replicated.

    `resolve_axes` accepts these entries in place of logical axes.
    """
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(as_tuple(e) or None if isinstance(e, str | tuple) else e for e in entries)


def fill_unconstrained(spec: PartitionSpec, now: Sequence[Any]) -> PartitionSpec:
    """A spec whose unconstrained dimensions keep their axes, if no other dimension takes them."""
    free = PartitionSpec.UNCONSTRAINED
    if free not in tuple(spec):
        return spec
    taken = {axis for entry in spec for axis in sharding_axes(entry)}
    kept = (axes if axes and not taken & {*axes} else None for axes in now)
    return PartitionSpec(*(k if s is free else s for s, k in zip(spec, kept, strict=False)))


def to_spec(resolved: Sequence[ResolvedDimension]) -> Spec:
    """The spec that resolved dimensions make."""
    outside = PartitionSpec(*[r.mesh_axes for r in resolved])
    if 'pad' not in [r.policy for r in resolved]:
        return outside
    inside = [r.wanted if r.policy == 'pad' else r.mesh_axes for r in resolved]
    return PaddedSpec(outside, PartitionSpec(*inside))
