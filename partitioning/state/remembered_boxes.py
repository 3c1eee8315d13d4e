"""The boxes of states, remembered for the time when only the arrays are left.

A state is initialized with boxes that name its arrays, and trained without them. A partitioner that
has seen the boxes once can put them back around the arrays of the same state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from partitioning.state.boxes import (
    Path,
    array_of,
    is_box,
    is_carrier,
    key_names,
    rebox,
    shape_of,
)

_KEPT = 8  # the number of states whose boxes are remembered


class BoxedState(NamedTuple):
    """The boxes of a state, without its arrays.

    Attributes:
      arrays: the path and the shape of every array.
      boxes: for every array its box, which holds 0 instead of the array; or 0 if it has none.
    """

    arrays: tuple[tuple[Path, tuple[int, ...]], ...]
    boxes: tuple[Any, ...]


def with_boxes(state: Any, known: tuple[BoxedState, ...]) -> tuple[Any, tuple[BoxedState, ...]]:
    """A state with its boxes, and the boxes to remember from now on.

    Args:
      state: a pytree, abstract or not. With boxes, it is remembered. If it carries no names at all,
        it gets the boxes of the remembered state whose arrays have the same paths and shapes. The
        dtypes and the static fields may differ.
      known: the states that are remembered, the latest first.

    Returns:
      The state, and the new value of `known`.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_carrier)
    boxed = any(is_box(x) for _, x in flat)
    if not boxed and (not known or any(is_carrier(x) for _, x in flat)):
        return state, known
    arrays = tuple((key_names(path), shape_of(array_of(x))) for path, x in flat)
    if boxed:
        boxes = tuple(jax.tree.map(lambda _: 0, x) if is_box(x) else 0 for _, x in flat)
        others = [other for other in known if other.arrays != arrays]
        return state, (BoxedState(arrays, boxes), *others)[:_KEPT]
    for same in known:
        if same.arrays == arrays:
            leaves = (rebox(box, x) for box, (_, x) in zip(same.boxes, flat, strict=True))
            return jax.tree.unflatten(treedef, leaves), known
    return state, known
