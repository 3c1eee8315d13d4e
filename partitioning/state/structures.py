"""Trees that differ from a state in static fields or in depth, leaf by leaf.

The static fields of a state, such as the optimizer in Flax's TrainState, are made anew by each
trace of an init function and are never equal, although jax compares them with the static fields of
the tree of shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax


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


def with_static_fields(
    in_shardings: Any, out_shardings: Any, args: Sequence[Any]
) -> tuple[Any, Any] | None:
    """Shardings for arguments that have other static fields than the shardings.

    Args:
      in_shardings: a tuple with the shardings of each argument.
      out_shardings: the shardings of the result.
      args: the arguments.

    Returns:
      Both shardings, with the static fields of the arguments. Wherever the result has the structure
      of an argument, it gets its static fields, as in a step that returns its state. None if each
      argument has the structure of its shardings, or if the paths of its arrays differ.
    """
    if not isinstance(in_shardings, tuple) or len(in_shardings) != len(args):
        return None
    pairs = list(zip(in_shardings, args, strict=True))
    adapted = {i: like(*pair) for i, pair in enumerate(pairs) if not has_structure_of(*pair)}
    if not adapted or None in adapted.values():
        return None
    old: dict[Any, Any] = {jax.tree.structure(in_shardings[i]): args[i] for i in adapted}
    out_shardings = jax.tree.map(
        lambda x: like(x, old[jax.tree.structure(x)]) if jax.tree.structure(x) in old else x,
        out_shardings,
        is_leaf=lambda x: x is None or jax.tree.structure(x) in old,
    )
    return tuple(adapted.get(i, x) for i, x in enumerate(in_shardings)), out_shardings


def like(shardings: Any, tree: Any) -> Any | None:
    """Shardings as a tree with the structure of `tree`; None if the paths of the two differ."""
    found = match_by_path(shardings, tree)
    if found is None or len(jax.tree.leaves(shardings, is_leaf=_is_none)) > len(found):
        return None
    return jax.tree.unflatten(jax.tree.structure(tree), found)
