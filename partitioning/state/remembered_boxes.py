"""The boxes of states, remembered for the time when only the arrays are left.

A state is initialized with boxes that name its arrays, and trained without them. A partitioner that
has seen the boxes once can put them back around the arrays of the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from partitioning.state.boxes import (
    array_of,
    is_box,
    is_carrier,
    rebox,
    shape_of,
)

_KEPT = 8  # the number of states whose boxes are remembered


class BoxedState(NamedTuple):
    """The boxes of a state, without its arrays.

    Attributes:
      arrays: the path and the shape of every array.
      boxes: for every array its box, which holds 0 instead of the array; or None if it has none.
    """

    arrays: tuple[tuple[Any, tuple[int, ...]], ...]
    boxes: tuple[Any, ...]


def with_boxes(state: Any, known: Sequence[BoxedState]) -> tuple[Any, BoxedState | None]:
    """A state with its boxes.

    Args:
      state: a pytree, abstract or not. If it carries no names at all, it gets the boxes of the
        first known state whose arrays have the same paths and shapes. The dtypes and the static
        fields may differ.
      known: the states that are remembered.

    Returns:
      The state, and its boxes if it came with them and they are to be remembered.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_carrier)
    boxed = any(is_box(x) for _, x in flat)
    if not boxed and (not known or any(is_carrier(x) for _, x in flat)):
        return state, None
    arrays = tuple((path, shape_of(array_of(x))) for path, x in flat)
    if boxed:
        return state, BoxedState(arrays, tuple(_emptied(x) if is_box(x) else None for _, x in flat))
    same = next((other for other in known if other.arrays == arrays), None)
    if same is None:
        return state, None
    pairs = zip(same.boxes, flat, strict=True)
    leaves = (x if box is None else rebox(box, x) for box, (_, x) in pairs)
    return jax.tree.unflatten(treedef, leaves), None


def _emptied(box: Any) -> Any:
    """The box, or the boxes inside one another, with 0 instead of the array."""
    return box.replace(value=_emptied(box.value) if is_box(box.value) else 0)


def remember(boxed: BoxedState, known: Sequence[BoxedState]) -> tuple[BoxedState, ...]:
    """The states to remember, the latest first, which replaces one with the same arrays."""
    return (boxed, *(other for other in known if other.arrays != boxed.arrays))[:_KEPT]
