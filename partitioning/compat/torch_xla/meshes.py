"""Meshes as torch_xla makes them: of device ids, of one axis, over slices; and the global one."""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from partitioning.hardware import JaxDevice, num_slices
from partitioning.mesh import create_hybrid_mesh
from partitioning.mesh.checks import as_tuple_of, check_devices, check_names, fill
from partitioning.rules import describe_axes

# One for all threads, as in torch_xla: a mesh is set once, before threads start to use it.
_global_mesh: Mesh | None = None


def mesh_from_device_ids(
    device_ids: Sequence[int] | np.ndarray,
    mesh_shape: Sequence[int],
    axis_names: Sequence[str] | None = None,
    *,
    devices: Sequence[JaxDevice] | None = None,
) -> Mesh:
    """The mesh of devices in the order of their ids, as torch_xla's `Mesh` takes them.

    Usage:
      mesh = mesh_from_device_ids(np.arange(8), (4, 2), ('x', 'y'))

    Args:
      device_ids: `device.id` of every device, in row-major order of the mesh.
      mesh_shape: size of each axis. One may be -1: whatever remains.
      axis_names: name of each axis; by default '0', '1', ...
      devices: the devices to find the ids among, each of which the mesh has; by default all.

    Returns:
      A mesh with Auto axes.

    Raises:
      ValueError: ids that are not those of the devices, each once; sizes whose product is not
        their number; names that are not one for each axis, each its own.
    """
    found = {device.id: device for device in check_devices(devices)}
    ids = _check_ids(device_ids, found)
    names = _names_of(axis_names, mesh_shape, 'mesh_shape')
    sizes = fill(mesh_shape, len(ids), 'mesh_shape', 'device ids')
    grid = np.empty(len(ids), dtype=object)
    grid[:] = [found[number] for number in ids]
    return Mesh(grid.reshape(sizes), names)


def get_1d_mesh(
    axis_name: str | None = None, *, devices: Sequence[JaxDevice] | None = None
) -> Mesh:
    """The mesh of one axis over all devices, by rising id.

    Args:
      axis_name: by default '0'.
      devices: by default all.
    """
    found = check_devices(devices)
    ids = sorted(device.id for device in found)
    names = None if axis_name is None else (axis_name,)
    return mesh_from_device_ids(ids, (len(ids),), names, devices=found)


def HybridMesh(
    *,
    ici_mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int] | None = None,
    axis_names: Sequence[str] | None = None,
    devices: Sequence[JaxDevice] | None = None,
) -> Mesh:
    """A mesh over one slice or several, each axis the product of its sizes within and over them.

    Usage:
      mesh = HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1), axis_names=('data', 'model'))

    Args:
      ici_mesh_shape: size of each axis within a slice, on its fast links.
      dcn_mesh_shape: size of each axis over the slices; needed where there are several.
      axis_names: name of each axis; by default '0', '1', ...
      devices: in any order; by default all.

    Returns:
      A mesh with Auto axes; see `create_hybrid_mesh` for the order of the devices, and for
      granules other than slices.

    Raises:
      ValueError: shapes that do not fit each other or the machine.
    """
    found = check_devices(devices)
    names = _names_of(axis_names, ici_mesh_shape, 'ici_mesh_shape')
    if dcn_mesh_shape is None:
        slices = num_slices(found)
        if slices > 1:
            example = (slices, *[1] * (len(names) - 1))
            raise ValueError(
                f'the {len(found)} devices are of {slices} slices: provide dcn_mesh_shape, how '
                f'many of them each axis spans, for example {example}'
            )
        dcn_mesh_shape = (1,) * len(names)
    return create_hybrid_mesh(ici_mesh_shape, dcn_mesh_shape, names, devices=found)


def set_global_mesh(mesh: Mesh | None) -> None:
    """Sets the mesh that stands in where a function of this package is given None; None unsets it.

    The mesh is one for all threads. jax's own context is another matter: `jax.set_mesh`.

    Raises:
      ValueError: no Mesh.
    """
    global _global_mesh
    _global_mesh = None if mesh is None else mesh_or_global(mesh)


def get_global_mesh() -> Mesh | None:
    """The mesh of `set_global_mesh`, None where none is set."""
    return _global_mesh


def mesh_or_global(mesh: Mesh | None) -> Mesh:
    """The mesh itself, or the global one for None.

    Raises:
      ValueError: none is set, or what is given is no mesh whose axes and devices each occur once.
    """
    if mesh is None:
        mesh = _global_mesh
        if mesh is None:
            raise ValueError('mesh is None and no global mesh is set: pass one, or set_global_mesh')
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f'mesh must be a jax.sharding.Mesh, such as mesh_from_device_ids makes, not {mesh!r}; '
            'it comes before the partition spec'
        )
    _check_once(mesh)
    return mesh


def get_logical_mesh(mesh: Mesh | None) -> np.ndarray:
    """The device ids of a mesh, in its shape."""
    devices = mesh_or_global(mesh).devices
    ids = np.fromiter((device.id for device in devices.flat), dtype=np.int64, count=devices.size)
    return ids.reshape(devices.shape)


def get_axis_name_idx(mesh: Mesh | None, name: str) -> int | None:
    """The place of an axis in a mesh; None for a name that it does not have."""
    names = mesh_or_global(mesh).axis_names
    return names.index(name) if name in names else None


@functools.lru_cache(maxsize=64)
def _check_once(mesh: Mesh) -> None:
    """jax takes meshes with an axis or a device twice, and fails when they are used."""
    for name, count in collections.Counter(mesh.axis_names).items():
        if count > 1:
            raise ValueError(
                f'mesh {mesh.axis_names} has {count} axes named {name!r}: name each axis once'
            )
    for device, count in collections.Counter(mesh.devices.flat).items():
        if count > 1:
            raise ValueError(
                f'mesh {describe_axes(mesh.shape)} has device {device.id} {count} times: each '
                'device can have one place'
            )


def _names_of(
    axis_names: Sequence[str] | None, sizes: Sequence[int], setting: str
) -> tuple[str, ...]:
    sizes = as_tuple_of(sizes, setting)
    names = [str(i) for i in range(len(sizes))] if axis_names is None else axis_names
    return check_names(names, sizes, setting)


def _check_ids(device_ids: Iterable[int] | np.ndarray, known: dict[int, JaxDevice]) -> list[int]:
    """Device ids in their order: whole numbers, those of the known devices, each once."""
    if isinstance(device_ids, set | frozenset | Mapping):
        raise ValueError(f'device_ids {device_ids!r} have no order, which is that of the mesh')
    ids = np.ravel(device_ids).tolist() if isinstance(device_ids, np.ndarray) else device_ids
    ids = list(as_tuple_of(ids, 'device_ids'))
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int | np.integer):
            raise ValueError(f'device id {number!r} must be a whole number: the id of a device')
    counts = collections.Counter(ids)
    for number, count in counts.items():
        if count > 1:
            raise ValueError(
                f'device id {number} is given {count} times of {len(ids)}: each must be unique'
            )
        if number not in known:
            raise ValueError(
                f'device id {number} is of none of the {len(known)} devices, whose ids are '
                f'{_listed(known)}'
            )
    if len(ids) != len(known):
        raise ValueError(
            f'{len(ids)} device ids {_listed(ids)} for {len(known)} devices: a mesh has all of '
            'them. For a part of the machine pass its devices= too'
        )
    return [int(number) for number in ids]


def _listed(ids: Iterable[int]) -> str:
    known = sorted(ids)
    if len(known) > 16:
        return f'{known[0]} to {known[-1]}'
    return str(known)
