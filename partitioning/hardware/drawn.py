"""Devices of described machines by arithmetic, where the compiler that describes them is missing.

They make meshes, and functions can be traced for them, so figures by formula need no compiler.
Nothing can be lowered or compiled for them. Tests compare them with the devices of the compilers.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

from partitioning.hardware.chips import Chip
from partitioning.hardware.devices import JaxDevice

# The numbers of the devices of a slice begin with this many times the number of the slice.
_NUMBERS_PER_SLICE = 100_000

_may_draw: contextvars.ContextVar[bool] = contextvars.ContextVar('may_draw', default=False)


@contextlib.contextmanager
def drawing_devices() -> Iterator[None]:
    """Inside, machines whose compilers are not installed are described by arithmetic."""
    token = _may_draw.set(True)
    try:
        yield
    finally:
        _may_draw.reset(token)


def may_draw() -> bool:
    """Whether devices may be described by arithmetic here."""
    return _may_draw.get()


@dataclasses.dataclass(frozen=True)
class DrawnDevice:
    """A device with the attributes of a jax.Device that meshes and layouts read."""

    id: int
    process_index: int
    platform: str
    device_kind: str
    coords: tuple[int, ...]

    @property
    def host_id(self) -> int:
        return self.process_index

    def __repr__(self) -> str:
        return f'DrawnDevice(id={self.id}, {self.device_kind}, coords={self.coords})'


@dataclasses.dataclass(frozen=True)
class DrawnCore(DrawnDevice):
    """A core of a TPU. `bounds` are the chips of its slice along x, y and z."""

    core_on_chip: int
    bounds: tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class SlicedCore(DrawnCore):
    """A core of a machine with several slices."""

    slice_index: int


@dataclasses.dataclass(frozen=True)
class DrawnGpu(DrawnDevice):
    """A GPU. Its domain is the first of its coordinates."""

    slice_index: int


def draw_tpus(
    chip: Chip, bounds: Sequence[int], num_slices: int, host: Sequence[int]
) -> tuple[JaxDevice, ...]:
    """The devices of TPU slices, host by host.

    `bounds` are the chips of a slice, and `host` the chips of a host, along x, y and z.
    """
    cores, (nx, ny, nz) = chip.devices, bounds
    hosts = [b // h for b, h in zip(bounds, host, strict=True)]
    kind: dict[str, Any] = {'platform': 'tpu', 'device_kind': chip.device_kind}

    def make(slice_index: int, about: dict[str, Any]) -> DrawnCore:
        if num_slices == 1:
            return DrawnCore(**kind, **about)
        return SlicedCore(**kind, **about, slice_index=slice_index)

    found: list[Any] = []
    for slice_index in range(num_slices):
        first = (slice_index + 1) * _NUMBERS_PER_SLICE if num_slices > 1 else 0
        for number, at in enumerate(itertools.product(*map(range, reversed(hosts)))):
            corner = [h * n for h, n in zip(reversed(at), host, strict=True)]
            for offset in itertools.product(*map(range, reversed(host))):
                x, y, z = (c + o for c, o in zip(corner, reversed(offset), strict=True))
                for core in range(cores):
                    about = {
                        'id': first + core + cores * (x + nx * (y + ny * z)),
                        'process_index': number + slice_index * math.prod(hosts),
                        'coords': (x, y, z),
                        'core_on_chip': core,
                        'bounds': (nx, ny, nz),
                    }
                    found.append(make(slice_index, about))
    return cast(tuple[JaxDevice, ...], tuple(found))


def draw_gpus(chip: Chip, shape: Sequence[int], num_domains: int) -> tuple[JaxDevice, ...]:
    """The devices of GPU hosts.

    `shape` has the hosts of an NVLink domain, and the GPUs of a host.
    """
    hosts, gpus = shape
    places = itertools.product(range(num_domains), range(hosts), range(gpus))
    found: list[Any] = [
        DrawnGpu(
            id=number,
            process_index=domain * hosts + host,
            platform='gpu',
            device_kind=chip.device_kind,
            coords=(domain, host, gpu),
            slice_index=0,
        )
        for number, (domain, host, gpu) in enumerate(places)
    ]
    return cast(tuple[JaxDevice, ...], tuple(found))
