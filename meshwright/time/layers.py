"""Which products a step consists of: how wide they are, and of which kinds."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.values import Block, Step
from partitioning.products.flops import PRODUCTS, product_flops

# Kinds of products that few measured steps have, as people call them.
KINDS = {'conv_general_dilated': 'convolutions', 'ragged_dot_general': 'products of groups of rows'}
_SHARE = 0.1  # of the FLOPs, from which a kind matters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """The products of a step on one device.

    Attributes:
      width: of half of the FLOPs, the smallest size of the product is at least this. A product of
        matrices of (m, k) and (k, n) elements, on one device, has three sizes.
      kinds: the kinds of products that matter, besides products of plain matrices.
    """

    width: float
    kinds: tuple[str, ...] = ()


def describe_layers(traced: TracedProgram) -> Layers | None:
    """The products of a traced function, or None if it has none."""
    widths, kinds = defaultdict[int, float](float), defaultdict[str, float](float)
    for step, times in _products(traced.block, 1):
        arrays = *step.inputs[:2], step.outputs[0]
        lhs, rhs, result = (value.shard_shape(traced.axis_sizes) for value in arrays)
        flops = times * product_flops(step.name, step.params, lhs, rhs, result)
        widths[_width(step, lhs, rhs, result)] += flops
        kinds[step.name] += flops
    whole = math.fsum(widths.values())
    if not whole:
        return None
    found = tuple(word for name, word in KINDS.items() if kinds[name] >= _SHARE * whole)
    return Layers(width=_median(widths), kinds=found)


def _products(block: Block, times: int) -> Iterator[tuple[Step, int]]:
    for step in block.steps:
        for body in step.bodies:
            yield from _products(body, times * step.times)
        if step.name in PRODUCTS:
            yield step, times


def _width(step: Step, lhs: Sequence[int], rhs: Sequence[int], result: Sequence[int]) -> int:
    """The smallest size of a product, of which each matrix may have several dimensions."""
    if step.name == 'conv_general_dilated':
        columns = rhs[step.params['dimension_numbers'].rhs_spec[0]]
        return min(columns, math.prod(rhs) // columns, math.prod(result) // columns)
    (summed, summed_rhs), (batch, batch_rhs) = _dimensions(step)
    rows = _free(lhs, (*summed, *batch))
    columns = _free(rhs, (*summed_rhs, *batch_rhs))
    return min(rows, columns, math.prod(lhs[d] for d in summed))


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
