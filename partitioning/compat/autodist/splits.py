"""How AutoDist cuts a dimension: into how many shards, of which sizes, and where each row goes.

The remainder goes to the first shards: 10 rows in 3 are 4, 3 and 3. jax, torch.chunk and XLA's
padding fill shards up instead, 4, 4 and 2, so what lies where differs where sizes do not divide.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from partitioning.rules import is_count


def split_sizes(size: int, num_shards: int) -> tuple[int, ...]:
    """Rows of each shard of a dimension: all equal, or the first ones one row larger.

    Args:
      size: of the dimension.
      num_shards: in how many it is cut.

    Raises:
      ValueError: no positive whole numbers, or more shards than rows.
    """
    if not is_count(size) or not is_count(num_shards):
        raise ValueError(f'size {size!r} and num_shards {num_shards!r} must be 1 or more')
    if num_shards > size:
        raise ValueError(
            f'a dimension of size {size} has no {num_shards} shards: use {size} or fewer'
        )
    least, larger = divmod(size, num_shards)
    return tuple(least + (shard < larger) for shard in range(num_shards))


def split_offsets(size: int, num_shards: int) -> tuple[int, ...]:
    """The first row of each shard of a dimension; arguments and errors as of `split_sizes`."""
    sizes = split_sizes(size, num_shards)
    return tuple(itertools.accumulate(sizes[:-1], initial=0))


def split_rows(
    rows: Sequence[int] | np.ndarray, size: int, num_shards: int, axis: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The shard that holds each row of a sparse gradient, and its number within that shard.

    Usage:
      shards, local = split_rows(gradient.indices, vocabulary, 3)

    Args:
      rows: [n], rows of the variable.
      size: how many rows the variable has.
      num_shards: in how many it is cut.
      axis: the dimension that is cut; a gradient of rows can only be cut by rows, along 0.

    Returns:
      Two arrays int64 [n]: the shard, and the row within it.

    Raises:
      ValueError: another axis, rows that the variable has not; and as `split_sizes`.
    """
    check_sparse_axis(axis)
    offsets = np.array(split_offsets(size, num_shards))
    found: np.ndarray[Any, Any] = np.asarray(rows)
    if found.size and found.dtype.kind not in 'iu':
        raise ValueError(f'rows are {found.dtype}, not whole numbers')
    found = found.astype(np.int64)
    outside = found[(found < 0) | (found >= size)]
    if outside.size:
        raise ValueError(f'row {outside.flat[0]} is not in a variable of {size} rows')
    shards = np.searchsorted(offsets, found, side='right') - 1
    return shards, found - offsets[shards]


def check_sparse_axis(axis: int, name: str = '') -> None:
    """Raises ValueError unless a variable with sparse gradients is cut along its rows."""
    if axis != 0:
        raise ValueError(
            'Embedding variables can only be partitioned along the first axis, since their '
            f'gradients are rows: {f"{name} is" if name else "this one is"} cut along {axis}. '
            'Cut it along 0, or do not declare it sparse.'
        )


def even_shards(size: int) -> int:
    """In how many equal shards AutoDist cuts a dimension: its smallest divisor of 2 or more."""
    divisors = (n for n in range(2, int(size**0.5) + 1) if size % n == 0)
    return max(next(divisors, size), 1)


def uneven_shards(size: int) -> int:
    """In how many shards UnevenPartitionedPS cuts a dimension: the fewest that do not divide it.

    Of 1 and 2, which every number of shards up to them divides, as many as there are rows.
    """
    return max(next((n for n in range(2, size) if size % n), size), 1)
