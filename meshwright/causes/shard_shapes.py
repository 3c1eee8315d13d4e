"""Tells from shapes whether an array can be a shard of another, and over which mesh axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from meshwright.jaxpr.values import Axes

_MAX_RANK = 6  # arrays with more dimensions are not compared, because all orders are tried


def shard_counts(sizes: Mapping[str, int]) -> frozenset[int]:
    """The numbers of shards that a dimension can have over the axes of a mesh."""
    return frozenset(math.prod(sizes[a] for a in axes) for axes in _choices(sizes))


def shard_dimensions(
    shape: Sequence[int], whole: Sequence[int], counts: frozenset[int]
) -> dict[int, int] | None:
    """For each dimension of a whole array, the number of its shards, if the shapes fit.

    Dimensions of size 1 do not count, and the shard may have its dimensions in another order. A
    shard with two dimensions may have merged several dimensions of the whole array into one.

    Args:
      shape: the shape of the shard.
      whole: the shape of the whole array.
      counts: the possible numbers of shards.

    Returns:
      The number of shards of each dimension, or None if one cannot be a shard of the other.
    """
    found = _exact_dimensions(shape, whole, counts)
    if found is not None or len(shape) != 2 or len(whole) < 3:
        return found
    # Compilers flatten the operands of matrix products: all dimensions but one are merged.
    for kept in (len(whole) - 1, 0):
        rest = [d for d in range(len(whole)) if d != kept]
        first = rest[0]
        merged = [math.prod(whole[d] for d in rest), whole[kept]]
        shards = _exact_dimensions(shape, merged if kept else merged[::-1], counts)
        if shards is not None:
            ordered = (shards[0], shards[1]) if kept else (shards[1], shards[0])
            return {**dict.fromkeys(range(len(whole)), 1), first: ordered[0], kept: ordered[1]}
    return None


def _exact_dimensions(
    shape: Sequence[int], whole: Sequence[int], counts: frozenset[int]
) -> dict[int, int] | None:
    kept = [i for i, n in enumerate(whole) if n > 1]
    parts = [n for n in shape if n > 1]
    if len(kept) < len(parts) or len(kept) > _MAX_RANK:
        return None
    held = max(math.prod(shape), 1)
    if math.prod(whole) % held or math.prod(whole) // held not in counts:
        return None
    padded = parts + [1] * (len(kept) - len(parts))
    # The given order is tried first. A dimension of size 1 in the shard matches any dimension.
    for order in itertools.permutations(padded):
        pairs = list(zip(order, kept, strict=True))
        if all(whole[j] % n == 0 and whole[j] // n in counts for n, j in pairs):
            return {**dict.fromkeys(range(len(whole)), 1), **{j: whole[j] // n for n, j in pairs}}
    return None


def likely_axes(
    shards: Mapping[int, int],
    preferred: Sequence[Axes],
    sizes: Mapping[str, int],
) -> tuple[Axes, ...]:
    """The mesh axes that probably shard each dimension, from the numbers of shards.

    Args:
      shards: the number of shards of each dimension.
      preferred: for each dimension the mesh axes to try first.
      sizes: the size of each mesh axis.
    """
    found: list[Axes] = [()] * len(shards)
    free = {axis: n for axis, n in sizes.items() if n > 1}
    for dim, count in shards.items():
        for axes in (preferred[dim], *_choices(free)) if count > 1 else ():
            if set(axes) <= set(free) and math.prod(sizes[a] for a in axes) == count:
                found[dim] = axes
                free = {axis: n for axis, n in free.items() if axis not in axes}
                break
    return tuple(found)


def _choices(sizes: Mapping[str, int]) -> list[Axes]:
    """All sets of mesh axes with a size above 1, the smallest sets first; the first is empty."""
    axes = [axis for axis, n in sizes.items() if n > 1]
    return [c for r in range(len(axes) + 1) for c in itertools.combinations(axes, r)]
