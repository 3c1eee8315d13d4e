"""Compiles a partitioned function so that it can be explained, and compiled with a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshwright.calls.held import plan_of
from meshwright.calls.partitioned import (
    PartitionedLike,
    PartitionerWithRules,
    is_partitioned,
    laid_out_for,
)
from meshwright.causes.layouts import describe_arguments
from meshwright.causes.trying import CompiledFunction
from meshwright.program.costs import read_costs
from partitioning.plan import PlanRow
from partitioning.rules import LogicalAxisRules, PaddedSpec


def compile_partitioned(
    partitioner: PartitionerWithRules, fn: PartitionedLike, *args: Any
) -> CompiledFunction:
    """Compiles a partitioned function, to explain it and to try changes of its rules.

    Usage:
      function = compile_partitioned(partitioner, step, plan.abstract_state, batch)
      best = find_change(function)

    Args:
      partitioner: the partitioner of the function.
      fn: what `partitioner.partition` returned.
      *args: the arguments of a call, as ShapeDtypeStructs or arrays.

    Raises:
      ValueError: if the function is not partitioned.
    """
    if not is_partitioned(fn):
        raise ValueError(
            f'{getattr(fn, "__name__", repr(fn))} is not a partitioned function: pass what '
            'partitioner.partition(...) returned'
        )
    fn = laid_out_for(fn, args)
    settings = fn.settings.on_any_mesh()
    # An argument whose arrays have no names, such as a batch, has no plan.
    plans = [plan_of(arg, partitioner, (ValueError, TypeError)) for arg in args]
    known: list[PlanRow] = [row for plan in plans if plan is not None for row in plan.rows]

    def retrace(rules: LogicalAxisRules) -> jax.stages.Traced:
        other = partitioner.with_rules(rules)
        changes: list[tuple[Any, Any]] = []
        for arg, plan in zip(args, plans, strict=True):
            if plan is not None:
                changes.append((plan.specs, other.plan(arg).specs))
        changes.append((partitioner.data_partition_spec, other.data_partition_spec))
        again = other.partition(
            settings.fn,
            _replace(settings.in_shardings, changes),
            _replace(settings.out_shardings, changes),
            static_argnums=settings.static_argnums,
            donate_argnums=settings.donate_argnums,
            compiler_options=settings.compiler_options,
        )
        return again.trace(*jax.tree.map(_without_layout, args))

    traced = fn.trace(*args)
    compiled = traced.lower().compile()
    return CompiledFunction(
        traced=traced,
        compiled=compiled,
        costs=read_costs(compiled, partitioner.mesh),
        mesh=partitioner.mesh,
        rules=partitioner.logical_axis_rules,
        rows=describe_arguments(traced, compiled, known),
        retrace=retrace,
    )


def _replace(resources: Any, changes: Sequence[tuple[Any, Any]]) -> Any:
    """Resources in which trees of specs are replaced by others."""
    for before, after in changes:
        first: Any = jax.tree.flatten(resources, is_leaf=_is_spec)
        second: Any = jax.tree.flatten(before, is_leaf=_is_spec)
        if first[1] == second[1] and first[0] == second[0]:
            return after
    if isinstance(resources, tuple | list) and not isinstance(resources, PartitionSpec):
        return tuple(_replace(resource, changes) for resource in resources)
    if isinstance(resources, dict):
        return {key: _replace(value, changes) for key, value in resources.items()}
    return resources


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec | PaddedSpec)


def _without_layout(x: Any) -> Any:
    """An array as a ShapeDtypeStruct without a sharding, which other rules change."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, 'shape') else x
