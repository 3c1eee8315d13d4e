"""One array of a plan: what it is, how it is laid out, and why."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax

from partitioning.rules import (
    AxisNames,
    MeshLike,
    PaddedSpec,
    Problem,
    ResolvedDimension,
    Spec,
    boundary_spec,
    check_definite,
    check_layout,
    check_spec,
    dimension_axes,
    either,
    from_tuple,
    nearest,
    num_shards,
    sharding_axes,
    to_spec,
)
from partitioning.state import Role, nbytes, shape_of

# An array of at most this many bytes needs no names if it follows no parameter: random keys,
# hyperparameters, statistics of a few thousand channels. The audit lists it nevertheless.
SMALL = 16 * 1024


class PlanRow(NamedTuple):
    """One array of a plan.

    Attributes:
      path: the place of the array in the state, `params/decoder/embedding`.
      shape: the global shape.
      dtype: the name of the dtype, `float32`.
      role: 'parameters', 'optimizer' or 'other'.
      dimensions: for each dimension its logical axis, its mesh axes, and the reason.
      spec: the PartitionSpec, or the PaddedSpec of an array that is padded inside partitioned
        functions.
      shard_shape: the shape of one device's shard.
      bytes_total: the size of the global array, in bytes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    dimensions: tuple[ResolvedDimension, ...]
    spec: Spec
    shard_shape: tuple[int, ...]
    bytes_total: int

    @property
    def bytes_per_device(self) -> int:
        """The size of one device's shard, in bytes."""
        return self.bytes_total * math.prod(self.shard_shape) // max(math.prod(self.shape), 1)

    @property
    def logical_axes(self) -> AxisNames:
        """The logical axis of each dimension."""
        return AxisNames(*(d.name for d in self.dimensions))

    @property
    def reason(self) -> str:
        """The reason of every dimension, in one line."""
        if not self.shape:
            return 'a scalar'
        reasons = {str(d) for d in self.dimensions}
        if len(reasons) == 1 and not any(isinstance(d.name, str) for d in self.dimensions):
            return reasons.pop()
        return join_reasons(
            (dimension_str(d.name, dim), str(d)) for dim, d in enumerate(self.dimensions)
        )


# The reasons of dimensions that no rule names.
NO_NAMES = 'no names, and the array follows no parameter'
SAID_NONE = 'the state names no axes for the array'
NOT_OF_PARAMETER = 'not a dimension of the parameter'
NOT_COVERED = 'no name'  # fewer names than dimensions; the numbers follow

# nnx keeps the names of an array to which it adds a dimension, unless it is told a name.
OF_LAYERS = (
    'if nnx.vmap or nnx.scan added dimension 0, give it transform_metadata={nnx.PARTITION_NAME: '
    'None}'
)


# The dimensions of an array, and why it cannot have the layout that it should have.
Decision = tuple[Sequence[ResolvedDimension], Sequence[Problem]]


def without_name(reason: str) -> ResolvedDimension:
    """A replicated dimension without a logical name."""
    return ResolvedDimension(None, None, None, (), reason)


def make_row(
    path: str,
    array: Any,
    mesh: MeshLike,
    dimensions: Sequence[ResolvedDimension],
    role: Role = 'parameters',
) -> PlanRow:
    """The row of an array, an abstract array or a Python number.

    The mesh axes of its dimensions must divide them; `check_layout_of` checks this.
    """
    shape = shape_of(array)
    if not hasattr(array, 'dtype'):
        array = jax.ShapeDtypeStruct(shape, jax.dtypes.result_type(array))
    return PlanRow(
        path,
        shape,
        dtype_name(array.dtype),
        role,
        tuple(dimensions),
        to_spec(dimensions),
        shard_shape(shape, dimensions, mesh),
        nbytes(array),
    )


def shard_shape(
    shape: Sequence[int], dimensions: Sequence[ResolvedDimension], mesh: MeshLike
) -> tuple[int, ...]:
    """The shape of one device's shard."""
    shards = [num_shards(sharding_axes(d.mesh_axes), mesh) for d in dimensions]
    return tuple([size // number for size, number in zip(shape, shards, strict=True)])


def check_layout_of(path: str, shape: Sequence[int], spec: Spec, mesh: MeshLike) -> None:
    """Checks that an array of this shape can have a spec.

    Raises:
      ValueError: if the spec does not fit the mesh or the shape, if it leaves a dimension
        UNCONSTRAINED, or if a PaddedSpec pads a dimension whose size is divisible.
    """
    check_definite(boundary_spec(spec), path)
    check_layout(boundary_spec(spec), mesh, path, shape)
    if not isinstance(spec, PaddedSpec):
        return
    check_spec(spec.inside, mesh, f'{path}, padded', shape)
    inner, outer = (dimension_axes(s, len(shape)) for s in (spec.inside, spec.outside))
    if inner == outer:
        raise ValueError(f'{path}: the padded spec equals the spec, so nothing is padded: omit it')
    for dim, (inside, outside) in enumerate(zip(inner, outer, strict=True)):
        shards = num_shards(inside, mesh)
        if inside != outside and (outside is not None or shape[dim] % shards == 0):
            raise ValueError(
                f'{path}: dimension {dim} of shape {tuple(shape)} has {from_tuple(outside or ())!r}'
                f' in the spec and {from_tuple(inside or ())!r} in the padded spec, but only a '
                f'dimension that is not divisible by {shards} can be padded, with None in the spec'
            )


def nearest_path(path: str, rows: Iterable[PlanRow]) -> str:
    """A hint for a path that is not there: those that end like it, parameters before others."""
    listed = [*rows]
    ending = [row for row in listed if row.path.endswith(f'/{path}')]
    paths = [row.path for row in ending if row.role == 'parameters'] or [r.path for r in ending]
    if not 0 < len(paths) <= 3:
        return nearest(path, [row.path for row in listed])
    return f' Did you mean {either(paths)}?'


@functools.cache
def dtype_name(dtype: Any) -> str:
    """The name of a dtype; random keys have one too."""
    return str(dtype)


def dimension_str(name: Any, dim: int) -> str:
    """A dimension as a message calls it: its logical axis, or its number."""
    return name if isinstance(name, str) else f'dimension {dim}'


def policy_texts(row: PlanRow) -> list[str]:
    """For each dimension that a policy decided, which policy and why."""
    return [
        f'{dimension_str(d.name, dim)}: {d.policy}, {d.reason}{d.fitting_sizes}'
        for dim, d in enumerate(row.dimensions)
        if d.policy is not None
    ]


def join_reasons(subjects_and_reasons: Any) -> str:
    """Reasons in one line, each once, with the subjects that share it."""
    subjects: dict[str, list[str]] = {}
    for subject, reason in subjects_and_reasons:
        subjects.setdefault(reason, []).append(subject)
    if len(subjects) == 1 and next(iter(subjects)) in (NO_NAMES, SAID_NONE):
        return next(iter(subjects))
    return '; '.join(f'{", ".join(names)}: {reason}' for reason, names in subjects.items())
