"""T5X's own meshes of TPU v2, v3 and v4: its table of tiles and its order of devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from partitioning.hardware import (
    HardwareMesh,
    JaxDevice,
    TpuMesh,
    get_coords,
    has_coords,
    num_slices,
    places_in_processes,
)
from partitioning.mesh.checks import as_tuple_of
from partitioning.mesh.create import make_mesh
from partitioning.mesh.order import TWO_CORES
from partitioning.rules import is_count

_ONE_DEVICE = ('TPU v4', 'TPU v4 lite')  # both cores of a chip one device (megacore)


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
    grid = tiled_grid(model_parallel_submesh, devices, input_local_devices, tile_by_host_if_needed)
    return make_mesh(grid, ('data', 'model'), AxisType.Auto)


def tiled_grid(
    model_parallel_submesh: HardwareMesh,
    devices: Sequence[JaxDevice],
    local_devices: Sequence[JaxDevice] = (),
    tile_by_host_if_needed: bool = True,
) -> np.ndarray:
    """The devices of `get_mesh`, of shape (data, model)."""
    first = min(d.process_index for d in devices)
    local = list(local_devices or [d for d in devices if d.process_index == first])
    tile = tuple(as_tuple_of(model_parallel_submesh, 'model_parallel_submesh'))
    if num_slices(devices) > 1:
        raise ValueError(
            f'{num_slices(devices)} slices: a tile makes the mesh of one; use default_mesh'
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
    """Places in the box of the devices: (x, y, z, core) on TPU, else (process, number in it)."""
    if not has_coords(devices[0]):
        return places_in_processes(devices)
    places = np.array([get_coords(device) for device in devices])
    return places - places.min(axis=0)


def _extent(places: np.ndarray) -> tuple[int, ...]:
    return tuple((places.max(axis=0) + 1).tolist())


def default_tile(devices: Sequence[JaxDevice], num_partitions: int) -> TpuMesh | None:
    """T5X's tile of one model replica, where it has one and it divides the slice; else None."""
    kind = devices[0].device_kind
    if kind not in TWO_CORES + _ONE_DEVICE:
        return None
    machine = cast(TpuMesh, _extent(_places(devices)))
    x, _, z, cores = machine
    if math.prod(machine) != len(devices) or cores != (2 if kind in TWO_CORES else 1):
        return None  # a part of a slice, or v4 without megacore
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
