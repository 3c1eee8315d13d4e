"""Mesh axes along which devices should have different rows of the batch.

Fully sharded training divides parameters and rows along the same axes. An axis that divides
parameters only, and along which no product pairs a divided activation with a divided parameter, was
forgotten in the layout of the batch:

    mesh data=4, fsdp=4;  up P('fsdp', None), down P('fsdp', None), x P('data')   ->  'fsdp'
    mesh data=4, model=4; up P(None, 'model'), down P('model', None), x P('data') ->  none: 'model'
                                                                  divides the hidden layer, too
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from meshwright.jaxpr.primitives import CONSTRAINTS, names_in
from meshwright.jaxpr.values import Value

# The usual names of mesh axes along which devices have different rows, and of others.
ROW_AXES = frozenset(names_in('data batch dp fsdp replica hsdp ddp zero'))
_OTHER_AXES = names_in(
    'model tensor tp mp mdl expert ep seq sequence sp context cp stage pipe pp pipeline'
)


def is_meant_for_rows(axis: str, values: Iterable[Value], parameters: Collection[str]) -> bool:
    """Whether a mesh axis that divides parameters should divide the rows of the batch, too.

    Args:
      axis: the axis, which does not divide the rows.
      values: the values of the function, with their names.
      parameters: the paths of its parameters.
    """
    if axis in _OTHER_AXES:
        return False
    cut = False
    for value in values:
        if value.backward:
            continue
        if axis in value.manual or _constrains(value, axis):
            return False
        for one, other in _summed(value) if value.primitive == 'dot_general' else ():
            if axis in one[1] and axis in other[1]:
                return axis in ROW_AXES
            cut |= any(axis in axes and path in parameters for path, axes in (one, other))
        if value.primitive == 'dot_general' and axis in _stacked(value):
            return axis in ROW_AXES
    return cut or axis in ROW_AXES


def _constrains(value: Value, axis: str) -> bool:
    """Whether a value is an activation with a constraint that names an axis."""
    is_state = value.argument or value.gradient_of or value.update_of
    named = value.primitive in CONSTRAINTS and value.layout is not None and not is_state
    return named and any(axis in axes for axes in value.layout or ())


def _summed(product: Value) -> Iterator[tuple[tuple[str, tuple[str, ...]], ...]]:
    """The dimensions that a product sums over: of each operand its argument and its mesh axes."""
    assert product.maker is not None
    (left, right), _ = product.maker.params['dimension_numbers']
    for pair in zip(left, right, strict=True):
        dims = [v.dims[d] for v, d in zip(product.operands[:2], pair, strict=True)]
        paths = [v.argument for v in product.operands[:2]]
        yield tuple((p, d.axes if d else ()) for p, d in zip(paths, dims, strict=True))


def _stacked(product: Value) -> set[str]:
    """The mesh axes of the dimensions that both operands of a product have, such as experts."""
    assert product.maker is not None
    _, batches = product.maker.params['dimension_numbers']
    pairs = zip(product.operands[:2], batches, strict=True)
    dims = [value.dims[d] for value, numbers in pairs for d in numbers]
    return {axis for dim in dims if dim is not None for axis in dim.axes}
