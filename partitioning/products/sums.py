"""Sums over the shards of mesh axes, inside a `jax.shard_map`."""

from __future__ import annotations

import jax
import numpy as np

from partitioning.products.rounds import rounds_along
from partitioning.rules import as_tuple


def scatter_sum(x: jax.Array, axes: str | tuple[str, ...], dimension: int) -> jax.Array:
    """Sums an array over Manual mesh axes and leaves each device one shard of the sum.

    It is `jax.lax.psum_scatter`, tiled, in the rounds that the machine needs: see `find_rounds`.
    The first dimension is the best one to scatter, because its shards are contiguous.

    Args:
      x: the addend of this device, of equal shape on all devices along the axes.
      axes: one or several Manual axes of the mesh. The shards of the result are in the order of the
        axes, the first axis slowest, as in a PartitionSpec.
      dimension: the dimension that is divided over the axes. They must divide its size.

    Returns:
      The shard of the sum that belongs to this device.
    """
    for axis in as_tuple(axes):
        size = jax.lax.axis_size(axis)
        if size == 1:
            continue
        order = np.arange(size).reshape(rounds_along(axis) or (size,))
        for number, together in enumerate(order.shape):
            groups = np.moveaxis(order, number, -1).reshape(-1, together).tolist()
            x = jax.lax.psum_scatter(
                x,
                axis,
                scatter_dimension=dimension,
                axis_index_groups=groups if together < size else None,
                tiled=True,
            )
    return x
