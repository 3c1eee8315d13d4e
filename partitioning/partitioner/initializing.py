"""States from init functions and existing ones: traced once, and made in their shards."""

from __future__ import annotations

import functools
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.plan import InitProgram, Plan
from partitioning.programs.contexts import in_context
from partitioning.programs.trace_log import Arguments, check_not_pmapped
from partitioning.rules import LogicalAxisRules, check_has_devices
from partitioning.state import path_str, unbox
from partitioning.state.boxes import is_metadata
from partitioning.state.static_arrays import (
    AS_ARRAY_FIELD,
    evaluate_constants,
    find_static_tracers,
    name_static_field,
    with_static_values,
)
from partitioning.values import array_str, value_str


def is_init_function(x: Any, args: tuple[Any, ...]) -> bool:
    """Whether the first argument of `plan` is a function that makes a state, or a state.

    Modules of nnx and Equinox can be called, but they hold arrays, so they are states, unless there
    are arguments to call them with.

    Arguments for a state are a ValueError.
    """
    if isinstance(x, type | functools.partial | types.FunctionType | types.MethodType):
        return True
    if not callable(x):
        if args:
            raise ValueError(
                f'a state, {_describe(x)}, takes no further arguments, but there are {len(args)}: '
                'pass only the state, or the function that makes it, as in (init, key)'
            )
        if x is None or isinstance(x, str | bytes):
            raise ValueError(f'{x!r} is neither a state nor a function that makes one')
        return False
    return bool(args) or not any(hasattr(leaf, 'shape') for leaf in jax.tree.leaves(x))


def check_is_state(x: Any, method: str, instead: str) -> None:
    """Raises ValueError if a method that takes a state gets the function that makes one."""
    if is_init_function(x, ()):
        raise ValueError(f'{method} takes a state, not {value_str(x)}: write partitioner.{instead}')


def trace_init(
    init_fn: Callable[..., Any], mesh: Mesh, rules: LogicalAxisRules, args: tuple[Any, ...]
) -> tuple[Any, InitProgram]:
    """Traces an init function once, inside the mesh and the rules; `args` may be abstract.

    The result is the abstract state with its boxes, and the program that makes the state; no array
    of either is weakly typed. A leaf that is not an array is a ValueError with its path.
    """

    check_not_pmapped(init_fn)
    name = getattr(init_fn, '__name__', 'the init function')
    # jax compares structures that a traced function returns with earlier ones, which fails for
    # arrays in static fields. Therefore it sees only the leaves.
    structures: list[Any] = []

    @functools.wraps(init_fn)
    def checked(*args: Any) -> Any:
        state = init_fn(*args)
        check_only_arrays(state, name)
        leaves, structure = jax.tree.flatten(state)
        structures.append(structure)
        return leaves, find_static_tracers(state)

    # Over Explicit axes a result gets its layout from its inputs, so a state that is made from a
    # random key would be replicated. Therefore the program is traced and runs over Auto axes.
    auto = mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    traced = jax.make_jaxpr(in_context(checked, auto, rules), return_shape=True)
    try:
        jaxpr, (leaves, static) = traced(*args)
        for constant in jaxpr.consts:
            if isinstance(constant, jax.core.Tracer):
                jnp.copy(constant)  # which fails if its trace has ended
    except jax.errors.UnexpectedTracerError as error:
        from partitioning.programs.explaining.trace_errors import explain_leak

        raise explain_leak(name, error) from error
    except Exception as error:
        _check_keys(init_fn, args, error)
        raise
    num_arrays = len(leaves)
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    named = jax.tree.unflatten(structures[-1], abstract)
    if static:
        named = with_static_values(named, _static_values(jaxpr, num_arrays, named, name))
    planned = jax.tree.map(array_str, args)

    def make(*arrays: Any) -> list[Any]:
        from jax.extend.core import jaxpr_as_fun  # imports Pallas, so not with this module

        made = jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arrays))[:num_arrays]
        # With a weak type, the first two steps would be compiled separately. The type is read from
        # the traced result, because a constant result is a plain number.
        return [
            jax.lax.convert_element_type(x, aval.dtype) if aval.weak_type else x
            for x, aval in zip(made, jaxpr.out_avals[:num_arrays], strict=True)
        ]

    def jit_for(plan: Plan, *given: Any) -> Any:
        check_has_devices(mesh, 'plan.init')
        if planned != (held := jax.tree.map(array_str, given)):
            names = Arguments(init_fn)
            write = f'plan.init({", ".join(map(names.name, range(len(args))))})'
            if len(given) != len(args):
                raise ValueError(
                    f'plan.init takes the arguments of {name}, {len(args)} of them, but got '
                    f'{len(given)}: write {write}'
                )
            raise ValueError(
                f'{write} was planned for arguments {planned}, not {held}: make the plan again '
                'for these arguments'
            )
        replicated = NamedSharding(auto, PartitionSpec())
        of_each = jax.tree.broadcast(plan.shardings, unbox(named), is_leaf=lambda x: x is None)
        shardings = [NamedSharding(auto, s.spec) for s in jax.tree.leaves(of_each)]
        return jax.jit(make, in_shardings=replicated, out_shardings=shardings)

    def finish(plan: Plan, made: Any) -> Any:
        state = jax.tree.unflatten(jax.tree.structure(unbox(named)), made)
        if AxisType.Explicit not in mesh.axis_types:
            return state
        return jax.device_put(state, plan.shardings)

    return named, InitProgram(jit_for, finish, named)


def _check_keys(init_fn: Callable[..., Any], args: Sequence[Any], error: Exception) -> None:
    """Raises ValueError if an error is of random keys, and an argument is an integer."""
    names = Arguments(init_fn)
    for i, arg in enumerate(args):
        if isinstance(arg, int) and re.search(r'\b(P?RNGs?|keys?)\b', str(error)):
            raise ValueError(
                f'{names.function} needs a random key, but {names.name(i)} is {arg}: pass '
                f'jax.random.key({arg})'
            ) from error


def _static_values(jaxpr: Any, first: int, state: Any, function: str) -> list[jax.Array]:
    """The values of the arrays in static fields, which are constants of the program."""
    values = evaluate_constants(jaxpr, first)
    if values is None:
        raise ValueError(
            f'{function} puts an array that depends on its arguments into the static field '
            f'{name_static_field(state) or "of a node"}, but a static field is a constant of the '
            f'program: {AS_ARRAY_FIELD}'
        )
    return values


def place_state(state: Any, plan: Plan) -> Any:
    """An existing state in the shards of its plan, without boxes and without weak types.

    Raises:
      ValueError: if a leaf is not an array.
    """
    check_only_arrays(state := unbox(state), 'the state', 'holds')
    return jax.device_put(jax.tree.map(_strong, state), plan.shardings)


def _strong(x: Any) -> Any:
    """An array, or a Python number, with a type that operations do not change."""
    dtype = jax.typeof(x).dtype
    return jax.lax.convert_element_type(x, dtype) if jax.typeof(x).weak_type else x


def check_only_arrays(
    tree: Any, subject: str, verb: str = 'returned', *, abstract: bool = False
) -> None:
    """Raises ValueError, with the path, if a leaf of a tree is no array and no number.

    `subject` and `verb` say who returned or holds the tree. Leaves may be `abstract` in a plan,
    where strings are replicated, as flax does.
    """
    if tree is None:
        raise ValueError(f'{subject} {verb} None: end it with `return state`')
    is_leaf = is_metadata if abstract else None
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        if abstract and (hasattr(leaf, 'dtype') or isinstance(leaf, str) or is_metadata(leaf)):
            continue
        try:
            jax.typeof(leaf)
            is_array = not isinstance(leaf, jax.ShapeDtypeStruct)  # which some versions of jax take
        except (TypeError, ValueError):  # ValueError: it only knows how to become an array
            is_array = False
        if not is_array:
            where = f' at {path_str(path)}' if path else ''
            raise ValueError(
                f'{subject} {verb} {_describe(leaf)}{where}, which is not an array: '
                f'{_way_out(leaf, bool(path), _holds_equinox(tree))}'
            )


def _describe(x: Any) -> str:
    if isinstance(x, str):
        return f'the string {x[:40]!r}'
    if callable(x) and hasattr(x, '__name__'):
        return f'the function {x.__name__}'
    kind, dtype = type(x).__name__, getattr(x, 'dtype', None)
    article = 'an' if kind[0] in 'aeiouAEIOU' else 'a'
    return f'{article} {kind}' + (f' of dtype {dtype}' if dtype is not None else '')


def _holds_equinox(tree: Any) -> bool:
    """Whether a pytree has a module of Equinox, whose fields may be strings and functions."""
    module = getattr(sys.modules.get('equinox'), 'Module', None)
    if module is None:
        return False
    parts = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, module))
    return any(isinstance(part, module) for part in parts)


def _way_out(x: Any, is_inside: bool, is_equinox: bool) -> str:
    if callable(x) or is_equinox:
        return (
            'keep arrays only, for example eqx.partition(model, eqx.is_array)[0], and make the '
            'rest a static field, such as flax.struct.field(pytree_node=False)'
        )
    if not is_inside:
        return (
            'return a pytree of arrays, such as a dict, and register your own class with '
            'jax.tree_util.register_dataclass'
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        return 'call the function that makes it instead of jax.eval_shape'
    return 'keep it outside, or make it a static field: flax.struct.field(pytree_node=False)'
