"""Checks of the devices, axis names and axis sizes that a mesh is made from."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType

from partitioning.hardware import JaxDevice
from partitioning.rules import is_count

AxisTypes = AxisType | str | Sequence[AxisType | str]
AxisSizes = Mapping[str, int] | Iterable[tuple[str, int]]


def check_devices(
    devices: Sequence[JaxDevice] | None, backend: str | None = None
) -> list[JaxDevice]:
    """Returns the devices to make a mesh of, by default all devices of `backend`.

    Raises:
      ValueError: if there is no device, a device appears twice, the devices are of several kinds,
        or both arguments are given.
    """
    if devices is not None and backend is not None:
        raise ValueError(f'backend={backend!r} and devices each decide the devices: keep one')
    try:
        found = list(jax.devices(backend) if devices is None else devices)
    except TypeError:
        found = [devices]
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


def check_count(value: Any, setting: str) -> None:
    """Checks that a setting is a positive integer.

    Raises:
      ValueError: if it is not.
    """
    if not is_count(value):
        raise ValueError(f'{setting}={value!r} must be an integer >= 1')


def as_tuple_of(value: Any, setting: str) -> tuple[Any, ...]:
    """Returns a setting of several entries as a tuple.

    Raises:
      ValueError: if `value` is a string or is not iterable.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f'{setting}={value!r} must be a sequence, for example (2, 4)')
    return tuple(value)


def check_axes(axes: AxisSizes, setting: str) -> tuple[tuple[str, int], ...]:
    """Returns the names and sizes of axes as pairs.

    Raises:
      ValueError: if `axes` is neither a mapping nor pairs, or a name or a size is malformed.
    """
    pairs = tuple(axes.items()) if isinstance(axes, Mapping) else axes
    if isinstance(pairs, Iterable) and not isinstance(pairs, str):
        pairs = tuple(pairs)
    if not isinstance(pairs, tuple) or not all(
        isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError(
            f"{setting}={axes!r} must be a mapping such as {{'data': -1, 'model': 2}}, or a list "
            "of pairs such as [('data', -1), ('model', 2)]"
        )
    names = check_names([name for name, _ in pairs], pairs, setting)
    sizes = check_sizes([size for _, size in pairs], setting, names)
    return tuple(zip(names, sizes, strict=True))


def check_names(axis_names: Sequence[str], sizes: Sequence[Any], setting: str) -> tuple[str, ...]:
    """Returns axis names as a tuple.

    Args:
      axis_names: one name per axis.
      sizes: the sizes of the axes, of which only the number is checked.
      setting: the setting that `sizes` comes from, for messages.

    Raises:
      ValueError: if a name is not a string, is empty or appears twice, or if the number of names
        differs from the number of sizes.
    """
    one = isinstance(axis_names, str)
    names = (axis_names,) if one else as_tuple_of(axis_names, 'axis names')
    if isinstance(sizes, str) or not hasattr(sizes, '__len__') or not len(sizes):
        raise ValueError(f'{setting}={sizes!r} must be a sequence of sizes, one per axis')
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f'axis names {names} must be non-empty strings')
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f'axis name {repeated[0]!r} appears twice in {names}')
    if len(names) != len(sizes):
        raise ValueError(f'{setting} has {len(sizes)} sizes for {len(names)} axis names {names}')
    return names


def check_sizes(
    sizes: Sequence[int], setting: str, names: Sequence[str] | None = None
) -> tuple[int, ...]:
    """Returns axis sizes as Python integers.

    Raises:
      ValueError: if a size is neither an integer >= 1 nor -1, or if several sizes are -1.
    """
    given = tuple(sizes)
    shown = f'{setting} {_shown(given, setting, names)}'
    for size in given:
        is_rest = isinstance(size, int | np.integer) and size == -1
        if not is_count(size) and not is_rest:
            raise ValueError(
                f'{shown}: the size {size!r} must be an integer >= 1, or -1 for whatever remains'
            )
    if given.count(-1) > 1:
        raise ValueError(f'{shown} has {given.count(-1)} sizes of -1: only one can be -1')
    return tuple(int(size) for size in given)


def fill(
    sizes: Sequence[int],
    total: int,
    setting: str,
    counted: str,
    context: str = '',
    names: Sequence[str] | None = None,
) -> tuple[int, ...]:
    """Returns axis sizes whose product is `total`, with -1 replaced by whatever remains.

    Args:
      sizes: the size of each axis.
      total: the number of devices, slices or processes that the axes must cover.
      setting: the name of the setting that `sizes` comes from, for messages.
      counted: what `total` counts, for messages, for example 'devices'.
      context: a phrase that follows the sizes in messages.
      names: the axis names, with which messages show the sizes of MeshConfig.

    Raises:
      ValueError: if a size is malformed, or if no value of -1 gives the product `total`. The
        message has the nearest sizes that fit.
    """
    given = check_sizes(sizes, setting, names)
    known = math.prod(size for size in given if size != -1)
    if -1 in given and total % known == 0:
        return tuple(total // known if size == -1 else size for size in given)
    if known != total or -1 in given:
        needs = f'needs a multiple of {known}' if -1 in given else f'has product {known}'
        raise ValueError(
            f'{setting} {_shown(given, setting, names)}{context} {needs}, but the number of '
            f'{counted} is {total}{_suggestion(given, total, setting, names)}'
        )
    return given


def divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def check_axis_types(axis_types: AxisTypes) -> tuple[AxisType, ...]:
    """Returns axis types, given as AxisType or by name, as a tuple.

    Raises:
      ValueError: if an entry is not an axis type.
    """
    one = axis_types is None or isinstance(axis_types, AxisType | str)
    given = (axis_types,) if one else as_tuple_of(axis_types, 'axis_types')
    by_name = {axis_type.name.lower(): axis_type for axis_type in AxisType}
    types = tuple(by_name.get(t.lower()) if isinstance(t, str) else t for t in given)
    if not types or not all(isinstance(t, AxisType) for t in types):
        raise ValueError(
            f'axis_types={axis_types!r} must be one of {", ".join(by_name)}, or one of these for '
            'each axis'
        )
    return types  # type: ignore[return-value]


def _shown(sizes: Sequence[int], setting: str, names: Sequence[str] | None) -> str:
    """Sizes as the caller writes them: as a mapping for MeshConfig, else in a tuple."""
    if names is None or setting not in ('axes', 'dcn'):
        return str(tuple(sizes))
    return str(dict(zip(names, sizes, strict=True)))


def _suggestion(sizes: Sequence[int], total: int, setting: str, names: Sequence[str] | None) -> str:
    """The sizes with product `total` that are nearest to `sizes`, where -1 stands for any size."""
    if len(sizes) > 5:  # too many to try
        return ''

    def distance(candidate: Sequence[int]) -> tuple[float, ...]:
        pairs = zip(candidate, sizes, strict=True)
        ratios = [0.0 if size == -1 else abs(math.log(c / size)) for c, size in pairs]
        return (round(sum(ratios), 6), *reversed(ratios))  # of equals, change the last axes least

    nearest = min(_shapes(total, len(sizes)), key=distance)
    return f'; the nearest that fits: {_shown(nearest, setting, names)}'


def _shapes(total: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    if num_axes == 1:
        yield (total,)
        return
    for first in divisors(total):
        for rest in _shapes(total // first, num_axes - 1):
            yield (first, *rest)
