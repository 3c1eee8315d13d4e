"""Arrays piece by piece, so that an array that is larger than the memory can be copied."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from train.checkpoints.arrays.stored import Index, StoredArray

# A piece is larger only if one chunk of the file is.
PIECE_BYTES = 2**28


def split(array: StoredArray) -> Iterator[Index]:
    """The slices of an array, in the order of its values, of at most 256 MiB each.

    Every chunk of the file is in one piece, because a part of it costs as much as all of it.
    """
    return grid(array.shape, piece_shape(array))


def grid(shape: Sequence[int], part: Sequence[int]) -> Iterator[Index]:
    """The slices that divide a shape into parts; the last ones may be smaller."""
    starts = (range(0, size, max(step, 1)) for size, step in zip(shape, part, strict=True))
    for corner in itertools.product(*starts):
        bounds = zip(corner, part, shape, strict=True)
        yield tuple(slice(at, min(at + step, size)) for at, step, size in bounds)


def piece_shape(array: StoredArray) -> tuple[int, ...]:
    """The shape of all pieces of an array but the last ones, which may be smaller."""
    chunk = array.chunk or (1,) * array.ndim
    shape = list(map(min, chunk, array.shape))
    for dimension in reversed(range(array.ndim)):
        rest = math.prod(shape) // max(shape[dimension], 1) * array.dtype.itemsize
        step = min(chunk[dimension], array.shape[dimension])
        count = max(PIECE_BYTES // max(rest * step, 1), 1)
        # A power of two, which `chunk_shape` can divide.
        whole = count * step >= array.shape[dimension]
        count = count if whole else 2 ** (count.bit_length() - 1)
        shape[dimension] = min(count * step, array.shape[dimension])
        if shape[dimension] < array.shape[dimension]:
            break
    return tuple(shape)


def chunk_shape(array: StoredArray, max_bytes: int) -> tuple[int, ...]:
    """The shape of the chunks in which the pieces of an array are written.

    A chunk is a part of one piece, so it is written once. It has at most `max_bytes`, unless the
    sizes of the chunks that are read have only large factors. `max_bytes` is the size of the
    largest chunk.
    """
    piece = piece_shape(array)
    chunk = list(piece)
    while math.prod(chunk) * array.dtype.itemsize > max_bytes:
        halves = {
            dimension: half
            for dimension, size in enumerate(chunk)
            if (half := _divide(size, piece[dimension] == array.shape[dimension])) < size
        }
        if not halves:
            break
        largest = max(halves, key=chunk.__getitem__)
        chunk[largest] = halves[largest]
    return tuple(chunk)


def _divide(size: int, is_whole: bool) -> int:
    """A part of a size, about half of it. Parts of a piece that is not a whole array are equal."""
    if is_whole:
        return -(-size // 2)
    return size // next((factor for factor in (2, 3, 5, 7) if size % factor == 0), 1)
