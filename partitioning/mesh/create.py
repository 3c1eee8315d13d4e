"""Meshes of any shape and names, on one slice or host, or on several."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh

from partitioning.hardware import JaxDevice, has_coords, num_slices
from partitioning.mesh.checks import as_tuple_of, check_devices, check_names, fill
from partitioning.mesh.granules import (
    check_same_size,
    granules_of,
    hybrid_grid,
    same_size,
    spread,
)
from partitioning.mesh.order import order_devices

# 'auto', 'explicit' and 'manual' for configuration files.
AxisTypes = AxisType | str | Sequence[AxisType | str]


def create_mesh(
    axis_sizes: Sequence[int],
    axis_names: Sequence[str],
    *,
    devices: Sequence[JaxDevice] | None = None,
    axis_types: AxisTypes = AxisType.Auto,
    granule_size: int | None = None,
) -> Mesh:
    """A mesh of this shape, whose later axes get the faster links.

    Usage:
      mesh = create_mesh((2, -1, 4), ('data', 'fsdp', 'model'))

    Args:
      axis_sizes: size of each axis, by rising traffic: the last goes to the shortest rings of a
        torus, and inside slices and hosts first. One of them may be -1: whatever remains.
      axis_names: name of each axis.
      devices: the devices to use, in any order; by default all.
      axis_types: Auto, Explicit or Manual, for all axes or one for each.
      granule_size: devices that share fast links, where that is neither a TPU slice nor a
        process: 72 for racks of 72 GPUs on one NVLink network.

    Raises:
      ValueError: sizes, names or devices that make no mesh, with the nearest shape that does.
    """
    devices = check_devices(devices)
    names = check_names(axis_names, axis_sizes, 'axis_sizes')
    sizes = fill(axis_sizes, len(devices), 'axis_sizes', 'devices')
    granules = granules_of(devices, granule_size=granule_size)
    if has_coords(devices[0]):
        check_same_size(granules)
    if len(granules) == 1 or not same_size(granules):
        return make_mesh(order_devices(devices, sizes), names, axis_types)
    ici, dcn = spread(sizes, len(granules[0]))
    return make_mesh(hybrid_grid(granules, ici, dcn), names, axis_types)


def create_hybrid_mesh(
    ici_mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int],
    axis_names: Sequence[str],
    *,
    devices: Sequence[JaxDevice] | None = None,
    process_is_granule: bool | None = None,
    granule_size: int | None = None,
    axis_types: AxisTypes = AxisType.Auto,
) -> Mesh:
    """A mesh over several slices or hosts, each axis the product of its two sizes.

    Usage:
      mesh = create_hybrid_mesh((1, 64, 4), (2, 1, 1), ('replica', 'data', 'model'))

    Args:
      ici_mesh_shape: size of each axis within a granule, on its fast links. One may be -1.
      dcn_mesh_shape: size of each axis over the granules. One may be -1.
      axis_names: name of each axis.
      devices: the devices to use, in any order; by default all.
      process_is_granule: whether a process is one granule. By default a granule is a TPU slice,
        an NVLink domain where GPUs know theirs, or else a process.
      granule_size: devices of one granule, where it is neither.
      axis_types: Auto, Explicit or Manual, for all axes or one for each.

    Raises:
      ValueError: shapes that do not fit each other or the machine.
    """
    devices = check_devices(devices)
    names = check_names(axis_names, ici_mesh_shape, 'ici_mesh_shape')
    ici, dcn = tuple(ici_mesh_shape), as_tuple_of(dcn_mesh_shape, 'dcn_mesh_shape')
    if len(dcn) != len(names):
        raise ValueError(
            f'ici_mesh_shape {ici} has {len(ici)} axes and dcn_mesh_shape {dcn} {len(dcn)}: give '
            f'each axis of {names} both'
        )
    no_granules = not process_is_granule and granule_size is None and num_slices(devices) == 1
    if no_granules and all(n == 1 for n in dcn):
        ici = fill(ici, len(devices), 'ici_mesh_shape', 'devices', f' beside dcn_mesh_shape {dcn}')
        return create_mesh(ici, names, devices=devices, axis_types=axis_types)
    granules = granules_of(devices, process_is_granule, granule_size)
    check_same_size(granules)
    by_slice = not process_is_granule and (has_coords(devices[0]) or num_slices(devices) > 1)
    what = 'granules' if granule_size else 'slices' if by_slice else 'processes'
    dcn = fill(dcn, len(granules), 'dcn_mesh_shape', what, f' beside ici_mesh_shape {ici}')
    each = f'devices in each of the {len(granules)} {what}'
    ici = fill(ici, len(granules[0]), 'ici_mesh_shape', each, f' beside dcn_mesh_shape {dcn}')
    return make_mesh(hybrid_grid(granules, ici, dcn), names, axis_types)


def check_axis_types(axis_types: AxisTypes) -> tuple[AxisType, ...]:
    """Axis types as a tuple, by name or not.

    Raises:
      ValueError: no axis type.
    """
    one = axis_types is None or isinstance(axis_types, AxisType | str)
    given = (axis_types,) if one else as_tuple_of(axis_types, 'axis_types')
    by_name = {axis_type.name.lower(): axis_type for axis_type in AxisType}
    types = tuple(by_name.get(t.lower()) if isinstance(t, str) else t for t in given)
    if not types or not all(isinstance(t, AxisType) for t in types):
        raise ValueError(
            f'axis_types={axis_types!r} must be one of {", ".join(by_name)}, or one for each axis'
        )
    return types  # type: ignore[return-value]


def make_mesh(grid: np.ndarray, axis_names: Sequence[str], axis_types: AxisTypes) -> Mesh:
    """The mesh of an array of devices, logged.

    Raises:
      ValueError: not one axis type for all axes, nor one for each.
    """
    types = check_axis_types(axis_types)
    if len(types) not in (1, grid.ndim):
        raise ValueError(
            f'axis_types={axis_types!r} must be one, or one for each of the axes '
            f'{tuple(axis_names)}'
        )
    if len(types) == 1:
        types *= grid.ndim
    mesh = Mesh(grid, tuple(axis_names), axis_types=types)
    logging.info('mesh %s of %d devices', dict(mesh.shape), mesh.size)
    return mesh
