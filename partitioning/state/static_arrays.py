"""Arrays in static fields of a state, such as a mask that an Equinox module keeps.

An init function that is traced fills such fields with tracers, which mean nothing after the trace.
The trace returns them as further results, and their values take their places.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partitioning.state.structures import children_of

# jax compares static fields whenever it looks for a compiled function, and arrays are equal only if
# they are the same object. Two plans of one program therefore get the same arrays.
_KNOWN: weakref.WeakValueDictionary[Any, jax.Array] = weakref.WeakValueDictionary()

AS_ARRAY_FIELD = 'make it a field for arrays, without static=True or pytree_node=False'


def find_static_tracers(tree: Any) -> list[jax.core.Tracer]:
    """The tracers in the static fields of a tree, in a fixed order."""
    found: list[jax.core.Tracer] = []

    def keep(x: jax.core.Tracer) -> Any:
        found.append(x)
        return x

    _map_structure(jax.tree.structure(tree), keep)
    return found


def with_static_values(tree: Any, values: Sequence[Any]) -> Any:
    """The tree with these values in place of the tracers that `find_static_tracers` finds."""
    remaining = iter(values)
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(_map_structure(structure, lambda _: next(remaining)), leaves)


def name_static_field(tree: Any) -> str | None:
    """The first static field that holds an array, such as `Net.bias`, or None.

    Fields have names if the node is a dataclass, as all modules of Equinox are.
    """
    children = children_of(tree)
    if children is None:
        return None
    dynamic = {jax.tree_util.keystr((key,), simple=True).lstrip('.') for key in children}
    for field in dataclasses.fields(tree) if dataclasses.is_dataclass(tree) else ():
        held = jax.tree.leaves(getattr(tree, field.name, None))
        if field.name not in dynamic and any(isinstance(x, jax.Array | np.ndarray) for x in held):
            return f'{type(tree).__name__}.{field.name}'
    below = (name_static_field(child) for child in children.values())
    return next((name for name in below if name is not None), None)


def evaluate_constants(jaxpr: Any, first: int) -> list[jax.Array] | None:
    """The values of the results of a trace from number `first` on, which take no argument.

    None is returned if one of them depends on the arguments of the trace.
    """
    inside = jaxpr.jaxpr
    varying = {id(x) for x in inside.invars}
    for equation in inside.eqns:
        if any(id(x) in varying for x in equation.invars):
            varying |= {id(x) for x in equation.outvars}
    if any(id(x) in varying for x in inside.outvars[first:]):
        return None

    @jax.jit
    def evaluate() -> list[Any]:
        from jax.extend.core import jaxpr_as_fun  # imports Pallas, so not with this module

        return jaxpr_as_fun(jaxpr)(*map(_zeros, jaxpr.in_avals))[first:]

    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return [_one_object(x) for x in evaluate()]


def _node_data(structure: Any) -> Any:
    """The type and the static data of a node, or None for a leaf."""
    return structure.node_data()


def _map_structure(structure: Any, replace: Callable[[Any], Any]) -> Any:
    """A tree structure with `replace(x)` for every tracer in its static data."""
    data = _node_data(structure)
    if data is None:
        return structure
    kind, static = data
    children = structure.children()
    new = [_map_structure(child, replace) for child in children]
    new_static = None if static is None else _map_static(static, replace)
    if new_static is static and all(map(lambda x, y: x is y, new, children)):
        return structure
    make = jax.tree_util.PyTreeDef.from_node_data_and_children
    return make(jax.tree_util.default_registry, (kind, new_static), new)


def _map_static(static: Any, replace: Callable[[Any], Any]) -> Any:
    """Static data with `replace(x)` for every tracer, also in pytrees; itself if it has none."""
    try:
        leaves, structure = jax.tree.flatten(static)
    except (TypeError, ValueError):  # such as a dict whose keys have no order
        return static
    data = _node_data(structure)
    if data is not None and data[1] is static:  # by jax.tree_util.register_static
        return static
    new = [replace(x) if isinstance(x, jax.core.Tracer) else x for x in leaves]
    new_structure = _map_structure(structure, replace)
    if new_structure is structure and all(map(lambda x, y: x is y, new, leaves)):
        return static
    return jax.tree.unflatten(new_structure, new)


def _zeros(aval: Any) -> Any:
    """An array of this kind, for an argument whose value does not matter."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.zeros(aval.shape, aval.dtype)
    implementations: list[Any] = []
    abstract = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    jax.eval_shape(lambda key: implementations.append(jax.random.key_impl(key)), abstract)
    return jnp.broadcast_to(jax.random.key(0, impl=implementations[0]), aval.shape)


def _one_object(x: jax.Array) -> jax.Array:
    """The array, or an earlier one with the same value."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    content = hashlib.sha256(np.asarray(x).tobytes()).digest()
    return _KNOWN.setdefault((x.shape, x.dtype, x.weak_type, content), x)
