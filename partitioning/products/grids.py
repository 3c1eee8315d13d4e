"""How often the body of a Pallas kernel runs: the number of blocks of its grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any


def count_blocks(mapping: Any, bounds: Sequence[Any] = ()) -> int:
    """Returns the number of blocks of a kernel's grid.

    Kernels for groups of rows, and some of attention, compute the length of a dimension of their
    grid when they run. Where it is not known, it counts as the longest that their blocks can need:
    the length of the lists, such as the group of each block, that the index of the dimension looks
    up, or the number of blocks of the array along it.

    Args:
      mapping: the `grid_mapping` of the kernel.
      bounds: the lengths that the kernel computes, in the order of the grid; None if not known.
    """
    known = list(bounds)
    runs = 1
    for axis, size in enumerate(mapping.grid):
        if isinstance(size, int):
            runs *= size
            continue
        given = known.pop(0) if known else None
        runs *= max(_lengths(mapping, axis), default=1) if given is None else int(given)
    return runs


def _lengths(mapping: Any, axis: int) -> Iterator[int]:
    """The lengths that a dimension of a grid can have, by what is looked up with its index."""
    for blocks in mapping.block_mappings:
        jaxpr = blocks.index_map_jaxpr.jaxpr
        index = jaxpr.invars[axis]
        derived = {index}
        for equation in jaxpr.eqns:
            inputs = [v for v in equation.invars if not hasattr(v, 'val')]
            if not derived & set(inputs):
                continue
            if equation.primitive.name == 'get':
                yield inputs[0].aval.shape[-1]
            else:
                derived.update(equation.outvars)
        sizes = zip(jaxpr.outvars, _shape_of(blocks), blocks.block_shape, strict=True)
        for at, size, block in sizes:
            if at is index:
                yield math.ceil(size / _size_of(block))


def _shape_of(blocks: Any) -> Sequence[int]:
    """The shape of the array that is divided into blocks."""
    named = getattr(blocks, 'array_aval', None)
    return (blocks.array_shape_dtype if named is None else named).shape


def _size_of(block: Any) -> int:
    """The size of a block along a dimension; 1 if the kernel does not see the dimension."""
    return block if isinstance(block, int) else getattr(block, 'block_size', 1)
