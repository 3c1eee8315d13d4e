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

    Args:
      devices: the devices, in any order.
      process_is_granule: True groups by process, False by slice. By default, devices of several
        slices are grouped by slice, TPUs of one slice form one group, and GPUs and CPUs are
        grouped by process.
      granule_size: the number of devices per group: whole neighbouring processes, or equal parts
        of one.

    Returns:
      The groups, in the order of their slice or process numbers.

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


def same_size(granules: Sequence[Sequence[JaxDevice]]) -> bool:
    """Whether all groups have the same number of devices."""
    return len({len(granule) for granule in granules}) == 1


def check_same_size(granules: Sequence[Sequence[JaxDevice]]) -> None:
    """Checks that a mesh can hold the groups side by side.

    Raises:
      ValueError: if the groups differ in size.
    """
    if not same_size(granules):
        raise ValueError(
            f'the slices (or processes) have unequal sizes, {[len(g) for g in granules]} devices: '
            'choose equal ones with devices='
        )


def best_grid(
    devices: Sequence[JaxDevice], sizes: Sequence[int], granule_size: int | None = None
) -> np.ndarray:
    """Orders devices so that the later axes of a mesh get the faster links.

    Args:
      devices: the devices, in any order.
      sizes: the sizes of the mesh axes, whose product is the number of devices.
      granule_size: as in `granules_of`.

    Returns:
      An array of devices of shape `sizes`.

    Raises:
      ValueError: as `granules_of`, or if TPU slices differ in size.
    """
    granules = granules_of(devices, granule_size=granule_size)
    if has_coords(devices[0]):
        check_same_size(granules)
    if len(granules) == 1 or not same_size(granules):
        return order_devices(devices, sizes)
    within, over = spread(sizes, len(granules[0]))
    return join_blocks([order_devices(granule, within) for granule in granules], over)


def spread(axis_sizes: Sequence[int], granule_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits each axis into a factor within a granule and a factor over granules.

    The last axes stay within a granule as far as it reaches.

    Args:
      axis_sizes: the sizes of the mesh axes.
      granule_size: the number of devices in a granule, which divides the product of the sizes.

    Returns:
      The sizes within a granule and the sizes over the granules; their elementwise product is
      `axis_sizes`.
    """
    within = []
    for size in reversed(axis_sizes):
        inner = math.gcd(size, granule_size)
        granule_size //= inner
        within.append(inner)
    ici = tuple(reversed(within))
    return ici, tuple(size // inner for size, inner in zip(axis_sizes, ici, strict=True))


def join_blocks(blocks: Sequence[np.ndarray], over: Sequence[int]) -> np.ndarray:
    """Joins the blocks of the granules, all of one shape, to the grid of a mesh.

    Args:
      blocks: the devices of each granule in their order.
      over: the number of blocks along each axis.

    Returns:
      An array of devices of shape `over * shape of a block`.
    """
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
