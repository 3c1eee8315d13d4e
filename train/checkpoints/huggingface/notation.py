"""How the dimensions of two arrays with the same values correspond, and how one becomes the other.

Dimensions are letters. Parentheses join dimensions; the first of them changes slowest. A first
entry such as `2of3` is one of equal parts that are stored one after another.

  ours      theirs           a matrix of PyTorch, which is stored as [outputs, inputs]
  D H N     (H N) D
  D H N     D (2of3 H N)     the second third of the columns of a fused matrix
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from train.checkpoints.arrays.stored import Bounds

Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Group:
    """A dimension of an array that is joined from others: one of equal parts, numbered from 0."""

    letters: tuple[str, ...]
    part: int = 0
    num_parts: int = 1

    def size(self, sizes: Sizes) -> int:
        """The size of the whole dimension, with all parts."""
        return self.num_parts * math.prod(sizes[letter] for letter in self.letters)


@functools.cache
def parse(dimensions: str) -> tuple[Group, ...]:
    """Parses the dimensions of an array, such as 'D (2of3 H N)'."""
    groups = []
    for joined, single in re.findall(r'\(([^)]*)\)|(\S+)', dimensions):
        letters = (joined or single).split()
        part, num_parts = 0, 1
        if found := re.fullmatch(r'(\d+)of(\d+)', letters[0]):
            part, num_parts, letters = int(found[1]) - 1, int(found[2]), letters[1:]
        groups.append(Group(tuple(letters), part, num_parts))
    return tuple(groups)


def letters_of(dimensions: str) -> tuple[str, ...]:
    """The letters of all dimensions, in their order."""
    return tuple(itertools.chain.from_iterable(group.letters for group in parse(dimensions)))


def place_of(letter: str, dimensions: str) -> int | None:
    """The number of the dimension that has this letter alone, or None if there is none."""
    alone = (i for i, group in enumerate(parse(dimensions)) if group.letters == (letter,))
    return next(alone, None)


def chunk_of(ours: str, theirs: str, sizes: Sizes) -> tuple[int, ...]:
    """The smallest slice of our array that is read at once: one index of their first dimension."""
    first = parse(theirs)[0].letters[0]
    return tuple(1 if letter == first else sizes[letter] for letter in letters_of(ours))


def shape_of(dimensions: str, sizes: Sizes) -> tuple[int, ...]:
    """The shape of an array whose dimensions have these sizes."""
    return tuple(group.size(sizes) for group in parse(dimensions))


@dataclasses.dataclass(frozen=True)
class Region:
    """The slice of a joined dimension that contains the wanted slices of its parts.

    Attributes:
      bounds: the first index and the end along the joined dimension.
      shape: the sizes of the joined dimensions in this slice.
      index: the wanted slices of them.
    """

    bounds: tuple[int, int]
    shape: tuple[int, ...]
    index: tuple[slice, ...]


def bounds_to_read(
    theirs: str, sizes: Sizes, wanted: Mapping[str, tuple[int, int]]
) -> tuple[Bounds, list[Region]]:
    """The slice of an array that contains the wanted values, and what to do with each dimension.

    The first part of a joined dimension is cut, and the others are read whole. `wanted` is the
    first index and the end along each dimension of the array.
    """
    found = []
    for group in parse(theirs):
        letter, *others = group.letters
        low, high = wanted[letter]
        below = math.prod(sizes[other] for other in others)
        start = group.part * sizes[letter] * below
        shape = (high - low, *(sizes[other] for other in others))
        index = (slice(None), *(slice(*wanted[other]) for other in others))
        found.append(Region((start + low * below, start + high * below), shape, index))
    return tuple(each.bounds for each in found), found


def to_ours(values: np.ndarray, ours: str, theirs: str, found: Sequence[Region]) -> np.ndarray:
    """Arranges what `bounds_to_read` says to read in the order of our dimensions."""
    shape = tuple(itertools.chain.from_iterable(each.shape for each in found))
    index = tuple(itertools.chain.from_iterable(each.index for each in found))
    order = [letters_of(theirs).index(letter) for letter in letters_of(ours)]
    return values.reshape(shape)[index].transpose(order)


def write_part(out: np.ndarray, values: np.ndarray, ours: str, theirs: str) -> None:
    """Writes one of our arrays to its part of another one, whose dimensions are joined."""
    order = [letters_of(ours).index(letter) for letter in letters_of(theirs)]
    groups, sizes = parse(theirs), dict(zip(letters_of(ours), values.shape, strict=True))
    index = []
    for group in groups:
        size = group.size(sizes) // group.num_parts
        index.append(slice(group.part * size, (group.part + 1) * size))
    part = out[tuple(index)]
    part[...] = values.transpose(order).reshape(part.shape)
