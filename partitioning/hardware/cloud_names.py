"""Names under which clouds rent machines, such as 'v5p-128', as names of topologies.

The names of TPUs follow the tables of the Cloud TPU documentation
(docs.cloud.google.com/tpu/docs/v2 to tpu7x). It counts the TensorCores of v2 to v5p and of 7x, two
per chip, and the chips of v5e and v6e. The names of GPUs follow the tables of Compute Engine's
accelerator-optimized machines. Tools for clusters also write 'v5p-4x4x4' and 'h100-80gb-8'.
"""

from __future__ import annotations

import math
import re

from partitioning.hardware.chips import CHIPS

# The kind of a name, the chip in CHIPS, and how many of what the name counts a chip has.
_KINDS = {
    'v2': ('v2', 2),
    'v3': ('v3', 2),
    'v4': ('v4', 2),
    'v5litepod': ('v5e', 1),
    'v5lite': ('v5e', 1),
    'v5e': ('v5e', 1),
    'v5p': ('v5p', 2),
    'v6e': ('v6e', 1),
    'tpu7x': ('tpu7x', 2),
}
# Planes of these numbers of chips are offered, in these arrangements.
_PLANES = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16)}
_PLANES |= {256: (16, 16), 512: (16, 32), 1024: (32, 32)}
_LARGEST = {'v2': 256, 'v3': 1024, 'v5e': 256, 'v6e': 256}
# Parts of a cube of 4 x 4 x 4 chips.
_PARTS = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
_CUBE = 4
_MOST_CUBES = {'v4': 64, 'v5p': 140, 'tpu7x': 144}
# Compute Engine: the chip, and the GPUs of a host.
_GPU_HOSTS = {
    'a2-ultragpu-1g': ('a100', 1),
    'a2-ultragpu-2g': ('a100', 2),
    'a2-ultragpu-4g': ('a100', 4),
    'a2-ultragpu-8g': ('a100', 8),
    'a3-highgpu-1g': ('h100', 1),
    'a3-highgpu-2g': ('h100', 2),
    'a3-highgpu-4g': ('h100', 4),
    'a3-highgpu-8g': ('h100', 8),
    'a3-megagpu-8g': ('h100', 8),
    'a3-ultragpu-8g': ('h200', 8),
    'a4-highgpu-8g': ('b200', 8),
    'h100-80gb-8': ('h100', 8),
    'h100-mega-80gb-8': ('h100', 8),
    'h200-141gb-8': ('h200', 8),
    'b200-8': ('b200', 8),
}


def from_cloud_name(name: str) -> str | None:
    """Returns the topology of a cloud's name: 'v5p:4x4x4' for 'v5p-128', 'h100:1x8' for GPUs.

    Other names, such as the names of topologies, give None.

    Raises:
      ValueError: if the cloud has such machines, but not of this size.
    """
    if name in _GPU_HOSTS:
        chip, gpus = _GPU_HOSTS[name]
        return f'{chip}:1x{gpus}'
    kind, _, size = name.rpartition('-')
    if kind not in _KINDS or not re.fullmatch(r'[1-9]\d*(x[1-9]\d*)*', size):
        return None
    chip, per_chip = _KINDS[kind]
    if 'x' in size:
        return f'{chip}:{size}'
    count, rest = divmod(int(size), per_chip)
    flat = CHIPS[chip].dimensions == 2
    shape = None if rest else (_plane(chip, count) if flat else _cuboid(chip, count))
    if shape is None:
        counted = f'{per_chip} TensorCores per chip' if per_chip > 1 else 'chips'
        sizes = [f'{kind}-{n * per_chip}' for n in _sizes(chip)]
        raise ValueError(
            f'no machine {name!r} is offered, whose number counts {counted}: write, for example, '
            f'{min(sizes, key=lambda s: _distance(s, size))!r}, or its chips as in '
            f"'{chip}:{'4x4' if flat else '4x4x4'}'"
        )
    return f'{chip}:{"x".join(map(str, shape))}'


def _plane(chip: str, count: int) -> tuple[int, ...] | None:
    return _PLANES.get(count) if count in _sizes(chip) else None


def _cuboid(chip: str, count: int) -> tuple[int, ...] | None:
    """The arrangement of a part of a cube, or of whole cubes that is closest to a cube."""
    if count in _PARTS:
        return _PARTS[count]
    cubes, rest = divmod(count, _CUBE**3)
    if rest or not 1 <= cubes <= _MOST_CUBES[chip]:
        return None
    shapes = [
        (x, y, cubes // (x * y))
        for x in range(1, cubes + 1)
        for y in range(x, cubes + 1)
        if cubes % (x * y) == 0 and cubes // (x * y) >= y
    ]
    best = min(shapes, key=sum)
    return tuple(_CUBE * n for n in best)


def _sizes(chip: str) -> list[int]:
    """The numbers of chips of the machines that are offered."""
    if CHIPS[chip].dimensions == 2:
        most = _LARGEST[chip]
        alone = chip in ('v5e', 'v6e')  # they are offered with one chip, the others with four
        return [n for n in _PLANES if n <= most and (n > 1 or alone)]
    return [*_PARTS, *(_CUBE**3 * n for n in range(1, _MOST_CUBES[chip] + 1))]


def _distance(name: str, size: str) -> float:
    return abs(math.log(int(name.rpartition('-')[2]) / int(size)))
