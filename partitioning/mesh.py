"""Devices -> Mesh, for every platform."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import jax
import numpy as np
from absl import logging
from jax.sharding import Mesh

from partitioning.hardware import (
    HardwareMesh,
    JaxDevice,
    TpuMesh,
    bounds_from_last_device,
    get_coords,
    has_coords,
    num_slices,
)

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
) -> Mesh:
    """The mesh of this machine for so many model partitions.

    Args:
      num_partitions: size of the 'model' axis.
      model_parallel_submesh: (x, y, z, cores) tile of one model replica on a TPU torus, instead
        of `num_partitions`.
      backend: take the devices of this backend instead of the default one.
      ici_mesh_shape: (replica, data, model) within one slice; with `dcn_mesh_shape`.
      dcn_mesh_shape: (replica, data, model) over slices; the mesh is the product of the two.
      devices: the devices to use, instead of all of `backend`.

    Returns:
      A mesh ('data', 'model'), or ('replica', 'data', 'model') with `ici_mesh_shape`. TPU v2, v3
      and v4 get T5X's device order where T5X has a table entry that fits; every other TPU gets
      the order of `jax.experimental.mesh_utils.create_device_mesh`.

    Raises:
      ValueError: sizes that do not fit the machine, or settings that contradict each other.
    """
    devices = list(devices if devices is not None else jax.devices(backend))
    check_mesh_settings(num_partitions, model_parallel_submesh, ici_mesh_shape, dcn_mesh_shape)
    if ici_mesh_shape is not None and dcn_mesh_shape is not None:
        return _hybrid_mesh(ici_mesh_shape, dcn_mesh_shape, devices)
    slices = num_slices(devices)
    if slices > 1:
        per_slice = len(devices) // slices
        model = num_partitions or math.prod(model_parallel_submesh or (1,))
        raise ValueError(
            f'{slices} slices of {per_slice} devices: say how the mesh spans them, for example '
            f'ici_mesh_shape=(1, {max(per_slice // model, 1)}, {model}), '
            f'dcn_mesh_shape=({slices}, 1, 1)'
        )
    if model_parallel_submesh:
        return get_mesh(model_parallel_submesh, devices, backend=backend)
    partitions = _check_partitions(num_partitions, len(devices))
    if devices[-1].platform == 'cpu':
        return _host_major_mesh(devices, partitions)
    if not has_coords(devices[-1]):
        return _nvlink_mesh(devices, partitions)
    submesh = _t5x_submesh(max(devices, key=get_coords), partitions)
    if submesh is not None:
        return get_mesh(submesh, devices, backend=backend)
    return _torus_mesh(devices, partitions)


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
    if model_parallel_submesh is not None and len(model_parallel_submesh) != 4:
        raise ValueError(
            'model_parallel_submesh must be a 4-tuple (x, y, z, cores), not '
            f'{model_parallel_submesh!r}'
        )
    model = ici_mesh_shape[-1] * dcn_mesh_shape[-1] if ici_mesh_shape and dcn_mesh_shape else None
    if model is not None and num_partitions == model:
        # T5X asks for num_partitions beside the shapes: fine, since it says the same.
        del given['num_partitions']
    if len(given) > 1:
        settings = ' and '.join(f'{name}={value!r}' for name, value in given.items())
        raise ValueError(f'{settings} each decide the model axis: keep one of them')


def get_mesh(
    model_parallel_submesh: HardwareMesh,
    input_devices: Sequence[JaxDevice] = (),
    input_local_devices: Sequence[JaxDevice] = (),
    tile_by_host_if_needed: bool = True,
    backend: str | None = None,
) -> Mesh:
    """A ('data', 'model') mesh whose model axis is one tile of the machine, in T5X's order.

    Args:
      model_parallel_submesh: (x, y, z, cores) tile on TPU, (processes, devices) elsewhere; each
        entry divides that dimension of the machine.
      input_devices: all devices, by default those of `backend`.
      input_local_devices: the devices of one process, by default those of the first among
        `input_devices`; their extent is the tile of one host.
      tile_by_host_if_needed: order devices so that each process holds one contiguous block of the
        mesh, which T5X's data layout needs. False keeps the plain torus order.
      backend: backend of the devices where none are given.

    Raises:
      ValueError: the tile does not divide the machine, or does not fit whole hosts.
    """
    devices = list(input_devices or jax.devices(backend))
    first = min(d.process_index for d in devices)
    local = list(input_local_devices or [d for d in devices if d.process_index == first])
    machine: tuple[int, ...] = bounds_from_last_device(max(devices, key=get_coords))
    host: tuple[int, ...] = bounds_from_last_device(max(local, key=get_coords))
    tile: tuple[int, ...] = tuple(model_parallel_submesh)
    if len(tile) != len(machine) or any(m < 1 or g % m for g, m in zip(machine, tile, strict=True)):
        raise ValueError(
            f'model_parallel_submesh {tile} does not tile the machine {tuple(machine)}: each of '
            f'its {len(machine)} entries must divide the same entry of the machine'
        )
    if math.prod(machine) != len(devices):
        raise ValueError(
            f'{len(devices)} devices do not fill a machine of {tuple(machine)} '
            f'({math.prod(machine)} devices)'
        )
    grid = np.empty(machine, dtype=object)
    for device in devices:
        grid[get_coords(device)] = device

    order = _z_major_order(cast(TpuMesh, machine), cast(TpuMesh, tile)) if len(tile) == 4 else None
    if order is not None:
        if tile[3] != machine[3]:
            raise ValueError(
                f'model_parallel_submesh {tile} spans a whole plane of the machine {machine}, so '
                f'it must take all {machine[3]} cores of each chip: use {(*tile[:3], machine[3])}'
            )
        grid, tile = grid.transpose(order), tuple(tile[i] for i in order)
        tiled = _split(grid, [(g // m, m) for g, m in zip(grid.shape, tile, strict=True)])
    elif tile_by_host_if_needed:
        tiled = _split(
            grid, [_host_tiling(g, m, h) for g, m, h in zip(machine, tile, host, strict=True)]
        )
    else:
        tiled = _split(grid, [(g // m, m) for g, m in zip(machine, tile, strict=True)])
    return _logged(Mesh(tiled.reshape(-1, math.prod(tile)), MESH_AXES))


def get_cpu_mesh(num_partitions: int | None = None) -> Mesh:
    """A ('data', 'model') mesh of the default backend's devices, process by process.

    Args:
      num_partitions: size of 'model'; by default all devices of a process, as in T5X.
    """
    if num_partitions is None:
        num_partitions = jax.local_device_count()
    return _host_major_mesh(jax.devices(), _check_partitions(num_partitions, jax.device_count()))


def get_gpu_mesh(num_partitions: int) -> Mesh:
    """A ('data', 'model') mesh of GPUs: 'model' inside a process (NVLink) first, then across.

    Raises:
      ValueError: `num_partitions` is neither a factor nor a multiple of a process's devices.
    """
    return _nvlink_mesh(jax.devices(), _check_partitions(num_partitions, jax.device_count()))


def _check_partitions(num_partitions: int | None, num_devices: int) -> int:
    if num_partitions is None or num_partitions < 1 or num_devices % num_partitions:
        fits = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
        raise ValueError(
            f'num_partitions={num_partitions} does not divide the {num_devices} devices; use one '
            f'of {", ".join(map(str, fits))}'
        )
    return num_partitions


def _host_major_mesh(devices: Sequence[JaxDevice], num_partitions: int) -> Mesh:
    ordered = sorted(devices, key=lambda d: (d.process_index, d.id))
    grid = np.asarray(ordered, dtype=object).reshape(-1, num_partitions)
    return _logged(Mesh(grid, MESH_AXES))


def _nvlink_mesh(devices: Sequence[JaxDevice], num_partitions: int) -> Mesh:
    local = len(devices) // len({d.process_index for d in devices})
    if local % num_partitions and num_partitions % local:
        raise ValueError(
            f'num_partitions={num_partitions} must be a factor or a multiple of the {local} '
            'devices of a process'
        )
    return _host_major_mesh(devices, num_partitions)


def _torus_mesh(devices: Sequence[JaxDevice], num_partitions: int) -> Mesh:
    from jax.experimental import mesh_utils

    shape = (len(devices) // num_partitions, num_partitions)
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return _logged(Mesh(grid, MESH_AXES))


def _hybrid_mesh(
    ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], devices: Sequence[JaxDevice]
) -> Mesh:
    from jax.experimental import mesh_utils

    ici, dcn = tuple(ici_mesh_shape), tuple(dcn_mesh_shape)
    axes = MULTISLICE_MESH_AXES
    if len(ici) != len(axes) or len(dcn) != len(axes):
        raise ValueError(
            f'ici_mesh_shape {ici} and dcn_mesh_shape {dcn} need one size for each of {axes}'
        )
    by_slice = hasattr(devices[0], 'slice_index')
    granules = num_slices(devices) if by_slice else len({d.process_index for d in devices})
    spans = (granules,) if by_slice else (1, granules)  # one process may hold several granules
    if math.prod(ici) * math.prod(dcn) != len(devices) or math.prod(dcn) not in spans:
        raise ValueError(
            f'ici_mesh_shape {ici} x dcn_mesh_shape {dcn} holds {math.prod(ici) * math.prod(dcn)} '
            f'devices over {math.prod(dcn)} slices; the machine has {len(devices)} devices over '
            f'{granules} {"slices" if by_slice else "processes"}'
        )
    if math.prod(dcn) == 1:
        grid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_hybrid_device_mesh(
            ici,
            dcn,
            devices,
            process_is_granule=not by_slice,
            allow_split_physical_axes=True,
        )
    return _logged(Mesh(grid, axes))


def _t5x_submesh(last_device: JaxDevice, num_partitions: int) -> TpuMesh | None:
    """T5X's default tile, where it has one and it divides the machine; else None."""
    machine = cast(TpuMesh, bounds_from_last_device(last_device))
    x, _, z, cores = machine
    kind = last_device.device_kind
    table: dict[int, TpuMesh] = {}
    if kind in ('TPU v2', 'TPU v3'):
        table = {
            1: (1, 1, 1, 1),
            2: (1, 1, 1, 2),
            4: (2, 1, 1, 2),
            8: (2, 2, 1, 2),
            16: (4, 2, 1, 2),
        }
    elif kind in ('TPU v4', 'TPU v4 lite') and cores == 1:  # megacore: one device a chip
        table = {
            1: (1, 1, 1, 1),
            2: (1, 2, 1, 1),
            4: (4, 1, 1, 1) if x >= 4 else (2, 2, 1, 1),
            8: (1, 1, 8, 1) if z >= 8 else (4, 2, 1, 1),
            16: _v4_tile_of_16(x, z),
        }
    tile = table.get(num_partitions)
    if tile is None or any(g % m for g, m in zip(machine, tile, strict=True)):
        return None
    return tile


def _v4_tile_of_16(x: int, z: int) -> TpuMesh:
    if z >= 16:
        return 1, 1, 16, 1
    if x >= 8:
        return 8, 2, 1, 1
    return (4, 4, 1, 1) if x >= 4 else (2, 2, 4, 1)


def _z_major_order(machine: TpuMesh, tile: TpuMesh) -> tuple[int, int, int, int] | None:
    """The axis order that keeps a host's devices together without tiling, if there is one.

    It exists where the tile spans exactly one of x and y, or z and exactly one of them.
    """
    gx, gy, gz, _ = machine
    mx, my, mz, _ = tile
    if (my == gy > 1 and mx == mz == 1) or (my == 1 and mx == gx > 1 and mz == gz > 1):
        return 2, 1, 0, 3
    if (mx == gx > 1 and my == mz == 1) or (mx == 1 and my == gy > 1 and mz == gz > 1):
        return 0, 2, 1, 3
    return None


def _host_tiling(machine: int, tile: int, host: int) -> tuple[int, int, int, int]:
    """One machine dimension as (data hosts, data devices, model hosts, model devices)."""
    data = machine // tile
    if tile % host == 0:
        return data, 1, tile // host, host
    if host % tile == 0:
        return data // (host // tile), host // tile, 1, tile
    raise ValueError(
        f'model_parallel_submesh has an entry of {tile} where a host has {host} devices: it must '
        'be a factor or a multiple of that'
    )


def _split(grid: np.ndarray, factors: list[tuple[int, ...]]) -> np.ndarray:
    """Splits each dimension by `factors` and puts like factors together, outermost first."""
    width = len(factors[0])
    parts = grid.reshape([f for group in factors for f in group])
    return parts.transpose([width * d + i for i in range(width) for d in range(len(factors))])


def _logged(mesh: Mesh) -> Mesh:
    logging.info('mesh %s of %d devices', dict(mesh.shape), mesh.size)
    return mesh
