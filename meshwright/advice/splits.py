"""Features that are split into parts in an order that shards a part over which products sum.

A kernel, whose columns are sharded over 4 devices of 'tensor', makes the features of 8 heads:

    x.reshape(16, 256, 64, 8)    # each device has 16 of the 64 elements of all heads
    x.reshape(16, 256, 8, 64)    # each device has 2 heads

The scores sum over the 64 elements, so the first one sums scores over devices. The order decides
which features belong to a head, and nothing else, so a trace can be edited to try it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.advice.surroundings import Candidate, Surroundings
from meshwright.causes.cause import SplitChange, over
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.values import Dim, Value

_NEAR = 60  # values before a product that are looked at


class _Split(NamedTuple):
    """A reshape that splits a sharded dimension.

    Attributes:
      value: its result.
      start: the dimension of the result that is the first part.
      parts: the number of parts.
    """

    value: Value
    start: int
    parts: int


def order_splits(around: Surroundings) -> Iterator[tuple[float, Candidate]]:
    """Other orders of the parts over whose first one a product of two activations sums.

    Args:
      around: the arrays of the function.
    """
    seen = set[SplitChange]()
    for product in around.traced.values:
        if product.primitive != 'dot_general' or product.backward or product.manual:
            continue
        weight, _ = around.near_values.get(id(product), (0.0, product))
        change = _reorder(around, product) if weight else None
        if change is not None and change not in seen:
            seen.add(change)
            yield weight, Candidate(change)


def _reorder(around: Surroundings, product: Value) -> SplitChange | None:
    """The change of the splits of both operands of a product, or None."""
    assert product.maker is not None
    parameters = {path for path, row in around.rows.items() if row.role != 'other'}
    operands = product.operands[:2]
    if any(value.argument in parameters for value in operands):
        return None
    (left, right), _ = product.maker.params['dimension_numbers']
    for pair in zip(left, right, strict=True):
        dims = [value.dims[d] for value, d in zip(operands, pair, strict=True)]
        axes = {a for dim in dims if dim is not None for a in dim.axes} - {*around.rows_axes}
        devices = math.prod(around.possible.layouts.sizes.get(a, 1) for a in axes)
        if devices == 1 or None in dims:
            continue
        found = [_find_split(v, dim) for v, dim in zip(operands, dims, strict=True) if dim]
        splits = [split for split in found if split is not None]
        orders = [_order(split, devices) for split in splits]
        if len(splits) == len(operands) and None not in orders:
            return _change(splits, [o for o in orders if o], tuple(sorted(axes)), devices)
    return None


def _find_split(value: Value, dim: Dim) -> _Split | None:
    """The reshape before a value that makes a dimension the first part of a larger one."""
    pending, seen = [value], {id(value)}
    while pending and len(seen) < _NEAR:
        current = pending.pop(0)
        if current.primitive == 'reshape' and current.maker is not None and dim in current.dims:
            first = current.dims.index(dim)
            factors = find_factors(current.maker)
            own = factors.outputs[0][first]
            for parts in factors.inputs[0] if factors.known else ():
                if len(parts) > 1 and own and own == parts[:1]:
                    return _Split(current, first, len(parts))
        for operand in current.operands:
            if id(operand) not in seen and dim in operand.dims:
                seen.add(id(operand))
                pending.append(operand)
    return None


def _order(split: _Split, devices: int) -> tuple[int, ...] | None:
    """The dimensions of a split with a part first that devices divide, or None."""
    shape, first = split.value.shape, split.start
    others = range(first + 1, first + split.parts)
    fits = next((d for d in others if shape[d] % devices == 0), None)
    if fits is None:
        return None
    rest = (d for d in range(first, len(shape)) if d != fits)
    return (*range(first), fits, *rest)


def _change(
    splits: list[_Split], orders: list[tuple[int, ...]], axes: tuple[str, ...], devices: int
) -> SplitChange:
    split, order = splits[0], orders[0]
    value, shape = split.value, split.value.shape
    new = ', '.join(str(shape[d]) for d in order)
    lines = ' and '.join(dict.fromkeys(one.value.line for one in splits))
    return SplitChange(
        source=value.line,
        splits=tuple(
            dict.fromkeys(
                (one.value.operands[0].shape, one.value.shape, o)
                for one, o in zip(splits, orders, strict=True)
            )
        ),
        text=(
            f'write reshape({new}) in place of reshape({", ".join(map(str, shape))}) at {lines}, '
            f'and merge in the same order: {over(axes)} then shards the part of '
            f'{shape[order[split.start]]:,}, which {devices} devices divide, in place of the part '
            f'of {shape[split.start]:,}, over which a product sums'
        ),
    )
