"""T5X's order of devices on TPU v2, v3 and v4: its table of tiles and how tiles make a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from partitioning.hardware import (
    HardwareMesh,
    JaxDevice,
    TpuMesh,
    get_coords,
    has_coords,
    num_slices,
    places_in_processes,
)
from partitioning.mesh.granules import best_grid
from partitioning.mesh.order import TWO_CORES, order_devices
from partitioning.mesh.validation import as_tuple_of
from partitioning.rules import is_count

_ONE_DEVICE = ('TPU v4', 'TPU v4 lite')  # the two cores of a chip are one device (megacore)


def t5x_grid(
    devices: Sequence[JaxDevice],
    num_partitions: int,
    model_parallel_submesh: HardwareMesh | None = None,
    granule_size: int | None = None,
) -> np.ndarray:
    """Orders the devices of one slice as T5X does where it has an order for them.

    Args:
      devices: the devices of one TPU slice, or all devices of another machine.
      num_partitions: the size of the model axis, which divides the number of devices.
      model_parallel_submesh: the tile of the model axis; by default T5X's own, if it has one.
      granule_size: as in `granules_of`.

    Returns:
      An array of devices of shape (data, model).

    Raises:
      ValueError: if the tile does not tile the slice, or the devices are not on a TPU torus.
    """
    tile = model_parallel_submesh
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
    model_parallel_submesh: HardwareMesh,
    devices: Sequence[JaxDevice],
    local_devices: Sequence[JaxDevice] = (),
    tile_by_host_if_needed: bool = True,
) -> np.ndarray:
    """Orders devices so that each row of the model axis is one tile of the machine, as T5X does.

    Args:
      model_parallel_submesh: the tile: (x, y, z, cores) on TPU, (processes, devices) elsewhere.
      devices: all devices, in any order.
      local_devices: the devices of one process, by default of the first; their extent is the tile
        of a host.
      tile_by_host_if_needed: whether each process holds one contiguous block of the mesh.

    Returns:
      An array of devices of shape (data, model).

    Raises:
      ValueError: if the tile does not divide the machine, or hosts cut through tiles.
    """
    first = min(d.process_index for d in devices)
    local = list(local_devices or [d for d in devices if d.process_index == first])
    tile = tuple(as_tuple_of(model_parallel_submesh, 'model_parallel_submesh'))
    if num_slices(devices) > 1:
        raise ValueError(
            f'get_mesh makes the mesh of one slice, not of {num_slices(devices)} slices: use '
            'default_mesh'
        )
    places = _places(devices)
    machine, host = _extent(places), _extent(_places(local))
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
    grid = np.empty(machine, dtype=object)
    for device, place in zip(devices, places.tolist(), strict=True):
        grid[tuple(place)] = device

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
    return tiled.reshape(-1, math.prod(tile))


def _places(devices: Sequence[JaxDevice]) -> np.ndarray:
    """The place of each device: (x, y, z, core) on TPU, (process, index in it) elsewhere."""
    if not has_coords(devices[0]):
        return places_in_processes(devices)
    places = np.array([get_coords(device) for device in devices])
    return places - places.min(axis=0)


def _extent(places: np.ndarray) -> tuple[int, ...]:
    return tuple((places.max(axis=0) + 1).tolist())


def default_tile(devices: Sequence[JaxDevice], num_partitions: int) -> TpuMesh | None:
    """Returns T5X's tile of one model replica, or None if it has none that divides the slice."""
    kind = devices[0].device_kind
    if kind not in TWO_CORES + _ONE_DEVICE:
        return None
    machine = cast(TpuMesh, _extent(_places(devices)))
    x, _, z, cores = machine
    if math.prod(machine) != len(devices) or cores != (2 if kind in TWO_CORES else 1):
        return None  # the devices are a part of a slice, or v4 without megacore
    table: dict[int, TpuMesh]
    if kind in TWO_CORES:
        table = {
            1: (1, 1, 1, 1),
            2: (1, 1, 1, 2),
            4: (2, 1, 1, 2),
            8: (2, 2, 1, 2),
            16: (4, 2, 1, 2),
        }
    else:
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


def _split(grid: np.ndarray, factors: list[tuple[int, ...]]) -> np.ndarray:
    """Splits each dimension by `factors`, and groups the n-th factors of all dimensions."""
    width = len(factors[0])
    parts = grid.reshape([f for group in factors for f in group])
    return parts.transpose([width * d + i for i in range(width) for d in range(len(factors))])
