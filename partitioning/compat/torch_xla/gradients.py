"""Layouts of gradients, and the order in which they are computed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from partitioning.compat.torch_xla.mark import mark_sharding
from partitioning.compat.torch_xla.partition_spec import SpecLike

P = ParamSpec('P')
R = TypeVar('R')


def mark_sharding_with_gradients(t: Any, mesh: Mesh | None, partition_spec: SpecLike) -> jax.Array:
    """Lays out an array, and on the way back its gradient.

    Over Auto axes jax turns a constraint around into the same constraint, so the gradient of `t`
    has the layout too. Over Explicit axes the layout is a part of every array's type, and the
    gradient has the type of the array: that of the result has this layout, that of `t` the layout
    of `t`. Where it should be this one, lay out `t` itself before `jax.grad`.

    Args:
      t: an array.
      mesh: the mesh; None for the global one.
      partition_spec: for each dimension a mesh dimension or name, a tuple of them, or None.

    Raises:
      ValueError: a spec that the mesh or the array cannot have, sizes that do not divide.
    """
    return mark_sharding(t, mesh, partition_spec)


def apply_backward_optimization_barrier(fn: Callable[P, R]) -> Callable[P, R]:
    """A function whose gradients XLA computes as a block of their own.

    The gradients of all its arguments pass one optimization barrier together: no operation of the
    backward pass is moved across, or fused with those on the other side. Put around each layer, it
    keeps the collectives of one layer's gradients with that layer. Values do not change.

    Usage:
      layer = apply_backward_optimization_barrier(layer)

    Args:
      fn: a function of pytrees; arguments that are no floating-point arrays have no gradients.
    """
    if not callable(fn):
        raise ValueError(f'{fn!r} must be a function, such as the apply of one layer')

    @functools.wraps(fn)
    def barred(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if _has_gradient(leaf)]
        passed = _barrier_on_the_way_back(tuple(leaves[i] for i in places))
        for place, leaf in zip(places, passed, strict=True):
            leaves[place] = leaf
        args, kwargs = jax.tree.unflatten(tree, leaves)
        return fn(*args, **kwargs)

    return barred


@jax.custom_vjp
def _barrier_on_the_way_back(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return arrays


def _forward(arrays: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
    return arrays, None


def _backward(_: None, gradients: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...]]:
    return (jax.lax.optimization_barrier(gradients),)


_barrier_on_the_way_back.defvjp(_forward, _backward)


def _has_gradient(leaf: Any) -> bool:
    return hasattr(leaf, 'dtype') and jnp.issubdtype(leaf.dtype, jnp.inexact)
