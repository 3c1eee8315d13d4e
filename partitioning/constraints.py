"""Layouts of activations inside a partitioned function, under Auto and Explicit meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.rules import (
    LogicalAxisRules,
    OnIndivisible,
    PaddedSpec,
    as_tuple,
    check_layout,
    dimension_axes,
    logical_to_mesh_axes,
)


def global_mesh_defined() -> bool:
    """True inside a mesh context: a partitioned function or `jax.set_mesh`.

    The deprecated `with mesh:` is none: jax shows its mesh to its own functions only.
    """
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
      ValueError: the deprecated `with mesh:` in the place of `jax.set_mesh`; a spec that the mesh
        or an array cannot have, sizes that do not divide (which jax would leave whole without a
        word); a spec names a Manual axis, that of a shard_map around, or an Auto axis before an
        Explicit one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        _check_no_old_context()
        return x
    outside = _mesh_outside_traces(x)

    def place(resource: Any, below: Any) -> Any:
        return jax.tree.map(lambda array: _lay_out(array, resource, mesh, outside), below)

    return jax.tree.map(place, axis_resources, x, is_leaf=_is_spec)


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
        _check_no_old_context()
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


def _check_no_old_context() -> None:
    """Raises ValueError inside `with mesh:`, where this would do nothing without a word."""
    try:
        jax.lax.with_sharding_constraint(np.float32(0), PartitionSpec())
    except RuntimeError:  # jax sees no mesh either
        return
    raise ValueError(
        'inside `with mesh:`, which jax has deprecated, only jax itself sees the mesh, and nothing '
        'would be laid out here: write `with jax.set_mesh(mesh):`'
    )


def _mesh_outside_traces(x: Any) -> Mesh | None:
    """The mesh that `jax.set_mesh` has set; None while a function of the arrays is traced."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(x)):
        return None
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # jax allows it outside traces only
        return None
    return None if mesh.empty else mesh


def _lay_out(x: Any, resource: Any, mesh: AbstractMesh, outside: Mesh | None) -> jax.Array:
    """One array laid out over a mesh; outside of traces moved, from wherever it is."""
    if isinstance(resource, str):
        raise ValueError(
            f'{resource!r} is no PartitionSpec; logical axis names are for `constrain`'
        )
    spec = PartitionSpec() if resource is None else resource
    if isinstance(spec, PaddedSpec):  # there is no padding outside of programs
        spec = spec.inside if outside is None else spec.outside
    elif AxisType.Manual not in mesh.axis_types:
        check_layout(spec, mesh, f'a constraint of {np.shape(x)}', np.shape(x))
    if outside is not None:
        return jax.device_put(x, NamedSharding(outside, _with_what_is(x, spec, outside)))
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if set(types.values()) == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint(x, spec)
    if set(types.values()) == {AxisType.Explicit}:
        return jax.sharding.reshard(x, spec)
    return _place(x, spec, types)


def _with_what_is(x: Any, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A spec whose unconstrained dimensions stay as they are, as far as its axes are not taken."""
    free = PartitionSpec.UNCONSTRAINED
    if free not in tuple(spec):
        return spec
    held = getattr(x, 'sharding', None)
    now: tuple[Any, ...] = (None,) * len(spec)
    if isinstance(held, NamedSharding) and held.mesh.shape == mesh.shape:
        now = dimension_axes(held.spec, len(spec))
    taken = {axis for entry in spec if entry is not free for axis in as_tuple(entry)}
    kept = (axes if axes and not taken & {*axes} else None for axes in now)
    return PartitionSpec(*(k if s is free else s for s, k in zip(spec, kept, strict=False)))


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


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
