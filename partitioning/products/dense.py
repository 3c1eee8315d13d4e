"""Products of rows and weights, whose gradients are scattered while they are summed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.constraints import lay_out
from partitioning.products.sharing import Equation, Sharing, find_sharing, parse
from partitioning.products.sums import scatter_sum, sum_over, varying_axes


def multiply(
    equation: str,
    x: jax.Array,
    w: jax.Array,
    x_names: Sequence[Any],
    w_names: Sequence[Any],
    *,
    gradient_dtype: Any = None,
) -> jax.Array:
    """Multiplies rows by weights, like `jnp.einsum(equation, x, w.astype(x.dtype))`.

    Where mesh axes shard both the batch (or another dimension that the gradient of the weights sums
    over) and the weights, each device computes its addend of the gradient. The addends are summed
    so that each device receives its shard of the sum, which moves half the bytes of a sum that all
    devices receive. Mesh axes that shard only the batch, such as those over slices, sum the shards.
    XLA lays out everything else, and all of it where no mesh axis is shared.

    Args:
      equation: an einsum of two arrays, such as 'BLD,DF->BLF'.
      x: the rows.
      w: the weights, in any dtype. They are cast to the dtype of the rows before they are gathered.
      x_names: the logical axes of the rows, one name or None for each dimension.
      w_names: the logical axes of the weights.
      gradient_dtype: the dtype in which the gradient of the weights is summed over devices. By
        default, it is the dtype of the rows.

    Returns:
      The product, in the dtype of the rows. It has no forward-mode derivative where mesh axes are
      shared.

    Raises:
      ValueError: if the equation is not a product of rows and weights, or if the rules do not fit
        the mesh.
    """
    from flax.core import spmd  # the context that linen models read; heavy, so not at import

    letters, rules = parse(equation), spmd.get_logical_axis_rules()
    sharing = find_sharing(letters, x, w, x_names, w_names, rules)
    dtype = jnp.dtype(x.dtype if gradient_dtype is None else gradient_dtype)
    if sharing is None and dtype == x.dtype:
        return jnp.einsum(equation, x, w.astype(x.dtype))
    # In a shard_map both vary along the same axes, so it sums the gradient of one that does not.
    of_x, of_w = varying_axes(x), varying_axes(w)
    if of_w - of_x:
        x = jax.lax.pcast(x, tuple(of_w - of_x), to='varying')
    if of_x - of_w:
        w = jax.lax.pcast(w, tuple(of_x - of_w), to='varying')
    return _multiply(letters, sharing, dtype, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _multiply(
    letters: Equation, sharing: Sharing | None, dtype: Any, x: jax.Array, w: jax.Array
) -> jax.Array:
    w = _gather(letters, sharing, w.astype(x.dtype))
    return jnp.einsum(f'{letters.rows},{letters.weights}->{letters.result}', x, w)


def _forward(
    letters: Equation, sharing: Sharing | None, dtype: Any, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _multiply(letters, sharing, dtype, x, w), (x, w)


def _backward(
    letters: Equation,
    sharing: Sharing | None,
    dtype: Any,
    saved: tuple[jax.Array, jax.Array],
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    gathered = _gather(letters, sharing, w.astype(x.dtype))
    dx = jnp.einsum(f'{letters.result},{letters.weights}->{letters.rows}', dy, gathered)
    return dx, _gradient_of_weights(letters, sharing, dtype, x, dy).astype(w.dtype)


_multiply.defvjp(_forward, _backward)


def _gather(letters: Equation, sharing: Sharing | None, w: jax.Array) -> jax.Array:
    """Gathers weights over the axes that shard the rows, too, one dimension after another.

    XLA gathers two dimensions at once by a sum of padded shards, which moves twice the bytes. One
    dimension is left to XLA.
    """
    axes: dict[str, Any] = dict(sharing.weights) if sharing else {}
    if len(axes) < 2:
        return w
    for letter in (*axes,):
        axes[letter] = None
        spec = (axes.get(each, PartitionSpec.UNCONSTRAINED) for each in letters.weights)
        w = lay_out(w, PartitionSpec(*spec))
    return w


def _gradient_of_weights(
    letters: Equation, sharing: Sharing | None, dtype: Any, x: jax.Array, dy: jax.Array
) -> jax.Array:
    """Returns the gradient of the weights, in `dtype` and in their layout."""
    product = f'{letters.rows},{letters.result}->'
    if sharing is None:
        return jnp.einsum(product + letters.weights, x, dy, preferred_element_type=dtype)
    scattered = dict(sharing.weights)
    # Scattered dimensions are the first ones, so that each shard is contiguous before it moves.
    order = ''.join(sorted(letters.weights, key=lambda letter: letter not in scattered))

    def sum_shards(x: jax.Array, dy: jax.Array) -> jax.Array:
        dw = jnp.einsum(product + order, x, dy, preferred_element_type=dtype)
        for dimension, letter in enumerate(order[: len(scattered)]):
            dw = scatter_sum(dw, scattered[letter], dimension)
        return sum_over(dw, sharing.whole)

    # Over axes that are not Manual, XLA would gather the gradient before it is scattered.
    kept = dict(sharing.kept)
    rows = dict(sharing.rows) | kept
    dw = jax.shard_map(
        sum_shards,
        in_specs=(_spec(letters.rows, rows), _spec(letters.result, rows)),
        out_specs=_spec(order, scattered | kept),
        # jax cannot map a shard_map with vmap over an spmd_axis_name that is not Manual in it.
        axis_names={*sharing.axes, *sharing.unused, *(a for axes in kept.values() for a in axes)},
        # Inside another shard_map, jax keeps track of what varies over the axes of that one.
        # Elsewhere there is nothing to track, and it fails in vmap with an spmd_axis_name.
        check_vma=bool(varying_axes(dy)),
    )(x, dy)
    return dw.transpose([order.index(letter) for letter in letters.weights])


def _spec(letters: str, axes: dict[str, tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(letter) for letter in letters))
