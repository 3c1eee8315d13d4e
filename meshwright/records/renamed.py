"""Which arrays of two records are the same, although their names may have changed.

A variable that is renamed renames all arrays in it: 'params/up' becomes 'weights/up'. What is left
after equal names are paired is paired by meaning: type, layout and donation, in the order of the
arguments.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.records.record import RecordedArray

Pair = tuple[RecordedArray | None, RecordedArray | None]


def pair_arrays(before: Sequence[RecordedArray], after: Sequence[RecordedArray]) -> list[Pair]:
    """Pairs the arrays of two records; None stands for one that is missing or new.

    Args:
      before, after: the arguments, or the results, in their order.
    """
    keys: tuple[Any, ...] = (
        lambda array: array.path,
        _meaning,
        lambda array: (array.path.rpartition('/')[2], array.shape),
    )
    left, new = [*before], [*after]
    pairs: list[Pair] = []
    for key in keys:
        waiting: dict[Any, collections.deque[RecordedArray]] = collections.defaultdict(
            collections.deque
        )
        for array in new:
            waiting[key(array)].append(array)
        rest = []
        for array in left:
            if waiting[key(array)]:
                pairs.append((array, waiting[key(array)].popleft()))
            else:
                rest.append(array)
        left = rest
        new = [array for queue in waiting.values() for array in queue]
    return [*pairs, *((array, None) for array in left), *((None, array) for array in new)]


def names_after(pairs: Sequence[Pair]) -> Mapping[str, str]:
    """The present name of each array that has another one now."""
    return {
        one.path: other.path
        for one, other in pairs
        if one is not None and other is not None and one.path != other.path
    }


def rename(text: str, names: Mapping[str, str]) -> str:
    """'the gradient of params/up' with the present name of the array."""
    words, of, path = text.rpartition(' of ')
    return words + of + names.get(path, path)


def _meaning(array: RecordedArray) -> RecordedArray:
    return dataclasses.replace(array, path='', reason='')
