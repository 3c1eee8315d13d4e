"""Layouts of arrays inside and outside partitioned functions, on meshes with axes of any type.

`lay_out` is the one place that depends on the types of mesh axes: it constrains an array over Auto
axes, reshards it over Explicit axes, and refuses Manual axes.
"""

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
    check_axes,
    check_layout,
    describe_axes,
    dimension_axes,
    logical_to_mesh_axes,
    padding_problems,
    sharding_axes,
)


def global_mesh_defined() -> bool:
    """Whether a mesh is set, by a partitioned function or by `jax.set_mesh`.

    The deprecated `with mesh:` does not count: only jax's own functions see its mesh.
    """
    return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Lays out a pytree of arrays by PartitionSpecs over the mesh that is set.

    Args:
      x: a pytree of arrays.
      axis_resources: PartitionSpecs, a pytree that is a prefix of `x`. None replicates. A
        PaddedSpec counts as its `inside` within partitioned functions.

    Returns:
      The arrays in these layouts, or `x` itself if no mesh is set. CPUs get the layouts too, so
      that tests on CPUs find errors.

    Raises:
      ValueError: if `lay_out` raises it for an array.
    """
    if not global_mesh_defined():
        _check_no_old_context()
        return x

    def place(resource: Any, below: Any) -> Any:
        return jax.tree.map(lambda array: lay_out(array, resource), below)

    def is_spec(leaf: Any) -> bool:
        return leaf is None or isinstance(leaf, PartitionSpec)

    return jax.tree.map(place, axis_resources, x, is_leaf=is_spec)


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
      names: one logical axis name or None per dimension.
      rules: logical axis rules. By default these are the rules of the context, which partitioned
        functions and `flax.linen.logical_axis_rules` set.
      on_indivisible: the policy for a size that its mesh axes do not divide; by default that of the
        rules. See `resolve_axes`. Under 'pad' XLA pads the array; this needs Auto axes.

    Returns:
      `x` in the layout that the rules give, or `x` itself if no mesh is set.

    Raises:
      ValueError: if a mesh is set and there are no rules, or if `resolve_axes` raises it for `x`.
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
            f'constrain{tuple(names)}: a mesh is set, but there are no axis rules. Call it in '
            'a function that PjitPartitioner.partition made, or pass rules='
        )
    try:
        spec = logical_to_mesh_axes(
            names, rules, mesh=mesh, shape=x.shape, on_indivisible=on_indivisible
        )
    except ValueError as error:
        raise ValueError(f'constrain{tuple(names)}: {error}') from None
    return lay_out(x, spec)


def lay_out(x: Any, spec: PartitionSpec | PaddedSpec | None, mesh: Mesh | None = None) -> jax.Array:
    """Lays out one array over a mesh.

    Args:
      x: an array.
      spec: the mesh axes of each dimension; None replicates. UNCONSTRAINED dimensions keep their
        layout.
      mesh: the mesh; by default the mesh that is set.

    Returns:
      The array in this layout. Inside a traced function it is constrained over Auto axes and
      resharded over Explicit axes; elsewhere it is moved to the devices. If there is no mesh, it is
      returned unchanged.

    Raises:
      ValueError: if the mesh was set by the deprecated `with mesh:`; if the spec does not fit the
        mesh or the array (jax itself would replicate a size that is not divisible); if the spec
        names a Manual axis of a shard_map, or an Auto axis before an Explicit one in a dimension;
        or if `mesh` has axes of several types and is not set.
    """
    around, traced = jax.sharding.get_abstract_mesh(), isinstance(x, jax.core.Tracer)
    over: Mesh | AbstractMesh | None = mesh
    if over is None:
        if around.empty:
            _check_no_old_context()
            return x
        over = around if traced else _mesh_set_outside_traces() or around
    padded = isinstance(spec, PaddedSpec)
    inner, outer = _inside_and_outside(spec)
    in_shard_map = AxisType.Manual in around.axis_types
    for problem in padding_problems(over) if padded else ():
        raise ValueError(problem.message)
    if not padded and not in_shard_map:
        check_layout(inner, over, f'an array of shape {np.shape(x)}', np.shape(x))
    if isinstance(over, Mesh) and not traced:
        x = jax.device_put(x, NamedSharding(over, _keep_unconstrained(x, outer, over)))
        if not isinstance(x, jax.core.Tracer):
            return x
        # In a trace, device_put does not fix the layout: XLA may still choose another one.
    target = inner if over is around else NamedSharding(over, inner)
    kinds = {*over.axis_types}
    if not in_shard_map and kinds == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint(x, target)
    if not in_shard_map and kinds == {AxisType.Explicit}:
        return jax.sharding.reshard(x, target)
    if around.shape != over.shape:
        types = ', '.join(kind.name for kind in over.axis_types)
        raise ValueError(
            f'the mesh {describe_axes(over)} has {types} axes, and the mesh that is set is '
            f'{describe_axes(around) or "empty"}: call the function under jax.set_mesh(mesh)'
        )
    types_of_axes = dict(zip(around.axis_names, around.axis_types, strict=True))
    return _lay_out_by_type(x, inner, types_of_axes)


def _inside_and_outside(spec: Any) -> tuple[PartitionSpec, PartitionSpec]:
    """The spec inside programs, and the one outside, where nothing can be padded."""
    if isinstance(spec, PaddedSpec):
        return spec.inside, spec.outside
    if isinstance(spec, str):
        raise ValueError(
            f'{spec!r} is not a PartitionSpec; `constrain` lays out by logical axis names'
        )
    spec = PartitionSpec() if spec is None else spec
    return spec, spec


def _check_no_old_context() -> None:
    """Raises ValueError inside `with mesh:`, where a constraint would silently do nothing."""
    try:
        jax.lax.with_sharding_constraint(np.float32(0), PartitionSpec())
    except RuntimeError:  # jax sees no mesh either
        return
    raise ValueError(
        'the mesh was set by the deprecated `with mesh:`, so this constraint would do nothing: '
        'write `with jax.set_mesh(mesh):`'
    )


def _mesh_set_outside_traces() -> Mesh | None:
    """The mesh that `jax.set_mesh` has set, or None inside a trace and where none is set."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # jax allows it only outside traces
        return None
    return None if mesh.empty else mesh


def _keep_unconstrained(x: Any, spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    """A spec whose unconstrained dimensions keep the axes that no other dimension takes."""
    free = PartitionSpec.UNCONSTRAINED
    if free not in tuple(spec):
        return spec
    held = getattr(x, 'sharding', None)
    now: tuple[Any, ...] = (None,) * len(spec)
    if isinstance(held, NamedSharding) and held.mesh.shape == mesh.shape:
        now = dimension_axes(held.spec, len(spec))
    taken = {axis for entry in spec for axis in sharding_axes(entry)}
    kept = (axes if axes and not taken & {*axes} else None for axes in now)
    return PartitionSpec(*(k if s is free else s for s, k in zip(spec, kept, strict=False)))


def _lay_out_by_type(x: Any, spec: PartitionSpec, types: Mapping[str, AxisType]) -> jax.Array:
    """`x` inside a trace, over axes of several types: Explicit ones first, then Auto ones."""
    now = (*jax.typeof(x).sharding.spec, *[None] * x.ndim)
    explicit: list[Any] = []
    auto: list[Any] = []
    for dim, entry in enumerate(spec):
        if entry is PartitionSpec.UNCONSTRAINED:
            explicit.append(now[dim])
            auto.append(entry)
            continue
        axes = as_tuple(entry)
        _check_types(axes, types)
        explicit.append(tuple(a for a in axes if types[a] == AxisType.Explicit) or None)
        auto.append(tuple(a for a in axes if types[a] == AxisType.Auto) or None)
    x = jax.sharding.reshard(x, PartitionSpec(*explicit))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*auto))


def _check_types(axes: tuple[str, ...], types: Mapping[str, AxisType]) -> None:
    """Raises ValueError if a dimension cannot be laid out over axes of these types."""
    check_axes(axes, jax.sharding.get_abstract_mesh(), 'a constraint')
    kinds = [types[axis] for axis in axes]
    for axis, kind in zip(axes, kinds, strict=True):
        if kind == AxisType.Manual:
            raise ValueError(
                f'mesh axis {axis!r} is Manual inside this shard_map, so the array is already one '
                'shard along it: remove the axis from the spec'
            )
    if AxisType.Auto in kinds and AxisType.Explicit in kinds[kinds.index(AxisType.Auto) :]:
        raise ValueError(
            f'a dimension over mesh axes {axes} must name Explicit axes before Auto axes'
        )
