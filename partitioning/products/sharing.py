"""Which mesh axes shard both the rows of a product and its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from partitioning.products.sums import GRADIENT_RULES
from partitioning.rules import (
    LogicalAxisRules,
    drop_axes_of_names,
    free_axes,
    manual_axes,
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
    """Returns how the gradient of weights is summed and scattered over the mesh that is set.

    Args:
      equation: the letters of the arrays.
      x, w: the rows and the weights.
      x_names, w_names: their logical axes.
      rules: the logical axis rules of the context. GRADIENT_RULES, if set, lay out the gradient.

    Returns:
      None if no mesh axis shards both the summed dimensions and the weights, if there is no mesh or
      there are no rules, and on meshes with Explicit axes, where jax lays out gradients by itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not rules or AxisType.Explicit in mesh.axis_types:
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


def _axes_of_letters(
    letters: str,
    names: Sequence[Any],
    shape: Sequence[int],
    rules: LogicalAxisRules,
    mesh: AbstractMesh,
) -> dict[str, tuple[str, ...]]:
    """The mesh axes of more than one device that shard each dimension of an array."""
    # An array that cannot be sharded is an error where it is laid out. Here it shares no axes.
    if manual := {*manual_axes(mesh)}:
        names, rules = drop_axes_of_names(names, rules, mesh, manual)
    resolved = resolve_axes(
        names, rules, mesh=mesh, shape=shape, on_unmatched='replicate', on_indivisible='replicate'
    )
    found = (sharding_axes(dimension.mesh_axes) for dimension in resolved)
    return {
        letter: tuple(axis for axis in axes if mesh.shape[axis] > 1)
        for letter, axes in zip(letters, found, strict=True)
    }
