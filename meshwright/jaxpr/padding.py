"""The memory of arrays on TPUs, which keep the last two dimensions in tiles of 8 x 128."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from meshwright.jaxpr.fusion import VIEWS
from meshwright.jaxpr.primitives import ELEMENTWISE
from meshwright.jaxpr.values import Block, Step, Value, carries, item_size, ties

_ROWS, _COLUMNS = 8, 128


def padded_bytes(shape: Sequence[int], dtype: object) -> int:
    """The bytes of an array in the layout that wastes the least.

    Args:
      shape: its shape on one device.
      dtype: its type.
    """
    elements = math.prod(shape)
    if len(shape) < 2 or not elements:
        return math.ceil(elements * item_size(dtype))
    best = min(_tiled(elements, a, b) for a, b in itertools.permutations(shape, 2))
    return math.ceil(best * item_size(dtype))


def row_major_ratio(shape: Sequence[int]) -> float:
    """What an array takes whose last two dimensions are in tiles, as a multiple of its size."""
    elements = math.prod(shape)
    return _tiled(elements, *shape[-2:]) / elements if len(shape) > 1 and elements else 1.0


def _tiled(elements: int, rows: int, columns: int) -> int:
    tile = min(_ROWS, 1 << max(rows - 1, 0).bit_length())  # few rows have smaller tiles
    return elements // (rows * columns) * _round_up(rows, tile) * _round_up(columns, _COLUMNS)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def kernel_ratios(block: Block, sizes: Mapping[str, int]) -> dict[int, float]:
    """How much more memory the arrays take that kernels read and write.

    Kernels fix the order of the dimensions, so XLA cannot choose the one that wastes the least.
    The order spreads to what is computed element by element, and through loops.

    Args:
      block: the steps.
      sizes: the size of each mesh axis.

    Returns:
      For the ids of those arrays, their size in memory as a multiple of their size.
    """
    ratios: dict[int, float] = {}
    while _spread(block, sizes, ratios):
        pass
    return ratios


def _spread(block: Block, sizes: Mapping[str, int], ratios: dict[int, float]) -> bool:
    before = len(ratios)
    for step in (*reversed(block.steps), *block.steps):
        if step.name == 'pallas_call':
            for value in (*step.inputs, *step.outputs):
                if (ratio := row_major_ratio(value.shard_shape(sizes))) > 1:
                    ratios.setdefault(id(value), ratio)
        elif step.bodies:
            _spread_through(step, sizes, ratios)
        elif step.name in VIEWS or step.name in ELEMENTWISE:
            _share([*step.inputs, *step.outputs], sizes, ratios)
    return len(ratios) > before


def _spread_through(step: Step, sizes: Mapping[str, int], ratios: dict[int, float]) -> None:
    for body in step.bodies:
        _spread(body, sizes, ratios)
    pairs = [(tie.outer, tie.inner) for tie in ties(step)] + list(carries(step))
    for pair in pairs:
        known = next((ratios[id(value)] for value in pair if id(value) in ratios), None)
        if known is not None:
            for value in pair:
                ratios.setdefault(id(value), known)


def _share(values: Sequence[Value], sizes: Mapping[str, int], ratios: dict[int, float]) -> None:
    """Arrays of equal sizes that are read together have the same order."""
    marked = [value for value in values if id(value) in ratios]
    for one in marked[:1]:
        size = math.prod(one.shard_shape(sizes))
        for value in values:
            if math.prod(value.shard_shape(sizes)) == size:
                ratios.setdefault(id(value), ratios[id(one)])
