"""Arrays piece by piece, so that an array that is larger than the memory can be copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from train.checkpoints.stored import Index, StoredArray

# A piece is larger only if one chunk of the file is.
PIECE_BYTES = 2**28


def split(array: StoredArray, *, whole_rows: bool = False) -> Iterator[Index]:
    """The slices of an array, in the order of its values, of at most 256 MiB each.

    Every chunk of the file is in one piece, because a part of it costs as much as all of it.

    Args:
      array: the array.
      whole_rows: whether each piece has all values between its first and its last one.
    """
    shape = piece_shape(array, whole_rows=whole_rows)
    starts = [range(0, size, max(part, 1)) for size, part in zip(array.shape, shape, strict=True)]
    for corner in itertools.product(*starts):
        bounds = zip(corner, shape, array.shape, strict=True)
        yield tuple(slice(at, min(at + part, size)) for at, part, size in bounds)


def piece_shape(array: StoredArray, *, whole_rows: bool = False) -> tuple[int, ...]:
    """The shape of all pieces of an array but the last ones, which may be smaller."""
    chunk = array.chunk or (1,) * array.ndim
    shape = list(map(min, chunk, array.shape))
    if whole_rows:
        first = next((d for d, size in enumerate(shape) if size > 1), array.ndim)
        shape[first + 1 :] = array.shape[first + 1 :]
    for dimension in reversed(range(array.ndim)):
        rest = math.prod(shape) // max(shape[dimension], 1) * array.dtype.itemsize
        step = min(chunk[dimension], array.shape[dimension])
        count = PIECE_BYTES // max(rest * step, 1)
        shape[dimension] = min(max(count, 1) * step, array.shape[dimension])
        if shape[dimension] < array.shape[dimension]:
            break
    return tuple(shape)


def divide(shape: Sequence[int], itemsize: int, max_bytes: int) -> tuple[int, ...]:
    """Divides a shape evenly into chunks of at most `max_bytes`, if its sizes allow it.

    The largest dimension is divided by its smallest factor until the chunks are small enough.

    Args:
      shape: the shape.
      itemsize: the size of an element, in bytes.
      max_bytes: the largest chunk.
    """
    chunk = list(shape)
    while math.prod(chunk) * itemsize > max_bytes:
        largest = max(range(len(chunk)), key=chunk.__getitem__)
        size = chunk[largest]
        factors = range(2, math.isqrt(size) + 1)
        chunk[largest] = size // next((f for f in factors if size % f == 0), size)
    return tuple(chunk)
