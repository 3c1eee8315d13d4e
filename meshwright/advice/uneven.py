"""Sizes that the devices along a mesh axis do not divide, such as a vocabulary of 32,003 on 8.

jax lays out such a dimension without a word: the compiler pads it, and gathers and cuts the array
wherever it is used otherwise, or every device has all of it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from meshwright.advice.advised import Told
from meshwright.causes.cause import CodeChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import in_words, spec_text
from meshwright.jaxpr.primitives import CONSTRAINTS
from meshwright.jaxpr.values import Axes, Value
from meshwright.program.collectives import Collective
from partitioning.plan.rows import PlanRow

_SHARE = 0.15  # of the parameters of a device, for a whole parameter to be worth padding
_ELEMENTS = 4  # of a whole dimension on each device, for it to be worth padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uneven(Told):
    """A dimension whose size the devices along its mesh axes do not divide.

    Attributes:
      axes: the mesh axes.
      path: the path of the parameter that is whole; '' where a constraint asks for the axes.
      sizes: the size, the part of a device, and the size with padding.
    """

    axes: Axes
    path: str
    sizes: tuple[int, int, int]

    @property
    def is_avoidable(self) -> bool:
        return not self.path

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        value = evidence.value if evidence is not None else None
        if self.path:
            return value is not None and self.path in (value.gradient_of, value.argument)
        if not {*collective.axes} & {*self.axes}:
            return False
        n, part, padded = self.sizes
        moved = {int(size) for text in collective.arrays for size in re.findall(r'\d+', text[3:])}
        # Small parts say little: 2 of 6 heads are as many as 2 rows.
        told = {n, padded} | ({part} if part > max(self._devices, 16) else set())
        return bool(moved & told) or (value is not None and n in value.shape)

    @property
    def _devices(self) -> int:
        return -(-self.sizes[0] // self.sizes[1])


def find_uneven(
    values: Iterable[Value], rows: Mapping[str, PlanRow], sizes: Mapping[str, int]
) -> tuple[Uneven, ...]:
    """Finds constraints on sizes that do not divide, and parameters that are whole for that reason.

    Args:
      values: the values of the function.
      rows: the layout of each argument, by its path.
      sizes: the size of each mesh axis.
    """
    found: dict[tuple[str, int, Axes], Uneven] = {}
    for value, d, axes, shards in uneven_constraints(values, sizes):
        one = _constrained(value, d, axes, shards)
        found.setdefault((value.line, value.shape[d], axes), one)
    return (*found.values(), *_whole_parameters(rows, sizes))


def uneven_constraints(
    values: Iterable[Value], sizes: Mapping[str, int]
) -> Iterator[tuple[Value, int, Axes, int]]:
    """Yields the constraints on dimensions that the devices along their axes do not divide.

    Args:
      values: the values of the function.
      sizes: the size of each mesh axis.

    Yields:
      The constrained value, the dimension, its mesh axes, and the number of devices along them.
    """
    for value in values:
        if value.primitive in CONSTRAINTS and value.layout is not None and not value.backward:
            for d, axes in enumerate(value.layout):
                shards = math.prod(sizes.get(a, 1) for a in axes)
                if value.shape[d] % shards:
                    yield value, d, axes, shards


def _constrained(value: Value, d: int, axes: Axes, shards: int) -> Uneven:
    n, part = value.shape[d], -(-value.shape[d] // shards)
    padded = part * shards
    dim = value.dims[d]
    origin = f' (dimension {dim.number} of {dim.argument})' if dim and dim.argument else ''
    array = in_words(value.operands[0]) if value.operands else 'an activation'
    return Uneven(
        line=value.line,
        axes=axes,
        array=array,
        path='',
        sizes=(n, part, padded),
        why=(
            f'the constraint at {value.line} shards dimension {d} of {value.shape}{origin} over '
            f'{over(axes)}, whose {shards} devices do not divide {n:,}: the compiler pads it to '
            f'{padded:,}, and moves the parts wherever it is used in another way'
        ),
        change=CodeChange(
            source=value.line,
            text=(
                f'make dimension {d}{origin} {padded:,} elements in place of {n:,}, the next '
                f'multiple of {shards}, and mask those that do not count; or leave {over(axes)} '
                f'out of the constraint at {value.line}'
            ),
        ),
    )


def _whole_parameters(rows: Mapping[str, PlanRow], sizes: Mapping[str, int]) -> Iterator[Uneven]:
    """Large parameters that are whole along an axis that shards others and does not divide them."""
    parameters = [row for row in rows.values() if row.role == 'parameters' and row.shape]
    total = sum(row.bytes_per_device for row in parameters)
    for row in parameters:
        now = axes_of_row(row)
        d = max(range(len(row.shape)), key=lambda d: row.shape[d])
        n = row.shape[d]
        if len(row.shape) < 2 or row.bytes_per_device < _SHARE * total:
            continue
        for axis, size in sizes.items():
            shards = math.prod(sizes.get(a, 1) for a in now[d]) * size
            if size == 1 or n % shards == 0 or n < _ELEMENTS * shards:
                continue
            if any(axis in axes for axes in now) or not _shards(axis, parameters):
                continue
            padded = -(-n // shards) * shards
            wanted = tuple((*axes, axis) if e == d else axes for e, axes in enumerate(now))
            yield Uneven(
                axes=(axis,),
                array=row.path,
                path=row.path,
                sizes=(n, padded // shards, padded),
                why=(
                    f'{row.path}, {row.shape} as {spec_text(now)}, is whole along {axis!r}: the '
                    f'{shards} devices do not divide dimension {d} of {n:,} elements'
                ),
                change=CodeChange(
                    source='',
                    text=(
                        f'make dimension {d} of {row.path} {padded:,} elements in place of {n:,}, '
                        f'the next multiple of {shards}, and lay it out as {spec_text(wanted)}'
                    ),
                ),
            )
            break


def _shards(axis: str, parameters: Iterable[PlanRow]) -> bool:
    return any(axis in axes for row in parameters for axes in axes_of_row(row))
