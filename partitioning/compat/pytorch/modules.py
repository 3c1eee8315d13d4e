"""Lays out a model by a plan: its parameters now, and its outputs whenever it runs."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

from partitioning.compat.pytorch.entries import apply_entries
from partitioning.compat.pytorch.outputs import constrain_submodules, find_submodules
from partitioning.compat.pytorch.sharding_plan import ShardingPlan
from partitioning.compat.pytorch.trees import is_array, is_nnx_module, nnx_state
from partitioning.plan import Plan, impose_plan
from partitioning.rules import AxisRules, LogicalAxisRules, OnIndivisible, OnUnmatched
from partitioning.state import unbox
from partitioning.state.boxes import array_of, is_carrier, is_metadata


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
      plan: a ShardingPlan; or a Plan, for which `rules` and the policies are already decided.
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
      ValueError: as `ShardingPlan.resolve`; if `output_plan` names a module that does not exist.
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
        find_submodules(module, outputs)  # raises before anything is changed
    policies = AxisRules(rules or (), on_unmatched, on_indivisible)
    planned = apply_entries(plan.plan, module, mesh)
    made = _place(planned.module, planned.resolve(mesh, policies), mesh)
    if outputs and is_nnx_module(made):
        constrain_submodules(made, outputs, mesh, policies)
    return made


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
