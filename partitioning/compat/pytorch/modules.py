"""Lays out a model by a plan: its parameters now, and its outputs whenever it runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.pytorch.entries import check_mesh_of, resolve_entries
from partitioning.compat.pytorch.sharding_plan import ShardingPlan
from partitioning.compat.pytorch.trees import is_array, is_nnx_module, nnx_state, subtree
from partitioning.constraints import lay_out
from partitioning.plan import Plan, impose_plan
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    OnIndivisible,
    OnUnmatched,
    boundary_spec,
    nearest,
    resolve_axes,
    to_spec,
)
from partitioning.state import Path, unbox
from partitioning.state.boxes import array_of, is_carrier, is_metadata

Outputs = Mapping[Path, tuple[str, Any]]


def shard_module(
    module: Any,
    plan: ShardingPlan | Plan,
    mesh: Mesh,
    rules: LogicalAxisRules | None = None,
    *,
    on_unmatched: OnUnmatched | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> Any:
    """Lays out the arrays of a model over a mesh.

    If the parameters do not fit on one device, create them in their shards instead:
    `PjitPartitioner(mesh=mesh, plan=plan.resolve(...)).init`.

    Args:
      module: parameters, which may be linen variables; or an nnx module.
      plan: a ShardingPlan; or a Plan, which takes no `rules` and no policies.
      mesh: the mesh.
      rules, on_unmatched, on_indivisible: as in `ShardingPlan.resolve`.

    Returns:
      The parameters, without linen boxes. Buffers next to them are laid out too, and replicated if
      the plan does not name them. An nnx module is changed in place: its variables hold the sharded
      arrays, and its submodules lay out their outputs by the plan's `output_plan`. (For linen
      modules `constrain_outputs` does that.) A submodule with a layout of its output becomes an
      instance of a generated subclass, which pickle does not find.

    Raises:
      TypeError: if `plan` is not a plan, and as `ShardingPlan.resolve`.
      ValueError: if `ShardingPlan.resolve` raises it, or if `output_plan` names an absent module.
    """
    if isinstance(plan, Plan):
        settings = {'rules': rules, 'on_unmatched': on_unmatched, 'on_indivisible': on_indivisible}
        if given := [name for name, value in settings.items() if value is not None]:
            raise ValueError(f'the plan already determines {", ".join(given)}: remove it')
        return _place(module, plan, mesh)
    if not isinstance(plan, ShardingPlan):
        raise TypeError(f'plan={plan!r} must be a ShardingPlan: write ShardingPlan({{...}})')
    outputs = plan.outputs()
    if outputs and is_nnx_module(module):
        _find_submodules(module, outputs)  # raises before anything is changed
    policies = AxisRules(rules or (), on_unmatched, on_indivisible)
    made, resolved = resolve_entries(plan.plan, module, mesh, policies)
    made = _place(made, resolved, mesh)
    if outputs and is_nnx_module(made):
        _constrain_submodules(made, outputs, mesh, policies)
    return made


@contextlib.contextmanager
def constrain_outputs(
    plan: ShardingPlan, mesh: Mesh | None = None, rules: LogicalAxisRules | None = None
) -> Iterator[None]:
    """A context in which linen modules lay out their outputs by the plan's `output_plan`.

    Usage:
      @jax.jit
      def loss(params, x):
          with constrain_outputs(plan, mesh):
              return jnp.mean(model.apply({'params': params}, x))

    The outputs keep their global shapes.

    Args:
      plan: the plan.
      mesh: the mesh; by default the one that a partitioned function or `jax.set_mesh` has set.
        Without a mesh nothing is laid out.
      rules: the rules for logical names, which may also be mesh axes; by default the rules of the
        context.

    Raises:
      TypeError: if `plan` is not a ShardingPlan, or if an entry of `output_plan` is not a layout.
      ValueError: if an output cannot have its layout, or, on leaving the context, if a module of
        `output_plan` was not called; the message names the nearest module that was.
    """
    import flax.linen as nn  # heavy, and needed only for linen modules

    if not isinstance(plan, ShardingPlan):
        raise TypeError(f'plan={plan!r} must be a ShardingPlan, which has an output_plan')
    outputs, own = plan.outputs(), AxisRules(rules or ())
    called: dict[Path, None] = {}

    def intercept(next_fun: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        output = next_fun(*args, **kwargs)
        if context.method_name != '__call__':
            return output
        path = tuple(context.module.path)
        called[path] = None
        return _lay_out_all(output, *outputs[path], mesh, own) if path in outputs else output

    with nn.intercept_methods(intercept):
        yield
    for path, (name, _) in outputs.items():
        if path not in called:
            raise ValueError(
                f'output_plan names {name!r}, but no such module was called'
                f'{_not_called(name, called)}'
            )


def _place(module: Any, plan: Plan, mesh: Mesh) -> Any:
    state = nnx_state(module)
    leaves = jax.tree.leaves(state, is_leaf=is_carrier)
    if any(isinstance(array_of(x), jax.ShapeDtypeStruct) for x in leaves):
        raise ValueError(
            'the parameters are ShapeDtypeStructs, which have no arrays to lay out: '
            'plan.resolve(params, mesh) gives their layouts'
        )
    held = unbox(state)
    shardings = impose_plan(plan, held, mesh).shardings
    placed = jax.tree.map(_move, held, shardings, is_leaf=is_carrier)
    if not is_nnx_module(module):
        return placed
    from flax import nnx  # already imported, because the module is an nnx module

    nnx.update(module, placed)
    return module


def _move(x: Any, sharding: Any) -> Any:
    """An array moved to its sharding, in its variable; texts and AxisMetadata are unchanged."""
    if is_metadata(x) or not is_array(x):
        return x
    array = jax.device_put(array_of(x), sharding)
    return x.replace(array) if is_carrier(x) else array


def _find_submodules(module: Any, outputs: Outputs) -> list[Any]:
    """The submodules of an nnx module that have a layout; one that is absent is a ValueError."""
    from flax import nnx  # already imported, because the module is an nnx module

    found = []
    for path, (name, _) in outputs.items():
        try:
            found.append(subtree(module, path))
        except LookupError:
            found.append(None)
        if not is_nnx_module(found[-1]) or not callable(found[-1]):
            known = ['/'.join(map(str, p)) for p, m in nnx.iter_modules(module) if callable(m)]
            raise ValueError(
                f'output_plan names {name!r}, but the model has no such module with a __call__.'
                f'{nearest(name, known)} It has {", ".join(map(repr, known))}'
            )
    return found


def _constrain_submodules(module: Any, outputs: Outputs, mesh: Mesh, rules: AxisRules) -> None:
    """Makes submodules of an nnx module lay out their outputs, by giving them subclasses.

    nnx looks up `__call__` in the class of a module, and rebuilds modules from their classes.
    """
    found = _find_submodules(module, outputs)
    for submodule, (name, layout) in zip(found, outputs.values(), strict=True):
        kind: Any = type(submodule)
        submodule.__class__ = _subclass(kind, name, layout, mesh, rules)


@functools.cache
def _subclass(cls: Any, name: str, layout: Any, mesh: Mesh, rules: AxisRules) -> Any:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _lay_out_all(cls.__call__(self, *args, **kwargs), name, layout, mesh, rules)

    return type(cls.__name__, (cls,), {'__call__': __call__, '__module__': cls.__module__})


def _lay_out_all(output: Any, name: str, layout: Any, mesh: Mesh | None, rules: AxisRules) -> Any:
    """An output with each of its arrays laid out; other leaves are left as they are."""

    def one(x: Any) -> Any:
        try:
            return _lay_out_one(x, layout, mesh, rules) if isinstance(x, jax.Array) else x
        except ValueError as error:
            raise ValueError(f'output_plan of {name!r}: {error}') from error

    return jax.tree.map(one, output)


def _lay_out_one(x: jax.Array, layout: Any, mesh: Mesh | None, rules: AxisRules) -> jax.Array:
    from flax.core import spmd  # the rules of the context; flax is imported, as modules exist

    around = jax.sharding.get_abstract_mesh()
    if isinstance(layout, NamedSharding):
        for other in (around, mesh):
            if other is not None and not other.empty:
                check_mesh_of(layout, other)
        if mesh is None and around.empty and isinstance(layout.mesh, Mesh):
            mesh = layout.mesh
        layout = layout.spec
    over = around if mesh is None else mesh
    if over.empty:
        return x
    if not isinstance(layout, PartitionSpec):
        known = rules or AxisRules(spmd.get_logical_axis_rules())
        dimensions = resolve_axes(layout, known, mesh=over, shape=x.shape, axes_as_names=True)
        layout = boundary_spec(to_spec(dimensions))
    return lay_out(x, layout, mesh)


def _not_called(name: str, called: Mapping[Path, None]) -> str:
    names = ['/'.join(path) for path in called]
    if names:
        return f'.{nearest(name, names)} These were called: {", ".join(map(repr, names))}'
    return (
        ', and no other module: functions that were already traced do not count, so '
        'enter constrain_outputs inside the jitted function'
    )
