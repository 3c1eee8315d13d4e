"""Where the dimensions of an operation's operands are in its result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class Dim(NamedTuple):
    """A dimension of a value.

    Attributes:
      name: its logical axis, or None if it has none.
      axes: the mesh axes that shard it in the argument or the constraint that it comes from.
      argument: the path of that argument, or ''.
      number: the number of the dimension there.
    """

    name: str | None
    axes: tuple[str, ...]
    argument: str
    number: int = 0


Dims = tuple[Dim | None, ...]


def result_dims(equation: Any, operands: Sequence[Any], shape: tuple[int, ...]) -> Dims:
    """Returns the dimensions of a result of an operation.

    Args:
      equation: the operation.
      operands: its operands, with `dims` and `shape`.
      shape: the shape of the result.
    """
    name, params = equation.primitive.name, equation.params
    unknown: Dims = (None,) * len(shape)
    if not operands:
        return unknown
    first = operands[0]
    if name == 'dot_general':
        return _of_product(params['dimension_numbers'], operands)
    if name == 'transpose':
        return tuple(first.dims[d] for d in params['permutation'])
    if name == 'broadcast_in_dim':
        dims = list(unknown)
        for source, target in enumerate(params['broadcast_dimensions']):
            if first.shape[source] == shape[target]:
                dims[target] = first.dims[source]
        return tuple(dims)
    if name in ('reshape', 'squeeze', 'expand_dims'):
        return _of_reshape(first, shape)
    if name.startswith(('reduce_', 'arg')) and 'axes' in params:
        return tuple(d for i, d in enumerate(first.dims) if i not in params['axes'])
    if name == 'gather':
        return _of_gather(params, operands, shape)
    if name == 'dynamic_update_slice' or name.startswith('scatter'):
        return first.dims
    if name in ('slice', 'split', 'pad') and len(first.shape) == len(shape):
        return first.dims
    if name == 'concatenate':
        return _of_concatenated(operands)
    return _of_equal_shapes(operands, shape)


def contracted_dims(equation: Any, operands: Sequence[Any]) -> Dims:
    """Returns the dimensions that an operation sums over."""
    name, params = equation.primitive.name, equation.params
    if name == 'dot_general':
        (lhs, rhs), _ = params['dimension_numbers']
        pairs = zip(lhs, rhs, strict=True)
        return tuple(better(operands[0].dims[i], operands[1].dims[j]) for i, j in pairs)
    if name.startswith(('reduce_', 'arg')) and 'axes' in params:
        return tuple(operands[0].dims[i] for i in params['axes'])
    if name == 'gather':
        numbers = params['dimension_numbers']
        return tuple(operands[0].dims[i] for i in numbers.start_index_map)
    if name.startswith('scatter'):
        return tuple(operands[1].dims[:-1])  # the rows that are added into one
    if name == 'sort':
        return (operands[0].dims[params['dimension']],)
    return ()


def better(one: Dim | None, other: Dim | None) -> Dim | None:
    """The one of two descriptions of a dimension that says more."""
    if one is None or (one.name is None and other is not None):
        return other
    return one


def _of_product(numbers: Any, operands: Sequence[Any]) -> Dims:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers
    lhs, rhs = operands[0].dims, operands[1].dims
    batch = [better(lhs[i], rhs[j]) for i, j in zip(lhs_batch, rhs_batch, strict=True)]
    free = [d for i, d in enumerate(lhs) if i not in (*lhs_sum, *lhs_batch)]
    return (
        *batch,
        *free,
        *(d for i, d in enumerate(rhs) if i not in (*rhs_sum, *rhs_batch)),
    )


def _of_reshape(operand: Any, shape: tuple[int, ...]) -> Dims:
    """Dimensions keep their names; of merged ones the first name, of a split one its first part."""
    dims: list[Dim | None] = []
    source = 0
    old = operand.shape
    while len(dims) < len(shape):
        if shape[len(dims)] == 1 and (source >= len(old) or old[source] != 1):
            dims.append(None)
            continue
        while source < len(old) and old[source] == 1 and shape[len(dims)] != 1:
            source += 1
        if source >= len(old):
            dims.append(None)
            continue
        start, first = source, len(dims)
        taken, made = old[source], shape[first]
        source, count = source + 1, 1
        while taken != made:
            if taken < made and source < len(old):
                taken, source = taken * old[source], source + 1
            elif first + count < len(shape):
                made, count = made * shape[first + count], count + 1
            else:
                break
        merged = [d for d in operand.dims[start:source] if d is not None and d.name]
        dims += [merged[0] if merged else operand.dims[start], *[None] * (count - 1)]
    return tuple(dims[: len(shape)])


def _of_gather(params: Any, operands: Sequence[Any], shape: tuple[int, ...]) -> Dims:
    table, indices = operands[0], operands[1]
    numbers = params['dimension_numbers']
    batching = getattr(numbers, 'operand_batching_dims', ())
    dropped = {*numbers.collapsed_slice_dims, *batching}
    kept = [i for i in range(len(table.shape)) if i not in dropped]
    dims: list[Dim | None] = [None] * len(shape)
    for target, source in zip(numbers.offset_dims, kept, strict=False):
        if params['slice_sizes'][source] == table.shape[source]:
            dims[target] = table.dims[source]
    rows = [i for i in range(len(shape)) if i not in numbers.offset_dims]
    for target, dim in zip(rows, indices.dims, strict=False):
        dims[target] = dim
    return tuple(dims)


def _of_concatenated(operands: Sequence[Any]) -> Dims:
    dims = operands[0].dims
    for operand in operands[1:]:
        dims = tuple(better(one, other) for one, other in zip(dims, operand.dims, strict=True))
    return dims


def _of_equal_shapes(operands: Sequence[Any], shape: tuple[int, ...]) -> Dims:
    dims: list[Dim | None] = [None] * len(shape)
    for operand in operands:
        if len(operand.shape) == len(shape):
            for i, dim in enumerate(operand.dims):
                if operand.shape[i] == shape[i]:
                    dims[i] = better(dims[i], dim)
    if math.prod(shape) == 1:
        return (None,) * len(shape)
    return tuple(dims)
