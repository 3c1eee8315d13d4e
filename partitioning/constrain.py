"""Layouts of activations inside a partitioned function, under Auto and Explicit meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.rules import (
    LogicalAxisRules,
    OnIndivisible,
    PaddedSpec,
    as_tuple,
    logical_to_mesh_axes,
)


def global_mesh_defined() -> bool:
    """True inside a mesh context: a partitioned function or `jax.set_mesh`."""
    return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Lays out a pytree of arrays by PartitionSpecs inside the current mesh.

    Args:
      x: a pytree of arrays.
      axis_resources: PartitionSpecs, a pytree that is a prefix of `x`; None replicates. Of
        PaddedSpecs, what they are inside partitioned functions.

    Returns:
      `x`, constrained over Auto axes, resharded over Explicit ones, and untouched where no mesh is
      defined. No platform is skipped: a layout that is wrong on TPU is wrong on CPU.

    Raises:
      ValueError: a spec names a Manual axis, that of a shard_map around, or an Auto axis before an
        Explicit one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    specs = jax.tree.map(_inside, axis_resources, is_leaf=_is_spec)
    if (outside := _mesh_outside_traces(x)) is not None:
        return _move(x, specs, outside)
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if set(types.values()) == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint(x, specs)
    if set(types.values()) == {AxisType.Explicit}:
        return jax.sharding.reshard(x, specs)

    def place(spec: PartitionSpec, below: Any) -> Any:
        return jax.tree.map(lambda array: _place(array, spec, types), below)

    return jax.tree.map(place, specs, x, is_leaf=_is_spec)


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
      ValueError: a mesh is defined and the rules are missing or do not cover `names`; as
        `resolve_axes`, for the shape of `x`.
    """
    if names is None or not hasattr(x, 'shape'):
        raise ValueError(f'constrain takes one array and its names, not {x!r} and {names!r}')
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
    if isinstance(spec, PaddedSpec) and AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"constrain{tuple(names)}: on_indivisible='pad' needs Auto mesh axes, not Explicit ones"
        )
    return with_sharding_constraint(x, spec)


def _mesh_outside_traces(x: Any) -> Mesh | None:
    """The mesh that `jax.set_mesh` has set; None while a function of the arrays is traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
        return None
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # jax allows it outside traces only
        return None
    return None if mesh.empty else mesh


def _move(x: Any, specs: Any, mesh: Mesh) -> Any:
    """Arrays moved to their layouts, wherever they were, over axes of any types."""

    def one(array: Any, spec: PartitionSpec) -> Any:
        if PartitionSpec.UNCONSTRAINED in tuple(spec):
            now = getattr(getattr(array, 'sharding', None), 'spec', ())
            kept = (*now, *[None] * len(spec))
            free = PartitionSpec.UNCONSTRAINED
            spec = PartitionSpec(*(k if s is free else s for s, k in zip(spec, kept, strict=False)))
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(
        lambda spec, below: jax.tree.map(lambda array: one(array, spec), below),
        specs,
        x,
        is_leaf=_is_spec,
    )


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def _inside(resource: Any) -> Any:
    if isinstance(resource, PaddedSpec):
        return resource.inside
    if isinstance(resource, str):
        raise ValueError(
            f'{resource!r} is no PartitionSpec; logical axis names are for `constrain`'
        )
    return PartitionSpec() if resource is None else resource


def _place(x: jax.Array, spec: PartitionSpec, types: Mapping[str, AxisType]) -> jax.Array:
    """`x` laid out by `spec` where some mesh axes are Explicit and others are not."""
    now = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)
    explicit: list[Any] = []
    auto: list[Any] = []
    for dim, partition in enumerate(spec):
        if partition is PartitionSpec.UNCONSTRAINED:
            explicit.append(now[dim])
            auto.append(partition)
            continue
        axes = as_tuple(partition)
        _check_types(axes, types)
        explicit.append(tuple(a for a in axes if types[a] == AxisType.Explicit) or None)
        auto.append(tuple(a for a in axes if types[a] == AxisType.Auto) or None)
    x = jax.sharding.reshard(x, PartitionSpec(*explicit))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*auto))


def _check_types(axes: tuple[str, ...], types: Mapping[str, AxisType]) -> None:
    """Raises ValueError for mesh axes that no dimension can be over, for their types."""
    kinds = [types.get(axis) for axis in axes]
    for axis, kind in zip(axes, kinds, strict=True):
        if kind is None:
            raise ValueError(f'mesh axis {axis!r} is none of {", ".join(types)}')
        if kind == AxisType.Manual:
            raise ValueError(
                f'mesh axis {axis!r} is Manual here, inside a shard_map over it: an array is the '
                'part of one device already, and cannot be laid out over it'
            )
    if AxisType.Auto in kinds and AxisType.Explicit in kinds[kinds.index(AxisType.Auto) :]:
        raise ValueError(
            f'a dimension over {axes}: of Auto and Explicit mesh axes the Explicit ones come first'
        )
