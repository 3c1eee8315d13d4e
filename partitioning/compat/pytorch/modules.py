"""A model laid out by a plan: its parameters now, its outputs whenever it runs."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from partitioning.compat.pytorch.entries import apply_entries
from partitioning.compat.pytorch.outputs import check_submodules, constrain_submodules
from partitioning.compat.pytorch.sharding_plan import ShardingPlan
from partitioning.compat.pytorch.trees import is_array, is_nnx_module
from partitioning.plan.resolved import ResolvedPlan
from partitioning.rules import AxisRules, LogicalAxisRules, OnIndivisible, OnUnmatched
from partitioning.state import unbox
from partitioning.state.boxes import array_of, is_carrier, is_metadata


def shard_module(
    module: Any,
    plan: ShardingPlan | ResolvedPlan,
    mesh: Mesh,
    rules: LogicalAxisRules | None = None,
    *,
    on_unmatched: OnUnmatched | None = None,
    on_indivisible: OnIndivisible | None = None,
) -> Any:
    """A model with its parameters laid out over a mesh.

    Where parameters are too large to be whole anywhere, have them born in their shards:
    `PjitPartitioner(mesh=mesh, plan=plan.resolve(...)).init`.

    Args:
      module: parameters, which may be linen variables; or an nnx module.
      plan: for them; a resolved one has decided already what `rules` and the policies are for.
      mesh: the mesh.
      rules, on_unmatched, on_indivisible: as of `ShardingPlan.resolve`.

    Returns:
      The parameters, without linen boxes; what is beside them is laid out, too, replicated where
      the plan does not name it. An nnx module is changed in place: its variables hold the sharded
      arrays, and its submodules lay out their outputs by the plan's `output_plan`, which of linen
      modules `constrain_outputs` does. (A submodule with an output plan has a class of its own,
      which pickle does not find.)

    Raises:
      TypeError: no plan; as `ShardingPlan.resolve`.
      ValueError: as `ShardingPlan.resolve`; output_plan names a module that is not there.
    """
    if isinstance(plan, ResolvedPlan):
        settings = {'rules': rules, 'on_unmatched': on_unmatched, 'on_indivisible': on_indivisible}
        if given := [name for name, value in settings.items() if value is not None]:
            raise ValueError(f'a ResolvedPlan has decided what {", ".join(given)} would: leave out')
        return _place(module, plan, mesh)
    if not isinstance(plan, ShardingPlan):
        raise TypeError(f'plan={plan!r} is no ShardingPlan: write ShardingPlan({{...}})')
    outputs = plan.outputs()
    if outputs and is_nnx_module(module):
        check_submodules(module, outputs)  # before anything is changed
    policies = AxisRules(rules or (), on_unmatched, on_indivisible)
    planned = apply_entries(plan.plan, module, mesh)
    placed = _place(planned.module, planned.resolve(mesh, policies), mesh)
    if outputs and is_nnx_module(placed):
        constrain_submodules(placed, outputs, mesh, policies)
    return placed


def _place(module: Any, plan: ResolvedPlan, mesh: Mesh) -> Any:
    if any(isinstance(array_of(x), jax.ShapeDtypeStruct) for x in _leaves(module)):
        raise ValueError(
            'the parameters are ShapeDtypeStructs, without any arrays to lay out: '
            'plan.resolve(params, mesh) says how they would be'
        )
    state = module
    if is_nnx_module(module):
        from flax import nnx  # imported already, or there would be no such module

        state = nnx.state(module)
    held = unbox(state)
    shardings = plan.resolve_state(held, mesh).shardings
    placed = jax.tree.map(_moved, held, shardings, is_leaf=is_carrier)
    if state is module:
        return placed
    nnx.update(module, placed)
    return module


def _moved(x: Any, sharding: Any) -> Any:
    """An array, also one in a variable, at its place; texts and T5X's names stay what they are."""
    if is_metadata(x) or not is_array(x):
        return x
    array = jax.device_put(array_of(x), sharding)
    return x.replace(array) if is_carrier(x) else array


def _leaves(module: Any) -> list[Any]:
    return jax.tree.leaves(module, is_leaf=is_carrier)
