"""The mesh of a machine for so many model partitions, on every platform."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from partitioning.hardware import HardwareMesh, JaxDevice, has_coords
from partitioning.mesh.checks import as_tuple_of, check_devices, check_names, divisors
from partitioning.mesh.create import AxisTypes, create_hybrid_mesh, create_mesh, make_mesh
from partitioning.mesh.granules import check_same_size, granules_of
from partitioning.mesh.order import order_devices
from partitioning.mesh.t5x import default_tile, tiled_grid
from partitioning.rules import is_count

MESH_AXES = ('data', 'model')
MULTISLICE_MESH_AXES = ('replica', 'data', 'model')


def default_mesh(
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None = None,
    backend: str | None = None,
    ici_mesh_shape: Sequence[int] | None = None,
    dcn_mesh_shape: Sequence[int] | None = None,
    *,
    devices: Sequence[JaxDevice] | None = None,
    mesh_axis_names: Sequence[str] | None = None,
    axis_types: AxisTypes = AxisType.Auto,
    granule_size: int | None = None,
) -> Mesh:
    """The mesh of this machine for so many model partitions.

    Args:
      num_partitions: size of the 'model' axis.
      model_parallel_submesh: (x, y, z, cores) tile of one model replica on a TPU torus, instead
        of `num_partitions`.
      backend: take the devices of this backend instead of the default one.
      ici_mesh_shape: size of each axis within one slice; with `dcn_mesh_shape`.
      dcn_mesh_shape: size of each axis over slices; the mesh is the product of the two.
      devices: the devices to use, in any order, instead of all of `backend`.
      mesh_axis_names: other names than ('data', 'model'), or ('replica', 'data', 'model') on
        several slices or with the two shapes, which may have any number of axes. Three names
        with `num_partitions` make the first axis that of the slices, also where there is one.
      axis_types: Auto, Explicit or Manual, for all axes or one for each.
      granule_size: GPUs that share NVLink, where they are more than those of a host.

    Returns:
      A mesh ('data', 'model'); on several TPU slices ('replica', 'data', 'model'), 'replica' over
      the data centre network. TPU v2, v3 and v4 get T5X's device order where T5X has a table
      entry that fits, all others that of `create_mesh`.

    Raises:
      ValueError: sizes that do not fit the machine, or settings that contradict each other.
    """
    devices = check_devices(devices, backend)
    check_mesh_settings(num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape)
    if ici_mesh_shape is not None and dcn_mesh_shape is not None:
        names = mesh_axis_names
        return create_hybrid_mesh(
            ici_mesh_shape,
            dcn_mesh_shape,
            _names_of_shapes(ici_mesh_shape, dcn_mesh_shape) if names is None else names,
            devices=devices,
            granule_size=granule_size,
            axis_types=axis_types,
        )
    if not has_coords(devices[0]):
        return _mesh_of_hosts(
            devices,
            num_partitions,
            model_parallel_submesh,
            mesh_axis_names,
            axis_types,
            granule_size,
        )
    slices = granules_of(devices, granule_size=granule_size)
    check_same_size(slices)
    names = _names(mesh_axis_names, len(slices))
    grid = np.stack(
        [_grid_of_slice(s, len(slices), num_partitions, model_parallel_submesh) for s in slices]
    )
    return make_mesh(grid if len(names) == 3 else grid[0], names, axis_types)


def default_moe_mesh(
    num_expert_partitions: int,
    num_partitions: int | None = None,
    model_parallel_submesh: HardwareMesh | None = None,
    backend: str | None = None,
    *,
    devices: Sequence[JaxDevice] | None = None,
    axis_types: AxisTypes = AxisType.Auto,
    granule_size: int | None = None,
) -> Mesh:
    """The default mesh with an 'expert' axis taken out of its 'data' axis, as T5X's MoE has it.

    Args:
      num_expert_partitions: size of the 'expert' axis; where the data axis is smaller, all of it,
        and several experts share a device.
      num_partitions: size of the 'model' axis.
      model_parallel_submesh: its tile, instead.
      backend: take the devices of this backend instead of the default one.
      devices: the devices to use, instead of all of `backend`.
      axis_types: Auto, Explicit or Manual, for all axes or one for each.
      granule_size: GPUs that share NVLink, where they are more than those of a host.

    Returns:
      A mesh ('data', 'expert', 'model'), after 'replica' on several slices.

    Raises:
      ValueError: neither divides the other, or as `default_mesh`.
    """
    mesh = default_mesh(
        num_partitions,
        model_parallel_submesh,
        backend,
        devices=devices,
        granule_size=granule_size,
    )
    data = mesh.shape['data']
    if not is_count(num_expert_partitions) or (
        data % num_expert_partitions and num_expert_partitions % data
    ):
        raise ValueError(
            f'num_expert_partitions={num_expert_partitions!r} is neither a factor nor a multiple '
            f'of the {data} devices of the data axis; use one of {_listed(divisors(data))}'
        )
    experts = min(num_expert_partitions, data)
    *replica, _, model = mesh.devices.shape
    grid = mesh.devices.reshape(*replica, data // experts, experts, model)
    return make_mesh(grid, (*mesh.axis_names[:-1], 'expert', 'model'), axis_types)


def check_mesh_settings(
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None,
    ici_mesh_shape: Sequence[int] | None,
    dcn_mesh_shape: Sequence[int] | None,
) -> None:
    """Finds settings of a mesh that are missing or contradict each other, on any machine.

    Raises:
      ValueError: with the setting to add or to leave out.
    """
    if (ici_mesh_shape is None) != (dcn_mesh_shape is None):
        raise ValueError(
            f'ici_mesh_shape={ici_mesh_shape} and dcn_mesh_shape={dcn_mesh_shape}: set both or '
            'neither (dcn_mesh_shape=(1, 1, 1) for one slice)'
        )
    choices = {
        'num_partitions': num_partitions,
        'model_parallel_submesh': model_parallel_submesh,
        'ici_mesh_shape': ici_mesh_shape,
    }
    given = {name: value for name, value in choices.items() if value is not None}
    if not given:
        raise ValueError(
            'At least one of num_partitions, model_parallel_submesh, ici_mesh_shape (with '
            'dcn_mesh_shape) or mesh must be set'
        )
    tile = model_parallel_submesh
    if tile is not None and (
        not isinstance(tile, Sequence) or len(tile) != 4 or not all(map(is_count, tile))
    ):
        raise ValueError(
            'model_parallel_submesh must be a 4-tuple (x, y, z, cores) of whole numbers, not '
            f'{tile!r}'
        )
    if ici_mesh_shape is not None and dcn_mesh_shape is not None:
        ici = as_tuple_of(ici_mesh_shape, 'ici_mesh_shape')
        dcn = as_tuple_of(dcn_mesh_shape, 'dcn_mesh_shape')
        model = (*ici[-1:], *dcn[-1:])
        if all(map(is_count, model)) and math.prod(model) == num_partitions:
            # T5X asks for num_partitions beside the shapes: fine, since it says the same.
            del given['num_partitions']
    if len(given) > 1:
        settings = ' and '.join(f'{name}={value!r}' for name, value in given.items())
        raise ValueError(f'{settings} each decide the model axis: keep one of them')


def get_cpu_mesh(num_partitions: int | None = None) -> Mesh:
    """A ('data', 'model') mesh of the default backend's devices, process by process.

    Args:
      num_partitions: size of 'model'; by default all devices of a process, as in T5X.
    """
    devices = jax.devices()
    partitions = jax.local_device_count() if num_partitions is None else num_partitions
    return _mesh_of_hosts(devices, partitions)


def get_gpu_mesh(num_partitions: int) -> Mesh:
    """A ('data', 'model') mesh of GPUs: 'model' inside a process (NVLink) first, then across.

    Raises:
      ValueError: `num_partitions` does not divide the devices.
    """
    return _mesh_of_hosts(jax.devices(), num_partitions)


def _mesh_of_hosts(
    devices: Sequence[JaxDevice],
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None = None,
    mesh_axis_names: Sequence[str] | None = None,
    axis_types: AxisTypes = AxisType.Auto,
    granule_size: int | None = None,
) -> Mesh:
    """The mesh of GPUs or CPUs: the model axis within a granule as far as it reaches."""
    if model_parallel_submesh is not None:
        raise ValueError(
            f'model_parallel_submesh={tuple(model_parallel_submesh)} is a tile of a TPU torus; on '
            f'{devices[0].platform} say num_partitions={math.prod(model_parallel_submesh)}'
        )
    names = _names(mesh_axis_names, slices=1)
    partitions = _check_partitions(num_partitions, len(devices))
    sizes = (1, len(devices) // partitions, partitions)[-len(names) :]
    return create_mesh(
        sizes, names, devices=devices, axis_types=axis_types, granule_size=granule_size
    )


def _grid_of_slice(
    devices: Sequence[JaxDevice],
    slices: int,
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None,
) -> np.ndarray:
    """The devices of one TPU slice of several, of shape (data, model)."""
    if model_parallel_submesh is not None:
        return tiled_grid(model_parallel_submesh, devices)
    partitions = _check_partitions(num_partitions, len(devices), slices)
    tile = default_tile(devices, partitions)
    if tile is not None:
        return tiled_grid(tile, devices)
    return order_devices(devices, (len(devices) // partitions, partitions))


def _check_partitions(num_partitions: int | None, num_devices: int, slices: int = 1) -> int:
    """`num_partitions`, where it divides the devices of the machine or of each of its slices."""
    n = num_partitions
    if is_count(n) and num_devices % n == 0:
        return int(n)
    where = f'each of the {slices} slices' if slices > 1 else 'the machine'
    problem, way_out = '', f'use one of {_listed(divisors(num_devices))}'
    if is_count(n) and n > num_devices:
        problem = f': it is larger than {"a slice" if slices > 1 else "the machine"}'
        if slices > 1 and n <= num_devices * slices:
            way_out += ", or take 'model' over slices with ici_mesh_shape and dcn_mesh_shape"
    raise ValueError(
        f'num_partitions={n!r} does not divide the {num_devices} devices of {where}{problem}; '
        f'{way_out}'
    )


def _names(mesh_axis_names: Sequence[str] | None, slices: int) -> tuple[str, ...]:
    """The two names of a mesh of one slice, or the three of one over slices."""
    if mesh_axis_names is None:
        return MESH_AXES if slices == 1 else MULTISLICE_MESH_AXES
    number = len(as_tuple_of(mesh_axis_names, 'mesh_axis_names'))
    if number not in ((2, 3) if slices == 1 else (3,)):
        raise ValueError(
            f'mesh_axis_names {tuple(mesh_axis_names)} has {number} names; with num_partitions or '
            f'a submesh a mesh of {slices} slices has '
            + ("3, for example ('replica', 'data', 'model')" if slices > 1 else '2, or 3')
            + '. For other axes say ici_mesh_shape and dcn_mesh_shape, or mesh=create_mesh(...)'
        )
    return check_names(mesh_axis_names, range(number), 'the mesh')


def _names_of_shapes(ici: Sequence[int], dcn: Sequence[int]) -> tuple[str, ...]:
    if not len(ici) == len(dcn) == len(MULTISLICE_MESH_AXES):
        raise ValueError(
            f'ici_mesh_shape {tuple(ici)} and dcn_mesh_shape {tuple(dcn)} need one size for each '
            f'of {MULTISLICE_MESH_AXES}, or names of their own in mesh_axis_names'
        )
    return MULTISLICE_MESH_AXES


def _listed(numbers: Sequence[int]) -> str:
    return ', '.join(map(str, numbers))
