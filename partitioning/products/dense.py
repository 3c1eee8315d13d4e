"""Products of rows and weights, whose gradients are scattered over the mesh axes of both."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from partitioning.constraints import lay_out
from partitioning.products.rounded import (
    Rounded,
    Rounding,
    multiply_values,
    spread,
    summed_dimensions,
)
from partitioning.products.sums import GRADIENT_RULES, scatter_sum, sum_over, varying_axes
from partitioning.rules import (
    LogicalAxisRules,
    drop_axes_of_names,
    free_axes,
    resolve_axes,
    sharding_axes,
)


class Equation(NamedTuple):
    """The letters of an einsum of rows and weights, one for each dimension."""

    rows: str
    weights: str
    result: str

    @property
    def summed(self) -> str:
        """The letters that the gradient of the weights sums over, such as the batch."""
        return ''.join(letter for letter in self.rows if letter not in self.weights)


class Sharing(NamedTuple):
    """The mesh axes over which the gradient of weights is summed, if it can stay scattered.

    Attributes:
      rows: for each letter that the gradient sums over, the mesh axes that shard it.
      weights: for each letter of the weights that these axes shard, too, its mesh axes.
      kept: for each letter of the weights that other axes shard, its mesh axes. They shard the rows
        or the result, and the gradient, in the same way.
      unused: the mesh axes that shard neither rows nor weights.
    """

    rows: tuple[tuple[str, tuple[str, ...]], ...]
    weights: tuple[tuple[str, tuple[str, ...]], ...]
    kept: tuple[tuple[str, tuple[str, ...]], ...]
    unused: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes over which the gradient is summed."""
        return tuple(axis for _, axes in self.rows for axis in axes)

    @property
    def whole(self) -> tuple[str, ...]:
        """The mesh axes over which the gradient is summed and stays whole."""
        scattered = {axis for _, axes in self.weights for axis in axes}
        return tuple(axis for axis in self.axes if axis not in scattered)


def parse(equation: str) -> Equation:
    """Parses an einsum of two arrays, such as 'BLD,DF->BLF'.

    Raises:
      ValueError: if it has not two arrays, or if the result has a letter of neither, or lacks a
        letter that only one of them has.
    """
    inputs, arrow, result = equation.replace(' ', '').partition('->')
    rows, comma, weights = inputs.partition(',')
    alone = {*rows} ^ {*weights}
    if not (arrow and comma) or ',' in weights or not alone <= {*result} <= {*rows, *weights}:
        raise ValueError(
            f"{equation!r} is not a product of rows and weights: write one like 'BLD,DF->BLF', "
            'whose result has each letter of one array only'
        )
    return Equation(rows, weights, result)


def find_sharing(
    equation: Equation,
    x: jax.Array,
    w: jax.Array,
    x_names: Sequence[Any],
    w_names: Sequence[Any],
    rules: LogicalAxisRules,
) -> Sharing | None:
    """Returns how the gradient of weights `w` is summed and scattered over the mesh that is set.

    `x_names` and `w_names` are the logical axes of the two arrays. GRADIENT_RULES lay out the
    gradient if they are set, and otherwise `rules`, which are the rules of the context.

    The result is None if no mesh axis shards both the summed dimensions and the weights. It is also
    None without a mesh, without rules, and on meshes with Explicit axes, where jax lays out
    gradients by itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not _has_layouts(mesh, rules):
        return None
    of_x = _axes_of_letters(equation.rows, x_names, x.shape, rules, mesh)
    of_gradient = rules if (own := GRADIENT_RULES.get()) is None else own
    of_w = _axes_of_letters(equation.weights, w_names, w.shape, of_gradient, mesh)
    rows = tuple((letter, of_x[letter]) for letter in equation.summed if of_x[letter])
    summed = {axis for _, axes in rows for axis in axes}
    weights = []
    for letter, axes in of_w.items():
        # A dimension is divided over its first axes first, so that the gradient can be scattered
        # over the first of them, but not over a later one alone.
        count = next((i for i, axis in enumerate(axes) if axis not in summed), len(axes))
        if count and not summed & {*axes[count:]}:
            weights.append((letter, axes[:count]))
    kept = tuple((k, axes) for k, axes in of_w.items() if axes and not summed & {*axes})
    used = {axis for axes in (*of_x.values(), *of_w.values()) for axis in axes}
    unused = tuple(axis for axis in free_axes(mesh) if axis not in used)
    return Sharing(rows, tuple(weights), kept, unused) if weights else None


def _has_layouts(mesh: AbstractMesh, rules: LogicalAxisRules) -> bool:
    """Whether rules lay out arrays over the mesh that is set, and jax does not by itself."""
    return not mesh.empty and bool(rules) and AxisType.Explicit not in mesh.axis_types


def _axes_of_letters(
    letters: str,
    names: Sequence[Any],
    shape: Sequence[int],
    rules: LogicalAxisRules,
    mesh: AbstractMesh,
) -> dict[str, tuple[str, ...]]:
    """The mesh axes of more than one device that shard each dimension of an array."""
    # An array that cannot be sharded is an error where it is laid out. Here it shares no axes.
    if manual := {*mesh.manual_axes}:
        names, rules = drop_axes_of_names(names, rules, mesh, manual)
    resolved = resolve_axes(
        names, rules, mesh=mesh, shape=shape, on_unmatched='replicate', on_indivisible='replicate'
    )
    found = (sharding_axes(dimension.mesh_axes) for dimension in resolved)
    return {
        letter: tuple(axis for axis in axes if mesh.shape[axis] > 1)
        for letter, axes in zip(letters, found, strict=True)
    }


def multiply(
    equation: str,
    x: jax.Array,
    w: jax.Array,
    x_names: Sequence[Any],
    w_names: Sequence[Any],
    *,
    gradient_dtype: Any = None,
    rounding: Rounding | None = None,
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
      rounding: rounds the rows, the weights and the gradients to 8 bits, so that all three products
        are of 8 bits. Weights are gathered in 8 bits, too. None keeps them as they are.

    Returns:
      The product, in the dtype of the rows. It has no forward-mode derivative in a partitioned
      function with Auto axes, or with `rounding`.

    Raises:
      ValueError: if the equation is not a product of rows and weights, or if the rules do not fit
        the mesh.
    """
    from flax.core import spmd  # the context that linen models read; heavy, so not at import

    letters, rules = parse(equation), spmd.get_logical_axis_rules()
    mesh = jax.sharding.get_abstract_mesh()
    sharing = find_sharing(letters, x, w, x_names, w_names, rules)
    dtype = jnp.dtype(x.dtype if gradient_dtype is None else gradient_dtype)
    if rounding is None and dtype == x.dtype and not _has_layouts(mesh, rules):
        return jnp.einsum(equation, x, w.astype(x.dtype))
    # In a shard_map both vary along the same axes, so it sums the gradient of one that does not.
    of_x, of_w = varying_axes(x), varying_axes(w)
    if of_w - of_x:
        x = jax.lax.pcast(x, tuple(of_w - of_x), to='varying')
    if of_x - of_w:
        w = jax.lax.pcast(w, tuple(of_x - of_w), to='varying')
    if rounding is None:
        return _multiply(letters, sharing, dtype, x, w)
    how = _HowRounded(letters, sharing, dtype, rounding, x.dtype, w.dtype)
    return _multiply_rounded(how, x, w)


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


class _HowRounded(NamedTuple):
    """How a product in 8 bits is computed: what is known when it is traced."""

    letters: Equation
    sharing: Sharing | None
    gradient_dtype: Any
    rounding: Rounding
    x_dtype: Any
    w_dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply_rounded(how: _HowRounded, x: jax.Array, w: jax.Array) -> jax.Array:
    return _forward_rounded(how, x, w)[0]


def _forward_rounded(
    how: _HowRounded, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[Rounded, Rounded]]:
    (rows, weights, result), round = how.letters, how.rounding.round
    of_x = round(x, summed_dimensions(rows, result), gradient=False)
    of_w = round(w.astype(x.dtype), summed_dimensions(weights, result), gradient=False)
    gathered = _gather(how.letters, how.sharing, of_w.values)
    y = multiply_values(f'{rows},{weights}->{result}', of_x.values, gathered)
    y *= spread(of_x.scale, rows, result) * spread(of_w.scale, weights, result)
    return y.astype(x.dtype), (of_x, of_w)


def _backward_rounded(
    how: _HowRounded, saved: tuple[Rounded, Rounded], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Multiplies the rounded arrays of the forward pass.

    Their scales vary along what these products sum over, so they multiply the gradient before it is
    rounded.
    """
    (rows, weights, result), sharing, (of_x, of_w) = how.letters, how.sharing, saved
    dy = dy.astype(jnp.float32)
    scaled = dy * spread(of_w.scale, weights, result)
    of_dy = how.rounding.round(scaled, summed_dimensions(result, rows), gradient=True)
    gathered = _gather(how.letters, sharing, of_w.values)
    dx = multiply_values(f'{result},{weights}->{rows}', of_dy.values, gathered)
    dx *= spread(of_dy.scale, result, rows)
    scaled, dtype = dy * spread(of_x.scale, rows, result), how.gradient_dtype
    dw = _gradient_of_weights(how.letters, sharing, dtype, of_x.values, scaled, how.rounding)
    return dx.astype(how.x_dtype), dw.astype(how.w_dtype)


_multiply_rounded.defvjp(_forward_rounded, _backward_rounded)


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
    letters: Equation,
    sharing: Sharing | None,
    dtype: Any,
    x: jax.Array,
    dy: jax.Array,
    rounding: Rounding | None = None,
) -> jax.Array:
    """Returns the gradient of the weights, in `dtype` and in their layout.

    With `rounding`, the rows have 8 bits, and each device rounds its part of the gradient.
    """

    def product(x: jax.Array, dy: jax.Array, order: str) -> jax.Array:
        equation = f'{letters.rows},{letters.result}->{order}'
        if rounding is None:
            return jnp.einsum(equation, x, dy, preferred_element_type=dtype)
        rounded = rounding.round(dy, summed_dimensions(letters.result, order), gradient=True)
        dw = multiply_values(equation, x, rounded.values)
        return (dw * spread(rounded.scale, letters.result, order)).astype(dtype)

    if sharing is None:
        # jax would multiply the gradient by the rows, for which CPUs transpose all of it.
        return product(x, dy, letters.weights)
    scattered = dict(sharing.weights)
    # Scattered dimensions are the first ones, so that each shard is contiguous before it moves.
    order = ''.join(sorted(letters.weights, key=lambda letter: letter not in scattered))

    def sum_shards(x: jax.Array, dy: jax.Array) -> jax.Array:
        dw = product(x, dy, order)
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
