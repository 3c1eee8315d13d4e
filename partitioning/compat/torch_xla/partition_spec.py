"""Partition specs of mesh dimensions, as torch_xla writes them, made PartitionSpecs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.compat.torch_xla.meshes import mesh_or_global
from partitioning.rules import as_tuple, describe_axes, nearest

# A mesh dimension by its place or name, several of them, or None for a dimension that is whole.
SpecEntry = int | str | tuple[int | str, ...] | None
SpecLike = Sequence[SpecEntry] | PartitionSpec


def resolve_partition_spec(
    mesh: Mesh | None, partition_spec: SpecLike, ndim: int | None = None
) -> PartitionSpec:
    """A partition spec with the names of the mesh axes in it.

    Usage:
      resolve_partition_spec(mesh, (0, None))  # of ('x', 'y'): PartitionSpec('x', None)
      resolve_partition_spec(mesh, (None, ('y', 0)), ndim=2)  # PartitionSpec(None, ('y', 'x'))

    Args:
      mesh: the mesh; None for the global one.
      partition_spec: for each dimension of an array a mesh dimension (its place or its name), a
        tuple of them, the major first, or None: whole. Also a PartitionSpec.
      ndim: the dimensions that the array has, if known.

    Raises:
      ValueError: an axis that the mesh does not have, or that is used twice; an entry that is none
        of these; a spec that does not have `ndim` entries.
    """
    mesh = mesh_or_global(mesh)
    if not isinstance(partition_spec, tuple | list | PartitionSpec):
        raise ValueError(
            f'partition spec {partition_spec!r} must have an entry for each dimension of the '
            "array, for example (0, None) or ('data', None)"
        )
    if getattr(partition_spec, 'unreduced', None) or getattr(partition_spec, 'reduced', None):
        raise ValueError(
            f'partition spec {partition_spec!r} has sums that are still to be made, which no tile '
            'has: leave out unreduced and reduced'
        )
    entries = tuple(partition_spec)
    if ndim is not None and len(entries) != ndim:
        raise ValueError(
            f'partition spec {entries} is for rank {len(entries)}, but the array is of rank '
            f'{ndim}: write an entry for each dimension, None for those that are whole'
        )
    named = [_names(mesh, entry, entries) for entry in entries]
    flat = [axis for axes in named for axis in axes]
    for axis in flat:
        if flat.count(axis) > 1:
            raise ValueError(
                f'partition spec {entries} has mesh axis {axis!r} {flat.count(axis)} times: a mesh '
                'axis can be used at most once'
            )
    return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in named))


def ways_of(mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Into how many tiles a resolved spec divides each dimension."""
    return tuple(math.prod(mesh.shape[axis] for axis in as_tuple(axes)) for axes in spec)


def _names(mesh: Mesh, entry: Any, entries: tuple[Any, ...]) -> tuple[str, ...]:
    """The mesh axes of one entry."""
    if entry is None:
        return ()
    if not isinstance(entry, tuple):
        return (_name(mesh, entry, entries),)
    for part in entry:
        if part is None or isinstance(part, tuple):
            raise ValueError(
                f'entry {entry!r} of partition spec {entries} has {part!r} in it: a tuple holds '
                'mesh dimensions and names only'
            )
    return tuple(_name(mesh, part, entries) for part in entry)


def _name(mesh: Mesh, axis: Any, entries: tuple[Any, ...]) -> str:
    if isinstance(axis, str):
        if axis not in mesh.axis_names:
            raise ValueError(
                f'axis name {axis!r} of partition spec {entries} is not defined in the mesh '
                f'{describe_axes(mesh.shape)}.{nearest(axis, mesh.axis_names)}'
            )
        return axis
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise ValueError(
            f'{axis!r} ({type(axis).__name__}) in partition spec {entries} is not supported: an '
            'entry is a mesh dimension, a name, a tuple of them, or None'
        )
    if not 0 <= axis < len(mesh.axis_names):
        raise ValueError(
            f'mesh dimension {axis} of partition spec {entries} is out of bounds: the mesh '
            f'{describe_axes(mesh.shape)} has dimensions 0 to {len(mesh.axis_names) - 1}'
        )
    return mesh.axis_names[axis]
