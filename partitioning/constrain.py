"""Layouts of activations inside a partitioned function, under Auto and Explicit meshes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from partitioning.rules import (
    LogicalAxisRules,
    OnIndivisible,
    PaddedSpec,
    as_tuple,
    logical_to_mesh_axes,
    replicate_none,
)


def global_mesh_defined() -> bool:
    """True inside a mesh context: a partitioned function or `jax.set_mesh`."""
    return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Lays out a pytree of arrays by PartitionSpecs inside the current mesh.

    Args:
      x: a pytree of arrays.
      axis_resources: PartitionSpecs, a pytree that is a prefix of `x`; None replicates.

    Returns:
      `x`, constrained over Auto axes, resharded over Explicit ones, and untouched where no mesh is
      defined. No platform is skipped: a layout that is wrong on TPU is wrong on CPU.

    Raises:
      ValueError: a spec names a Manual axis, that of a shard_map around.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    specs = replicate_none(axis_resources)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if set(types.values()) == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint(x, specs)
    if set(types.values()) == {AxisType.Explicit}:
        return jax.sharding.reshard(x, specs)
    _check_not_manual(specs, types)
    x = jax.sharding.reshard(x, _over(AxisType.Explicit, specs, types))
    return jax.lax.with_sharding_constraint(x, _over(AxisType.Auto, specs, types))


def constrain(
    x: jax.Array,
    names: Sequence[str | None],
    rules: LogicalAxisRules | None = None,
    *,
    on_indivisible: OnIndivisible | None = None,
) -> jax.Array:
    """Lays out one activation by its logical axis names.

    Args:
      x: an array.
      names: one logical axis name (or None) a dimension.
      rules: logical axis rules; by default those of the context, which a partitioned function
        and `flax.linen.logical_axis_rules` set.
      on_indivisible: what becomes of a size that its mesh axes do not divide, by default what the
        rules say; see `resolve_axes`. Under 'pad' XLA pads the array; it takes Auto axes.

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
    spec = logical_to_mesh_axes(
        names, rules, mesh=mesh, shape=x.shape, on_indivisible=on_indivisible
    )
    return with_sharding_constraint(x, spec.inside if isinstance(spec, PaddedSpec) else spec)


def _map_axes(function: Callable[[tuple[str, ...]], Any], specs: Any) -> Any:
    """Specs with `function` of the mesh axes of each dimension in place of them."""

    def convert(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(
            *(p if p is PartitionSpec.UNCONSTRAINED else function(as_tuple(p)) for p in spec)
        )

    return jax.tree.map(convert, specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _over(kind: AxisType, specs: Any, types: dict[str, AxisType]) -> Any:
    """The part of specs that is over axes of one type."""
    return _map_axes(lambda axes: tuple(a for a in axes if types.get(a) == kind) or None, specs)


def _check_not_manual(specs: Any, types: dict[str, AxisType]) -> None:
    def check(axes: tuple[str, ...]) -> None:
        for axis in axes:
            if types.get(axis) == AxisType.Manual:
                raise ValueError(
                    f'mesh axis {axis!r} is Manual here, inside a shard_map over it: an array is '
                    'the part of one device already, and cannot be laid out over it'
                )

    _map_axes(check, specs)
