"""Finds the dimension along which scanned layers are stacked."""

from __future__ import annotations

from collections.abc import Mapping

Shape = tuple[int, ...]
_MOST = 512  # layers


def stacked_dimensions(shapes: Mapping[str, Shape]) -> dict[str, int]:
    """The dimension that counts layers, for each array that has one.

    All arrays of a scanned subtree have this dimension, those that have only one dimension in a
    single layer too. It is the first dimension, or the second as T5X and MaxText stack layers.

    Args:
      shapes: the shape of each array, by path.
    """
    subtrees: dict[str, list[str]] = {}
    for path in shapes:
        keys = path.split('/')
        for n in range(len(keys)):
            subtrees.setdefault('/'.join(keys[:n]), []).append(path)
    found: dict[str, int] = {}
    for _, paths in sorted(subtrees.items(), key=lambda subtree: len(subtree[1]), reverse=True):
        if any(path in found for path in paths):
            continue
        inside = {path: shapes[path] for path in paths}
        dim = next((dim for dim in (0, 1) if _are_stacked(inside, dim)), None)
        if dim is not None:
            found |= dict.fromkeys(paths, dim)
    return found


def _are_stacked(shapes: Mapping[str, Shape], dim: int) -> bool:
    ranks = {len(shape) for shape in shapes.values()}
    if min(ranks) < 2 or max(ranks) < 3 or (dim == 1 and len(shapes) < 4):
        return False
    if len({shape[dim] for shape in shapes.values()}) > 1:
        return False
    single = {path: (*shape[:dim], *shape[dim + 1 :]) for path, shape in shapes.items()}
    # Every layer has vectors, such as biases, and their sizes are those of its matrices. This is
    # what distinguishes layers from, say, attention heads.
    vectors = {path: shape[0] for path, shape in single.items() if len(shape) == 1}
    others = {size for path, shape in single.items() if path not in vectors for size in shape}
    return (
        bool(vectors)
        and {*vectors.values()} <= others
        and not any(path.endswith('kernel') for path in vectors)
        and next(iter(shapes.values()))[dim] <= _MOST
    )
