"""A training step whose result is laid out like the state that it takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from partitioning.constraints import lay_out
from partitioning.partitioner.partitioned import PartitionedCallable
from partitioning.partitioner.same_paths import match_by_path
from partitioning.rules import PaddedSpec
from partitioning.state import check_only_arrays, path_str


class TrainingSetup(NamedTuple):
    """What a training loop needs.

    Attributes:
      state: the state, with each array in its shards.
      step: the partitioned step. It donates the state that it is given.
      data_spec: the spec of the batch.
    """

    state: Any
    step: PartitionedCallable
    data_spec: PartitionSpec


def keep_layout(train_step: Callable[..., Any], specs: Any) -> Callable[..., Any]:
    """`train_step` with a result in a fixed layout: the state by its specs, the rest replicated.

    Args:
      train_step: maps (state, batch, ...) to a state, or to a tuple that begins with a state.
      specs: the specs of the state.

    Returns:
      The function, to be traced inside the mesh. It raises ValueError if `train_step` returns
      anything else, or a state whose arrays have other shapes or dtypes.
    """
    name = getattr(train_step, '__name__', 'train_step')

    @functools.wraps(train_step)
    def kept(state: Any, *args: Any, **kwargs: Any) -> Any:
        result = train_step(state, *args, **kwargs)
        check_only_arrays(result, name)
        _check_state(result, state, name)
        before, (leaves, treedef) = jax.tree.leaves(state), jax.tree.flatten(result)
        of_state = match_by_path(specs, state)
        assert of_state is not None, 'jax has compared the structures already'
        new = map(_lay_out, leaves, of_state, before)  # the state comes first
        rest = (lay_out(x, None) for x in leaves[len(before) :])
        return jax.tree.unflatten(treedef, [*new, *rest])

    return kept


def num_arguments(train_step: Callable[..., Any]) -> int:
    """The number of positional arguments that a step needs; 2 if it does not say."""
    try:
        parameters = inspect.signature(train_step).parameters.values()
    except (TypeError, ValueError):  # some functions have no signature
        return 2
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    return max(2, len(needed))


def _lay_out(x: Any, spec: Any, before: Any) -> jax.Array:
    """An array of the new state in the dtype and the layout of the array that it replaces."""
    # With a weak type, the second call would be compiled separately.
    x = lay_out(jax.lax.convert_element_type(x, before.dtype), spec)
    return lay_out(x, spec.outside) if isinstance(spec, PaddedSpec) else x


def _check_state(result: Any, state: Any, name: str) -> None:
    """Raises ValueError unless a result is or begins with a state whose arrays are as before."""
    structure: Any = jax.tree.structure(state)
    firsts = result[:1] if isinstance(result, tuple | list) else ()
    for candidate in (result, *firsts):
        if jax.tree.structure(candidate) == structure:
            return _check_same_arrays(candidate, state, name)
    returned = _kind(result)
    if firsts:
        returned += f' of ({", ".join(map(_kind, result))})'
    raise ValueError(
        f'{name} returned {returned}, but must return the new state, or a tuple that begins with '
        f'it, such as (state, metrics); {_difference(firsts[0] if firsts else result, state)}'
    )


def _kind(x: Any) -> str:
    return f'{jax.typeof(x).str_short()}' if _is_leaf(x) else f'a {type(x).__name__}'


def _is_leaf(x: Any) -> bool:
    return jax.tree_util.all_leaves([x])


def _difference(candidate: Any, state: Any) -> str:
    """How the structure of a result differs from that of the state."""
    paths = [
        {path_str(path): None for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (candidate, state)
    ]
    lacks = [path for path in paths[1] if path not in paths[0]]
    adds = [path for path in paths[0] if path not in paths[1]]
    if lacks:
        return f'the state has {lacks[0] or "one array"}, which is missing in the result'
    if adds:
        return f'the result has {adds[0]}, which the state does not have'
    return (
        'the arrays have the same paths, but the containers or the static fields differ: change '
        'the state that the step receives, for example with state.replace(...)'
    )


def _check_same_arrays(after: Any, before: Any, name: str) -> None:
    """Raises ValueError if an array has another shape or dtype than in the state."""
    paths = jax.tree_util.tree_leaves_with_path(before)
    for (path, old), new in zip(paths, jax.tree.leaves(after), strict=True):
        was, now = jax.typeof(old), jax.typeof(new)
        # A Python number takes the dtype of the state, but 0.5 does not become an integer.
        dtype = jnp.result_type(was.dtype, new) if now.weak_type else now.dtype
        if (was.shape, was.dtype) != (now.shape, dtype):
            raise ValueError(
                f'{name} returned {path_str(path) or "the state"} as {_shape(now)}, but received '
                f'{_shape(was)}, so each step would be compiled again: return it as '
                f'{_shape(was)}, or make it {_shape(now)} in the init function'
            )


def _shape(aval: Any) -> str:
    return f'{aval.dtype}{list(aval.shape)}'
