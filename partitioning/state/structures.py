"""What a state has in addition to arrays: the boxes around them, and static fields.

A state is initialized with boxes that name its arrays, and trained without them. Its static fields,
such as the optimizer in Flax's TrainState, are made anew by each trace of an init function and are
never equal, although jax compares them with the static fields of the tree of shardings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from partitioning.state.boxes import (
    FlatState,
    Path,
    flatten_state,
    is_box,
    path_str,
    rebox,
)

_KEPT = 8  # the number of states whose boxes are remembered


class BoxedState(NamedTuple):
    """The boxes of a state, without its arrays.

    Attributes:
      arrays: the path and the shape of every array.
      boxes: for every array its box, which holds nothing that needs memory; or None if it has none.
    """

    arrays: Sequence[tuple[Path, tuple[int, ...]]]
    boxes: Sequence[Any]


def with_boxes(
    state: Any, known: tuple[BoxedState, ...]
) -> tuple[FlatState, tuple[BoxedState, ...]]:
    """A state with its boxes.

    Args:
      state: a pytree, abstract or not. If it carries no names at all, it gets the boxes of the
        first known state whose arrays have the same paths and shapes. The dtypes and the static
        fields may differ.
      known: the states that are remembered.

    Returns:
      The state, and the states to remember from now on, the latest first.
    """
    flat = flatten_state(state)
    carriers = {entry.carrier for entry in flat.entries}
    has_boxes = 'box' in carriers
    if not has_boxes and (not known or carriers != {None}):
        return flat, known
    arrays = [(entry.path, entry.shape) for entry in flat.entries]
    same = next((other for other in known if other.arrays == arrays), None)
    if has_boxes:
        boxes = [_emptied(x.leaf) if x.carrier == 'box' else None for x in flat.entries]
        latest = BoxedState(arrays, boxes)
        return flat, (latest, *(other for other in known if other is not same))[:_KEPT]
    if same is None:
        return flat, known
    leaves = [
        x.array if box is None else rebox(box, x.array)
        for box, x in zip(same.boxes, flat.entries, strict=True)
    ]
    return flatten_state(jax.tree.unflatten(flat.treedef, leaves)), known


def _emptied(box: Any) -> Any:
    """The box, or the boxes inside one another, without an array that takes memory."""
    if type(box.value) is jax.ShapeDtypeStruct:
        return box
    return box.replace(value=_emptied(box.value) if is_box(box.value) else 0)


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
                f'{function} returned {_description(leaf)}{where}, which is not an array: '
                f'{_way_out(leaf, bool(path))}'
            )


def _is_array(x: Any) -> bool:
    try:
        jax.typeof(x)
    except (TypeError, ValueError):  # ValueError: the object only knows how to become an array
        return False
    return not isinstance(x, jax.ShapeDtypeStruct)  # some versions of jax take it for an array


def _description(x: Any) -> str:
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
