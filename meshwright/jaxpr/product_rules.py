"""The factors of products, convolutions and lookups, whose results are sums over what they read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.jaxpr.factors import Dimension, Factors, Table
from meshwright.jaxpr.steps import Step, Value


def relate_dot(step: Step) -> Factors:
    return _relate_product(step, *step.params['dimension_numbers'])


def relate_ragged_dot(step: Step) -> Factors:
    """A product whose rows are of groups, each with its own matrix; no factor is a group."""
    numbers = step.params['ragged_dot_dimension_numbers']
    summed, batch = numbers.dot_dimension_numbers
    found = _relate_product(step, summed, batch, numbers.rhs_group_dimensions)
    if numbers.rhs_group_dimensions:
        return found
    # Of two arrays with the same groups, it makes a matrix for each group.
    (result,) = found.outputs
    return dataclasses.replace(found, outputs=(((), *result),))


def _relate_product(
    step: Step,
    summed: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]],
    groups: Sequence[int] = (),
) -> Factors:
    table = Table()
    lhs_shape, rhs_shape, *others = (value.shape for value in step.inputs)
    lhs: list[Dimension] = table.all(lhs_shape)
    rhs: list[Dimension | None] = [() if d in groups else None for d in range(len(rhs_shape))]
    for pairs in (summed, batch):
        for a, b in zip(*pairs, strict=True):
            rhs[b] = lhs[a]
    rhs_dims = [table.add(n) if f is None else f for f, n in zip(rhs, rhs_shape, strict=True)]
    taken = [{*pair[0], *pair[1]} for pair in zip(summed, batch, strict=True)]
    result = [lhs[d] for d in batch[0]]
    result += [f for d, f in enumerate(lhs) if d not in taken[0]]
    result += [f for d, f in enumerate(rhs_dims) if d not in {*taken[1], *groups}]
    return Factors(
        tuple(table.sizes),
        (tuple(lhs), tuple(rhs_dims), *(((),) * len(shape) for shape in others)),
        (tuple(result),),
        frozenset(f for d in summed[0] for f in lhs[d]),
    )


def relate_convolution(step: Step) -> Factors:
    table, numbers = Table(), step.params['dimension_numbers']
    lhs, rhs, result = (_whole(v) for v in (*step.inputs, *step.outputs))
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


def _whole(value: Value) -> list[Dimension]:
    return [()] * len(value.shape)


def relate_gather(step: Step) -> Factors:
    """A lookup: the rows of a table are as if summed over, and what a row holds is kept."""
    table, numbers = Table(), step.params['dimension_numbers']
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
    return Factors(tuple(table.sizes), (tuple(dims), tuple(where)), (out,), frozenset(summed))


def relate_scatter(step: Step) -> Factors:
    """The reverse of a lookup: results are sums over all rows that are added."""
    table, numbers = Table(), step.params['dimension_numbers']
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
