"""Which dimensions of the operands and results of an operation belong together.

A factor is a loop over which an operation could be divided. The product of a float32[32, 64] and a
float32[64, 256] has three factors: its 32 rows, the 64 that it sums over, and its 256 columns.

    sizes    (32, 64, 256)
    inputs   ((0,), (1,)) and ((1,), (2,))      the factors of each dimension of each operand
    outputs  ((0,), (2,))
    summed   {1}

Dimensions with the same factor have the same name, and are sharded along the same mesh axes. An
operation that needs a dimension whole, such as the cumulative sum of a float32[32, 64] over its
second one, has a factor of size 1 for it: the dimension keeps its name, but nothing can divide it.
A reshape of a float32[512] to a float32[8, 64] has the factors 8 and 64, and its operand's
dimension has both: ((0, 1),).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

# The factors of one dimension, the major one first; () if it is related to no other dimension.
Dimension = tuple[int, ...]
WHOLE = 1  # the size of a factor that cannot be divided


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
        self._sizes: list[int] = []

    def add(self, size: int) -> Dimension:
        """A new factor."""
        self._sizes.append(size)
        return (len(self._sizes) - 1,)

    def all(self, shape: Sequence[int]) -> tuple[Dimension, ...]:
        """A new factor for each dimension of a shape."""
        first = len(self._sizes)
        self._sizes += shape
        return tuple((factor,) for factor in range(first, len(self._sizes)))

    def relate(
        self,
        inputs: Iterable[Sequence[Dimension]],
        outputs: Iterable[Sequence[Dimension]],
        summed: Iterable[int] = (),
    ) -> Factors:
        """The factors of the operation, from the factors of its arrays."""
        given, made = tuple(map(tuple, inputs)), tuple(map(tuple, outputs))
        return Factors(tuple(self._sizes), given, made, frozenset(summed))


def unrelated(shapes: Iterable[Sequence[int]]) -> list[tuple[Dimension, ...]]:
    """Arrays whose dimensions are related to no others."""
    return [((),) * len(shape) for shape in shapes]
