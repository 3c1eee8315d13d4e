"""What a mesh is asked for: sizes, names and devices, each wrong one an error with a way out."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from partitioning.hardware import JaxDevice
from partitioning.rules import is_count


def check_devices(
    devices: Sequence[JaxDevice] | None, backend: str | None = None
) -> list[JaxDevice]:
    """The devices to make a mesh of, by default all of `backend`; each once.

    Raises:
      ValueError: none at all, or the same one twice.
    """
    if devices is not None and backend is not None:
        raise ValueError(f'backend={backend!r} and devices each decide the devices: keep one')
    try:
        found = list(jax.devices(backend) if devices is None else devices)
    except TypeError:
        found = [devices]
    if not found:
        raise ValueError('devices is empty: a mesh needs at least one')
    for device in found:
        if not hasattr(device, 'process_index') or not hasattr(device, 'device_kind'):
            raise ValueError(
                f'devices must be JAX devices, such as jax.devices() or the devices of '
                f'describe_topology(...), not {device!r}'
            )
    kinds = sorted({(device.platform, device.device_kind) for device in found})
    if len(kinds) > 1:
        listed = ' and '.join(f'{kind} ({platform})' for platform, kind in kinds)
        raise ValueError(f'one mesh takes devices of one kind, not {listed}')
    seen = collections.Counter(device.id for device in found)
    twice = [number for number, count in seen.items() if count > 1]
    if twice:
        raise ValueError(
            f'{len(twice)} of the {len(seen)} devices are given more than once, for example '
            f'device {twice[0]} {seen[twice[0]]} times'
        )
    return found


def as_tuple_of(value: Any, setting: str) -> tuple[Any, ...]:
    """A setting of several entries as a tuple.

    Raises:
      ValueError: it is no sequence, or a text.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f'{setting}={value!r} must be a sequence, for example (2, 4)')
    return tuple(value)


def check_names(axis_names: Sequence[str], sizes: Sequence[Any], setting: str) -> tuple[str, ...]:
    """Axis names as a tuple: one for each of the sizes of `setting`, none twice.

    Raises:
      ValueError: other names.
    """
    one = isinstance(axis_names, str)
    names = (axis_names,) if one else as_tuple_of(axis_names, 'axis names')
    if isinstance(sizes, str) or not hasattr(sizes, '__len__') or not len(sizes):
        raise ValueError(f'{setting}={sizes!r} must be sizes, one for each axis of {names}')
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f'axis names {names} must be strings that are not empty')
    twice = [name for name, count in collections.Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f'axis names {names} have {twice[0]!r} more than once')
    if len(names) != len(sizes):
        raise ValueError(f'{setting} has {len(sizes)} entries for {len(names)} axis names {names}')
    return names


def fill(
    sizes: Sequence[int], total: int, setting: str, what: str, beside: str = ''
) -> tuple[int, ...]:
    """Axis sizes whose product is `total`, with -1 made whatever remains.

    Raises:
      ValueError: sizes that are no positive whole numbers, several -1, or another product; the
        message names `setting`, what it is `beside`, `what` there are `total` of, and the nearest
        sizes that fit.
    """
    given = tuple(sizes)
    for size in given:
        whatever_remains = isinstance(size, int | np.integer) and size == -1
        if not is_count(size) and not whatever_remains:
            raise ValueError(
                f'{setting} {given}: {size!r} is no size; sizes are positive whole numbers, and '
                'one of them may be -1, for whatever remains'
            )
    if given.count(-1) > 1:
        raise ValueError(f'{setting} {given} has {given.count(-1)} sizes of -1: only one can be')
    known = math.prod(size for size in given if size != -1)
    if -1 in given and total % known == 0:
        return tuple(int(total // known if size == -1 else size) for size in given)
    if known != total or -1 in given:
        holds = f'needs a multiple of {known}' if -1 in given else f'has product {known}'
        raise ValueError(
            f'{setting} {given}{beside} {holds}, but the number of {what} is {total}'
            f'{_suggestion(given, total)}'
        )
    return tuple(int(size) for size in given)


def divisors(number: int) -> list[int]:
    """All divisors, in rising order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _suggestion(sizes: Sequence[int], total: int) -> str:
    """The sizes with product `total` nearest to `sizes` (-1: any), the last ones changed least."""
    if len(sizes) > 5:  # too many to try
        return ''

    def distance(candidate: Sequence[int]) -> tuple[float, ...]:
        pairs = zip(candidate, sizes, strict=True)
        apart = [0.0 if size == -1 else abs(math.log(c / size)) for c, size in pairs]
        return (round(sum(apart), 6), *reversed(apart))

    nearest = min(_shapes(total, len(sizes)), key=distance)
    return f'; the nearest that fits: {tuple(nearest)}'


def _shapes(total: int, axes: int) -> Iterator[tuple[int, ...]]:
    if axes == 1:
        yield (total,)
        return
    for first in divisors(total):
        for rest in _shapes(total // first, axes - 1):
            yield (first, *rest)
