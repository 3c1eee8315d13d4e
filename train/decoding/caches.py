"""Caches of keys and values: which of their dimensions holds the rows of a batch.

A cache is any pytree of arrays. Its `axes` is a tree of the same structure that gives, for each
array, the dimension of the rows, or `NO_ROWS` if all rows share the array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

NO_ROWS = -1
Cache = Any


def find_row_axes(make_cache: Callable[..., Cache], *arguments: Any) -> Any:
    """Finds which dimension of each array of a cache holds the rows.

    The function is traced for batches of two sizes, and nothing is computed: the dimension that
    grows with the batch holds the rows.

    Args:
      make_cache: the function that returns the cache of a batch.
      arguments: pytrees of arrays, each [batch, ...], or of their ShapeDtypeStructs.

    Returns:
      The dimension of each array, or `NO_ROWS`; a tree with the structure of the cache.

    Raises:
      ValueError: if several dimensions of an array depend on the size of the batch.
    """

    def trace(times: int) -> Any:  # a multiple, because the mesh divides the rows
        resized = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] * times, *x.shape[1:]), x.dtype), arguments
        )
        return jax.eval_shape(make_cache, *resized)

    def axis(small: Any, large: Any) -> int:
        sizes = zip(small.shape, large.shape, strict=True)
        grown = [i for i, (a, b) in enumerate(sizes) if a != b]
        if len(grown) > 1:
            raise ValueError(
                f'a cached array is {small.shape} for one batch and {large.shape} for one of twice '
                'the size: only one dimension may hold the rows'
            )
        return grown[0] if grown else NO_ROWS

    return jax.tree.map(axis, trace(1), trace(2))


def tile(x: jax.Array, num_decodes: int, axis: int = 0) -> jax.Array:
    """Repeats each row, so that the decodes of a row follow one another.

    Unlike `jnp.repeat`, which gathers, it keeps the sharding of the rows.

    Args:
      x: an array with rows.
      num_decodes: the number of copies of each row.
      axis: the dimension of the rows. `NO_ROWS` returns the array as it is.
    """
    if num_decodes == 1 or axis == NO_ROWS:
        return x
    shape = (*x.shape[: axis + 1], num_decodes, *x.shape[axis + 1 :])
    return _merge(jnp.broadcast_to(jnp.expand_dims(x, axis + 1), shape), axis)


def tile_cache(cache: Cache, axes: Any, num_decodes: int) -> Cache:
    """Repeats the rows of every array of a cache; see `tile`."""
    return jax.tree.map(lambda x, axis: tile(x, num_decodes, axis), cache, axes)


def select_beams(cache: Cache, axes: Any, beams_BK: jax.Array) -> Cache:
    """Makes the cache of new beams from that of the beams that they continue.

    Args:
      cache: arrays with batch * beams rows.
      axes: their row dimensions.
      beams_BK: for each new beam, the index of the old beam among those of the row.
    """
    batch, num_beams = beams_BK.shape

    def select(x: jax.Array, axis: int) -> jax.Array:
        if axis == NO_ROWS:
            return x
        split = x.reshape(*x.shape[:axis], batch, num_beams, *x.shape[axis + 1 :])
        take = jax.vmap(lambda row, beams: jnp.take(row, beams, axis=axis), (axis, 0), axis)
        return _merge(take(split, beams_BK), axis)

    return jax.tree.map(select, cache, axes)


def _merge(x: jax.Array, axis: int) -> jax.Array:
    """Joins a dimension with the next one."""
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
