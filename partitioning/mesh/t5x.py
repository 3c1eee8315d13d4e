"""T5X's settings of a mesh as axes, and its order of devices on TPU v2, v3 and v4.

The order comes from a table of tiles and from how tiles make a mesh.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from partitioning.hardware import HardwareMesh, JaxDevice, has_coords, num_slices, places_of
from partitioning.mesh.order import TWO_CORES, as_array, best_grid, order_devices
from partitioning.mesh.validation import as_tuple_of, check_count, check_names, list_divisors
from partitioning.rules import is_count

_LOGGER = logging.getLogger(__name__)
MESH_AXES = ('data', 'model')
MULTISLICE_MESH_AXES = ('replica', 'data', 'model')


def t5x_axes(
    num_partitions: int | None,
    model_parallel_submesh: HardwareMesh | None,
    ici_mesh_shape: Sequence[int] | None,
    dcn_mesh_shape: Sequence[int] | None,
    mesh_axis_names: Sequence[str] | None,
) -> dict[str, Any]:
    """Converts T5X's settings to the arguments of MeshConfig.

    Raises:
      ValueError: if no setting or several decide the model axis, or if the names do not fit them.
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
    _check_one_decides({k: v for k, v in choices.items() if v is not None}, dcn_mesh_shape)
    if ici_mesh_shape is not None and dcn_mesh_shape is not None:
        if mesh_axis_names is None:
            if not len(ici_mesh_shape) == len(dcn_mesh_shape) == len(MULTISLICE_MESH_AXES):
                raise ValueError(
                    f'ici_mesh_shape {tuple(ici_mesh_shape)} and dcn_mesh_shape '
                    f'{tuple(dcn_mesh_shape)} need one size for each of {MULTISLICE_MESH_AXES}, or '
                    'mesh_axis_names with other names'
                )
            mesh_axis_names = MULTISLICE_MESH_AXES
        arguments = hybrid_axes(ici_mesh_shape, dcn_mesh_shape, mesh_axis_names)
        return {**arguments, 'slice_axis': 'replica' if 'replica' in mesh_axis_names else None}
    tile = model_parallel_submesh
    size = num_partitions if tile is None else math.prod(tile)
    given = MESH_AXES if mesh_axis_names is None else mesh_axis_names
    names = as_tuple_of(given, 'mesh_axis_names')
    if len(names) not in (2, 3):
        raise ValueError(
            f'mesh_axis_names {names} has {len(names)} names; with num_partitions or '
            'model_parallel_submesh, a mesh has 2 axes, or 3 with one for the slices. For other '
            "axes use mesh=MeshConfig(axes={'data': -1, ...}), or ici_mesh_shape and "
            'dcn_mesh_shape'
        )
    slice_axis = 'replica' if mesh_axis_names is None else names[0] if len(names) == 3 else None
    return {
        'axes': tuple(zip(names, (1, -1, size)[-len(names) :], strict=True)),
        'slice_axis': slice_axis,
        'order': 't5x',
        'model_parallel_submesh': tile,
        '_setting_names': ('num_partitions', 'dcn'),
    }


def hybrid_axes(
    ici_mesh_shape: Sequence[int], dcn_mesh_shape: Sequence[int], axis_names: Sequence[str]
) -> dict[str, Any]:
    """Returns the arguments of MeshConfig for the two shapes of a mesh, one entry per name."""
    names = check_names(axis_names, ici_mesh_shape, 'ici_mesh_shape')
    ici, dcn = tuple(ici_mesh_shape), as_tuple_of(dcn_mesh_shape, 'dcn_mesh_shape')
    if len(dcn) != len(names):
        raise ValueError(
            f'ici_mesh_shape {ici} has {len(ici)} axes and dcn_mesh_shape {dcn} has {len(dcn)}: '
            f'give each of the axes {names} both sizes'
        )
    return {
        'axes': tuple(zip(names, ici, strict=True)),
        'dcn': tuple(zip(names, dcn, strict=True)),
        '_setting_names': ('ici_mesh_shape', 'dcn_mesh_shape'),
    }


def check_submesh(tile: HardwareMesh) -> HardwareMesh:
    """Returns the tile of a TPU torus as a tuple; raises ValueError if it is not one."""
    if not isinstance(tile, Sequence) or len(tile) != 4 or not all(map(is_count, tile)):
        raise ValueError(
            'model_parallel_submesh must be a 4-tuple (x, y, z, cores) of integers >= 1, not '
            f'{tile!r}'
        )
    x, y, z, cores = tile
    return x, y, z, cores


def _check_one_decides(given: dict[str, Any], dcn_mesh_shape: Sequence[int] | None) -> None:
    """Checks that exactly one of the settings that are not None decides the model axis."""
    if not given:
        raise ValueError(
            'At least one of num_partitions, model_parallel_submesh, ici_mesh_shape (with '
            "dcn_mesh_shape) or mesh must be set: write a mesh, such as {'data': -1, 'model': 2}"
        )
    if 'model_parallel_submesh' in given:
        check_submesh(given['model_parallel_submesh'])
    if 'num_partitions' in given:
        check_count(given['num_partitions'], 'num_partitions')
    if 'ici_mesh_shape' in given:
        ici = as_tuple_of(given['ici_mesh_shape'], 'ici_mesh_shape')
        model = (*ici[-1:], *as_tuple_of(dcn_mesh_shape, 'dcn_mesh_shape')[-1:])
        if all(map(is_count, model)) and math.prod(model) == given.get('num_partitions'):
            # T5X requires num_partitions in addition to the shapes, so accept it if it agrees.
            return
    if len(given) > 1:
        settings = ' and '.join(f'{name}={value!r}' for name, value in given.items())
        raise ValueError(f'{settings} each decide the model axis: keep one of them')


def model_axis_size(devices: Sequence[JaxDevice], num_partitions: int) -> int:
    """Returns the size of the 'model' axis: `num_partitions`, but for programs of T5X on CPUs.

    T5X ignores the setting on CPUs: all devices of a process make 'model'. Its own programs rely on
    that: its tests have batches of two rows on eight devices with 1 partition, and ask for 2 on one
    device. So for programs that have loaded `t5x.partitioning`, or put this package in its place,
    1 and what does not divide the devices mean the mesh of T5X.
    """
    if devices[0].platform != 'cpu' or 't5x.partitioning' not in sys.modules:
        return num_partitions
    if num_partitions > 1 and len(devices) % num_partitions == 0:
        return num_partitions
    processes = len({device.process_index for device in devices})
    size = len(devices) // processes
    if size != num_partitions:
        _LOGGER.warning(
            'num_partitions=%d has no effect on these CPUs in a program of T5X: as there, the mesh '
            'is data %d x model %d',
            num_partitions,
            processes,
            size,
        )
    return size


_ONE_DEVICE = ('TPU v4', 'TPU v4 lite')  # the two cores of a chip are one device (megacore)


def t5x_grid(
    devices: Sequence[JaxDevice],
    num_partitions: int,
    model_parallel_submesh: HardwareMesh | None = None,
    granule_size: int | None = None,
) -> np.ndarray:
    """Returns the devices of one slice, of shape (data, model), in T5X's order if it has one.

    Other machines than TPUs count as one slice. The tile of the model axis is T5X's by default.
    """
    tile: Sequence[int] | None = model_parallel_submesh
    shape = (len(devices) // num_partitions, num_partitions)
    if not has_coords(devices[0]):
        if tile is not None:
            raise ValueError(
                f'model_parallel_submesh={tuple(tile)} is a tile of a TPU torus; on '
                f'{devices[0].platform} set num_partitions={math.prod(tile)} instead'
            )
        return best_grid(devices, shape, granule_size)
    if tile is None:
        tile = default_tile(devices, num_partitions)
    return order_devices(devices, shape) if tile is None else tiled_grid(tile, devices)


def tiled_grid(
    model_parallel_submesh: Sequence[int],
    devices: Sequence[JaxDevice],
    local_devices: Sequence[JaxDevice] = (),
    tile_by_host_if_needed: bool = True,
) -> np.ndarray:
    """Returns devices of shape (data, model), each row of which is one tile; see `get_mesh`."""
    first = min(d.process_index for d in devices)
    local = list(local_devices or [d for d in devices if d.process_index == first])
    tile = tuple(as_tuple_of(model_parallel_submesh, 'model_parallel_submesh'))
    places = places_of(devices)
    machine, host = _extent(places), _extent(places_of(local))
    _check_tile(tile, machine, devices)
    grid = np.empty(machine, dtype=object)
    grid[tuple(places.T)] = as_array(devices)
    order = _z_major_order(machine, tile) if len(tile) == 4 else None
    if order is not None:
        if tile[3] != machine[3]:
            raise ValueError(
                f'model_parallel_submesh {tile} spans a whole plane of the machine {machine}, so '
                f'it must take all {machine[3]} cores of each chip: use {(*tile[:3], machine[3])}'
            )
        grid, tile = grid.transpose(order), tuple(tile[i] for i in order)
    factors: list[tuple[int, ...]]
    factors = [(g // m, m) for g, m in zip(grid.shape, tile, strict=True)]
    if order is None and tile_by_host_if_needed:
        factors = [_host_tiling(*sizes) for sizes in zip(machine, tile, host, strict=True)]
    # Split each dimension by its factors, and group the n-th factors of all dimensions.
    width = len(factors[0])
    parts = grid.reshape([factor for group in factors for factor in group])
    grouped = [width * d + i for i in range(width) for d in range(len(factors))]
    return parts.transpose(grouped).reshape(-1, math.prod(tile))


def split_experts(
    names: tuple[str, ...], grid: np.ndarray, num_experts: int
) -> tuple[tuple[str, ...], np.ndarray]:
    """Splits an 'expert' axis off the 'data' axis: all of it, if there are more experts."""
    place = names.index('data')
    data = grid.shape[place]
    if data % num_experts and num_experts % data:
        raise ValueError(
            f'num_expert_partitions={num_experts!r} is neither a factor nor a multiple of the '
            f'{data} devices of the data axis; use one of {list_divisors(data)}'
        )
    experts = min(num_experts, data)
    shape = (*grid.shape[:place], data // experts, experts, *grid.shape[place + 1 :])
    return (*names[: place + 1], 'expert', *names[place + 1 :]), grid.reshape(shape)


def check_last_axis(size: int, total: int, num_slices: int, name: str, setting: str) -> None:
    """Checks that the last axis divides the devices of the machine, or of each slice."""
    if total % size == 0:
        return
    shown = setting if setting == 'num_partitions' else f'axis {name!r}'
    where = 'the machine' if num_slices == 1 else f'each of the {num_slices} slices'
    larger = f': it is larger than {"the machine" if num_slices == 1 else "a slice"}'
    spread = f', or spread {name!r} over slices with ici_mesh_shape and dcn_mesh_shape'
    raise ValueError(
        f'{shown}={size} does not divide the {total} devices of {where}'
        f'{larger if size > total else ""}; use one of {list_divisors(total)}'
        f'{spread if total < size <= total * num_slices else ""}'
    )


def _check_tile(
    tile: tuple[int, ...], machine: tuple[int, ...], devices: Sequence[JaxDevice]
) -> None:
    if num_slices(devices) > 1:
        raise ValueError(
            f'get_mesh makes the mesh of one slice, not of {num_slices(devices)} slices: use '
            'default_mesh'
        )
    fits = len(tile) == len(machine) and all(map(is_count, tile))
    if not fits or any(g % m for g, m in zip(machine, tile, strict=True)):
        raise ValueError(
            f'model_parallel_submesh {tile} does not tile the machine {machine}: each of its '
            f'{len(machine)} entries must divide the same entry of the machine'
        )
    if math.prod(machine) != len(devices):
        raise ValueError(
            f'{len(devices)} devices do not fill a machine of {machine} '
            f'({math.prod(machine)} devices)'
        )


def _extent(places: np.ndarray) -> tuple[int, ...]:
    return tuple((places.max(axis=0) + 1).tolist())


def default_tile(devices: Sequence[JaxDevice], num_partitions: int) -> tuple[int, ...] | None:
    """Returns T5X's tile of one model replica, or None if it has none that divides the slice."""
    kind = devices[0].device_kind
    if kind not in TWO_CORES + _ONE_DEVICE:
        return None
    machine = _extent(places_of(devices))
    x, _, z, cores = machine
    if math.prod(machine) != len(devices) or cores != (2 if kind in TWO_CORES else 1):
        return None  # the devices are a part of a slice, or v4 without megacore
    if kind in TWO_CORES:
        tiles = [(1, 1, 1, 1), (1, 1, 1, 2), (2, 1, 1, 2), (2, 2, 1, 2), (4, 2, 1, 2)]
    else:
        tiles = [
            *((1, 1, 1, 1), (1, 2, 1, 1)),
            (4, 1, 1, 1) if x >= 4 else (2, 2, 1, 1),
            (1, 1, 8, 1) if z >= 8 else (4, 2, 1, 1),
            (2, 2, 4, 1) if x < 4 else (4, 4, 1, 1) if x < 8 else (8, 2, 1, 1),
        ]
        if z >= 16:
            tiles[-1] = (1, 1, 16, 1)
    tile = {math.prod(tile): tile for tile in tiles}.get(num_partitions)
    if tile is None or any(g % m for g, m in zip(machine, tile, strict=True)):
        return None
    return tile


def _z_major_order(machine: tuple[int, ...], tile: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the order of dimensions that keeps a host's devices together without tiling, if any.

    It exists if the tile spans exactly one of x and y, or z and exactly one of them.
    """
    gx, gy, gz, _ = machine
    mx, my, mz, _ = tile
    if (my == gy > 1 and mx == mz == 1) or (my == 1 and mx == gx > 1 and mz == gz > 1):
        return 2, 1, 0, 3
    if (mx == gx > 1 and my == mz == 1) or (mx == 1 and my == gy > 1 and mz == gz > 1):
        return 0, 2, 1, 3
    return None


def _host_tiling(machine: int, tile: int, host: int) -> tuple[int, int, int, int]:
    """Splits a machine dimension into (data hosts, data devices, model hosts, model devices)."""
    data = machine // tile
    if tile % host == 0:
        return data, 1, tile // host, host
    if host % tile == 0:
        return data // (host // tile), host // tile, 1, tile
    raise ValueError(
        f'model_parallel_submesh has an entry of {tile}, but a host has {host} devices along that '
        'dimension: the entry must be a factor or a multiple of it'
    )
