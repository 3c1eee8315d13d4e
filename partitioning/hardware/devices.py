"""What machines are: device types and the coordinates of a device in its machine."""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

JaxDevice: TypeAlias = jax.Device
# (x, y, z, cores per chip) of a TPU machine, or of a tile of it.
TpuMesh: TypeAlias = tuple[int, int, int, int]
# (processes, devices per process) of any other machine.
OtherMesh: TypeAlias = tuple[int, int]
HardwareMesh: TypeAlias = TpuMesh | OtherMesh


def has_coords(device: JaxDevice) -> bool:
    """True where `device` knows its place on a 3-D torus (TPUs do; CPUs and GPUs do not)."""
    # Described GPUs have coordinates too, of slice, host and number, but no cores.
    on_torus = hasattr(device, 'core_on_chip')
    return on_torus and len(getattr(device, 'coords', None) or ()) == 3


def get_coords(device: JaxDevice) -> HardwareMesh:
    """The coordinates of `device` in its machine.

    Returns:
      `(x, y, z, core)` on TPU, `(process, index on the process)` elsewhere. The index is the
      device's id modulo the number of devices of a process, as in T5X.
    """
    if has_coords(device):
        x, y, z = device.coords
        return int(x), int(y), int(z), int(device.core_on_chip)
    return device.process_index, device.id % jax.local_device_count()


def bounds_from_last_device(last_device: JaxDevice) -> HardwareMesh:
    """The extent of the machine whose highest-coordinate device is `last_device`.

    Returns:
      `(X, Y, Z, cores)` on TPU, `(processes, devices per process)` elsewhere: devices within
      one process share the fastest links, so the process is the outer dimension.
    """
    if has_coords(last_device):
        x, y, z, core = get_coords(last_device)  # type: ignore[misc]  # has_coords: four of them
        return x + 1, y + 1, z + 1, core + 1
    return jax.process_count(), jax.local_device_count()


def places_in_processes(devices: Sequence[JaxDevice]) -> np.ndarray:
    """Where devices without coordinates are: (rank of the process, number in it by id) of each."""
    rank = {process: i for i, process in enumerate(sorted({d.process_index for d in devices}))}
    numbers: collections.Counter[int] = collections.Counter()
    places = np.empty((len(devices), 2), dtype=np.int64)
    for i in sorted(range(len(devices)), key=lambda i: devices[i].id):
        process = devices[i].process_index
        places[i] = rank[process], numbers[process]
        numbers[process] += 1
    return places


def slice_of(device: JaxDevice) -> int:
    """Number of the TPU slice, or of the NVLink domain, that `device` belongs to; 0 for others."""
    index = getattr(device, 'slice_index', 0)
    if index == 0 and device.platform == 'gpu':
        coords = getattr(device, 'coords', None) or (0,)  # (domain, host, GPU), where described
        index = coords[0]
    return int(index)


def num_slices(devices: Sequence[JaxDevice]) -> int:
    """The number of TPU slices, or NVLink domains, among `devices`; 1 where they know of none."""
    return len({slice_of(d) for d in devices})


def slice_bounds(device: JaxDevice) -> tuple[int, int, int] | None:
    """The (x, y, z) chips of the whole slice of a TPU device.

    Returns:
      The bounds, whatever part of the slice is in use; None where the device does not say who
      else there is, as stand-ins for devices do not.
    """
    client = getattr(device, 'client', None)
    return None if client is None else _bounds_of_slices(client).get(slice_of(device))


@functools.lru_cache(maxsize=8)
def _bounds_of_slices(client: Any) -> dict[int, tuple[int, int, int]]:
    bounds: dict[int, tuple[int, int, int]] = {}
    for device in client.devices():
        x, y, z = bounds.get(number := slice_of(device), (1, 1, 1))
        a, b, c = device.coords
        bounds[number] = max(x, a + 1), max(y, b + 1), max(z, c + 1)
    return bounds
