"""The table from primitives to the rules that find their factors.

This is all that is known about primitives: layouts, exchanges, memory, and the names of dimensions
follow from it. For example, `_relate_dot` describes `dot_general`, and `_broadcast` describes
`broadcast_in_dim`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

from meshwright.jaxpr.factors import WHOLE, Dimension, Factors, Table, unrelated
from meshwright.jaxpr.primitives import ELEMENTWISE, REDUCTIONS, SCATTERS, names_in
from meshwright.jaxpr.values import Step

Rule = Callable[[Step], Factors]
Shape = tuple[int, ...]


def find_factors(step: Step) -> Factors:
    """Returns the factors of a step, which are found once.

    They depend on its primitive, its parameters and the shapes of its arrays. Exchanges replace
    arrays of a step only by arrays of the same shapes.
    """
    if step.factors is None:
        step.factors = _RULES.get(step.name, _elementwise)(step)
    return step.factors


def _relate_dot(step: Step) -> Factors:
    return _relate_product(step, *step.params['dimension_numbers'])


def _relate_ragged_dot(step: Step) -> Factors:
    """The factors of a product with one matrix per group of rows; groups have no factor."""
    numbers = step.params['ragged_dot_dimension_numbers']
    summed, batch = numbers.dot_dimension_numbers
    return _relate_product(step, summed, batch, numbers.rhs_group_dimensions)


def _relate_product(
    step: Step,
    summed: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]],
    groups: Sequence[int] = (),
) -> Factors:
    table = Table()
    lhs_shape, rhs_shape, *others = (value.shape for value in step.inputs)
    lhs = table.all(lhs_shape)
    paired = {b: lhs[a] for pairs in (summed, batch) for a, b in zip(*pairs, strict=True)}
    paired |= dict.fromkeys(groups, ())
    rhs = [paired[d] if d in paired else table.add(n) for d, n in enumerate(rhs_shape)]
    result = [lhs[d] for d in batch[0]]
    result += [f for d, f in enumerate(lhs) if d not in {*summed[0], *batch[0]}]
    result += [f for d, f in enumerate(rhs) if d not in {*summed[1], *batch[1], *groups}]
    # If the groups divide the summed dimension, a ragged product makes one matrix per group.
    result = [()] * (len(step.outputs[0].shape) - len(result)) + result
    arrays = [lhs, rhs, *unrelated(others)]
    return table.relate(arrays, [result], [f for d in summed[0] for f in lhs[d]])


def _relate_convolution(step: Step) -> Factors:
    """The factors of a convolution: batch and features as in a product; windows are undivided."""
    table, numbers = Table(), step.params['dimension_numbers']
    one_group = step.params['feature_group_count'] == step.params['batch_group_count'] == 1
    kernel = step.inputs[1].shape
    batch = table.add(step.inputs[0].shape[numbers.lhs_spec[0]])
    features = table.add(kernel[numbers.rhs_spec[0]] if one_group else WHOLE)
    inner = table.add(kernel[numbers.rhs_spec[1]]) if one_group else ()
    before, after = step.inputs[0].shape, step.outputs[0].shape
    pairs = zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strict=True)
    windows = [table.add(WHOLE) if before[a] == after[b] else () for a, b in pairs]

    def place(spec: Sequence[int], *dims: Dimension) -> list[Dimension]:
        return [dims[spec.index(d)] for d in range(len(spec))]

    lhs = place(numbers.lhs_spec, batch, inner or features, *windows)
    rhs = place(numbers.rhs_spec, features, inner, *[()] * len(windows))
    return table.relate([lhs, rhs], [place(numbers.out_spec, batch, features, *windows)], inner)


def _relate_gather(step: Step) -> Factors:
    """The factors of a lookup, as if it summed over the rows of a table and kept the columns."""
    table, numbers = Table(), step.params['dimension_numbers']
    operand, indices, result = step.inputs[0].shape, step.inputs[1].shape, step.outputs[0].shape
    where = [*table.all(indices[:-1]), ()]
    batching = numbers.operand_batching_dims
    pairs = zip(batching, numbers.start_indices_batching_dims, strict=True)
    dims = {a: where[b] for a, b in pairs}
    rows, windows, sizes = numbers.collapsed_slice_dims, [], step.params['slice_sizes']
    for d in (d for d in range(len(operand)) if d not in batching):
        dims[d] = table.add(operand[d]) if d in rows or sizes[d] == operand[d] else ()
        windows += [] if d in rows else [dims[d]]
    made = _interleave(len(result), numbers.offset_dims, windows, where)
    summed = [f for d in rows for f in dims[d]]
    return table.relate([_ordered(dims), where], [made], summed)


def _relate_scatter(step: Step) -> Factors:
    """The factors of a scatter, the reverse of a lookup: it sums over all rows that are added."""
    table, numbers = Table(), step.params['dimension_numbers']
    operand, indices, updates = (v.shape for v in step.inputs[:3])
    where = [*table.all(indices[:-1]), ()]
    batching, inserted = numbers.operand_batching_dims, numbers.inserted_window_dims
    pairs = zip(batching, numbers.scatter_indices_batching_dims, strict=True)
    dims = {a: where[b] for a, b in pairs}
    kept = [d for d in range(len(operand)) if d not in {*batching, *inserted}]
    for d, u in zip(kept, numbers.update_window_dims, strict=True):
        dims[d] = table.add(operand[d] if operand[d] == updates[u] else WHOLE)
    for d in inserted:
        dims[d] = table.add(operand[d])
    windows = [dims[d] for d in kept]
    given = _interleave(len(updates), numbers.update_window_dims, windows, where)
    shared = {f for d in batching for f in dims[d]}
    summed = {f for dim in where for f in dim} - shared
    result = _ordered(dims)
    return table.relate([result, where, given], [result], summed)


def _ordered(dims: dict[int, Dimension]) -> list[Dimension]:
    return [dims[d] for d in range(len(dims))]


def _interleave(
    rank: int, windows: Sequence[int], inside: Sequence[Dimension], where: Sequence[Dimension]
) -> list[Dimension]:
    """The dimensions of looked-up rows: `inside` a row at `windows`, and elsewhere `where`."""
    window, batch = iter(inside), iter(where)
    return [next(window) if d in windows else next(batch) for d in range(rank)]


def _elementwise(step: Step) -> Factors:
    """Relates arrays of one shape, and scalars; others as far as positions and sizes agree."""
    given, results = _shapes(step)
    if (found := _relate_equal(tuple(given), tuple(results))) is not None:
        return found
    known = step.name in ELEMENTWISE
    return dataclasses.replace(_by_position(step, _largest(given, results)), known=known)


@functools.lru_cache(maxsize=1024)  # programs have few shapes
def _relate_equal(given: tuple[Shape, ...], results: tuple[Shape, ...]) -> Factors | None:
    """The factors of arrays of one shape and of scalars, or None if there are other shapes."""
    largest = _largest(given, results)
    if not {*given, *results} <= {(), largest}:
        return None
    dims = {(): (), largest: tuple((factor,) for factor in range(len(largest)))}
    return Factors(largest, tuple(dims[s] for s in given), tuple(dims[s] for s in results))


def _shapes(step: Step) -> tuple[list[Shape], list[Shape]]:
    return [v.shape for v in step.inputs], [v.shape for v in step.outputs]


def _largest(given: Sequence[Shape], results: Sequence[Shape]) -> Shape:
    return max([*results, *given], key=lambda s: (len(s), math.prod(s)), default=())


def _by_position(step: Step, divided: Shape = (), cut: Iterable[int] = ()) -> Factors:
    """Relates dimensions of the same position and size, in arrays of the same rank.

    Args:
      step: the operation.
      divided: the shape whose dimensions can be divided. All other dimensions are whole.
      cut: dimensions that are related although their sizes may differ. They are whole.
    """
    table, found = Table(), dict[tuple[int, int, int], Dimension]()

    def dims(shape: Shape) -> list[Dimension]:
        made = []
        for d, n in enumerate(shape):
            key = (len(shape), d, -1 if d in cut else n)
            if key not in found:
                free = d not in cut and len(shape) == len(divided) and divided[d] == n
                found[key] = table.add(n if free else WHOLE)
            made.append(found[key])
        return made

    dims(divided)  # its factors come first
    given, results = _shapes(step)
    return table.relate(map(dims, given), map(dims, results))


def _along(parameter: str) -> Rule:
    """Elementwise, but whole along the dimensions that a parameter names."""

    def rule(step: Step) -> Factors:
        found, largest = step.params[parameter], _largest(*_shapes(step))
        dims = found if isinstance(found, tuple | list) else (found,)
        return _by_position(step, largest, {d % len(largest) for d in dims})

    return rule


def _resize(step: Step) -> Factors:
    """Slices and the like: the dimensions that change their size are whole."""
    before, after = step.inputs[0].shape, step.outputs[0].shape
    return _by_position(step, before, _changed(before, after))


def _choose(step: Step) -> Factors:
    """The same, where the dimension of the result has another meaning: it counts what is chosen."""
    before, after = step.inputs[0].shape, step.outputs[0].shape
    changed = _changed(before, after)
    return _by_position(step, tuple(-1 if d in changed else n for d, n in enumerate(before)))


def _changed(before: Shape, after: Shape) -> set[int]:
    return {d for d, (n, m) in enumerate(zip(before, after, strict=True)) if n != m}


def _pairwise(step: Step) -> Factors:
    """Each result is as the operand of the same number."""
    table = Table()
    dims = [table.all(v.shape) for v in step.inputs]
    return table.relate(dims, dims)


def _transpose(step: Step) -> Factors:
    table = Table()
    dims = table.all(step.inputs[0].shape)
    return table.relate([dims], [[dims[d] for d in step.params['permutation']]])


def _broadcast(step: Step) -> Factors:
    table, (given, *others), (result,) = Table(), *_shapes(step)
    dims = table.all(result)
    pairs = zip(step.params['broadcast_dimensions'], given, strict=True)
    first = [dims[d] if n == result[d] else () for d, n in pairs]
    return table.relate([first, *unrelated(others)], [dims])


def _reshape(step: Step) -> Factors:
    """Splits and merges dimensions: both shapes are cut where either has a border."""
    (given, *others), (result,) = _shapes(step)
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
    return table.relate([dims[0], *unrelated(others)], [dims[1]])


def _squeeze(step: Step) -> Factors:
    table, shape = Table(), step.inputs[0].shape
    dropped = {d % len(shape) for d in step.params['dimensions']}
    dims = [() if d in dropped else table.add(n) for d, n in enumerate(shape)]
    return table.relate([dims], [[f for d, f in enumerate(dims) if d not in dropped]])


def _reduce(step: Step) -> Factors:
    table, shape = Table(), step.inputs[0].shape
    dims = table.all(shape)
    axes = set(step.params.get('axes', step.params.get('dimensions', ())))
    result = [f for d, f in enumerate(dims) if d not in axes]
    given = [dims if v.shape == shape else ((),) * len(v.shape) for v in step.inputs]
    return table.relate(given, [result] * len(step.outputs), [f for d in axes for f in dims[d]])


def _make(step: Step) -> Factors:
    """An operation that makes arrays of any layout from nothing."""
    table, (given, results) = Table(), _shapes(step)
    return table.relate(unrelated(given), map(table.all, results))


def _stack(step: Step) -> Factors:
    """Arrays of equal shapes along a new dimension."""
    table, axis = Table(), step.params['axis']
    dims = table.all(step.inputs[0].shape)
    return table.relate([dims] * len(step.inputs), [(*dims[:axis], (), *dims[axis:])])


def _unstack(step: Step) -> Factors:
    """The entries along a dimension, which they do not have."""
    table, axis = Table(), step.params['axis']
    dims = table.all(step.outputs[0].shape)
    return table.relate([(*dims[:axis], (), *dims[axis:])], [dims] * len(step.outputs))


# All arrays are whole, or already divided as the program says.
_WHOLE = names_in(
    'pallas_call axis_index all_gather reduce_scatter all_to_all psum_scatter '
    'all_gather_invariant create_token custom_partitioning io_callback pure_callback '
    'debug_callback debug_print tpu_custom_call'
)
_PAIRWISE = names_in(
    'optimization_barrier device_put pvary pcast psum pmax pmin ppermute pbroadcast psum_invariant'
)
_CUMULATIVE = names_in('cumsum cumprod cummax cummin cumlogsumexp')
_RESIZING = names_in(
    'slice dynamic_slice dynamic_update_slice pad reduce_window_sum reduce_window_max '
    'reduce_window tile'
)
_RULES: dict[str, Rule] = {
    'dot_general': _relate_dot,
    'ragged_dot_general': _relate_ragged_dot,
    'conv_general_dilated': _relate_convolution,
    'transpose': _transpose,
    'broadcast_in_dim': _broadcast,
    'reshape': _reshape,
    'squeeze': _squeeze,
    'gather': _relate_gather,
    'iota': _make,
    'rng_bit_generator': _make,
    'stack': _stack,
    'unstack': _unstack,
    'reduce': _reduce,
    'sort': _along('dimension'),
    'concatenate': _along('dimension'),
    'rev': _along('dimensions'),
    'split': _along('axis'),
    'top_k': _choose,
    **dict.fromkeys(_PAIRWISE, _pairwise),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(_CUMULATIVE, _along('axis')),
    **dict.fromkeys(_RESIZING, _resize),
    **dict.fromkeys(SCATTERS, _relate_scatter),
    **dict.fromkeys(_WHOLE, _by_position),
}
