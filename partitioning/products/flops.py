"""The floating-point operations of a function, counted from its jaxpr.

Equations have jaxprs inside. A `scan` of 12 layers has one body, which runs 12 times. A `shard_map`
over 8 devices has one body, which runs on 8 devices with the shapes of one shard. A `cond` has one
body for each branch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from partitioning.hardware.jax_private import manual_axes


def bodies_of(equation: Any) -> list[Any]:
    """Returns the jaxprs in the parameters of an equation: Jaxprs and ClosedJaxprs."""
    found, waiting = [], [*equation.params.values()]
    while waiting:
        value = waiting.pop()
        if hasattr(value, 'eqns'):
            found.append(value)
        elif isinstance(value, tuple | list):
            waiting += value
    return found[::-1]


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the Jaxpr in a ClosedJaxpr and its constants; a Jaxpr has no constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, 'jaxpr') else (jaxpr, ())


def count_runs(equation: Any) -> int:
    """Returns how often a device runs the bodies of an equation; 1 where nobody knows."""
    params, name = equation.params, equation.primitive.name
    if name == 'scan':
        return params['length']
    if name == 'pallas_call':  # its body has the shapes of one block
        return count_blocks(params['grid_mapping'])
    return 1


def count_scan_arguments(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many arguments of a `scan` are the same in all iterations, and how many carried.

    The other arguments are scanned: each iteration has one element along their first dimension.
    """
    if 'num_consts' in params:
        return params['num_consts'], params['num_carry']
    constants, carried, _ = params['ft_in'].unpack()  # from jax 0.12 on
    return len(constants), len(carried)


# The name scope in which jax traces what the backward pass of `jax.checkpoint` computes again.
RECOMPUTED = 'rematted_computation'


def computed_again() -> contextlib.AbstractContextManager[None]:
    """Inside, operations are named like those that `jax.checkpoint` computes again.

    Hand-written gradients use it for what they compute in place of keeping it, so that counts of
    FLOPs can leave it out.
    """
    return jax.named_scope(RECOMPUTED)


PRODUCTS = frozenset({'dot_general', 'ragged_dot_general', 'conv_general_dilated'})


def count_flops(function: Any, *args: Any) -> float:
    """Counts the FLOPs of all matrix products and convolutions of a function of arrays.

    Bodies of loops with a known length count once per iteration, which XLA's own cost analysis
    does not do. The bodies of `while` loops count once. Of a `cond`, the most expensive branch
    counts. The arguments can be ShapeDtypeStructs.
    """
    return count_jaxpr_flops(jax.make_jaxpr(function)(*args).jaxpr)


def count_jaxpr_flops(
    jaxpr: Any, *, kernels: bool = True, recomputed: bool = True, dense: bool = True
) -> float:
    """Counts the FLOPs of a jaxpr as `count_flops` does, on all devices together.

    Args:
      jaxpr: the jaxpr.
      kernels: whether to count the matrix products of Pallas kernels, with blocks that they skip.
      recomputed: whether to count what the backward pass computes again: the parts of
        `jax.checkpoint`, and others inside of `computed_again`.
      dense: whether to count products and convolutions besides `jax.lax.ragged_dot`.
    """
    counted = {'kernels': kernels, 'recomputed': recomputed, 'dense': dense}
    return math.fsum(_count_equation(equation, **counted) for equation in jaxpr.eqns)


def _count_equation(equation: Any, *, kernels: bool, recomputed: bool, dense: bool) -> float:
    name = equation.primitive.name
    if name == 'pallas_call' and not kernels:
        return 0.0
    if not recomputed and RECOMPUTED in str(equation.source_info.name_stack):
        return 0.0
    if name in PRODUCTS:
        if not dense and name != 'ragged_dot_general':
            return 0.0
        shapes = [v.aval.shape for v in (*equation.invars[:2], equation.outvars[0])]
        return product_flops(name, equation.params, *shapes)
    if not (bodies := bodies_of(equation)):
        return 0.0
    counted = {'kernels': kernels, 'recomputed': recomputed, 'dense': dense}
    inner = [count_jaxpr_flops(body, **counted) for body in bodies]
    if name == 'cond':
        return max(inner)
    devices = 1
    if name == 'shard_map':  # its body runs on each of these, with the shapes of one shard
        sizes, axes = equation.params['mesh'].shape, manual_axes(equation.params)
        devices = math.prod(sizes[axis] for axis in axes)
    return math.fsum(inner) * count_runs(equation) * devices


def product_flops(
    name: str,
    params: Mapping[str, Any],
    lhs: Sequence[int],
    rhs: Sequence[int],
    result: Sequence[int],
) -> float:
    """Returns the FLOPs of a product or convolution: two for each element and each summand.

    In a product whose rows are of several groups, each row meets the matrix of its group only. All
    rows count, no matter how many rows each group has. The name is one of `PRODUCTS`, and the
    shapes belong to whole arrays or to shards.
    """
    if name == 'dot_general':
        (contracted, _), _ = params['dimension_numbers']
        return 2.0 * math.prod(result) * math.prod(lhs[d] for d in contracted)
    if name == 'conv_general_dilated':
        features = rhs[params['dimension_numbers'].rhs_spec[0]]
        return 2.0 * math.prod(result) * math.prod(rhs) / features
    numbers = params['ragged_dot_dimension_numbers']
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    seen = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2.0 * math.prod(lhs) * math.prod(n for d, n in enumerate(rhs) if d not in seen)


def count_blocks(mapping: Any, bounds: Sequence[Any] = ()) -> int:
    """Returns the number of blocks of a kernel's grid.

    Kernels for groups of rows, and some of attention, compute the length of a dimension of their
    grid when they run. Where it is not known, it counts as the longest that their blocks can need:
    the length of the lists, such as the group of each block, that the index of the dimension looks
    up, or the number of blocks of the array along it.

    `mapping` is the `grid_mapping` of the kernel, and `bounds` the lengths that it computes, in the
    order of the grid; None if one is not known.
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
