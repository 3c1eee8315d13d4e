"""The floating-point operations of a function, counted from its jaxpr."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from partitioning.products.bodies import bodies_of, count_devices, count_runs
from partitioning.products.recomputed import RECOMPUTED as RECOMPUTED

PRODUCTS = frozenset({'dot_general', 'ragged_dot_general', 'conv_general_dilated'})


def count_flops(function: Any, *args: Any) -> float:
    """Counts the FLOPs of all matrix products and convolutions of a function.

    Bodies of loops with a known length count once per iteration, which XLA's own cost analysis
    does not do. The bodies of `while` loops count once. Of a `cond`, the most expensive branch
    counts.

    Args:
      function: any function of arrays.
      *args: its arguments, or their ShapeDtypeStructs.
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
    counted = {'kernels': kernels, 'recomputed': recomputed, 'dense': dense}
    inner = [count_jaxpr_flops(body, **counted) for body in bodies_of(equation)]
    if name == 'cond':
        return max(inner, default=0.0)
    return math.fsum(inner) * count_runs(equation) * count_devices(equation)


def product_flops(
    name: str,
    params: Mapping[str, Any],
    lhs: Sequence[int],
    rhs: Sequence[int],
    result: Sequence[int],
) -> float:
    """Returns the FLOPs of a product or convolution: two for each element and each summand.

    In a product whose rows are of several groups, each row meets the matrix of its group only. All
    rows count, no matter how many rows each group has.

    Args:
      name: the name of the primitive, one of `PRODUCTS`.
      params: its parameters.
      lhs, rhs, result: the shapes of the operands and of the result, of whole arrays or of shards.
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
