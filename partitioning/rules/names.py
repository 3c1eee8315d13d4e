"""Logical axis names, and the dimensions to which rules resolve them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec

from partitioning.rules.checks import MeshAxes, as_tuple, sharding_axes

LogicalAxisRules = Sequence[tuple[str, MeshAxes]]
OnUnmatched = Literal['error', 'replicate']
OnIndivisible = Literal['error', 'replicate', 'drop_axis', 'pad']


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
