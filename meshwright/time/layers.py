"""Which products a step consists of: how wide they are, and of which kinds."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.values import Block, Step, Value
from partitioning.products.flops import PRODUCTS, product_flops

# Kinds of products that few measured steps have, as people call them.
KINDS = {
    'conv_general_dilated': 'convolutions',
    'ragged_dot_general': 'products of groups of rows',
    'of 8 bits': 'products of 8 bits',
}
_SHARE = 0.1  # of the FLOPs, from which a kind matters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
    """All products of some sizes in a step, on one device: (rows, summed) by (summed, columns).

    Attributes:
      rows, summed, columns: the sizes.
      flops: the floating-point operations of all of them in one step.
      nbytes: the bytes of their operands and results.
      dtype: the type of both operands, such as 'float8_e4m3fn'; '' if they have more than 8 bits.
    """

    rows: int
    summed: int
    columns: int
    flops: float
    nbytes: float
    dtype: str = ''

    @property
    def of_vectors(self) -> bool:
        """Whether one of its sizes is 1, for which compilers do not use matrix units."""
        return min(self.rows, self.summed, self.columns) == 1

    def padding(self, unit: int) -> float:
        """How much a matrix unit of this side computes for each operation of the product.

        One of three sizes streams through the unit, in steps of 8. The other two fill its sides.
        """
        if self.of_vectors:
            return 1.0
        sizes = self.rows, self.summed, self.columns
        steps = [math.ceil(n / min(unit, 8)) * min(unit, 8) / n for n in sizes]
        sides = [math.ceil(n / unit) * unit / n for n in sizes]
        return min(steps[i] * sides[i - 1] * sides[i - 2] for i in range(3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """The products of a step on one device.

    Attributes:
      width: of half of the FLOPs, the smallest size of the product is at least this. A product of
        matrices of (m, k) and (k, n) elements, on one device, has three sizes.
      kinds: the kinds of products that matter, besides products of plain matrices.
      products: the products, one entry for each set of sizes, without convolutions.
    """

    width: float
    kinds: tuple[str, ...] = ()
    products: tuple[Product, ...] = dataclasses.field(default=(), compare=False)


def describe_layers(traced: TracedProgram) -> Layers | None:
    """The products of a traced function, or None if it has none."""
    widths, kinds = defaultdict[int, float](float), defaultdict[str, float](float)
    sums = defaultdict[tuple[int, int, int, str], list[float]](lambda: [0.0, 0.0])
    for step, times in _products(traced.block, 1):
        arrays = *step.inputs[:2], step.outputs[0]
        lhs, rhs, result = (value.shard_shape(traced.axis_sizes) for value in arrays)
        flops = times * product_flops(step.name, step.params, lhs, rhs, result)
        sizes = _sizes(step, lhs, rhs, result)
        widths[min(sizes)] += flops
        kinds[step.name] += flops
        if step.name != 'conv_general_dilated':
            key = (*sizes, _type_of(*step.inputs[:2]))
            kinds['of 8 bits'] += flops if key[3] else 0.0
            sums[key][0] += flops
            sums[key][1] += times * sum(v.shard_bytes(traced.axis_sizes) for v in arrays)
    whole = math.fsum(widths.values())
    if not whole:
        return None
    found = tuple(word for name, word in KINDS.items() if kinds[name] >= _SHARE * whole)
    products = tuple(
        Product(rows=m, summed=k, columns=n, flops=flops, nbytes=nbytes, dtype=dtype)
        for (m, k, n, dtype), (flops, nbytes) in sums.items()
        if flops
    )
    return Layers(width=_median(widths), kinds=found, products=products)


def _products(block: Block, times: int) -> Iterator[tuple[Step, int]]:
    for step in block.steps:
        for body in step.bodies:
            yield from _products(body, times * step.times)
        if step.name in PRODUCTS:
            yield step, times


def _type_of(lhs: Value, rhs: Value) -> str:
    """The type of the first operand, if both have 8 bits."""
    types = [np.dtype(value.dtype) for value in (lhs, rhs)]
    return types[0].name if all(one.itemsize == 1 for one in types) else ''


def _sizes(
    step: Step, lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int]
) -> tuple[int, int, int]:
    """The rows, summed elements and columns of a product, each of one or several dimensions."""
    if step.name == 'conv_general_dilated':
        columns = rhs[step.params['dimension_numbers'].rhs_spec[0]]
        return math.prod(result) // columns, math.prod(rhs) // columns, columns
    (summed, summed_rhs), (batch, batch_rhs) = _dimensions(step)
    rows = _free(lhs, (*summed, *batch))
    columns = _free(rhs, (*summed_rhs, *batch_rhs))
    return rows, math.prod(lhs[d] for d in summed), columns


def _dimensions(step: Step) -> tuple[Any, Any]:
    """The dimensions of both matrices that are summed, and the dimensions that count products."""
    if step.name == 'dot_general':
        return step.params['dimension_numbers']
    groups = step.params['ragged_dot_dimension_numbers']
    summed, (batch, batch_rhs) = groups.dot_dimension_numbers
    return summed, (batch, (*batch_rhs, *groups.rhs_group_dimensions))


def _free(shape: Sequence[int], others: Sequence[int]) -> int:
    return math.prod(n for d, n in enumerate(shape) if d not in others)


def _median(weights: Mapping[int, float]) -> int:
    """The largest key such that the keys from it on have half of the weight."""
    half, above = math.fsum(weights.values()) / 2, 0.0
    for key in sorted(weights, reverse=True):
        above += weights[key]
        if above >= half:
            return key
    raise AssertionError('half of a sum is at most the sum')
