"""One array of a plan: its layout, in numbers, and the reason."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from partitioning.rules import (
    MeshLike,
    PaddedSpec,
    ResolvedDimension,
    as_tuple,
    axis_sizes,
    boundary_spec,
    check_layout,
    check_spec,
    dimension_axes,
)
from partitioning.state import Role, nbytes, shape_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedArray:
    """One array of a plan.

    Attributes:
      path: its place among the parameters, `decoder/embedding`, or in the state.
      shape: global shape.
      dtype: its type, `float32`.
      logical_axes: a name or None for each dimension; None: it has no names.
      spec: the mesh axes of each dimension.
      padded_spec: those inside partitioned functions, of an array that is padded there; None:
        `spec`.
      shard_shape: what one device holds.
      bytes_total: of the global array.
      bytes_per_device: of one device's shard.
      category: 'parameters', 'optimizer' or 'other'.
      reason: why the layout is what it is.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str | None, ...] | None
    spec: PartitionSpec
    padded_spec: PartitionSpec | None = None
    shard_shape: tuple[int, ...]
    bytes_total: int
    bytes_per_device: int
    category: Role = 'parameters'
    reason: str

    @property
    def mesh_axes(self) -> PartitionSpec | PaddedSpec:
        """What `PjitPartitioner.partition` takes for the array."""
        return self.spec if self.padded_spec is None else PaddedSpec(self.spec, self.padded_spec)


def planned_array(
    path: str,
    array: Any,
    mesh_axes: PartitionSpec | PaddedSpec,
    mesh: MeshLike,
    *,
    logical_axes: Sequence[str | None] | None = None,
    category: Role = 'parameters',
    reason: str,
) -> PlannedArray:
    """The row of an array, or of a ShapeDtypeStruct, that `mesh_axes` lay out."""
    shape = shape_of(array)
    if not hasattr(array, 'dtype'):  # one of Python's numbers
        array = jax.ShapeDtypeStruct(shape, jax.dtypes.result_type(array))
    spec, padded = _whole(boundary_spec(mesh_axes), shape), None
    shard_shape = shard_shape_of(path, shape, spec, mesh)
    if isinstance(mesh_axes, PaddedSpec):
        padded = _whole(mesh_axes.inside, shape)
        _check_padded(path, shape, spec, padded, mesh)
    total = nbytes(array)
    return PlannedArray(
        path=path,
        shape=shape,
        dtype=str(array.dtype),
        logical_axes=None if logical_axes is None else tuple(logical_axes),
        spec=spec,
        padded_spec=padded,
        shard_shape=shard_shape,
        bytes_total=total,
        bytes_per_device=total * math.prod(shard_shape) // max(math.prod(shape), 1),
        category=category,
        reason=reason,
    )


def logical_only(names: Sequence[Any]) -> tuple[str | None, ...] | None:
    """Names that a file can hold; of mesh axes in their place, none."""
    kept = tuple(name if isinstance(name, str) else None for name in names)
    return kept if any(kept) else None


def _whole(spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
    """A spec with an entry for every dimension, each one written in one way."""
    axes = dimension_axes(spec, len(shape))
    return PartitionSpec(*(a[0] if a and len(a) == 1 else a for a in axes))


def shard_shape_of(
    path: str, shape: Sequence[int], spec: PartitionSpec, mesh: MeshLike
) -> tuple[int, ...]:
    """What one device holds of an array.

    Raises:
      ValueError: a spec that the mesh or the shape cannot have.
    """
    check_layout(spec, mesh, path, shape)
    sizes = axis_sizes(mesh)
    ways = (math.prod(sizes[axis] for axis in as_tuple(entry)) for entry in spec)
    return tuple(size // parts for size, parts in zip(shape, ways, strict=True))


def _check_padded(
    path: str,
    shape: Sequence[int],
    spec: PartitionSpec,
    padded: PartitionSpec,
    mesh: MeshLike,
) -> None:
    """Raises ValueError unless the two specs differ only where a size does not divide."""
    check_spec(padded, mesh, f'{path}, padded', shape)
    if padded == spec:
        raise ValueError(f'{path}: padded_spec is the spec, so nothing is padded: leave it out')
    sizes = axis_sizes(mesh)
    for dim, (outside, inside) in enumerate(zip(spec, padded, strict=True)):
        ways = math.prod(sizes[a] for a in as_tuple(inside))
        if outside != inside and (outside is not None or shape[dim] % ways == 0):
            raise ValueError(
                f'{path}: spec has {outside!r} and padded_spec {inside!r} for dimension {dim} of '
                f'shape {tuple(shape)}: only what does not divide by {ways} is padded, and None '
                'in the spec'
            )


def reason_of(dimensions: Sequence[ResolvedDimension | None]) -> str:
    """Why the dimensions of an array are laid out as they are, in one line."""
    whys: dict[str, list[str]] = {}
    for place, dim in enumerate(dimensions):
        named = dim is not None and isinstance(dim.name, str)
        why = 'no dimension of its parameter' if dim is None else dim.reason
        whys.setdefault(why, []).append(str(dim.name) if dim and named else f'dimension {place}')
    return '; '.join(f'{", ".join(names)}: {why}' for why, names in whys.items()) or 'a scalar'


def path_rule(path: str, row: PlannedArray) -> tuple[str, tuple[Any, ...]]:
    """The path rule that gives the array at a path the layout of a row."""
    return re.escape(path), dimension_axes(row.padded_spec or row.spec, len(row.shape))
