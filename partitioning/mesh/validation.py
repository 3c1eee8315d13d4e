"""Checks the settings of a mesh, and converts them to one form."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from jax.sharding import AxisType

from partitioning.rules import is_count

AxisTypes = AxisType | str | Sequence[AxisType | str]
AxisSizes = Mapping[str, int] | Iterable[tuple[str, int]]


class Axes(Mapping[str, int]):
    """The sizes of the axes of a mesh, in their order, which equality includes."""

    __slots__ = ('_pairs',)

    def __init__(self, pairs: Iterable[tuple[str, int]]):
        self._pairs = tuple(pairs)

    def __getitem__(self, name: str) -> int:
        return dict(self._pairs)[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._pairs == tuple(other.items())

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return repr(dict(self._pairs))


def check_count(value: Any, setting: str) -> None:
    """Raises ValueError if a setting is not an integer >= 1."""
    if not is_count(value):
        raise ValueError(f'{setting}={value!r} must be an integer >= 1')


def as_tuple_of(value: Any, setting: str) -> tuple[Any, ...]:
    """Returns a setting as a tuple; raises ValueError for a string or a non-iterable value."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f'{setting}={value!r} must be a sequence, for example (2, 4)')
    return tuple(value)


def check_axis_types(axis_types: AxisTypes) -> tuple[AxisType, ...]:
    """Returns axis types, also given by name, as a tuple; raises ValueError for anything else."""
    one = axis_types is None or isinstance(axis_types, AxisType | str)
    given = (axis_types,) if one else as_tuple_of(axis_types, 'axis_types')
    by_name = {axis_type.name.lower(): axis_type for axis_type in AxisType}
    types = tuple(by_name.get(t.lower()) if isinstance(t, str) else t for t in given)
    if not types or not all(isinstance(t, AxisType) for t in types):
        raise ValueError(
            f'axis_types={axis_types!r} must be one of {", ".join(by_name)}, or one of these for '
            'each axis'
        )
    return cast(tuple[AxisType, ...], types)


def check_axes(axes: AxisSizes, setting: str) -> Axes:
    """Returns the sizes of axes by name; raises ValueError if they are malformed."""
    given = axes.items() if isinstance(axes, Mapping) else axes
    pairs = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ValueError(
            f"{setting}={axes!r} must be a mapping such as {{'data': -1, 'model': 2}}, or a list "
            "of pairs such as [('data', -1), ('model', 2)]"
        )
    names = check_names([name for name, _ in pairs], pairs, setting)
    sizes = _check_sizes([size for _, size in pairs], setting, names)
    return Axes(zip(names, sizes, strict=True))


def check_names(axis_names: Sequence[str], sizes: Sequence[Any], setting: str) -> tuple[str, ...]:
    """Returns axis names as a tuple, one for each of the sizes that come from a setting.

    Raises:
      ValueError: if a name is not a string, is empty or appears twice, or if the numbers differ.
    """
    one = isinstance(axis_names, str)
    names = (axis_names,) if one else as_tuple_of(axis_names, 'axis names')
    if isinstance(sizes, str) or not hasattr(sizes, '__len__') or not len(sizes):
        raise ValueError(f'{setting}={sizes!r} must be a sequence of sizes, one per axis')
    if not all(isinstance(name, str) and name for name in names):
        swapped = all(isinstance(name, int) for name in names)
        hint = ': the sizes come before the names' if swapped else ''
        raise ValueError(f'axis names {names} must be non-empty strings{hint}')
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f'axis name {repeated[0]!r} appears twice in {names}')
    if len(names) != len(sizes):
        raise ValueError(
            f'{setting} has {len(sizes)} sizes for {len(names)} axis names {names}: write one name '
            'for each size'
        )
    return names


def fill(
    sizes: Sequence[int],
    total: int,
    setting: str,
    counted: str,
    context: str = '',
    names: Sequence[str] | None = None,
) -> tuple[int, ...]:
    """Returns axis sizes whose product is `total`, with -1 replaced by whatever remains.

    Messages name the setting that the sizes come from, what `total` counts, such as 'devices', a
    phrase that follows the sizes, and for MeshConfig the names of the axes.

    Raises:
      ValueError: if a size is malformed, or nothing fits; the message has the nearest that does.
    """
    given = _check_sizes(sizes, setting, names)
    known = math.prod(size for size in given if size != -1)
    if -1 in given and total % known == 0:
        return tuple(total // known if size == -1 else size for size in given)
    if -1 not in given and known == total:
        return given
    needs = f'needs a multiple of {known}' if -1 in given else f'has product {known}'
    near = _nearest_sizes(given, total)
    hint = f'; the nearest that fits: {show_sizes(near, setting, names)}' if near else ''
    raise ValueError(
        f'{setting} {show_sizes(given, setting, names)}{context} {needs}, but the number of '
        f'{counted} is {total}{hint}'
    )


def list_divisors(number: int) -> str:
    """Returns all divisors in ascending order, for messages."""
    return ', '.join(map(str, _divisors(number)))


def show_sizes(sizes: Sequence[int], setting: str, names: Sequence[str] | None) -> str:
    """Sizes as the caller writes them: as a mapping for MeshConfig, else as a tuple."""
    if names is None or setting not in ('axes', 'dcn'):
        return str(tuple(sizes))
    return str(dict(zip(names, sizes, strict=True)))


def _check_sizes(
    sizes: Sequence[int], setting: str, names: Sequence[str] | None
) -> tuple[int, ...]:
    """Returns sizes as Python integers, each of which must be >= 1, except for one -1."""
    given = tuple(sizes)
    shown = f'{setting} {show_sizes(given, setting, names)}'
    for size in given:
        if not is_count(size) and not (isinstance(size, int | np.integer) and size == -1):
            raise ValueError(
                f'{shown}: the size {size!r} must be an integer >= 1, or -1 for whatever remains'
            )
    if given.count(-1) > 1:
        raise ValueError(f'{shown} has {given.count(-1)} sizes of -1: only one can be -1')
    return tuple(int(size) for size in given)


def _nearest_sizes(sizes: Sequence[int], total: int) -> tuple[int, ...]:
    """Returns the sizes with product `total` that are nearest to `sizes`, or () if too many fit."""

    def distance(candidate: Sequence[int]) -> tuple[float, ...]:
        pairs = zip(candidate, sizes, strict=True)
        ratios = [0.0 if size == -1 else abs(math.log(c / size)) for c, size in pairs]
        return (round(sum(ratios), 6), *reversed(ratios))  # of equals, change the last axes least

    return () if len(sizes) > 5 else min(_shapes(total, len(sizes)), key=distance)


def _shapes(total: int, num_axes: int) -> list[tuple[int, ...]]:
    if num_axes == 1:
        return [(total,)]
    return [(n, *rest) for n in _divisors(total) for rest in _shapes(total // n, num_axes - 1)]


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
