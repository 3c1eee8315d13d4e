"""Finds which arguments of a plain function are parameters, optimizer state or a batch.

For `step(p, o, x)`, whose `p` is multiplied with rows of `x` and returned, and whose `o` has arrays
of the same shapes, which are only added and scaled element by element:

    p  parameters        o  optimizer        x  batch
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from meshwright.calls.held import MODELS, ArgumentRole, named_role
from partitioning.products.flops import PRODUCTS, bodies_of, open_jaxpr

# The result has the elements of the operand, cast, moved, or repeated.
_COPIES = frozenset(
    [
        *('convert_element_type', 'copy', 'copy_p', 'reshape', 'transpose', 'squeeze', 'slice'),
        *('dynamic_slice', 'sharding_constraint', 'reshard', 'optimization_barrier', 'pvary'),
        *('expand_dims', 'device_put', 'reduce_precision', 'mesh_cast', 'all_gather', 'name'),
    ]
)
_READS = PRODUCTS | {'gather'}
_SUMS = frozenset(['add', 'add_any', 'sub', 'mul', 'div'])  # of weights, such as with an adapter
_FEW = 2  # arrays of an argument that is not returned; more of them are parameters


def find_roles(jaxpr: Any, paths: Sequence[tuple[str, ...]]) -> list[ArgumentRole]:
    """The role of each array of the arguments.

    Names that say what an array is for count first. Otherwise, arrays of floats that a model
    computes with are parameters if the function returns arrays of their shapes, if their argument
    has several of them, or if a batch is named that has another number of rows; those that are only
    updated are of the optimizer; and arrays that are not returned are of the batch.

    Args:
      jaxpr: the trace, a ClosedJaxpr.
      paths: the path of each array.
    """
    computed = _find_computed(jaxpr)
    returned = collections.Counter(tuple(aval.shape) for aval in jaxpr.out_avals if aval.shape)
    several = collections.Counter(
        path[:1] for path, used in zip(paths, computed, strict=True) if used
    )
    shapes = {
        tuple(aval.shape)
        for aval, used in zip(jaxpr.in_avals, computed, strict=True)
        if used and aval.shape
    }
    most = max(several.values(), default=0)
    rows = {
        aval.shape[0]
        for path, aval in zip(paths, jaxpr.in_avals, strict=True)
        if aval.shape and named_role(path, aval) == 'batch'
    }
    found: list[ArgumentRole] = []
    for path, aval, used in zip(paths, jaxpr.in_avals, computed, strict=True):
        role, shape = named_role(path, aval), tuple(aval.shape)
        is_float = jnp.issubdtype(aval.dtype, jnp.inexact)
        of_few = several[path[:1]] <= _FEW < most
        is_state = returned[shape] > 0 and not (used and of_few)
        if role == 'parameters' and set(path) & MODELS and is_float and shape and not used:
            role = 'optimizer' if is_state and shape in shapes else role
        if role == 'other' and shape:
            # Frozen matrices in a dictionary have other rows than the batch.
            is_frozen = bool(rows) and len(path) > 1 and shape[0] not in rows
            if is_float and used and (is_state or several[path[:1]] > _FEW or is_frozen):
                role = 'parameters'
            elif is_float and is_state and shape in shapes:
                role = 'optimizer'
            elif not is_state and not jnp.issubdtype(aval.dtype, jnp.unsignedinteger):
                role = 'batch'
        found.append(role)
    return found


def _find_computed(jaxpr: Any) -> list[bool]:
    """Whether each argument is more than updated: multiplied, looked up, or joined with others."""
    inner, _ = open_jaxpr(jaxpr)
    seen: set[int] = set()
    _visit(inner, {var: {i} for i, var in enumerate(inner.invars)}, seen)
    return [i in seen for i in range(len(inner.invars))]


def _visit(jaxpr: Any, held: dict[Any, set[int]], seen: set[int]) -> None:
    """Follows arguments through the equations of a jaxpr.

    Args:
      jaxpr: the jaxpr.
      held: the arguments that each variable is a copy of.
      seen: receives the arguments with which something is computed.
    """
    for equation in jaxpr.eqns:
        carried = [_arguments(var, held) for var in equation.invars]
        if not any(carried):
            continue
        name, bodies = equation.primitive.name, list(bodies_of(equation))
        if bodies and name != 'pallas_call':
            for body in bodies:
                inner, _ = open_jaxpr(body)
                given = carried[len(carried) - len(inner.invars) :]
                _visit(inner, dict(zip(inner.invars, given, strict=False)), seen)
        elif name in _COPIES:
            for var in equation.outvars:
                held[var] = carried[0]
        elif name == 'dot_general':  # an optimizer may multiply what it updates with itself
            seen.update(carried[0] ^ carried[1])
        elif name in _READS or name == 'pallas_call' or _repeats(equation):
            seen.update(*carried)
        elif name in _SUMS and _is_sum(equation):
            held[equation.outvars[0]] = set[int]().union(*carried)


def _arguments(var: Any, held: dict[Any, set[int]]) -> set[int]:
    return set() if isinstance(var, core.Literal) else held.get(var, set())


def _is_sum(equation: Any) -> bool:
    """Whether arrays of one shape are added, or an array is multiplied by a number."""
    one, other = (var.aval.shape for var in equation.invars)
    return () in (one, other) if equation.primitive.name in ('mul', 'div') else one == other


def _repeats(equation: Any) -> bool:
    """Whether an array is repeated along other dimensions, such as a scale for all rows."""
    return equation.primitive.name == 'broadcast_in_dim' and bool(equation.invars[0].aval.shape)
