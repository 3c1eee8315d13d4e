"""Meshes and partition specs as torch_xla writes them, and its global mesh."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.hardware import JaxDevice, check_devices, num_slices
from partitioning.mesh.aliases import create_hybrid_mesh
from partitioning.mesh.validation import as_tuple_of, check_names, fill
from partitioning.rules import check_axes, describe_axes, from_tuple, num_shards, rank_problem

# A mesh dimension by its number or name, a tuple of them, or None for a dimension kept whole.
SpecEntry = int | str | tuple[int | str, ...] | None
SpecLike = Sequence[SpecEntry] | PartitionSpec

# All threads share it, as in torch_xla: set the mesh once, before threads start to use it.
_global_mesh: Mesh | None = None


def mesh_from_device_ids(
    device_ids: Sequence[int] | np.ndarray,
    mesh_shape: Sequence[int],
    axis_names: Sequence[str] | None = None,
    *,
    devices: Sequence[JaxDevice] | None = None,
) -> Mesh:
    """Returns the mesh with these device ids, as torch_xla's `Mesh` takes them.

    Args:
      device_ids: the `device.id` of every device, in row-major order of the mesh.
      mesh_shape: the size of each axis. One may be -1, which means whatever remains.
      axis_names: the name of each axis; by default '0', '1', ...
      devices: the devices with these ids, which the mesh must all use; by default all devices.

    Raises:
      ValueError: if the ids are not the ids of the devices, each exactly once; if the product of
        the sizes is not the number of ids; or if the axis names are not unique or not one per size.
    """
    found = {device.id: device for device in check_devices(devices)}
    ids = _check_ids(device_ids, found)
    names = _axis_names(axis_names, mesh_shape, 'mesh_shape')
    sizes = fill(mesh_shape, len(ids), 'mesh_shape', 'device ids')
    grid = np.empty(len(ids), dtype=object)
    grid[:] = [found[number] for number in ids]
    return Mesh(grid.reshape(sizes), names)


def get_1d_mesh(
    axis_name: str | None = None, *, devices: Sequence[JaxDevice] | None = None
) -> Mesh:
    """Returns the mesh with all devices, ordered by id, on one axis, which is '0' by default."""
    ids = sorted(device.id for device in check_devices(devices))
    names = None if axis_name is None else (axis_name,)
    return mesh_from_device_ids(ids, (-1,), names, devices=devices)


def HybridMesh(
    *,
    ici_mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int] | None = None,
    axis_names: Sequence[str] | None = None,
    devices: Sequence[JaxDevice] | None = None,
) -> Mesh:
    """Returns a mesh over one or several slices, with the device order of `create_hybrid_mesh`.

    `ici_mesh_shape` is the size of each axis inside a slice, and `dcn_mesh_shape` the number of
    slices along each axis, which several slices require. Axes have the names '0', '1', ... by
    default. The devices may be in any order; by default they are all.

    Raises:
      ValueError: if the shapes do not match each other, or the devices.
    """
    found = check_devices(devices)
    names = _axis_names(axis_names, ici_mesh_shape, 'ici_mesh_shape')
    if dcn_mesh_shape is None:
        slices = num_slices(found)
        if slices > 1:
            example = (slices, *[1] * (len(names) - 1))
            raise ValueError(
                f'the {len(found)} devices belong to {slices} slices: provide dcn_mesh_shape, the '
                f'number of slices along each axis, for example {example}'
            )
        dcn_mesh_shape = (1,) * len(names)
    return create_hybrid_mesh(ici_mesh_shape, dcn_mesh_shape, names, devices=found)


def set_global_mesh(mesh: Mesh | None) -> None:
    """Sets the mesh that functions of this package use if they are given None; None unsets it.

    All threads share this mesh. It is independent of jax's own context, `jax.set_mesh`.
    """
    global _global_mesh
    _global_mesh = None if mesh is None else mesh_or_global(mesh)


def get_global_mesh() -> Mesh | None:
    """Returns the mesh that `set_global_mesh` has set, or None."""
    return _global_mesh


def mesh_or_global(mesh: Mesh | None) -> Mesh:
    """Returns `mesh`, or the global mesh if it is None; raises ValueError if it is not a mesh."""
    if mesh is None and (mesh := _global_mesh) is None:
        raise ValueError('no global mesh is set: pass a mesh, or call set_global_mesh')
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f'mesh must be a jax.sharding.Mesh, not {mesh!r}; it comes before the partition spec'
        )
    _check_unique(mesh)
    return mesh


def get_logical_mesh(mesh: Mesh | None) -> np.ndarray:
    """Returns the device ids of a mesh, as an array of its shape."""
    return mesh_or_global(mesh).device_ids.copy()  # jax keeps its array


def get_axis_name_idx(mesh: Mesh | None, name: str) -> int | None:
    """Returns the position of an axis in a mesh, or None if the mesh has no such axis."""
    names = mesh_or_global(mesh).axis_names
    return names.index(name) if name in names else None


def resolve_partition_spec(
    mesh: Mesh | None, partition_spec: SpecLike, shape: Sequence[int] | None = None
) -> PartitionSpec:
    """Returns a partition spec as a PartitionSpec.

    Usage:
      resolve_partition_spec(mesh, (None, (1, 'x')))  # over x, y: PartitionSpec(None, ('y', 'x'))

    Args:
      mesh: the mesh; None means the global mesh.
      partition_spec: for each dimension a mesh dimension (its number or name), a tuple of them in
        major-to-minor order, or None to keep the dimension whole; or a PartitionSpec.
      shape: the shape of the array; by default, the number of entries is not checked.

    Raises:
      ValueError: if the mesh lacks an axis, if an axis appears twice, if an entry has another type,
        or if the number of entries is not the rank of the array.
    """
    mesh = mesh_or_global(mesh)
    if not isinstance(partition_spec, tuple | list | PartitionSpec):
        raise ValueError(
            f'partition spec {partition_spec!r} must have an entry per dimension, such as (0, None)'
        )
    if getattr(partition_spec, 'unreduced', None) or getattr(partition_spec, 'reduced', None):
        raise ValueError(
            f'partition spec {partition_spec!r} cannot have unreduced or reduced axes: remove them'
        )
    entries = tuple(partition_spec)
    where = f'partition spec {entries}'
    if shape is not None and len(entries) != len(shape):
        raise ValueError(rank_problem(where, len(entries), shape).message)
    parts = [e if isinstance(e, tuple) else () if e is None else (e,) for e in entries]
    axes = [[_axis_name(mesh, axis, where) for axis in group] for group in parts]
    check_axes([axis for group in axes for axis in group], mesh, where)
    return PartitionSpec(*map(from_tuple, axes))


def shards_per_dimension(mesh: Mesh, spec: PartitionSpec) -> tuple[int, ...]:
    """Returns the number of shards along each dimension of a resolved spec."""
    return tuple(num_shards(axes, mesh) for axes in spec)


@functools.lru_cache(maxsize=64)
def _check_unique(mesh: Mesh) -> None:
    """jax accepts meshes with a repeated axis or device, and fails only when they are used."""
    where = f'the mesh with axes {mesh.axis_names}: '
    _check_no_repeats(mesh.axis_names, f'{where}axis')
    _check_no_repeats([device.id for device in mesh.devices.flat], f'{where}device id')


def _check_no_repeats(values: Sequence[Any], noun: str) -> None:
    for value, count in collections.Counter(values).items():
        if count > 1:
            raise ValueError(f'{noun} {value!r} appears {count} times among {len(values)}')


def _axis_names(names: Sequence[str] | None, sizes: Any, setting: str) -> tuple[str, ...]:
    sizes = as_tuple_of(sizes, setting)
    names = [str(i) for i in range(len(sizes))] if names is None else names
    return check_names(names, sizes, setting)


def _check_ids(device_ids: Iterable[int] | np.ndarray, known: dict[int, JaxDevice]) -> list[int]:
    if isinstance(device_ids, set | frozenset | Mapping):
        raise ValueError(f'device_ids must be a sequence; {device_ids!r} has no order')
    given = np.ravel(device_ids).tolist() if isinstance(device_ids, np.ndarray) else device_ids
    ids = as_tuple_of(given, 'device_ids')
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise ValueError(f'device id {number!r} must be an integer')
        if number not in known:
            raise ValueError(f'device id {number} is not among the ids {_listed(known)}')
    _check_no_repeats(ids, 'device id')
    if len(ids) != len(known):
        raise ValueError(
            f'{len(ids)} device ids {_listed(ids)} for {len(known)} devices: use all of them, or '
            'pass the devices of a smaller mesh as devices='
        )
    return [int(number) for number in ids]


def _listed(ids: Iterable[int]) -> str:
    known = sorted(ids)
    return f'{known[0]} to {known[-1]}' if len(known) > 16 else str(known)


def _axis_name(mesh: Mesh, axis: Any, where: str) -> str:
    """Returns the name of an axis; whether the mesh has a name is not checked yet."""
    if isinstance(axis, str):
        return axis
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise ValueError(
            f'{where}: {axis!r} ({type(axis).__name__}) is not supported; an entry is None, the '
            'number or name of a mesh dimension, or a flat tuple of numbers and names'
        )
    if not 0 <= axis < len(mesh.axis_names):
        raise ValueError(
            f'{where}: mesh dimension {axis} is out of bounds; the mesh {describe_axes(mesh)} has '
            f'dimensions 0 to {len(mesh.axis_names) - 1}'
        )
    return mesh.axis_names[axis]
