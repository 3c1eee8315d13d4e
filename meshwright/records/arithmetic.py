"""Which kind of arithmetic an operation is, of which type, and how much of it."""

from __future__ import annotations

import math
from typing import Any

import jax

from meshwright.jaxpr.primitives import CONSTRAINTS, ELEMENTWISE, names_in
from partitioning.products.flops import PRODUCTS, product_flops

_EXPONENTIALS = names_in('exp exp2 expm1 log log1p log2 logistic tanh erf rsqrt sqrt pow')
_MAXIMA = names_in('reduce_max reduce_min argmax argmin sort top_k approx_top_k')
_SUMS = names_in('reduce_sum cumsum cumlogsumexp reduce_prod')


def arithmetic_of(equation: Any) -> tuple[str, str, float] | None:
    """The family of an operation on floats, its type, and how much it computes."""
    name: str = equation.primitive.name
    result: Any = equation.outvars[0].aval if equation.outvars else None
    operand: Any = getattr(equation.invars[0], 'aval', None) if equation.invars else None
    if name in _MAXIMA and _is_float(operand):  # the result may be the number of an element
        return 'maxima', str(operand.dtype), math.prod(operand.shape)
    if not _is_float(result):
        return None
    if name in PRODUCTS:
        given = [v.aval for v in equation.invars[:2]]
        shapes = [aval.shape for aval in (*given, result)]
        factors = ' x '.join(dict.fromkeys(str(aval.dtype) for aval in given))
        return (
            'products',
            f'{factors} -> {result.dtype}',
            product_flops(name, equation.params, *shapes),
        )
    if name == 'convert_element_type':
        (given,) = (v.aval for v in equation.invars)
        return 'conversions', f'{given.dtype} -> {result.dtype}', math.prod(result.shape)
    if name in _EXPONENTIALS:
        return 'exponentials', str(result.dtype), math.prod(result.shape)
    if name in _SUMS:
        return 'sums', str(result.dtype), math.prod(equation.invars[0].aval.shape)
    if name in ELEMENTWISE and name not in CONSTRAINTS and result.shape:
        return 'elementwise operations', str(result.dtype), math.prod(result.shape)
    return None


def _is_float(aval: Any) -> bool:
    return hasattr(aval, 'dtype') and jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact)
