"""Operations, arrays and dimensions in words, as reasons name them.

For `hidden @ params['down']` in line 32, whose result is summed over devices:

    what_makes(value)   "the product with params/down at train.py:32"
    name_dim(dim)       "'mlp'", or "dimension 0 of params/down" if it has no name
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.causes.cause import over, what_is
from meshwright.causes.layouts import KnownLayouts, axes_of_row
from meshwright.jaxpr.primitives import SCATTERS
from meshwright.jaxpr.values import Dim, Value
from partitioning.products.flops import PRODUCTS
from partitioning.rules import from_tuple

_LARGEST = {'reduce_max': 'the maximum', 'reduce_min': 'the minimum'}


def what_makes(value: Value) -> str:
    """The operation that makes a value, with the parameter that it uses and its line."""
    name, line = value.primitive, value.line
    at = f' at {line}' if line else ''
    arguments = list(dict.fromkeys(o.argument for o in value.operands if o.argument))
    used = f' with {arguments[0]}' if arguments else ''
    used = f' of {arguments[0]} and {arguments[1]}' if len(arguments) > 1 else used
    backward = ', for a gradient' if value.backward else ''
    if name in PRODUCTS:
        return f'the product{used or " of two activations"}{at}{backward}'
    if name == 'gather':
        return f'the lookup in {arguments[0] if arguments else "an array"}{at}{backward}'
    if name in SCATTERS:
        return f'the gradient of the lookup{at}'
    if name.startswith('reduce_'):
        return f'{_LARGEST.get(name, "the sum")}{at}{backward}'
    if name == 'add_any':  # the sum of the gradients of the uses of an array
        return f'the sum of gradients{at}'
    return f'{name}{at}{backward}' if name else what_is(value)


def in_words(value: Value) -> str:
    """A value: 'params/w', 'the gradient of params/w', or 'the result of the product at ...'."""
    if value.argument or value.gradient_of or value.update_of or not value.primitive:
        return what_is(value)
    return f'the result of {what_makes(value)}'


def name_dim(dim: Dim | None) -> str:
    """A dimension by its logical axis, or by its number in the argument that it comes from."""
    if dim is None:
        return 'a dimension'
    if dim.name:
        return repr(dim.name)
    return f'dimension {dim.number} of {dim.argument}' if dim.argument else 'a dimension'


def spec_text(layout: Sequence[Sequence[str]]) -> str:
    """A layout as one writes it: "PartitionSpec('data', None)"."""
    return f'PartitionSpec({", ".join(repr(from_tuple(tuple(axes))) for axes in layout)})'


def layouts_text(layouts: Sequence[tuple[str, Sequence[Sequence[str]]]]) -> str:
    """Arguments with their layouts; if there are many, the first three."""
    named = ' and '.join(f'{path} as {spec_text(layout)}' for path, layout in layouts[:3])
    return named + (f', and {len(layouts) - 3} more alike' if len(layouts) > 3 else '')


def say_rows(layouts: KnownLayouts) -> str:
    """Whether the batch is sharded: over the axes of its rows, which come first; '' if unclear."""
    rows = [row for row in layouts.rows.values() if row.role == 'other' and row.shape]
    if not any(axes for row in rows for axes in axes_of_row(row)):
        return 'the batch is not sharded' if rows else ''
    largest = sorted(rows, key=lambda row: -math.prod(row.shape))
    sharded = next((axes for row in largest if (axes := axes_of_row(row)[0])), ())
    return f'the batch is sharded over {over(sharded)}' if sharded else ''
