"""The floating-point operations of a function, counted from its jaxpr."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax

from partitioning.products.recomputed import RECOMPUTED as RECOMPUTED


def count_flops(function: Any, *args: Any) -> float:
    """Counts the FLOPs of all matrix products and convolutions of a function.

    Bodies of loops with a known length count once per iteration, which XLA's own cost analysis
    does not do. The bodies of `while` loops count once, and of `cond` the most expensive branch.

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
      recomputed: whether what the backward pass computes again counts: the parts of
        `jax.checkpoint`, and others inside of `computed_again`.
      dense: whether to count products and convolutions besides those of `jax.lax.ragged_dot`.
    """
    counted = {'kernels': kernels, 'recomputed': recomputed, 'dense': dense}
    return math.fsum(_count_equation(equation, **counted) for equation in jaxpr.eqns)


def _count_equation(equation: Any, *, kernels: bool, recomputed: bool, dense: bool) -> float:
    params, name = equation.params, equation.primitive.name
    if name == 'pallas_call' and not kernels:
        return 0.0
    if not recomputed and RECOMPUTED in str(equation.source_info.name_stack):
        return 0.0
    if name in ('dot_general', 'conv_general_dilated') and not dense:
        return 0.0
    if name == 'dot_general':
        (contracted, _), _ = params['dimension_numbers']
        lhs = equation.invars[0].aval.shape
        return 2.0 * equation.outvars[0].aval.size * math.prod(lhs[d] for d in contracted)
    if name == 'ragged_dot_general':
        return ragged_flops(equation.params, *(v.aval.shape for v in equation.invars[:2]))
    if name == 'conv_general_dilated':
        kernel, output = equation.invars[1].aval, equation.outvars[0].aval
        features = kernel.shape[params['dimension_numbers'].rhs_spec[0]]
        return 2.0 * output.size * kernel.size / features
    inner = [
        count_jaxpr_flops(body, kernels=kernels, recomputed=recomputed, dense=dense)
        for value in params.values()
        for body in _bodies(value)
    ]
    if name == 'cond':
        return max(inner, default=0.0)
    return math.fsum(inner) * _repetitions(name, params)


def ragged_flops(params: Mapping[str, Any], lhs: tuple[int, ...], rhs: tuple[int, ...]) -> float:
    """The FLOPs of a product whose rows are of several groups: each row meets its group's matrix.

    All rows count, of whichever group they are.

    Args:
      params: the parameters of the primitive `ragged_dot_general`.
      lhs: the shape of the rows.
      rhs: the shape of the matrices, or of other rows of the same groups.
    """
    numbers = params['ragged_dot_dimension_numbers']
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    seen = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return 2.0 * math.prod(lhs) * math.prod(n for d, n in enumerate(rhs) if d not in seen)


def _repetitions(name: str, params: Mapping[str, Any]) -> int:
    """How often the body of a primitive runs, on all devices together."""
    if name == 'scan':
        return params['length']
    if name == 'shard_map':  # its body has the shapes of one shard
        return math.prod(params['mesh'].shape[axis] for axis in params['newly_manual_axes'])
    if name == 'pallas_call':  # its body has the shapes of one block
        return math.prod(n for n in params['grid_mapping'].grid if isinstance(n, int))
    return 1


def _bodies(value: Any) -> list[Any]:
    """Returns the jaxprs in a parameter of an equation."""
    if hasattr(value, 'eqns'):  # a Jaxpr or a ClosedJaxpr
        return [value]
    return [body for x in value for body in _bodies(x)] if isinstance(value, tuple | list) else []
