"""A model laid out by a plan: its parameters now, its outputs whenever it runs."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from partitioning.plans.entries import apply_entries
from partitioning.plans.outputs import check_submodules, constrain_submodules
from partitioning.plans.resolved import ResolvedPlan
from partitioning.plans.sharding_plan import ShardingPlan
from partitioning.plans.trees import is_nnx_module
from partitioning.rules import AxisRules, LogicalAxisRules, OnIndivisible, OnUnmatched
from partitioning.state import key_names, unbox
from partitioning.state.boxes import array_of, is_carrier


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
      The parameters, without linen boxes. An nnx module is changed in place: its variables hold
      the sharded arrays, and its submodules lay out their outputs by the plan's `output_plan`,
      which of linen modules `constrain_outputs` does. (A submodule with an output plan has a class
      of its own, which pickle does not find.)

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
    planned = apply_entries(plan.plan, module, mesh)
    policies = AxisRules(rules or (), on_unmatched, on_indivisible)
    placed = _place(planned.module, planned.resolve(mesh, policies), mesh)
    if outputs and is_nnx_module(placed):
        constrain_submodules(placed, outputs, mesh)
    return placed


def _place(module: Any, plan: ResolvedPlan, mesh: Mesh) -> Any:
    if any(isinstance(array_of(x), jax.ShapeDtypeStruct) for x in _leaves(module)):
        raise ValueError(
            'the parameters are ShapeDtypeStructs, without any arrays to lay out: '
            'plan.resolve(params, mesh) says how they would be'
        )
    if not is_nnx_module(module):
        held = unbox(module)
        return jax.device_put(held, plan.resolve_state(held, mesh).shardings)
    from flax import nnx  # imported already, or there would be no such module

    held = nnx.state(module, nnx.Param)
    plan.check(held, mesh)

    def placed(path: Any, variable: Any) -> Any:
        sharding = NamedSharding(mesh, plan['/'.join(key_names(path))].spec)
        return variable.replace(jax.device_put(array_of(variable), sharding))

    nnx.update(module, jax.tree_util.tree_map_with_path(placed, held, is_leaf=is_carrier))
    return module


def _leaves(module: Any) -> list[Any]:
    return jax.tree.leaves(module, is_leaf=is_carrier)
