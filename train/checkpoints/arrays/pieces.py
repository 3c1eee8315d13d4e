"""Arrays piece by piece, so that an array that is larger than the memory can be copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from train.checkpoints.arrays.stored import Index, StoredArray

# A piece is larger only if one chunk of the file is.
PIECE_BYTES = 2**26


def split(array: StoredArray) -> Iterator[Index]:
    """The slices of an array, in the order of its values, of at most 64 MiB each.

    Every chunk of the file is in one piece, because a part of it costs as much as all of it.
    """
    piece = piece_shape(array)
    starts = (range(0, size, max(step, 1)) for size, step in zip(array.shape, piece, strict=True))
    for corner in itertools.product(*starts):
        bounds = zip(corner, piece, array.shape, strict=True)
        yield tuple(slice(at, min(at + step, size)) for at, step, size in bounds)


def piece_shape(array: StoredArray) -> tuple[int, ...]:
    """The shape of all pieces of an array but the last ones, which may be smaller."""
    chunk = array.chunk or (1,) * array.ndim
    shape = list(map(min, chunk, array.shape))
    for dimension in reversed(range(array.ndim)):
        rest = math.prod(shape) * array.dtype.itemsize
        count = max(PIECE_BYTES // max(rest, 1), 1)
        shape[dimension] = min(count * shape[dimension], array.shape[dimension])
        if shape[dimension] < array.shape[dimension]:
            break
    return tuple(shape)
