"""What a resolution gives: a reason for each dimension, and specs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import PartitionSpec

from partitioning.rules.names import (
    MeshAxes,
    MeshLike,
    OnIndivisible,
    as_tuple,
    axis_sizes,
    describe_axes,
    nearest,
)

Rule = tuple[str, MeshAxes]
ProblemKind = Literal[
    'names',
    'repeated name',
    'rank',
    'absent axis',
    'conflict',
    'unmatched',
    'indivisible',
    'policy',
]


class Problem(NamedTuple):
    """Why an array cannot be resolved: a kind, for programs, and a message with the way out."""

    kind: ProblemKind
    message: str


class ProblemError(ValueError):
    """A problem on its way to where it is reported."""

    def __init__(self, problem: Problem):
        super().__init__(problem.message)
        self.problem = problem


# Told of every problem with the path of its array; `raise_problem` raises the first.
Report = Callable[[str, Problem], None]


def raise_problem(path: str, problem: Problem) -> None:
    """Raises a problem of an array as ValueError."""
    raise ValueError(f'Failed to map logical axes for {path}: {problem.message}')


@dataclasses.dataclass(frozen=True)
class ResolvedDimension:
    """Why one dimension of an array is laid out as it is.

    Attributes:
      name: its logical axis name; None for a dimension without one.
      mesh_axes: the mesh axes it is sharded over; None: not sharded.
      rule: the rule that decided, if one did.
      lost: the rules for this name that did not apply, each with the reason.
      reason: one phrase that says why `mesh_axes` is what it is.
      policy: what was done about a name without a rule or a size that does not divide; None:
        nothing had to be.
      wanted: the mesh axes that the rules give, before a policy; under 'pad' those that the
        dimension is sharded over inside partitioned functions.
      fits: the nearest sizes, below and above, that need no policy.
    """

    name: str | None
    mesh_axes: MeshAxes
    rule: Rule | None
    lost: tuple[tuple[Rule, str], ...]
    reason: str
    policy: OnIndivisible | None = None
    wanted: MeshAxes = None
    fits: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class PaddedSpec:
    """The spec of an array with a dimension that its mesh axes do not divide, under 'pad'.

    jax lays out no such array at the door of a program, so it is whole along that dimension
    outside, and padded and sharded inside the functions of `PjitPartitioner.partition`.

    Attributes:
      outside: the spec of the array in a state.
      inside: its spec within a partitioned function.
    """

    outside: PartitionSpec
    inside: PartitionSpec


def spec_of(spec: Any) -> Any:
    """The spec at the door of a program: `outside` of a PaddedSpec, anything else as it is."""
    return spec.outside if isinstance(spec, PaddedSpec) else spec


def spec_str(spec: PartitionSpec) -> str:
    """A spec as code, the same on every jax: `P(None, 'model')`."""
    return f'P({", ".join(repr(axes) for axes in spec)})'


def check_spec(
    spec: PartitionSpec, mesh: MeshLike, where: str, shape: Sequence[int] | None = None
) -> None:
    """Raises ValueError for a spec that no array on the mesh can have.

    Args:
      spec: the mesh axes of each dimension.
      mesh: the mesh.
      where: what the spec is for, as the error calls it.
      shape: that of the array, if known.
    """
    sizes = axis_sizes(mesh)
    partitions = spec.partitions if hasattr(spec, 'partitions') else tuple(spec)
    shown = f'{where}: {spec_str(spec)}'
    axes = [a for p in partitions if isinstance(p, str | tuple) for a in as_tuple(p)]
    for axis in axes:
        if axis not in sizes:
            raise ValueError(
                f'{shown} names mesh axis {axis!r}, but the mesh is {describe_axes(sizes)}.'
                f'{nearest(axis, sizes)}'
            )
        if axes.count(axis) > 1:
            raise ValueError(f'{shown} names mesh axis {axis!r} twice: it can only be once')
    if shape is not None and len(partitions) > len(shape):
        raise ValueError(
            f'{shown} is for {len(partitions)} dimensions, but the array has {len(shape)}, '
            f'{tuple(shape)}'
        )


def names_of(spec: PartitionSpec, rank: int) -> tuple[Any, ...]:
    """What `resolve_axes` takes for a spec: a tuple of mesh axes or None for each dimension."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return tuple(as_tuple(e) or None if isinstance(e, str | tuple) else e for e in entries)


def replicate_none(specs: Any) -> Any:
    """A pytree of PartitionSpecs with every None in it made the spec that replicates."""
    return jax.tree.map(
        lambda spec: PartitionSpec() if spec is None else spec_of(spec),
        specs,
        is_leaf=lambda spec: spec is None or isinstance(spec, PartitionSpec),
    )


def to_spec(resolved: Sequence[ResolvedDimension]) -> PartitionSpec | PaddedSpec:
    """The spec that resolved dimensions make."""
    outside = PartitionSpec(*(r.mesh_axes for r in resolved))
    if not any(r.policy == 'pad' for r in resolved):
        return outside
    inside = (r.wanted if r.policy == 'pad' else r.mesh_axes for r in resolved)
    return PaddedSpec(outside, PartitionSpec(*inside))
