"""The factors of products, convolutions and lookups, and which of them are summed over."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.jaxpr.factors import WHOLE, Dimension, Factors, Table, unrelated
from meshwright.jaxpr.values import Step


def relate_dot(step: Step) -> Factors:
    return _relate_product(step, *step.params['dimension_numbers'])


def relate_ragged_dot(step: Step) -> Factors:
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


def relate_convolution(step: Step) -> Factors:
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


def relate_gather(step: Step) -> Factors:
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


def relate_scatter(step: Step) -> Factors:
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
