"""Granules: groups of devices that share fast links."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from partitioning.hardware.devices import JaxDevice, has_coords, num_slices, slice_of
from partitioning.rules import is_count


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
