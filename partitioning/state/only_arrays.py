"""The check that a function returns arrays only."""

from __future__ import annotations

from typing import Any

import jax

from partitioning.state.boxes import path_str


def check_only_arrays(tree: Any, function: str) -> None:
    """Checks that a result can be stored in arrays.

    Args:
      tree: the result, a pytree. Python numbers count as arrays.
      function: the name of the function that returned it.

    Raises:
      ValueError: with the path of the first leaf that is not an array.
    """
    if tree is None:
        raise ValueError(f'{function} returned None: end it with `return state`')
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not _is_array(leaf):
            where = f' at {path_str(path)}' if path else ''
            raise ValueError(
                f'{function} returned {_describe(leaf)}{where}, which is not an array: '
                f'{_way_out(leaf, bool(path))}'
            )


def _is_array(x: Any) -> bool:
    try:
        jax.typeof(x)
    except (TypeError, ValueError):  # ValueError: the object only knows how to become an array
        return False
    return not isinstance(x, jax.ShapeDtypeStruct)  # some versions of jax take it for an array


def _describe(x: Any) -> str:
    if isinstance(x, str):
        return f'the string {x[:40]!r}'
    if callable(x) and hasattr(x, '__name__'):
        return f'the function {x.__name__}'
    kind, dtype = type(x).__name__, getattr(x, 'dtype', None)
    article = 'an' if kind[0] in 'aeiouAEIOU' else 'a'
    return f'{article} {kind}' + (f' of dtype {dtype}' if dtype is not None else '')


def _way_out(x: Any, is_inside: bool) -> str:
    if not is_inside and not callable(x):
        return (
            'return a pytree of arrays, such as a dict, and register your own class with '
            'jax.tree_util.register_dataclass'
        )
    if callable(x):
        return (
            'keep arrays only, for example eqx.partition(model, eqx.is_array)[0], and make the '
            'rest a static field, such as flax.struct.field(pytree_node=False)'
        )
    if isinstance(x, jax.ShapeDtypeStruct):
        return 'call the function that makes it instead of jax.eval_shape'
    return 'keep it outside, or make it a static field: flax.struct.field(pytree_node=False)'
