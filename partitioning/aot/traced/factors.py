"""Which dimensions of the operands and results of an operation belong together.

A factor is a loop over which an operation could be divided: the rows of a product, its columns,
and what it sums over. Dimensions with the same factor are sharded along the same axes. This is
what one table says about each primitive, and everything else about layouts follows from it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from partitioning.aot.traced.steps import Step

# The factors of one dimension, the major one first; () for a dimension that must be whole.
Dimension = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Factors:
    """How the dimensions of an operation are related.

    Attributes:
      sizes: the size of each factor.
      inputs, outputs: for each array, the factors of each dimension.
      summed: the factors over which the result is a sum (or maximum): devices that hold parts of
        them have partial results.
      known: whether the table has the primitive.
    """

    sizes: tuple[int, ...]
    inputs: tuple[tuple[Dimension, ...], ...]
    outputs: tuple[tuple[Dimension, ...], ...]
    summed: frozenset[int] = frozenset()
    known: bool = True


class _Table:
    """Numbers the factors of one operation."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def add(self, size: int) -> Dimension:
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def all(self, shape: Sequence[int]) -> list[Dimension]:
        return [self.add(n) for n in shape]


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
    table = _Table()
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
    table = _Table()
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
    table = _Table()
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
    table = _Table()
    dims = table.all(step.inputs[0].shape)
    result = tuple(dims[d] for d in step.params['permutation'])
    return Factors(tuple(table.sizes), (tuple(dims),), (result,))


def _broadcast(step: Step) -> Factors:
    table = _Table()
    (result,) = (v.shape for v in step.outputs)
    dims = table.all(result)
    first = tuple(
        dims[d] if n == result[d] else ()
        for d, n in zip(
            step.params['broadcast_dimensions'], step.inputs[0].shape, strict=True
        )
    )
    rest = tuple(((),) * len(v.shape) for v in step.inputs[1:])
    return Factors(tuple(table.sizes), (first, *rest), (tuple(dims),))


def _reshape(step: Step) -> Factors:
    """Splits and merges dimensions: both shapes are cut where either has a border."""
    (given, *_), (result,) = _shapes(step)
    table = _Table()
    dims: tuple[list[Dimension], list[Dimension]] = ([() for _ in given], [() for _ in result])
    i, j = len(given) - 1, len(result) - 1
    left = [n for n in given], [n for n in result]
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
    table = _Table()
    shape = step.inputs[0].shape
    dropped = {d % len(shape) for d in step.params['dimensions']}
    dims = [() if d in dropped else table.add(n) for d, n in enumerate(shape)]
    return Factors(
        tuple(table.sizes),
        (tuple(dims),),
        (tuple(f for d, f in enumerate(dims) if d not in dropped),),
    )


def _reduce(step: Step) -> Factors:
    table = _Table()
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


def _dot(step: Step) -> Factors:
    table = _Table()
    (summed, batch) = step.params['dimension_numbers']
    lhs_shape, rhs_shape = step.inputs[0].shape, step.inputs[1].shape
    lhs: list[Dimension] = table.all(lhs_shape)
    rhs: list[Dimension | None] = [None] * len(rhs_shape)
    for pairs in (summed, batch):
        for a, b in zip(*pairs, strict=True):
            rhs[b] = lhs[a]
    rhs_dims = [table.add(n) if f is None else f for f, n in zip(rhs, rhs_shape, strict=True)]
    taken = [{*pair[0], *pair[1]} for pair in zip(summed, batch, strict=True)]
    result = [lhs[d] for d in batch[0]]
    result += [f for d, f in enumerate(lhs) if d not in taken[0]]
    result += [f for d, f in enumerate(rhs_dims) if d not in taken[1]]
    return Factors(
        tuple(table.sizes),
        (tuple(lhs), tuple(rhs_dims)),
        (tuple(result),),
        frozenset(f for d in summed[0] for f in lhs[d]),
    )


def _convolution(step: Step) -> Factors:
    table, numbers = _Table(), step.params['dimension_numbers']
    lhs, rhs, result = ([()] * len(v.shape) for v in (*step.inputs, *step.outputs))
    batch = table.add(step.inputs[0].shape[numbers.lhs_spec[0]])
    features = table.add(step.inputs[1].shape[numbers.rhs_spec[0]])
    lhs[numbers.lhs_spec[0]] = result[numbers.out_spec[0]] = batch
    summed: frozenset[int] = frozenset()
    if step.params['feature_group_count'] == step.params['batch_group_count'] == 1:
        rhs[numbers.rhs_spec[0]] = result[numbers.out_spec[1]] = features
        inner = table.add(step.inputs[1].shape[numbers.rhs_spec[1]])
        lhs[numbers.lhs_spec[1]] = rhs[numbers.rhs_spec[1]] = inner
        summed = frozenset(inner)
    return Factors(tuple(table.sizes), (tuple(lhs), tuple(rhs)), (tuple(result),), summed)


def _gather(step: Step) -> Factors:
    """A lookup: the rows of a table are as if summed over, and what a row holds is kept."""
    table, numbers = _Table(), step.params['dimension_numbers']
    operand, indices, result = step.inputs[0].shape, step.inputs[1].shape, step.outputs[0].shape
    sizes = step.params['slice_sizes']
    dims: list[Dimension] = [()] * len(operand)
    where: list[Dimension] = [table.add(n) for n in indices[:-1]] + [()]
    summed = set[int]()
    for a, b in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        dims[a] = where[b]
    offsets = []
    for d, n in enumerate(operand):
        if d in numbers.operand_batching_dims:
            continue
        if d in numbers.collapsed_slice_dims:
            dims[d] = table.add(n)
            summed |= {*dims[d]}
        else:
            dims[d] = table.add(n) if sizes[d] == n else ()
            offsets.append(dims[d])
    batch, offset = iter(where[:-1]), iter(offsets)
    out = tuple(
        next(offset) if d in numbers.offset_dims else next(batch) for d in range(len(result))
    )
    return Factors(
        tuple(table.sizes), (tuple(dims), tuple(where)), (out,), frozenset(summed)
    )


def _scatter(step: Step) -> Factors:
    """The reverse of a lookup: results are sums over all rows that are added."""
    table, numbers = _Table(), step.params['dimension_numbers']
    operand, indices, updates = (v.shape for v in step.inputs[:3])
    where: list[Dimension] = [table.add(n) for n in indices[:-1]] + [()]
    dims: list[Dimension] = [()] * len(operand)
    batching = numbers.operand_batching_dims
    for a, b in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        dims[a] = where[b]
    windows = []
    kept = [d for d in range(len(operand)) if d not in {*batching, *numbers.inserted_window_dims}]
    for d, u in zip(kept, numbers.update_window_dims, strict=True):
        dims[d] = table.add(operand[d]) if operand[d] == updates[u] else ()
        windows.append(dims[d])
    for d in numbers.inserted_window_dims:
        dims[d] = table.add(operand[d])
    batch, window = iter(where[:-1]), iter(windows)
    given = tuple(
        next(window) if d in numbers.update_window_dims else next(batch)
        for d in range(len(updates))
    )
    shared = {f for a in batching for f in dims[a]}
    return Factors(
        tuple(table.sizes),
        (tuple(dims), tuple(where), given),
        (tuple(dims),),
        frozenset(f for dim in where for f in dim) - shared,
    )


def _ragged_dot(step: Step) -> Factors:
    table = _Table()
    m, k = table.all(step.inputs[0].shape)
    groups, _, n = step.inputs[1].shape
    columns = table.add(n)
    rhs = ((), k, columns)
    rest = tuple(((),) * len(v.shape) for v in step.inputs[2:])
    return Factors(tuple(table.sizes), ((m, k), rhs, *rest), ((m, columns),), frozenset(k))


def _nothing(step: Step) -> Factors:
    """An operation whose arrays are all whole, or already divided as the program says."""
    given, results = _shapes(step)
    return Factors(
        (),
        tuple(((),) * len(s) for s in given),
        tuple(((),) * len(s) for s in results),
    )


def _results_only(step: Step) -> Factors:
    table = _Table()
    given, results = _shapes(step)
    dims = tuple(tuple(table.all(s)) for s in results)
    return Factors(tuple(table.sizes), tuple(((),) * len(s) for s in given), dims)


def _join(step: Step) -> Factors:
    """Arrays that are stacked along a new dimension."""
    table = _Table()
    dims = table.all(step.inputs[0].shape)
    axis = step.params.get('axis', 0)
    result = (*dims[:axis], (), *dims[axis:])
    return Factors(tuple(table.sizes), (tuple(dims),) * len(step.inputs), (result,))


ELEMENTWISE = frozenset(
    'abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e '
    'bitcast_convert_type cbrt ceil clamp clz conj convert_element_type copy copy_p cos cosh '
    'digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le '
    'lgamma log log1p logistic lt max min mul name ne neg nextafter not or '
    'population_count pow real reduce_precision rem round rsqrt select_n '
    'sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh '
    'sqrt square stop_gradient sub tan tanh xor random_bits random_unwrap random_wrap '
    'random_fold_in threefry2x32 dce_sink'.split()
)
_WHOLE = frozenset(
    'pallas_call axis_index all_gather reduce_scatter all_to_all psum_scatter '
    'all_gather_invariant create_token custom_partitioning io_callback pure_callback '
    'debug_callback debug_print tpu_custom_call'.split()
)
_PAIRWISE = (
    'optimization_barrier device_put pvary pcast psum pmax pmin ppermute pbroadcast psum_invariant'
).split()
_REDUCTIONS = (
    'reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor reduce_prod argmax argmin '
    'reduce'
).split()
_RULES: dict[str, Rule] = {
    'dot_general': _dot,
    'ragged_dot': _ragged_dot,
    'conv_general_dilated': _convolution,
    'transpose': _transpose,
    'broadcast_in_dim': _broadcast,
    'reshape': _reshape,
    'squeeze': _squeeze,
    'gather': _gather,
    'iota': _results_only,
    'rng_bit_generator': _results_only,
    'stack': _join,
    'sort': _along('dimension'),
    'concatenate': _along('dimension'),
    'rev': _along('dimensions'),
    'split': _along('axis'),
    **dict.fromkeys(_PAIRWISE, _pairwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(('cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp'), _along('axis')),
    **dict.fromkeys(
        ('slice', 'dynamic_slice', 'dynamic_update_slice', 'pad', 'top_k', 'reduce_window_sum',
         'reduce_window_max', 'reduce_window', 'tile'), _same_sizes),
    **dict.fromkeys(
        ('scatter', 'scatter-add', 'scatter_add', 'scatter-mul', 'scatter-min', 'scatter-max',
         'scatter_sub'), _scatter),
    **dict.fromkeys(_WHOLE, _nothing),
}
