"""Granules: devices that share fast links, and meshes over several of them."""

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
    """The devices in groups, slower links between the groups than within one.

    Args:
      devices: in any order.
      process_is_granule: True groups by process, False by slice. By default slices where there
        are several, otherwise one group for TPUs and one a process for GPUs and CPUs.
      granule_size: devices of a group, whole processes next to each other or equal parts of one.

    Returns:
      The groups, by slice or process number.

    Raises:
      ValueError: a size that does not divide the machine, or that the links contradict.
    """
    if process_is_granule not in (None, True, False):
        raise ValueError(f'process_is_granule={process_is_granule!r} must be True, False or None')
    if granule_size is not None:
        if process_is_granule is not None:
            raise ValueError(
                f'granule_size={granule_size} and process_is_granule={process_is_granule} each '
                'decide the granules: keep one of them'
            )
        return _of_size(devices, granule_size)
    if process_is_granule is None and num_slices(devices) == 1:
        process_is_granule = not has_coords(devices[0])
    groups: dict[int, list[JaxDevice]] = collections.defaultdict(list)
    for device in devices:
        groups[device.process_index if process_is_granule else slice_of(device)].append(device)
    return [groups[number] for number in sorted(groups)]


def same_size(granules: Sequence[Sequence[JaxDevice]]) -> bool:
    """Whether all groups have as many devices."""
    return len({len(g) for g in granules}) == 1


def check_same_size(granules: Sequence[Sequence[JaxDevice]]) -> None:
    """Refuses groups that no mesh holds side by side.

    Raises:
      ValueError: they are of different sizes.
    """
    if not same_size(granules):
        raise ValueError(
            f'slices (or processes) of unequal sizes, {[len(g) for g in granules]} devices: choose '
            'equal ones with devices='
        )


def spread(axis_sizes: Sequence[int], granule: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Splits each axis into a part within a granule and a part over granules.

    The last axes stay within a granule as far as it reaches.

    Args:
      axis_sizes: sizes of the mesh axes.
      granule: devices of one granule, a divisor of their product.

    Returns:
      (sizes within a granule, sizes over the granules), whose products are those of `axis_sizes`.
    """
    within = []
    for size in reversed(axis_sizes):
        inner = math.gcd(size, granule)
        granule //= inner
        within.append(inner)
    ici = tuple(reversed(within))
    return ici, tuple(size // inner for size, inner in zip(axis_sizes, ici, strict=True))


def hybrid_grid(
    granules: Sequence[Sequence[JaxDevice]], ici: Sequence[int], dcn: Sequence[int]
) -> np.ndarray:
    """Devices of shape `ici * dcn`, each granule a block of shape `ici`."""
    blocks = np.stack([order_devices(granule, ici) for granule in granules])
    n = len(ici)
    interleaved = [axis for pair in zip(range(n), range(n, 2 * n), strict=True) for axis in pair]
    sizes = [outer * inner for outer, inner in zip(dcn, ici, strict=True)]
    return blocks.reshape(*dcn, *ici).transpose(interleaved).reshape(sizes)


def _of_size(devices: Sequence[JaxDevice], size: int) -> list[list[JaxDevice]]:
    if has_coords(devices[0]):
        raise ValueError(f'granule_size={size} is of GPUs and CPUs: TPUs know their slices')
    local = collections.Counter(d.process_index for d in devices)
    whole = is_count(size) and len(devices) % size == 0
    if not whole or any(size % n and n % size for n in local.values()):
        raise ValueError(
            f'granule_size={size!r} must divide the {len(devices)} devices into whole processes '
            f'of {max(local.values())}, or equal parts of one'
        )
    ordered = sorted(devices, key=lambda d: (slice_of(d), d.process_index, d.id))
    granules = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    if any(num_slices(granule) > 1 for granule in granules):
        domains = collections.Counter(slice_of(d) for d in devices)
        raise ValueError(
            f'granule_size={size} does not divide the NVLink domains of '
            f'{sorted(set(domains.values()))} GPUs, which the devices know'
        )
    return granules
