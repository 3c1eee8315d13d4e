"""Layouts of arrays inside and outside partitioned functions, on meshes with axes of any type.

`lay_out` is the one place that depends on the types of mesh axes: it constrains an array over Auto
axes and reshards it over Explicit axes. It drops the Manual axes of a `jax.shard_map` from the
spec, because inside of it an array is already one shard along them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from partitioning.rules import (
    LogicalAxisRules,
    OnIndivisible,
    PaddedSpec,
    check_layout,
    check_spec,
    describe_axes,
    dimension_axes,
    drop_axes,
    drop_axes_of_names,
    fill_unconstrained,
    logical_to_mesh_axes,
    padding_problems,
    sharding_axes,
    spec_str,
)
from partitioning.values import value_str


def global_mesh_defined() -> bool:
    """Whether a mesh is set, by a partitioned function or by `jax.set_mesh`.

    The deprecated `with mesh:` does not count: only jax's own functions see its mesh.
    """
    return not jax.sharding.get_abstract_mesh().empty


def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
    """Lays out a pytree of arrays by PartitionSpecs over the mesh that is set.

    None replicates, and a PaddedSpec counts as its `inside` within partitioned functions. Without a
    mesh, `x` itself is returned. CPUs get the layouts too, so that tests on CPUs find errors. The
    errors come from `lay_out`.
    """
    if not global_mesh_defined():
        _check_no_old_context()
        return x

    def place(resource: Any, below: Any) -> Any:
        return jax.tree.map(lambda array: lay_out(array, resource), below)

    def is_spec(leaf: Any) -> bool:
        return leaf is None or _is_names(leaf)

    return jax.tree.map(place, axis_resources, x, is_leaf=is_spec)


def _is_names(x: Any) -> bool:
    """Whether a node is names of dimensions without P, such as ('batch', 'mlp')."""
    plain = isinstance(x, tuple | list) and not isinstance(x, PartitionSpec) and any(x)
    return plain and all(isinstance(name, str | None) for name in x)


def constrain(
    x: jax.Array,
    names: Sequence[Any],
    rules: LogicalAxisRules | None = None,
    *others: Any,
    on_indivisible: OnIndivisible | None = None,
) -> jax.Array:
    """Lays out one activation by its logical axis names.

    It works inside every transformation of jax. Inside `jax.vmap` the names leave out the batched
    dimension. Inside a `jax.shard_map` the Manual axes are dropped from what the rules give, and an
    array is one shard.

    Args:
      names: one logical axis name or None per dimension. `PartitionSpec.UNCONSTRAINED` leaves the
        layout of a dimension to XLA.
      rules: logical axis rules. By default these are the rules of the context, which partitioned
        functions and `flax.linen.logical_axis_rules` set.
      on_indivisible: the policy for a size that its mesh axes do not divide; by default the rules
        say it. See `resolve_axes`. Under 'pad' XLA pads the array; this needs Auto axes.

    Returns:
      `x` in the layout that the rules give, or `x` itself if no mesh is set or if all axes of the
      mesh are Manual.

    Raises:
      ValueError: if a mesh is set and there are no rules, or if `resolve_axes` or `lay_out` raises
        it for `x`.
    """
    if names is None or not hasattr(x, 'shape'):
        tree = (
            isinstance(x, dict | list | tuple) and names is not None and not hasattr(names, 'shape')
        )
        write = (
            'jax.tree.map(lambda x: constrain(x, names), tree)' if tree else 'constrain(x, names)'
        )
        raise ValueError(
            f'constrain takes one array and its names, not {x!r} and {names!r}: write {write}'
        )
    if others or isinstance(names, str) or isinstance(rules, str):
        listed = (names, rules, *others) if others or isinstance(rules, str) else (names,)
        raise ValueError(
            f'the names of constrain are one tuple, not {", ".join(map(repr, listed))}: write '
            f'constrain(x, {listed!r})'
        )
    if not global_mesh_defined():
        _check_no_old_context()
        return x
    try:
        spec = activation_spec(x.shape, names, rules, on_indivisible=on_indivisible)
        return x if spec is None else lay_out(x, spec)
    except ValueError as error:
        text = _of_mesh_axes(names, rules) or str(error)
        raise ValueError(f'constrain{tuple(names)}: {text}') from None


def _of_mesh_axes(names: Sequence[Any], rules: LogicalAxisRules | None) -> str | None:
    """What to write if names are not of the rules but axes of the mesh that is set, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    known = {rule[0] for rule in (_rules_of_context() if rules is None else rules)}
    flat = [axis for entry in names for axis in sharding_axes(entry)]
    if not known or not flat or not {*flat} <= {*mesh.axis_names} - known:
        return None
    spec = spec_str(PartitionSpec(*names))
    return (
        f'{flat[0]!r} is an axis of the mesh {describe_axes(mesh)}, but no logical axis of the '
        f'rules: write with_sharding_constraint(x, {spec}) for axes of the mesh'
    )


def _rules_of_context() -> LogicalAxisRules:
    """The rules of partitioned functions and of `flax.linen.logical_axis_rules`."""
    from flax.core import spmd  # the context that linen models read; heavy, so not at import

    return spmd.get_logical_axis_rules()


def activation_spec(
    shape: Sequence[int],
    names: Sequence[Any],
    rules: LogicalAxisRules | None = None,
    *,
    on_indivisible: OnIndivisible | None = None,
) -> PartitionSpec | PaddedSpec | None:
    """Returns the layout that `constrain` gives to an activation, for example for `jax.shard_map`.

    The arguments are as for `constrain`, with the shape of the activation or, inside a
    `jax.shard_map`, of one shard. The spec has no Manual axes. It is None if no mesh is set, or if
    all axes of the mesh are Manual and there are no rules. It raises what `constrain` raises.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    if rules is None:
        rules = _rules_of_context()
    manual = mesh.manual_axes
    if not rules:
        if manual == mesh.axis_names:
            return None
        raise ValueError(
            'a mesh is set, but there are no axis rules. Call it in a function that '
            'PjitPartitioner.partition made, or pass rules='
        )
    kept = names
    if manual:
        with _pmap_explained(mesh):
            kept, rules = drop_axes_of_names(names, rules, mesh, {*manual})
    return logical_to_mesh_axes(kept, rules, mesh=mesh, shape=shape, on_indivisible=on_indivisible)


def lay_out(x: Any, spec: PartitionSpec | PaddedSpec | None, mesh: Mesh | None = None) -> jax.Array:
    """Lays out one array over a mesh.

    Args:
      x: an array. Inside a `jax.shard_map` it is one shard along the Manual axes.
      spec: the mesh axes of each dimension; None replicates. Manual axes are dropped.
        UNCONSTRAINED dimensions keep their layout.
      mesh: the mesh; by default the mesh that is set.

    Returns:
      The array in this layout. Inside a traced function it is constrained over Auto axes and
      resharded over Explicit axes; elsewhere it is moved to the devices. If there is no mesh, or if
      all of its axes are Manual, it is returned unchanged.

    Raises:
      ValueError: if the mesh was set by the deprecated `with mesh:`; if the spec does not fit the
        mesh or the array (jax itself would replicate a size that is not divisible); if the spec
        names an Auto axis before an Explicit one in a dimension, or an axis over which a
        surrounding `jax.vmap` shards its batched dimension; or if `mesh` has axes of several types
        and is not set.
    """
    around, traced = jax.sharding.get_abstract_mesh(), isinstance(x, jax.core.Tracer)
    over: Mesh | AbstractMesh | None = mesh
    if over is None:
        if around.empty:
            _check_no_old_context()
            return x
        over = around
        if not traced:
            with contextlib.suppress(ValueError):  # jax allows get_mesh only outside traces
                here = jax.sharding.get_mesh()
                over = around if here.empty else here
    padded, manual = isinstance(spec, PaddedSpec), around.manual_axes
    if not isinstance(spec, PartitionSpec | PaddedSpec | None):
        hint = 'write P(...), or None to replicate; `constrain` takes logical axis names'
        raise ValueError(f'{value_str(spec)} is not a PartitionSpec: {hint}')
    spec = PartitionSpec() if spec is None else spec
    # Outside programs, nothing can be padded.
    inner, outer = (spec.inside, spec.outside) if isinstance(spec, PaddedSpec) else (spec, spec)
    for problem in padding_problems(over) if padded else ():
        raise ValueError(problem.message)
    where = f'an array of shape {np.shape(x)}'
    if manual:
        _check_mesh_is_set(over, around)
        where = f'one shard along {", ".join(map(repr, manual))}, of shape {np.shape(x)}'
        with _pmap_explained(around):
            check_spec(inner, around, where, np.shape(x))
        over, inner = around, drop_axes(inner, {*manual})
    if not padded:
        check_layout(inner, over, where, np.shape(x))
    if manual == over.axis_names:
        return x
    if isinstance(over, Mesh) and not traced:
        x = jax.device_put(x, NamedSharding(over, fill_unconstrained(outer, _layout_on(over, x))))
        if not isinstance(x, jax.core.Tracer):
            return x
        # In a trace, device_put does not fix the layout: XLA may still choose another one.
    try:
        return _lay_out_traced(x, inner, over, around)
    except Exception as error:
        # The spec names each axis once, so the second use is the batched dimension.
        if 'spmd_axis_name' not in str(error) and 'duplicate entries' not in str(error):
            raise
        raise ValueError(f'{spec_str(inner)}: {explain_batched_axis(error)}') from None


def _lay_out_traced(
    x: Any, spec: PartitionSpec, over: Mesh | AbstractMesh, around: AbstractMesh
) -> jax.Array:
    """`x` inside a trace, over a mesh whose Manual axes the spec does not name."""
    mesh = over
    if len({*over.axis_types}) > 1:
        _check_mesh_is_set(over, around)
        mesh = around
    held = fill_unconstrained(spec, dimension_axes(jax.typeof(x).sharding.spec, np.ndim(x)))
    for axes in map(sharding_axes, held):
        are_auto = [axis in mesh.auto_axes for axis in axes]
        if are_auto != sorted(are_auto):
            raise ValueError(
                f'a dimension over mesh axes {axes} must name Explicit axes before Auto axes'
            )
    if not mesh.explicit_axes:
        on_mesh = spec if mesh is around else NamedSharding(mesh, spec)
        return jax.lax.with_sharding_constraint(x, on_mesh)
    if not mesh.auto_axes:
        return jax.sharding.reshard(x, held if mesh is around else NamedSharding(mesh, held))
    # All axes are Auto for the constraint. Next to Explicit axes, jax would replicate UNCONSTRAINED
    # dimensions, and the batched dimension of a vmap, over the Auto axes.
    return jax.sharding.auto_axes(
        lambda x: jax.lax.with_sharding_constraint(x, spec),
        axes=mesh.explicit_axes,
        out_sharding=drop_axes(held, {*mesh.auto_axes}),
    )(x)


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


def _check_mesh_is_set(over: Mesh | AbstractMesh, around: AbstractMesh) -> None:
    """Raises ValueError unless `over` is the mesh that is set, whose axes have several types."""
    if around.shape != over.shape:
        types = ', '.join(kind.name for kind in over.axis_types)
        raise ValueError(
            f'the mesh {describe_axes(over)} has {types} axes, and the mesh that is set is '
            f'{describe_axes(around) or "empty"}: call the function under jax.set_mesh(mesh)'
        )


def _layout_on(mesh: Mesh, x: Any) -> tuple[Any, ...]:
    """The mesh axes of each dimension of an array, if it lies on this mesh."""
    held = getattr(x, 'sharding', None)
    if isinstance(held, NamedSharding) and held.mesh.shape == mesh.shape:
        return dimension_axes(held.spec, np.ndim(x))
    return (None,) * np.ndim(x)


@contextlib.contextmanager
def _pmap_explained(mesh: AbstractMesh) -> Iterator[None]:
    """Adds to an error about a mesh axis that jax.pmap makes a mesh of one Manual axis."""
    try:
        yield
    except ValueError as error:
        if 'does not exist' not in str(error) or not mesh.are_all_axes_manual:
            raise
        raise ValueError(
            f'{error} All axes of this mesh are Manual; if jax.pmap made it, write '
            'PjitPartitioner.partition instead of jax.pmap'
        ) from None


def explain_batched_axis(error: Exception) -> str:
    """Explains jax's error for an axis over which `jax.vmap` shards its batched dimension."""
    return (
        'a constraint names a mesh axis over which jax.vmap shards its batched dimension, by '
        'spmd_axis_name or because the array has it: remove the axis from the spec or the rule. '
        f'jax says: {error}'
    )
