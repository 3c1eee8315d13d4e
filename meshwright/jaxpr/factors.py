"""Which dimensions of the operands and results of an operation belong together.

A factor is a loop over which an operation could be divided: the rows of a product, its columns,
and what it sums over. Dimensions with the same factor are sharded along the same axes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# The factors of one dimension, the major one first; () for a dimension that must be whole.
Dimension = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Factors:
    """How the dimensions of an operation are related.

    Attributes:
      sizes: the size of each factor.
      inputs, outputs: for each array, the factors of each dimension.
      summed: the factors over which the result is a sum (or maximum): devices that hold parts of
        them have partial results.
      known: whether the table has the primitive.
    """

    sizes: tuple[int, ...]
    inputs: tuple[tuple[Dimension, ...], ...]
    outputs: tuple[tuple[Dimension, ...], ...]
    summed: frozenset[int] = frozenset()
    known: bool = True


class Table:
    """Numbers the factors of one operation, and keeps their sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def add(self, size: int) -> Dimension:
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def all(self, shape: Sequence[int]) -> list[Dimension]:
        return [self.add(n) for n in shape]
