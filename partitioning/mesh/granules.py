"""Granules: groups of devices that share fast links, and how a mesh covers several of them."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np

from partitioning.hardware import JaxDevice, has_coords, num_slices, slice_of
from partitioning.mesh.order import order_devices
from partitioning.rules import is_count


def granules_of(
    devices: Sequence[JaxDevice],
    process_is_granule: bool | None = None,
    granule_size: int | None = None,
) -> list[list[JaxDevice]]:
    """Groups devices so that the links within a group are faster than those between groups.

    The groups are in the order of their slice or process numbers. By default, devices of several
    slices are grouped by slice, TPUs of one slice form one group, and GPUs and CPUs are grouped by
    process.

    Args:
      devices: the devices, in any order.
      process_is_granule: True groups by process, False by slice.
      granule_size: the number of devices per group: whole processes, or equal parts of one.

    Raises:
      ValueError: if `granule_size` does not divide the machine or contradicts its links.
    """
    if granule_size is not None:
        return _granules_of_size(devices, granule_size)
    if process_is_granule is None and num_slices(devices) == 1:
        process_is_granule = not has_coords(devices[0])
    groups: dict[int, list[JaxDevice]] = collections.defaultdict(list)
    for device in devices:
        groups[device.process_index if process_is_granule else slice_of(device)].append(device)
    return [groups[number] for number in sorted(groups)]


def check_same_size(granules: Sequence[Sequence[JaxDevice]]) -> None:
    """Raises ValueError if the groups differ in size, so that a mesh cannot hold them."""
    sizes = [len(granule) for granule in granules]
    if len(set(sizes)) > 1:
        raise ValueError(
            f'the slices (or processes) have unequal sizes, {sizes} devices: choose equal ones '
            'with devices='
        )


def best_grid(
    devices: Sequence[JaxDevice], sizes: Sequence[int], granule_size: int | None = None
) -> np.ndarray:
    """Returns an array of devices, of shape `sizes`, whose later axes have the faster links.

    The last axes stay within a granule (see `granules_of`) as far as it reaches.
    """
    granules = granules_of(devices, granule_size=granule_size)
    if has_coords(devices[0]):
        check_same_size(granules)
    if len({len(granule) for granule in granules}) > 1:
        granules = [list(devices)]  # hosts of unequal size
    within: list[int] = []
    left = len(granules[0])
    for size in reversed(sizes):
        within.insert(0, math.gcd(size, left))
        left //= within[0]
    over = [size // inner for size, inner in zip(sizes, within, strict=True)]
    return join_blocks([order_devices(granule, within) for granule in granules], over)


def join_blocks(blocks: Sequence[np.ndarray], over: Sequence[int]) -> np.ndarray:
    """Joins the devices of each granule, all of one shape, with `over` blocks along each axis."""
    shape = blocks[0].shape
    n = len(shape)
    interleaved = [axis for pair in zip(range(n), range(n, 2 * n), strict=True) for axis in pair]
    sizes = [outer * inner for outer, inner in zip(over, shape, strict=True)]
    return np.stack(blocks).reshape(*over, *shape).transpose(interleaved).reshape(sizes)


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
