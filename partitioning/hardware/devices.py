"""Device types, the coordinates of a device in its machine, and groups that share fast links."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np

from partitioning.rules import is_count

JaxDevice: TypeAlias = jax.Device
# The extent of a machine or of a tile of it.
TpuMesh: TypeAlias = tuple[int, int, int, int]  # (x, y, z, cores per chip)
OtherMesh: TypeAlias = tuple[int, int]  # (processes, devices per process)
HardwareMesh: TypeAlias = TpuMesh | OtherMesh


_stand_ins: contextvars.ContextVar[tuple[JaxDevice, ...] | None] = contextvars.ContextVar(
    'stand_ins', default=None
)


@contextlib.contextmanager
def stand_in_devices(devices: Iterable[JaxDevice]) -> Iterator[None]:
    """Inside, meshes are made of these devices wherever no devices or machine are named.

    So a configuration that was written for the machine that it runs on can be laid out on another,
    such as one that `describe_topology` returns.
    """
    token = _stand_ins.set(tuple(devices))
    try:
        yield
    finally:
        _stand_ins.reset(token)


def check_devices(
    devices: Sequence[JaxDevice] | None, backend: str | None = None
) -> list[JaxDevice]:
    """Returns the devices to make a mesh of, by default all devices of `backend`.

    Inside `stand_in_devices`, those take the place of all devices.

    Raises:
      ValueError: if there is no device, or they are not distinct devices of one kind.
    """
    if devices is not None and backend is not None:
        raise ValueError(f'backend={backend!r} and devices each decide the devices: keep one')
    given: Any = devices
    if devices is None:
        stand_ins = _stand_ins.get()
        given = jax.devices(backend) if stand_ins is None else stand_ins
    found = list(given) if isinstance(given, Iterable) else [given]
    if not found:
        raise ValueError('devices is empty: a mesh needs at least one device')
    for device in found:
        if not hasattr(device, 'process_index') or not hasattr(device, 'device_kind'):
            raise ValueError(
                f'devices must be JAX devices, such as jax.devices() or the devices of '
                f'describe_topology(...), not {device!r}'
            )
    kinds = sorted({(device.platform, device.device_kind) for device in found})
    if len(kinds) > 1:
        listed = ' and '.join(f'{kind} ({platform})' for platform, kind in kinds)
        raise ValueError(f'all devices of a mesh must be of one kind, not {listed}')
    counts = collections.Counter(device.id for device in found)
    repeated = [number for number, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            f'{len(repeated)} of the {len(counts)} devices appear more than once, for example '
            f'device {repeated[0]} {counts[repeated[0]]} times'
        )
    return found


def has_coords(device: JaxDevice) -> bool:
    """Whether `device` has coordinates on a 3-D torus. TPUs have them; CPUs and GPUs do not."""
    # Described GPUs also have three coordinates (domain, host, GPU), but no cores.
    on_torus = hasattr(device, 'core_on_chip')
    return on_torus and len(getattr(device, 'coords', None) or ()) == 3


def get_coords(device: JaxDevice) -> HardwareMesh:
    """Returns `(x, y, z, core)` of a TPU and `(process, index in the process)` of other devices.

    The index is the device's id modulo the number of devices per process, as in T5X.
    """
    if has_coords(device):
        x, y, z = device.coords
        return int(x), int(y), int(z), int(device.core_on_chip)
    return device.process_index, device.id % jax.local_device_count()


def bounds_from_last_device(last_device: JaxDevice) -> HardwareMesh:
    """Returns the extent of the machine whose device with the highest coordinates is `last_device`.

    It is `(X, Y, Z, cores)` on TPU and `(processes, devices per process)` elsewhere.
    """
    if has_coords(last_device):
        x, y, z, core = get_coords(last_device)  # type: ignore[misc]  # has_coords: four of them
        return x + 1, y + 1, z + 1, core + 1
    return jax.process_count(), jax.local_device_count()


def places_of(devices: Sequence[JaxDevice]) -> np.ndarray:
    """Returns the coordinates of each device within the part of a machine that they span.

    It is `(x, y, z, core)` on TPU, and `(rank of the process, rank by id in it)` elsewhere.
    """
    if has_coords(devices[0]):
        places = np.array([(*d.coords, d.core_on_chip) for d in devices], dtype=np.int64)
        return places - places.min(axis=0)
    rank = {process: i for i, process in enumerate(sorted({d.process_index for d in devices}))}
    numbers: collections.Counter[int] = collections.Counter()
    places = np.empty((len(devices), 2), dtype=np.int64)
    for i in sorted(range(len(devices)), key=lambda i: devices[i].id):
        process = devices[i].process_index
        places[i] = rank[process], numbers[process]
        numbers[process] += 1
    return places


def slice_of(device: JaxDevice) -> int:
    """Returns the number of the TPU slice or NVLink domain of `device`, or 0 if it has none."""
    index = getattr(device, 'slice_index', 0)
    if index == 0 and device.platform == 'gpu' and getattr(device, 'coords', None):
        return int(device.coords[0])  # described GPUs have (domain, host, GPU)
    return int(index)


def num_slices(devices: Sequence[JaxDevice]) -> int:
    """Returns the number of TPU slices or NVLink domains of `devices`, or 1 if they have none."""
    return len({slice_of(d) for d in devices})


def slice_bounds(device: JaxDevice) -> tuple[int, int, int] | None:
    """Returns the number of chips along x, y and z of the whole slice of a TPU device.

    It is None for devices without a client, such as the stand-ins of tests, unless they know it.
    """
    client = getattr(device, 'client', None)
    if client is None and (bounds := getattr(device, 'bounds', None)) is not None:
        return bounds
    return None if client is None else _bounds_of_slices(client).get(slice_of(device))


@functools.lru_cache(maxsize=8)
def _bounds_of_slices(client: Any) -> dict[int, tuple[int, int, int]]:
    bounds: dict[int, tuple[int, int, int]] = {}
    for device in client.devices():
        x, y, z = bounds.get(number := slice_of(device), (1, 1, 1))
        a, b, c = device.coords
        bounds[number] = max(x, a + 1), max(y, b + 1), max(z, c + 1)
    return bounds


def granules_of(
    devices: Sequence[JaxDevice],
    process_is_granule: bool | None = None,
    granule_size: int | None = None,
) -> list[list[JaxDevice]]:
    """Groups devices so that the links within a group are faster than those between groups.

    By default, devices of several slices are grouped by slice, TPUs of one slice form one group,
    and GPUs and CPUs are grouped by process. Groups are in the order of these numbers.

    Args:
      devices: the devices, in any order.
      process_is_granule: True groups by process, False by slice.
      granule_size: the number of devices per group: whole processes, or equal parts of one.

    Raises:
      ValueError: if `granule_size` does not divide the machine or contradicts its links.
    """
    if granule_size is not None:
        return _granules_of_size(devices, granule_size)
    numbers = [slice_of(device) for device in devices]
    by_default = len(set(numbers)) == 1 and not has_coords(devices[0])
    if by_default if process_is_granule is None else process_is_granule:
        numbers = [device.process_index for device in devices]
    groups: dict[int, list[JaxDevice]] = {number: [] for number in sorted(set(numbers))}
    for number, device in zip(numbers, devices, strict=True):
        groups[number].append(device)
    return list(groups.values())


def _granules_of_size(devices: Sequence[JaxDevice], size: int) -> list[list[JaxDevice]]:
    if has_coords(devices[0]):
        raise ValueError(
            f'granule_size={size} applies to GPUs and CPUs only: TPUs know their slices. Remove it'
        )
    per_process = collections.Counter(d.process_index for d in devices)
    divides = is_count(size) and len(devices) % size == 0
    if not divides or any(size % n and n % size for n in per_process.values()):
        raise ValueError(
            f'granule_size={size!r} must divide the {len(devices)} devices into whole processes '
            f'of {max(per_process.values())} devices, or into equal parts of one process'
        )
    ordered = sorted(devices, key=lambda d: (slice_of(d), d.process_index, d.id))
    granules = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    if any(num_slices(granule) > 1 for granule in granules):
        domains = collections.Counter(slice_of(d) for d in devices)
        raise ValueError(
            f'granule_size={size} does not divide the NVLink domains of '
            f'{sorted(set(domains.values()))} GPUs that the devices report'
        )
    return granules


_GOOGLE = '0x1ae0'  # as the vendor of a PCI device
# Variables that say that this computer has a TPU, or reaches one.
_TPU_VARIABLES = ('TPU_NAME', 'TPU_ACCELERATOR_TYPE', 'TPU_WORKER_HOSTNAMES', 'COLAB_TPU_ADDR')


def has_accelerator(root: str = '/', environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this computer may have an accelerator that jax can use. If in doubt, it may.

    `root` is the root of the file system, and `environment` has its variables.
    """
    if sys.platform != 'linux' or any(name in environment for name in _TPU_VARIABLES):
        return True
    devices = Path(root, 'dev')
    if any(any(devices.glob(one)) for one in ('accel*', 'vfio/[0-9]*', 'nvidia*', 'kfd', 'dxg')):
        return True
    for vendor in Path(root, 'sys/bus/pci/devices').glob('*/vendor'):
        try:
            if vendor.read_text().strip() == _GOOGLE and _is_tpu(vendor.parent):
                return True
        except OSError:
            return True
    return any(not name.startswith('xla_cuda') for name in _plugins())


def _is_tpu(device: Path) -> bool:
    """Whether a PCI device of Google is a TPU: an accelerator, and not a network card or a disk."""
    kind = (device / 'class').read_text().strip()
    return not kind.startswith(('0x01', '0x02'))


def _plugins() -> list[str]:
    """The plugins of jax that are installed, besides libtpu."""
    found = importlib.util.find_spec('jax_plugins')
    places = [] if found is None else list(found.submodule_search_locations or [])
    return [module.name for module in pkgutil.iter_modules(places)]


def use_cpu_without_accelerators() -> None:
    """Lets jax use the CPU only if it has nothing else, and the user has not chosen a platform.

    Call it before jax finds its devices.
    """
    import jax

    config: Any = jax.config  # whose types lack the setting in some versions of jax
    chosen = os.environ.get('JAX_PLATFORMS') or config.jax_platforms
    if not chosen and not has_accelerator():
        jax.config.update('jax_platforms', 'cpu')
