"""Chips: memory, peak rates and links, each with its source.

The figures of TPUs are from the Cloud TPU documentation of each chip (peak FLOP/s, HBM, ICI and DCN
bandwidth; ICI bandwidth is over all links and both directions of a chip), from papers where the
documentation has none (links of v2, v3 and v4), and from the compiler (the memory that a program
can use). The figures of GPUs are from NVIDIA's data sheets, without sparsity, and their memory is
what CUDA reports. `Chip.source` names the source of each chip.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

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
      source: the source of these figures.
    """

    name: str
    platform: str = 'tpu'
    device_kind: str
    devices: int = 1
    dimensions: int
    hbm_bytes: int
    peak_flops: float
    hbm_bandwidth: float
    ici_links: int
    ici_link_bandwidth: float
    dcn_bandwidth: float | None
    source: str

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

_TPUS = (
    Chip(
        name='v2',
        device_kind='TPU v2',
        devices=2,
        dimensions=2,
        hbm_bytes=int(2 * 7.48 * GIB),
        peak_flops=46e12,
        hbm_bandwidth=700e9,
        ici_links=4,
        ici_link_bandwidth=496 * GBIT,
        dcn_bandwidth=None,
        source=_TWO_GENERATIONS,
    ),
    Chip(
        name='v3',
        device_kind='TPU v3',
        devices=2,
        dimensions=2,
        hbm_bytes=int(2 * 15.48 * GIB),
        peak_flops=123e12,
        hbm_bandwidth=900e9,
        ici_links=4,
        ici_link_bandwidth=656 * GBIT,
        dcn_bandwidth=None,
        source=f'{_CLOUD_TPU}v3; {_TWO_GENERATIONS}',
    ),
    Chip(
        name='v4',
        device_kind='TPU v4',
        dimensions=3,
        hbm_bytes=int(30.75 * GIB),
        peak_flops=275e12,
        hbm_bandwidth=1200e9,
        ici_links=6,
        ici_link_bandwidth=50e9,
        dcn_bandwidth=None,
        source=f'{_CLOUD_TPU}v4; Jouppi et al., TPU v4 (ISCA 2023): 6 links of 50 GB/s. '
        f'{_COMPILER_LIMIT}, with the two cores of a chip as one device (megacore)',
    ),
    Chip(
        name='v5e',
        device_kind='TPU v5 lite',
        dimensions=2,
        hbm_bytes=int(15.75 * GIB),
        peak_flops=197e12,
        hbm_bandwidth=819e9,
        ici_links=4,
        ici_link_bandwidth=400e9 / (4 * 2),
        dcn_bandwidth=6400 * GBIT / 256,
        source=f'{_CLOUD_TPU}v5e (DCN: 6.4 Tbit/s for a pod of 256). {_COMPILER_LIMIT}',
    ),
    Chip(
        name='v5p',
        device_kind='TPU v5',
        dimensions=3,
        hbm_bytes=int(95.73 * GIB),
        peak_flops=459e12,
        hbm_bandwidth=2765e9,
        ici_links=6,
        ici_link_bandwidth=1200e9 / (6 * 2),
        dcn_bandwidth=50 * GBIT,
        source=f'{_CLOUD_TPU}v5p. {_COMPILER_LIMIT}',
    ),
    Chip(
        name='v6e',
        device_kind='TPU v6 lite',
        dimensions=2,
        hbm_bytes=int(31.24 * GIB),
        peak_flops=918e12,
        hbm_bandwidth=1638e9,
        ici_links=4,
        ici_link_bandwidth=800e9 / (4 * 2),
        dcn_bandwidth=100 * GBIT,
        source=f'{_CLOUD_TPU}v6e, tpu7x (a table next to v5p). {_COMPILER_LIMIT}',
    ),
    Chip(
        name='tpu7x',
        device_kind='TPU7x',
        devices=2,
        dimensions=3,
        hbm_bytes=int(2 * 94.74 * GIB),
        peak_flops=2307e12,
        hbm_bandwidth=7380e9,
        ici_links=6,
        ici_link_bandwidth=1200e9 / (6 * 2),
        dcn_bandwidth=100 * GBIT,
        source=f'{_CLOUD_TPU}tpu7x. {_COMPILER_LIMIT}',
    ),
)
_GPUS = (
    Chip(
        name='a100',
        platform='gpu',
        device_kind='NVIDIA A100-SXM4-80GB',
        dimensions=0,
        hbm_bytes=int(79.15 * GIB),
        peak_flops=312e12,
        hbm_bandwidth=2039e9,
        ici_links=12,
        ici_link_bandwidth=25e9,
        dcn_bandwidth=200 * GBIT,
        source=_NVIDIA,
    ),
    Chip(
        name='h100',
        platform='gpu',
        device_kind='NVIDIA H100 80GB HBM3',
        dimensions=0,
        hbm_bytes=int(79.10 * GIB),
        peak_flops=989e12,
        hbm_bandwidth=3352e9,
        ici_links=18,
        ici_link_bandwidth=25e9,
        dcn_bandwidth=400 * GBIT,
        source=_NVIDIA,
    ),
    Chip(
        name='h200',
        platform='gpu',
        device_kind='NVIDIA H200',
        dimensions=0,
        hbm_bytes=int(139.7 * GIB),
        peak_flops=989e12,
        hbm_bandwidth=4800e9,
        ici_links=18,
        ici_link_bandwidth=25e9,
        dcn_bandwidth=400 * GBIT,
        source=_NVIDIA,
    ),
    Chip(
        name='b200',
        platform='gpu',
        device_kind='NVIDIA B200',
        dimensions=0,
        hbm_bytes=int(178.3 * GIB),
        peak_flops=2250e12,
        hbm_bandwidth=8000e9,
        ici_links=18,
        ici_link_bandwidth=50e9,
        dcn_bandwidth=400 * GBIT,
        source=_NVIDIA,
    ),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _TPUS + _GPUS}

# The side of a whole pod, along which links close to rings (Cloud TPU documentation: v2 pods have
# 16 x 16 chips, v3 pods 32 x 32, v5e and v6e pods 16 x 16).
_POD_SIDE = {'TPU v2': 16, 'TPU v3': 32, 'TPU v5 lite': 16, 'TPU v6 lite': 16}
_CUBES = ('TPU v4', 'TPU v5', 'TPU v5p', 'TPU7x')


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip whose devices have this `device_kind`, or None if it is unknown."""
    return next((c for c in CHIPS.values() if c.device_kind == device_kind), None)


def torus_wrap(device_kind: str, bounds: Sequence[int]) -> tuple[bool, bool, bool]:
    """Returns for each dimension of a TPU slice whether its links close to a ring.

    v4, v5p and 7x slices are built of cubes of 4 x 4 x 4 chips, and have all three rings if they
    consist of whole cubes. v2, v3, v5e and v6e slices have the ring of a dimension if they are as
    long as their pod (Cloud TPU documentation).

    Args:
      device_kind: the `device_kind` of its devices.
      bounds: the number of chips of the slice along x, y and z.
    """
    x, y, z = bounds
    if device_kind in _CUBES:
        whole = all(n % 4 == 0 for n in bounds)
        return whole, whole, whole
    side = _POD_SIDE.get(device_kind)
    return x == side, y == side, z == side
