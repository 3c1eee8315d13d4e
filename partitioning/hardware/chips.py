"""Chips: memory, peak rates and links, each with its source.

The figures of TPUs are from the Cloud TPU documentation (whose ICI bandwidth is over all links and
both directions of a chip), from papers where it has none (links of v2, v3 and v4), and from the
compiler (the memory that a program can use). A clock is computed: at it, a whole number of matrix
units gives the peak rate. A unit does 128 x 128 multiply-adds per cycle, from v6e on 256 x 256. The
papers state the same clocks for v2, v3 and v4. The figures of GPUs are from NVIDIA's data sheets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

GIB = 2**30
GBIT = 1e9 / 8  # 1 Gbit/s in bytes/s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of chip. Every figure is for a whole chip.

    Attributes:
      name: the name in topologies, for example 'v5p'.
      platform: 'tpu' or 'gpu'.
      device_kind: the `device_kind` of its JAX devices.
      devices: the number of JAX devices of one chip: 2 if each core is a device.
      dimensions: the dimensions of the network: 2 or 3 for the torus of a TPU, 0 for GPUs, which
        switches connect.
      hbm_bytes: the memory in bytes: on TPUs, what the compiler lets a program use; on GPUs, what
        CUDA reports (by default, JAX takes three quarters of it).
      peak_flops: the peak rate of bfloat16 matrix products in FLOP/s, without sparsity.
      hbm_bandwidth: the bandwidth of the memory in bytes/s.
      ici_links: the number of links to neighbouring chips (ICI), or to the switches (NVLink).
      ici_link_bandwidth: the bandwidth of one link in each direction, in bytes/s.
      dcn_bandwidth: a chip's share of the data centre network in bytes/s, or None if not published.
      clock_hz: the clock in whose cycles the compiler estimates operations, or None for GPUs.
      source: the source of these figures.
    """

    name: str
    platform: str
    device_kind: str
    devices: int
    dimensions: int
    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    ici_links: int
    ici_link_bandwidth: float
    dcn_bandwidth: float | None
    clock_hz: float | None
    source: str

    @property
    def matrix_unit(self) -> int:
        """The side of a matrix unit, to which products are padded; 1 for GPUs."""
        if self.platform == 'gpu':
            return 1
        return 256 if self.name in ('v6e', 'tpu7x') else 128

    def speed_of(self, dtype: str) -> float:
        """How many times as fast as bfloat16 products of a type are: 2 for some of 8 bits."""
        fast = _FAST_TYPES.get(self.name, ())
        return 2.0 if dtype.startswith(fast) else 1.0

    @property
    def hbm_bytes_per_device(self) -> int:
        """The memory of one JAX device, in bytes."""
        return self.hbm_bytes // self.devices

    @property
    def peak_flops_per_device(self) -> float:
        """The peak bfloat16 FLOP/s of one JAX device."""
        return self.peak_flops / self.devices


_COMPILER_LIMIT = (
    "HBM: the compiler's own limit, as its out-of-memory error prints it (libtpu 0.0.51)"
)
_TWO_GENERATIONS = (
    "Norrie et al., The Design Process for Google's Training Chips: TPUv2 and TPUv3 (IEEE Micro, "
    f'2021), links 496 and 656 Gbit/s. {_COMPILER_LIMIT}'
)
_CLOUD_TPU = 'Cloud TPU documentation, docs.cloud.google.com/tpu/docs/'
_NVIDIA = (
    'NVIDIA data sheets of the chip and of its DGX system (one network adapter per GPU). Memory: '
    'the capacity that CUDA reports'
)

# fmt: off
_TPUS = (
    # name, device_kind, JAX devices, dimensions, HBM in GiB, FLOP/s, HBM bytes/s,
    # links, bytes/s of a link in each direction, DCN bytes/s, clock in Hz, source
    ('v2', 'TPU v2', 2, 2, 2 * 7.48, 46e12, 700e9,
     4, 496 * GBIT, None, 0.7e9, _TWO_GENERATIONS),
    ('v3', 'TPU v3', 2, 2, 2 * 15.48, 123e12, 900e9,
     4, 656 * GBIT, None, 0.94e9, f'{_CLOUD_TPU}v3; {_TWO_GENERATIONS}'),
    ('v4', 'TPU v4', 1, 3, 30.75, 275e12, 1200e9,
     6, 50e9, None, 1.05e9,
     f'{_CLOUD_TPU}v4; Jouppi et al., TPU v4 (ISCA 2023): 6 links of 50 GB/s. '
     f'{_COMPILER_LIMIT}, with the two cores of a chip as one device (megacore)'),
    ('v5e', 'TPU v5 lite', 1, 2, 15.75, 197e12, 819e9,
     4, 400e9 / (4 * 2), 6400 * GBIT / 256, 1.5e9,
     f'{_CLOUD_TPU}v5e (DCN: 6.4 Tbit/s for a pod of 256). {_COMPILER_LIMIT}'),
    ('v5p', 'TPU v5', 1, 3, 95.73, 459e12, 2765e9,
     6, 1200e9 / (6 * 2), 50 * GBIT, 1.75e9, f'{_CLOUD_TPU}v5p. {_COMPILER_LIMIT}'),
    ('v6e', 'TPU v6 lite', 1, 2, 31.24, 918e12, 1638e9,
     4, 800e9 / (4 * 2), 100 * GBIT, 1.75e9,
     f'{_CLOUD_TPU}v6e, tpu7x (a table next to v5p). {_COMPILER_LIMIT}'),
    ('tpu7x', 'TPU7x', 2, 3, 2 * 94.74, 2307e12, 7380e9,
     6, 1200e9 / (6 * 2), 100 * GBIT, 2.2e9, f'{_CLOUD_TPU}tpu7x. {_COMPILER_LIMIT}'),
)
_GPUS = (
    ('a100', 'NVIDIA A100-SXM4-80GB', 1, 0, 79.15, 312e12, 2039e9,
     12, 25e9, 200 * GBIT, None, _NVIDIA),
    ('h100', 'NVIDIA H100 80GB HBM3', 1, 0, 79.10, 989e12, 3352e9,
     18, 25e9, 400 * GBIT, None, _NVIDIA),
    ('h200', 'NVIDIA H200', 1, 0, 139.7, 989e12, 4800e9,
     18, 25e9, 400 * GBIT, None, _NVIDIA),
    ('b200', 'NVIDIA B200', 1, 0, 178.3, 2250e12, 8000e9,
     18, 50e9, 400 * GBIT, None, _NVIDIA),
)
# fmt: on


def _chip(platform: str, row: tuple[Any, ...]) -> Chip:
    names = [field.name for field in dataclasses.fields(Chip) if field.name != 'platform']
    figures = dict(zip(names, row, strict=True))
    return Chip(**figures | {'platform': platform, 'hbm_bytes': int(figures['hbm_bytes'] * GIB)})


_ALL = [_chip('tpu', row) for row in _TPUS] + [_chip('gpu', row) for row in _GPUS]
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _ALL}
_BY_KIND = {chip.device_kind: chip for chip in _ALL}

# Types whose products run at twice the rate of bfloat16, by the same sources. Chips that are not
# listed, and other types, have the rate of bfloat16 or none that is published.
_FAST_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(('v5e', 'v5p', 'v6e', 'a100'), ('int8',)),
    'tpu7x': ('float8',),
    **dict.fromkeys(('h100', 'h200', 'b200'), ('int8', 'float8')),
}

# The side of a whole pod, along which links close to rings (Cloud TPU documentation: v2 pods have
# 16 x 16 chips, v3 pods 32 x 32, v5e and v6e pods 16 x 16).
_POD_SIDE = {'TPU v2': 16, 'TPU v3': 32, 'TPU v5 lite': 16, 'TPU v6 lite': 16}
_CUBES = ('TPU v4', 'TPU v5', 'TPU v5p', 'TPU7x')


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip whose devices have this `device_kind`, or None if it is unknown."""
    return _BY_KIND.get(device_kind)


def torus_wrap(device_kind: str, bounds: Sequence[int]) -> tuple[bool, bool, bool]:
    """Returns for each dimension of a TPU slice whether its links close to a ring.

    `bounds` are its chips along x, y and z. v4, v5p and 7x slices are built of cubes of 4 x 4 x 4
    chips, and have all three rings if they consist of whole cubes. v2, v3, v5e and v6e slices have
    the ring of a dimension if they are as long as their pod (Cloud TPU documentation).
    """
    x, y, z = bounds
    if device_kind in _CUBES:
        whole = all(n % 4 == 0 for n in bounds)
        return whole, whole, whole
    side = _POD_SIDE.get(device_kind)
    return x == side, y == side, z == side
