"""Creates states in their shards, with an init function that is traced once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.plan import InitProgram, Plan
from partitioning.programs.contexts import in_context
from partitioning.rules import LogicalAxisRules, check_has_devices
from partitioning.state import check_only_arrays, unbox


def trace_init(
    init_fn: Callable[..., Any], mesh: Mesh, rules: LogicalAxisRules, args: tuple[Any, ...]
) -> tuple[Any, InitProgram]:
    """Traces an init function once, inside the mesh and the rules.

    Args:
      init_fn: makes a train state.
      mesh: the mesh.
      rules: rules for the linen models and `constrain` calls inside.
      args: the arguments of `init_fn`, abstract or not.

    Returns:
      The abstract state with its boxes, and the program that makes the state. No array of either
      is weakly typed.

    Raises:
      ValueError: with the path of the first leaf of the state that is not an array.
    """
    # Over Explicit axes a result gets its layout from its inputs, so a state that is made from a
    # random key would be replicated. Therefore the program is traced and runs over Auto axes.
    auto = _over_auto_axes(mesh)
    traced = jax.make_jaxpr(in_context(_checked(init_fn), auto, rules), return_shape=True)
    jaxpr, named = traced(*args)
    named = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), named)
    abstract = unbox(named)
    treedef = jax.tree.structure(abstract)
    planned = jax.tree.map(_kind, args)

    def make(*arrays: Any) -> Any:
        from jax.extend.core import jaxpr_as_fun  # imports Pallas, so not with this module

        made = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arrays))
        return jax.tree.unflatten(treedef, map(_strongly_typed, made, jaxpr.out_avals))

    def jit_for(plan: Plan, *given: Any) -> Any:
        check_has_devices(mesh, 'plan.init')
        _check_arguments(planned, given)
        replicated = NamedSharding(auto, PartitionSpec())
        shardings = jax.tree.map(lambda s: NamedSharding(auto, s.spec), plan.shardings)
        return jax.jit(make, in_shardings=replicated, out_shardings=shardings)

    def finish(plan: Plan, state: Any) -> Any:
        if AxisType.Explicit not in mesh.axis_types:
            return state
        return jax.device_put(state, plan.shardings)

    return named, InitProgram(jit_for, finish, abstract)


def _checked(init_fn: Callable[..., Any]) -> Callable[..., Any]:
    """`init_fn` with a check of its result: jax's own error does not name the path."""

    @functools.wraps(init_fn)
    def checked(*args: Any) -> Any:
        state = init_fn(*args)
        check_only_arrays(state, getattr(init_fn, '__name__', 'the init function'))
        return state

    return checked


def _over_auto_axes(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes; an AbstractMesh stays one."""
    if isinstance(mesh, AbstractMesh):
        types = (AxisType.Auto,) * len(mesh.axis_names)  # in jax 0.12 they are Explicit by default
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names)


def _check_arguments(planned: Any, given: Any) -> None:
    """Raises ValueError if the arguments differ in structure, shape or dtype."""
    held = jax.tree.map(_kind, given)
    if planned != held:
        raise ValueError(
            f'plan.init was planned for arguments {planned}, not {held}: make the plan again for '
            'these arguments'
        )


def _kind(x: Any) -> str:
    """The dtype and shape of an argument, as text: `float32[8, 16]`."""
    return f'{getattr(x, "dtype", type(x).__name__)}{list(np.shape(x))}'


def _strongly_typed(x: Any, aval: Any) -> Any:
    """A result without a weak type. With one, the first two steps would be compiled separately.

    The type is read from the traced result, because a constant result is a plain number.
    """
    return jax.lax.convert_element_type(x, aval.dtype) if aval.weak_type else x
