"""T5X's order of devices on TPU v2, v3 and v4: its table of tiles and how tiles make a mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from partitioning.hardware import HardwareMesh, JaxDevice, has_coords, num_slices, places_of
from partitioning.mesh.order import TWO_CORES, as_array, best_grid, order_devices
from partitioning.mesh.validation import as_tuple_of, list_divisors
from partitioning.rules import is_count

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
