"""Shardings matched to arrays by their paths, for trees whose static fields differ.

jax compares the static fields of a state, such as the optimizer in Flax's TrainState, with those of
the tree of its shardings. Each trace of an init function makes new ones, which are never equal.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from partitioning.constraints import lay_out


def _is_none(x: Any) -> bool:
    return x is None


def has_structure_of(prefix: Any, tree: Any) -> bool:
    """Whether jax accepts `prefix` as a prefix of `tree`."""
    try:
        jax.tree.map(lambda *_: 0, prefix, tree, is_leaf=_is_none)
    except ValueError:
        return False
    return True


def match_by_path(prefix: Any, tree: Any) -> list[Any] | None:
    """The leaf of `prefix` that belongs to each leaf of a tree, in the order of the tree.

    Args:
      prefix: a pytree in which None is a leaf. It is a prefix of `tree`, except that static fields
        may differ.
      tree: a pytree.

    Returns:
      The leaves of `prefix`; None if the paths of the two trees do not match.
    """
    given = dict(jax.tree_util.tree_leaves_with_path(prefix, is_leaf=_is_none))
    found = []
    for path, _ in jax.tree_util.tree_leaves_with_path(tree):
        above = next((path[:n] for n in range(len(path), -1, -1) if path[:n] in given), None)
        if above is None:
            return None
        found.append(given[above])
    return found


def shardings_of_arguments(shardings: Any, args: Sequence[Any]) -> tuple[Any, ...] | None:
    """The shardings of arguments, as trees with the static fields of the arguments.

    Args:
      shardings: a tuple with the shardings of each argument.
      args: the arguments.

    Returns:
      The shardings; None if they do not match the arguments by their paths.
    """
    if not isinstance(shardings, tuple) or len(shardings) != len(args):
        return None
    adapted = []
    for given, arg in zip(shardings, args, strict=True):
        found = match_by_path(given, arg)
        if found is None or len(jax.tree.leaves(given, is_leaf=_is_none)) > max(len(found), 1):
            return None
        adapted.append(jax.tree.unflatten(jax.tree.structure(arg), found))
    return tuple(adapted)


def lay_out_by_path(fn: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """`fn` with a result in these shardings, which are matched to its arrays by their paths.

    Args:
      fn: a function, to be traced inside the mesh.
      shardings: a pytree of shardings. None leaves the layout to the compiler.
    """

    @functools.wraps(fn)
    def laid_out(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if (found := match_by_path(shardings, result)) is None:
            raise ValueError(
                f'{getattr(fn, "__name__", "the function")} returned {jax.tree.structure(result)}, '
                f'but out_axis_resources are for {jax.tree.structure(shardings)}'
            )
        leaves, treedef = jax.tree.flatten(result)
        return jax.tree.unflatten(treedef, map(_place, leaves, found))

    return laid_out


def _place(x: Any, sharding: Any) -> Any:
    if sharding is None:
        return x
    if isinstance(sharding, NamedSharding) and sharding.memory_kind is None:
        return lay_out(x, sharding.spec)
    return jax.device_put(x, sharding)
