"""Layouts of activations inside a partitioned function, under Auto and Explicit meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType

from partitioning.rules import LogicalAxisRules, logical_to_mesh_axes, replicate_none


def global_mesh_defined() -> bool:
    """True inside a mesh context: a partitioned function or `jax.set_mesh`."""
    return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Lays out a pytree of arrays by PartitionSpecs inside the current mesh.

    Args:
      x: a pytree of arrays.
      axis_resources: PartitionSpecs, a pytree that is a prefix of `x`; None replicates.

    Returns:
      `x`, constrained under an Auto mesh, resharded under an Explicit one, and untouched where
      no mesh is defined. No platform is skipped: a layout that is wrong on TPU is wrong on CPU.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    explicit = all(t == AxisType.Explicit for t in mesh.axis_types)
    place = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return place(x, replicate_none(axis_resources))


def constrain(
    x: jax.Array, names: Sequence[str | None], rules: LogicalAxisRules | None = None
) -> jax.Array:
    """Lays out one activation by its logical axis names.

    Args:
      x: an array.
      names: one logical axis name (or None) a dimension.
      rules: logical axis rules; by default those of the context, which a partitioned function
        and `flax.linen.logical_axis_rules` set.

    Returns:
      `x` with the layout that the rules give; `x` itself outside a mesh.

    Raises:
      ValueError: a mesh is defined and the rules are missing or do not cover `names`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    if rules is None:
        from flax.core import spmd  # the context that linen models read; heavy, so not at import

        rules = spmd.get_logical_axis_rules()
    if not rules:
        raise ValueError(
            f'constrain{tuple(names)}: a mesh is set but no logical axis rules are; call it inside '
            'a function of PjitPartitioner.partition, or pass rules='
        )
    spec = logical_to_mesh_axes(names, rules, axis_sizes=mesh.shape, shape=x.shape)
    return with_sharding_constraint(x, spec)
