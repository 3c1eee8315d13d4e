"""The order of the devices of one machine in a mesh: links decide, not device numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from absl import logging

from partitioning.hardware import JaxDevice, has_coords, torus_wrap
from partitioning.mesh.torus import Torus, ring_order, snake

_TWO_CORES = ('TPU v2', 'TPU v3')  # each core a device
# jax before 0.11 knows no ring of these eight chips, numbered x fastest, z slowest.
_V5P_CUBE_RING = (0, 1, 3, 2, 6, 7, 5, 4)


def order_devices(devices: Sequence[JaxDevice], axis_sizes: Sequence[int]) -> np.ndarray:
    """The devices of one TPU slice, or of one group of GPUs or CPUs, as a mesh.

    Args:
      devices: in any order.
      axis_sizes: sizes of the mesh axes, by rising traffic; their product is the devices' number.

    Returns:
      Devices of shape `axis_sizes`. GPUs and CPUs by process and id. TPUs in the order of
      `jax.experimental.mesh_utils.create_device_mesh` where it has one that follows the links,
      else as the shortest rings of the torus; where chips are missing from the box that the
      devices span, along a path that winds through it.
    """
    shape = tuple(axis_sizes)
    if not all(has_coords(d) for d in devices):
        by_process = sorted(devices, key=lambda d: (d.process_index, d.id))
        return as_array(by_process).reshape(shape)
    places = np.array([(*d.coords, d.core_on_chip) for d in devices], dtype=np.int64)
    places -= places.min(axis=0)
    bounds = tuple((places.max(axis=0) + 1).tolist())
    if math.prod(bounds) != len(devices):
        return _winding(devices, places, bounds).reshape(shape)
    grid = np.empty(bounds, dtype=object)
    grid[tuple(places.T)] = as_array(devices)
    ordered = _jax_order(grid, shape)
    return _shortest_rings(grid, shape) if ordered is None else ordered


def as_array(devices: Sequence[JaxDevice]) -> np.ndarray:
    """A one-dimensional array of devices."""
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array


def _jax_order(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """The order of jax for a grid (x, y, z, core) of devices; None where it ignores the links."""
    kind, two_cores = grid.flat[0].device_kind, grid.shape[3] == 2
    if kind in ('TPU v5', 'TPU v5p') and grid.shape == (2, 2, 2, 1):
        return _by_rows(grid)[list(_V5P_CUBE_RING)].reshape(shape)
    trays = two_cores and grid.shape[0] % 2 == grid.shape[1] % 2 == 0  # of 2 x 2 chips
    if kind in _TWO_CORES and not (trays and 8 in (grid.size, shape[-1])):
        return None  # a plain reshape
    if two_cores and kind not in _TWO_CORES and kind != 'TPU7x':
        return None  # refused: it wants one device a chip
    from jax.experimental import mesh_utils

    # As jax.devices() is on a pod, which some of its rings rely on.
    pod = sorted(_by_rows(grid), key=lambda d: d.process_index)
    try:
        return mesh_utils.create_device_mesh(shape, pod)
    except NotImplementedError:  # an axis that would split a dimension
        return None


def _by_rows(grid: np.ndarray) -> np.ndarray:
    """The devices of a grid (x, y, z, core), z slowest and core fastest."""
    return grid.transpose(2, 1, 0, 3).reshape(-1)


def _shortest_rings(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    kind = grid.flat[0].device_kind
    torus = Torus(
        bounds=grid.shape,
        wrap=(*torus_wrap(kind, grid.shape[:3]), False),
        hops=(1, 1, 1, 0),
    )
    return grid.reshape(-1)[ring_order(torus, shape, whole_row_major=kind not in _TWO_CORES)]


def _winding(
    devices: Sequence[JaxDevice], places: np.ndarray, bounds: tuple[int, ...]
) -> np.ndarray:
    logging.warning(
        '%d TPU devices do not fill the %s box they lie in: their mesh winds through it, and its '
        'rings have detours',
        len(devices),
        'x'.join(map(str, bounds)),
    )
    rank = np.empty(bounds, dtype=np.int64)
    rank[tuple(snake(bounds).T)] = np.arange(rank.size)
    return as_array(devices)[np.argsort(rank[tuple(places.T)], kind='stable')]
