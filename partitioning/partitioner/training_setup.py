"""The init function and the step of a program, each traced once.

The init function creates a state in its shards, and the step is partitioned by the plan of the
state alone.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from partitioning.constraints import lay_out
from partitioning.plan import InitProgram, Plan
from partitioning.programs.contexts import PjittedFnWithContext, in_context
from partitioning.programs.partitioned_function import PartitionedCallable
from partitioning.programs.trace_log import check_not_pmapped
from partitioning.rules import LogicalAxisRules, check_has_devices
from partitioning.state import path_str, unbox
from partitioning.state.static_arrays import (
    AS_ARRAY_FIELD,
    evaluate_constants,
    find_static_tracers,
    name_static_field,
    with_static_values,
)
from partitioning.state.structures import match_by_path


def trace_init(
    init_fn: Callable[..., Any], mesh: Mesh, rules: LogicalAxisRules, args: tuple[Any, ...]
) -> tuple[Any, InitProgram]:
    """Traces an init function once, inside the mesh and the rules; `args` may be abstract.

    Returns:
      The abstract state with its boxes, and the program that makes the state. No array of either
      is weakly typed.

    Raises:
      ValueError: with the path of the first leaf of the state that is not an array.
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
    num_arrays = len(leaves)
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    named = jax.tree.unflatten(structures[-1], abstract)
    if static:
        named = with_static_values(named, _static_values(jaxpr, num_arrays, named, name))
    planned = jax.tree.map(_array, args)

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
        if planned != (held := jax.tree.map(_array, given)):
            raise ValueError(
                f'plan.init was planned for arguments {planned}, not {held}: make the plan again '
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


def _array(x: Any) -> str:
    """The dtype and shape of an array: `float32[8, 16]`."""
    return f'{getattr(x, "dtype", type(x).__name__)}{list(np.shape(x))}'


def check_only_arrays(tree: Any, function: str) -> None:
    """Raises ValueError, with the path, if a result has a leaf that is no array and no number."""
    if tree is None:
        raise ValueError(f'{function} returned None: end it with `return state`')
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            jax.typeof(leaf)
            is_array = not isinstance(leaf, jax.ShapeDtypeStruct)  # which some versions of jax take
        except (TypeError, ValueError):  # ValueError: it only knows how to become an array
            is_array = False
        if not is_array:
            where = f' at {path_str(path)}' if path else ''
            raise ValueError(
                f'{function} returned {_describe(leaf)}{where}, which is not an array: '
                f'{_way_out(leaf, bool(path))}'
            )


def _describe(x: Any) -> str:
    if isinstance(x, str):
        return f'the string {x[:40]!r}'
    if callable(x) and hasattr(x, '__name__'):
        return f'the function {x.__name__}'
    kind, dtype = type(x).__name__, getattr(x, 'dtype', None)
    article = 'an' if kind[0] in 'aeiouAEIOU' else 'a'
    return f'{article} {kind}' + (f' of dtype {dtype}' if dtype is not None else '')


def _way_out(x: Any, is_inside: bool) -> str:
    if callable(x):
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


class TrainingSetup(NamedTuple):
    """What a training loop needs; see `BasePartitioner.setup`."""

    state: Any
    step: PartitionedCallable
    data_spec: PartitionSpec


class Step(PjittedFnWithContext):
    """A partitioned step whose calls return what the step of the user returns.

    `needed` is the number of arguments that a call must have, and `optional` names further ones.
    """

    def __init__(self, pairs: PartitionedCallable, mesh: Mesh, needed: int, optional: list[str]):
        super().__init__(pairs, mesh)
        self._needed, self._optional = needed, optional

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        needed, optional = self._needed, self._optional
        if needed < len(args) <= needed + len(optional):
            kwargs |= dict(zip(optional, args[needed:], strict=False))
            args = args[:needed]
        pair = self._pjitted_fn(*args, **kwargs)
        return pair[1].with_state(pair[0]) if type(pair[1]) is _Rest else pair

    def _apply(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        return getattr(self._pjitted_fn, method)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get('_pjitted_fn'), name)


@functools.partial(jax.tree_util.register_dataclass, data_fields=['values'], meta_fields=['kind'])
@dataclasses.dataclass(frozen=True)
class _Rest:
    """A result without its state. Its kind is its type, such as list; None for only a state."""

    values: tuple[Any, ...]
    kind: type | None

    def with_state(self, state: Any) -> Any:
        """The result."""
        if self.kind is None:
            return state
        return getattr(self.kind, '_make', self.kind)((state, *self.values))


def positional_arguments(train_step: Callable[..., Any]) -> tuple[int, list[str]]:
    """The number of arguments that a step needs, and the names of those that are passed by name.

    jax.jit has to know how many positional arguments there are.
    """
    try:
        parameters = list(inspect.signature(train_step).parameters.values())
    except (TypeError, ValueError):  # some functions have no signature
        return 2, []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in positional]
    needed = sum(p.kind in positional and p.default is p.empty for p in parameters)
    return max(2, needed), names[max(2, needed) :]


def returning_pairs(train_step: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    """`train_step` with a result of (state, rest), in which the state is as it was before."""
    check_not_pmapped(train_step)
    name = getattr(train_step, '__name__', 'train_step')

    @functools.wraps(train_step)
    def pair(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        result = train_step(state, *args, **kwargs)
        check_only_arrays(result, name)
        if find_static_tracers(result):
            raise ValueError(
                f'{name} puts an array that it computes into the static field '
                f'{name_static_field(result) or "of a node"}, but a static field is a constant of '
                f'the program: {AS_ARRAY_FIELD}, or change the state that {name} receives'
            )
        after, rest = _state_and_rest(result, state, name)
        of_each = match_by_path(specs, state)
        assert of_each is not None, 'jax has compared the structures already'
        leaves = zip(jax.tree.leaves(state), jax.tree.leaves(after), of_each, strict=True)
        # Each array has the layout and the dtype of the old one: a weak type would make jax compile
        # the second call separately. The rest is laid out because over Explicit axes, jax.jit moves
        # no results.
        arrays = [
            lay_out(jax.lax.convert_element_type(new, old.dtype), spec) for old, new, spec in leaves
        ]
        rest = jax.tree.map(lambda x: lay_out(x, None), rest)
        return jax.tree.unflatten(jax.tree.structure(state), arrays), rest

    return pair


def _state_and_rest(result: Any, state: Any, name: str) -> tuple[Any, Any]:
    """The state in the result of a step, and what comes after it.

    Raises ValueError if the result neither is nor begins with a state like the one before.
    """
    structure: Any = jax.tree.structure(state)

    def is_state(x: Any) -> bool:
        return bool(jax.tree.structure(x) == structure)

    if is_state(result):
        new, rest = result, _Rest((), None)
    elif isinstance(result, tuple | list) and result and is_state(result[0]):
        new, *others = result
        is_pair = type(result) is tuple and len(others) == 1
        rest = others[0] if is_pair else _Rest(tuple(others), type(result))
    else:
        returned, candidate = _kind(result), result
        if isinstance(result, tuple | list) and result:
            returned += f' of ({", ".join(map(_kind, result))})'
            candidate = result[0]
        raise ValueError(
            f'{name} returned {returned}, but must return the new state, or a tuple that begins '
            f'with it, such as (state, metrics). {_difference(candidate, state)}'
        )
    _check_same_arrays(new, state, name)
    return new, rest


def _check_same_arrays(after: Any, before: Any, name: str) -> None:
    """Raises ValueError if an array has another shape or dtype than before."""
    paths = jax.tree_util.tree_leaves_with_path(before)
    for (path, old), new in zip(paths, jax.tree.leaves(after), strict=True):
        was, now = jax.typeof(old), jax.typeof(new)
        # A Python number takes the dtype of the state, but 0.5 does not become an integer.
        dtype = jnp.result_type(was.dtype, new) if now.weak_type else now.dtype
        if (was.shape, was.dtype) != (now.shape, dtype):
            raise ValueError(
                f'{name} returned {path_str(path) or "the state"} as {_array(now)}, but received '
                f'{_array(was)}, so each step would be compiled again: return it as '
                f'{_array(was)}, or make it {_array(now)} in the init function'
            )


def _kind(x: Any) -> str:
    """What a value is, in words: `a dict` or `float32[8]`."""
    return _array(jax.typeof(x)) if jax.tree_util.all_leaves([x]) else f'a {type(x).__name__}'


def _difference(candidate: Any, state: Any) -> str:
    """How the structures of a result and of the state differ."""
    after, before = (
        [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (candidate, state)
    )
    if lacks := [path for path in before if path not in after]:
        return f'It lacks {len(lacks)} of {len(before)} arrays of the state, first {lacks[0]}'
    if adds := [path for path in after if path not in before]:
        return f'The state had no {adds[0]}: create it in the init function'
    return (
        f'The arrays are the same as in the state, a {type(state).__name__}, but the containers or '
        'the static fields differ: change the state that the step receives, as state.replace(...) '
        'does'
    )
