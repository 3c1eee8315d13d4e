"""What machines are: device types and the coordinates of a device in its machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax

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


def num_slices(devices: Sequence[JaxDevice]) -> int:
    """The number of TPU slices among `devices`; 1 where devices do not belong to slices."""
    return len({getattr(d, 'slice_index', 0) for d in devices})
