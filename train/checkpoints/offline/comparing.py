"""Two checkpoints compared: names, shapes, dtypes, and then values, piece by piece."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from train.checkpoints.arrays.stored import StoredArray, split

# The number of values that are compared at once. Differences are computed in float64.
BLOCK = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayDifference:
    """How an array differs between two checkpoints.

    Attributes:
      what: 'only in the first', 'only in the second', 'shape', 'dtype' or 'values'.
      first, second: the shape and dtype in each of them, or None where it is absent.
      absolute: the largest absolute difference of two values; NaN if only one of them is NaN.
      relative: the largest absolute difference, relative to the larger of the two values.
      count: the number of values with different bits.
    """

    name: str
    what: str
    first: str | None = None
    second: str | None = None
    absolute: float | None = None
    relative: float | None = None
    count: int | None = None


def compare(
    first: Mapping[str, StoredArray],
    second: Mapping[str, StoredArray],
    report: Callable[[int], None],
    *,
    values: bool = True,
) -> Iterator[ArrayDifference]:
    """Compares the arrays of two checkpoints, by name. Yields each that differs, in their order.

    `report` receives the number of bytes of every piece whose `values` have been compared.
    """
    for name, array in first.items():
        other = second.get(name)
        if other is None:
            yield ArrayDifference(name=name, what='only in the first', first=_show(array))
            continue
        what = 'shape' if array.shape != other.shape else 'dtype'
        found = ArrayDifference(name=name, what=what, first=_show(array), second=_show(other))
        if array.shape != other.shape or array.dtype != other.dtype:
            yield found
        elif values and (figures := _compare_values(array, other, report)):
            absolute, relative, count = figures
            yield dataclasses.replace(
                found, what='values', absolute=absolute, relative=relative, count=count
            )
    for name, array in second.items():
        if name not in first:
            yield ArrayDifference(name=name, what='only in the second', second=_show(array))


def _show(array: StoredArray) -> str:
    shape = 'x'.join(map(str, array.shape)) or 'scalar'
    return f'{shape} {array.dtype}'


def _compare_values(
    first: StoredArray, second: StoredArray, report: Callable[[int], None]
) -> tuple[float, float, int] | None:
    """The largest absolute and relative difference of two arrays, and the number of other bits.

    None if all values are equal. Both arrays have the same shape and dtype.
    """
    absolute, relative, count = [0.0], [0.0], 0
    for index in split(first):
        pieces = [array.start(index) for array in (first, second)]
        ours, theirs = (np.ascontiguousarray(piece.result()).reshape(-1) for piece in pieces)
        for begin in range(0, ours.size, BLOCK):
            block = slice(begin, begin + BLOCK)
            # By bits, so that NaN is equal to itself.
            bits = [x[block].view(np.uint8).reshape(-1, x.itemsize) for x in (ours, theirs)]
            differ = (bits[0] != bits[1]).any(axis=1)
            if differ.any():
                count += int(differ.sum())
                largest = _differences(ours[block][differ], theirs[block][differ])
                absolute.append(largest[0])
                relative.append(largest[1])
        report(ours.nbytes)
    return (float(np.max(absolute)), float(np.max(relative)), count) if count else None


def _differences(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """The largest absolute and relative difference between values that are not all equal."""
    wide = np.complex128 if ours.dtype.kind == 'c' else np.float64
    a, b = ours.astype(wide), theirs.astype(wide)
    with np.errstate(invalid='ignore'):
        absolute = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    scale = np.maximum(np.abs(a), np.abs(b))
    with np.errstate(divide='ignore', invalid='ignore'):
        relative = np.where(absolute == 0, 0.0, absolute / scale)
    return float(np.max(absolute)), float(np.max(relative))
