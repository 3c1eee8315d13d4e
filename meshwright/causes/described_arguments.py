"""The layout of the arguments of any jitted function, whether a partitioner made it or not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from partitioning.plan.rows import PlanRow, make_row
from partitioning.rules import ResolvedDimension, boundary_spec, dimension_axes, from_tuple
from partitioning.state import Role

_OPTIMIZER = ('opt_state', 'optimizer', 'momentum', 'mu', 'nu', 'param_states')


def describe_arguments(
    traced: jax.stages.Traced, compiled: jax.stages.Compiled, known: Sequence[PlanRow] = ()
) -> tuple[PlanRow | None, ...]:
    """Returns the layout of each argument of a compiled function, for `explain_program`.

    Args:
      traced: the trace.
      compiled: the program.
      known: rows of a plan, which give names and reasons to arguments of the same path and shape.

    Returns:
      A row per array, in the order of `jax.tree.leaves`; None for those without a NamedSharding.
    """
    # Arguments that the program does not use have None in place of a sharding.
    tree: Any = compiled.in_tree
    shardings = tree.flatten_up_to(compiled.input_shardings)
    avals = traced.jaxpr.in_avals
    names = getattr(traced.jaxpr.jaxpr.debug_info, 'arg_names', None) or ()
    paths = [_path(name) for name in names]
    paths += [f'argument_{n}' for n in range(len(paths), len(avals))]
    mesh = next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
    if mesh is None or len(shardings) != len(avals):
        return (None,) * len(avals)
    donated = [x.donated for x in jax.tree.leaves(compiled.args_info)]
    rows = []
    for path, aval, sharding, is_state in zip(paths, avals, shardings, donated, strict=True):
        spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
        role = _role(path, aval, is_state)
        rows.append(_row(path, aval, spec, mesh, role, known) if sharding is not None else None)
    return tuple(rows)


def _row(
    path: str, aval: Any, spec: PartitionSpec, mesh: Any, role: Role, known: Sequence[PlanRow]
) -> PlanRow:
    """The row of a plan, if it has this layout, or one with its names."""
    axes = [entry or () for entry in dimension_axes(spec, len(aval.shape))]
    same = [r for r in known if f'/{path}'.endswith(f'/{r.path}') and r.shape == aval.shape]
    names: Sequence[Any] = (None,) * len(axes)
    for row in same[:1]:
        planned = dimension_axes(boundary_spec(row.spec), len(aval.shape))
        if [entry or () for entry in planned] == axes:
            return row
        names, path, role = row.logical_axes, row.path, row.role
    dimensions = [
        ResolvedDimension(name, from_tuple(entry), None, (), 'the layout of the argument')
        for name, entry in zip(names, axes, strict=True)
    ]
    return make_row(path, aval, mesh, dimensions, role)


def _path(name: str) -> str:
    """The path of an argument: "state.params['w']" is state/params/w."""
    return '/'.join(re.findall(r'[\w\-]+', name)) if name else 'argument'


def _role(path: str, aval: Any, donated: bool) -> Role:
    """What an argument without a plan is for: a batch is not donated, or has integers."""
    if any(word in path.split('/') for word in _OPTIMIZER):
        return 'optimizer'
    is_float = jnp.issubdtype(aval.dtype, jnp.floating)
    return 'parameters' if donated and is_float else 'other'
