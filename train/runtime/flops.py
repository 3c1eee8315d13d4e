"""The floating-point operations of a function, counted from its jaxpr."""

from __future__ import annotations

import math
from typing import Any

import jax


def count_flops(function: Any, *args: Any) -> float:
    """Counts the FLOPs of all matrix products and convolutions of a function.

    Bodies of loops with a known length count once per iteration, which XLA's own cost analysis
    does not do. The bodies of `while` loops count once, and of `cond` the most expensive branch.

    Args:
      function: any function of arrays.
      *args: its arguments, or their ShapeDtypeStructs.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr: Any) -> float:
    return math.fsum(_count_equation(equation) for equation in jaxpr.eqns)


def _count_equation(equation: Any) -> float:
    params, name = equation.params, equation.primitive.name
    if name == 'dot_general':
        (contracted, _), _ = params['dimension_numbers']
        lhs = equation.invars[0].aval.shape
        return 2.0 * equation.outvars[0].aval.size * math.prod(lhs[d] for d in contracted)
    if name == 'conv_general_dilated':
        kernel, output = equation.invars[1].aval, equation.outvars[0].aval
        features = kernel.shape[params['dimension_numbers'].rhs_spec[0]]
        return 2.0 * output.size * kernel.size / features
    inner = [_count(body) for value in params.values() for body in _bodies(value)]
    if name == 'cond':
        return max(inner, default=0.0)
    return math.fsum(inner) * (params['length'] if name == 'scan' else 1)


def _bodies(value: Any) -> list[Any]:
    """Returns the jaxprs in a parameter of an equation."""
    if hasattr(value, 'eqns'):  # a Jaxpr or a ClosedJaxpr
        return [value]
    return [body for x in value for body in _bodies(x)] if isinstance(value, tuple | list) else []
