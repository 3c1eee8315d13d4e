"""Sums over the shards of mesh axes, inside a `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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

    def scatter(x: jax.Array) -> jax.Array:
        for axis in as_tuple(axes):
            if jax.lax.axis_size(axis) > 1:
                x = _scatter_along(axis, x, dimension)
        return x

    return _in_dtype_of_sums(scatter, x)


def sum_over(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Sums an array over Manual mesh axes, and every device along them has the sum."""
    return _in_dtype_of_sums(lambda x: jax.lax.psum(x, axes), x) if axes else x


def _scatter_along(axis: str, x: jax.Array, dimension: int) -> jax.Array:
    size = jax.lax.axis_size(axis)
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


def _in_dtype_of_sums(add: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Adds in the dtype of the array, and on CPUs in float32 at least.

    XLA's sums of 16 bits on CPUs are of float32, too, but next to Auto axes its compiler aborts the
    process: "Invalid binary instruction opcode copy", in jaxlib 0.10 to 0.12.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.device_kind != 'cpu' or x.dtype.itemsize > 2:
        return add(x)
    return add(x.astype(jnp.float32)).astype(x.dtype)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Returns the Manual mesh axes along which the shards of an array can differ."""
    aval: Any = jax.typeof(x)
    manual = getattr(aval, 'manual_axis_type', None)  # jax before 0.10 has only `vma`
    return aval.vma if manual is None else manual.varying
