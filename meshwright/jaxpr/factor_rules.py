"""The table from primitives to the rules that find their factors.

This is all that is known about primitives; layouts, exchanges and memory follow from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from meshwright.jaxpr.factors import Dimension, Factors, Table
from meshwright.jaxpr.primitives import ELEMENTWISE, REDUCTIONS, SCATTERS, names_in
from meshwright.jaxpr.product_rules import (
    relate_convolution,
    relate_dot,
    relate_gather,
    relate_ragged_dot,
    relate_scatter,
)
from meshwright.jaxpr.steps import Step

Rule = Callable[[Step], Factors]


def find_factors(step: Step) -> Factors:
    """Returns the factors of a step."""
    rule = _RULES.get(step.name)
    if rule is not None:
        return dataclasses.replace(rule(step), known=True)
    return _elementwise(step)


def _shapes(step: Step) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    return [v.shape for v in step.inputs], [v.shape for v in step.outputs]


def _elementwise(step: Step) -> Factors:
    """Arrays of equal shapes, where a size of 1 and scalars are repeated."""
    given, results = _shapes(step)
    shape = max([*results, *given], key=lambda s: (len(s), math.prod(s)), default=())
    table = Table()
    dims = table.all(shape)

    def match(other: tuple[int, ...]) -> tuple[Dimension, ...]:
        if len(other) != len(shape):
            return ((),) * len(other)
        return tuple(f if n == m else () for f, n, m in zip(dims, other, shape, strict=True))

    known = step.name in ELEMENTWISE or all(s in ((), shape) for s in (*given, *results))
    return Factors(
        tuple(table.sizes), tuple(map(match, given)), tuple(map(match, results)), known=known
    )


def _pairwise(step: Step) -> Factors:
    """Each result is as the operand of the same number."""
    table = Table()
    dims = tuple(tuple(table.all(v.shape)) for v in step.inputs)
    return Factors(tuple(table.sizes), dims, dims)


def _along(parameter: str) -> Rule:
    """Elementwise, but whole along the dimensions that a parameter names."""

    def rule(step: Step) -> Factors:
        found = step.params[parameter]
        return _whole(_elementwise(step), found if isinstance(found, tuple | list) else (found,))

    return rule


def _whole(factors: Factors, dims: Sequence[int]) -> Factors:
    def strip(array: tuple[Dimension, ...]) -> tuple[Dimension, ...]:
        whole = {d % len(array) for d in dims} if array else set()
        return tuple(() if d in whole else f for d, f in enumerate(array))

    return dataclasses.replace(
        factors,
        inputs=tuple(map(strip, factors.inputs)),
        outputs=tuple(map(strip, factors.outputs)),
    )


def _same_sizes(step: Step) -> Factors:
    """Slices and the like: dimensions that keep their size are kept, the others are whole."""
    given, results = _shapes(step)
    table = Table()
    dims = table.all(given[0])

    def match(other: tuple[int, ...]) -> tuple[Dimension, ...]:
        if len(other) != len(given[0]):
            return ((),) * len(other)
        return tuple(f if n == m else () for f, n, m in zip(dims, other, given[0], strict=True))

    kept = {f for array in (*results, *given[1:2]) if array for dim in match(array) for f in dim}
    first = tuple(f if f[0] in kept else () for f in dims)
    return Factors(
        tuple(table.sizes),
        (first, *map(match, given[1:])),
        tuple(tuple(f if set(f) <= kept else () for f in match(array)) for array in results),
    )


def _transpose(step: Step) -> Factors:
    table = Table()
    dims = table.all(step.inputs[0].shape)
    result = tuple(dims[d] for d in step.params['permutation'])
    return Factors(tuple(table.sizes), (tuple(dims),), (result,))


def _broadcast(step: Step) -> Factors:
    table = Table()
    (result,) = (v.shape for v in step.outputs)
    dims = table.all(result)
    first = tuple(
        dims[d] if n == result[d] else ()
        for d, n in zip(step.params['broadcast_dimensions'], step.inputs[0].shape, strict=True)
    )
    rest = tuple(((),) * len(v.shape) for v in step.inputs[1:])
    return Factors(tuple(table.sizes), (first, *rest), (tuple(dims),))


def _reshape(step: Step) -> Factors:
    """Splits and merges dimensions: both shapes are cut where either has a border."""
    (given, *_), (result,) = _shapes(step)
    table = Table()
    dims: tuple[list[Dimension], list[Dimension]] = ([()] * len(given), [()] * len(result))
    i, j = len(given) - 1, len(result) - 1
    left = list(given), list(result)
    while i >= 0 and j >= 0:
        a, b = left[0][i], left[1][j]
        if a == 1 or b == 1:
            i, j = (i - 1, j) if a == 1 else (i, j - 1)
            continue
        common = math.gcd(a, b)
        if common == 1 or common not in (a, b):
            break  # the borders do not nest: nothing to the left of here is related
        factor = table.add(common)
        dims[0][i], dims[1][j] = factor + dims[0][i], factor + dims[1][j]
        left[0][i], left[1][j] = a // common, b // common
    rest = tuple(((),) * len(v.shape) for v in step.inputs[1:])
    return Factors(tuple(table.sizes), (tuple(dims[0]), *rest), (tuple(dims[1]),))


def _squeeze(step: Step) -> Factors:
    table = Table()
    shape = step.inputs[0].shape
    dropped = {d % len(shape) for d in step.params['dimensions']}
    dims = [() if d in dropped else table.add(n) for d, n in enumerate(shape)]
    return Factors(
        tuple(table.sizes),
        (tuple(dims),),
        (tuple(f for d, f in enumerate(dims) if d not in dropped),),
    )


def _reduce(step: Step) -> Factors:
    table = Table()
    shape = step.inputs[0].shape
    dims = tuple(table.all(shape))
    axes = set(step.params.get('axes', step.params.get('dimensions', ())))
    result = tuple(f for d, f in enumerate(dims) if d not in axes)
    return Factors(
        tuple(table.sizes),
        tuple(dims if v.shape == shape else ((),) * len(v.shape) for v in step.inputs),
        (result,) * len(step.outputs),
        frozenset(f for d in axes for f in dims[d]),
    )


def _nothing(step: Step) -> Factors:
    """An operation whose arrays are all whole, or already divided as the program says."""
    given, results = _shapes(step)
    return Factors(
        (),
        tuple(((),) * len(s) for s in given),
        tuple(((),) * len(s) for s in results),
    )


def _results_only(step: Step) -> Factors:
    table = Table()
    given, results = _shapes(step)
    dims = tuple(tuple(table.all(s)) for s in results)
    return Factors(tuple(table.sizes), tuple(((),) * len(s) for s in given), dims)


def _stack(step: Step) -> Factors:
    """Arrays of equal shapes along a new dimension."""
    table = Table()
    dims = table.all(step.inputs[0].shape)
    axis = step.params['axis']
    result = (*dims[:axis], (), *dims[axis:])
    return Factors(tuple(table.sizes), (tuple(dims),) * len(step.inputs), (result,))


def _unstack(step: Step) -> Factors:
    """The entries along a dimension, which they do not have."""
    table = Table()
    dims = table.all(step.outputs[0].shape)
    axis = step.params['axis']
    given = (*dims[:axis], (), *dims[axis:])
    return Factors(tuple(table.sizes), (given,), (tuple(dims),) * len(step.outputs))


_WHOLE = names_in(
    'pallas_call axis_index all_gather reduce_scatter all_to_all psum_scatter '
    'all_gather_invariant create_token custom_partitioning io_callback pure_callback '
    'debug_callback debug_print tpu_custom_call'
)
_PAIRWISE = names_in(
    'optimization_barrier device_put pvary pcast psum pmax pmin ppermute pbroadcast psum_invariant'
)
_CUMULATIVE = names_in('cumsum cumprod cummax cummin cumlogsumexp')
_SLICING = names_in(
    'slice dynamic_slice dynamic_update_slice pad top_k reduce_window_sum reduce_window_max '
    'reduce_window tile'
)
_RULES: dict[str, Rule] = {
    'dot_general': relate_dot,
    'ragged_dot_general': relate_ragged_dot,
    'conv_general_dilated': relate_convolution,
    'transpose': _transpose,
    'broadcast_in_dim': _broadcast,
    'reshape': _reshape,
    'squeeze': _squeeze,
    'gather': relate_gather,
    'iota': _results_only,
    'rng_bit_generator': _results_only,
    'stack': _stack,
    'unstack': _unstack,
    'reduce': _reduce,
    'sort': _along('dimension'),
    'concatenate': _along('dimension'),
    'rev': _along('dimensions'),
    'split': _along('axis'),
    **dict.fromkeys(_PAIRWISE, _pairwise),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(_CUMULATIVE, _along('axis')),
    **dict.fromkeys(_SLICING, _same_sizes),
    **dict.fromkeys(SCATTERS, relate_scatter),
    **dict.fromkeys(_WHOLE, _nothing),
}
