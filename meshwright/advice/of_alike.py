"""What all devices of a shard_map compute alike, of rows that they have gathered.

    images = jax.lax.all_gather(images, 'data', tiled=True)        # (4096, 256) on each device
    texts = jax.lax.all_gather(texts, 'data', tiled=True)
    logits = images @ texts.T                                      # all 4096 * 4096, 8 times

    mean = jax.lax.all_gather(x, 'data', tiled=True).mean(0)

If the loss only needs sums over the rows, each device can compare its own 512 images with all
texts, and sum the loss over the devices. So can it sum its own rows of x, whose sums are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.advice.candidates import GATHERS as GATHERING, Match, Told
from meshwright.advice.figures import LEAST_SAVED, shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.advice.of_collectives import Reduced
from meshwright.causes.cause import CodeChange, over
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.implied_exchanges import exchange_axes
from meshwright.jaxpr.primitives import ELEMENTWISE, GATHERS, MOVES, names_in
from meshwright.jaxpr.values import Axes, Step, Value
from partitioning.products.flops import PRODUCTS

_KINDS = GATHERING | {'reduce-scatter'}  # which jax makes of a gather in a backward pass
# What is made of all rows by these is made of the same of the rows of each device.
_OF_PARTS = (
    ELEMENTWISE
    | MOVES - names_in('slice dynamic_slice reshape')
    | names_in('broadcast_in_dim reduce_sum reduce_max reduce_min pvary')
)


class _Alike(NamedTuple):
    """A gather of rows of which all devices make the same, and something small in the end.

    Attributes:
      gather: the gather.
      axes, n: the mesh axes, and the number of devices along them.
      product: the product of the rows with others, of which all devices compute all; None if the
        rows are only summed.
      d: the dimension of its result that has the rows.
      where: the line of what is small.
    """

    gather: Step
    axes: Axes
    n: int
    product: Step | None
    d: int
    where: str


def find_alike(view: FunctionView) -> Iterator[Told]:
    """Finds these gathers; of a product of two gathered arrays, it is the first one."""
    seen = set[int]()
    for step in view.steps:
        one = _read(view, step) if step.name in GATHERS else None
        if one is not None and id(one.product) not in seen:
            seen |= {id(one.product)} - {id(None)}
            yield from _tell(view, one)


def _read(view: FunctionView, step: Step) -> _Alike | None:
    made, axes = step.outputs[0], tuple(exchange_axes(step))
    n = view.num_devices(axes)
    if step.place.is_backward or n == 1 or step.params.get('axis_index_groups'):
        return None
    if not step.params.get('tiled') or made.nbytes < LEAST:
        return None
    rows = made.shape[step.params['all_gather_dimension']]
    reduced = Reduced(view, axes, any_function=True, rows=rows)
    ends = list(reduced.ends(made))
    if not ends or None in ends:
        return None
    where = next(view.line_of(end) for end in ends if end is not None)
    pairs = [one for one in reduced.steps if one.name in PRODUCTS and reduced.others(one)]
    if not pairs:
        picks = [one for one in reduced.steps if one.name == 'gather' and one in ends]
        alone = all(one.name in _OF_PARTS or one in picks for one in reduced.steps)
        return _Alike(step, axes, n, None, 0, where) if alone else None
    for product in pairs:
        d = _rows_of(view, step, product)
        if d is not None and product.outputs[0].nbytes >= LEAST:
            return _Alike(step, axes, n, product, d, where)
    return None


def _rows_of(view: FunctionView, gather: Step, product: Step) -> int | None:
    """The dimension of a product that has the rows of a gather, if one of its operands has."""
    factors = find_factors(product)
    for number, operand in enumerate(product.inputs[:2]):
        d = _dimension(view, operand, gather)
        dim = () if d is None else factors.inputs[number][d]
        rows = [e for e, own in enumerate(factors.outputs[0]) if own == dim]
        if len(dim) == 1 and not {*dim} & factors.summed and len(rows) == 1:
            return rows[0]
    return None


def _dimension(view: FunctionView, value: Value, gather: Step) -> int | None:
    """The dimension of an array that has the rows of a gather, cast, scaled or transposed."""
    path = list[Step]()
    step = view.makers.get(id(value))
    while step is not None and step is not gather and step.name in ELEMENTWISE | MOVES | {'pvary'}:
        large = [one for one in step.inputs if one.size == step.outputs[0].size]
        path.append(step)
        step = view.makers.get(id(large[0])) if large else None
    if step is not gather:
        return None
    d, shape = gather.params['all_gather_dimension'], gather.outputs[0].shape
    for one in reversed(path):
        after = one.outputs[0].shape
        if one.name == 'transpose':
            d = tuple(one.params['permutation']).index(d)
        elif after != shape:
            return None
        shape = after
    return d


def _tell(view: FunctionView, one: _Alike) -> Iterator[Told]:
    line, axes = one.gather.line, over(one.axes)
    shapes = frozenset(shape_of(v) for v in (*one.gather.inputs, *one.gather.outputs))
    match = Match(axes=one.axes, kinds=_KINDS, lines=frozenset([line]), shapes=shapes)
    moved = view.sent_by(match)
    if moved <= LEAST_SAVED * view.sends:
        return
    rows = f'the gather at {line} gives all {one.n} devices along {axes} all rows'
    if one.product is None:
        shape = one.gather.inputs[0].shape
        why = (
            f'the gather at {line} gives all {one.n} devices along {axes} all of '
            f'{one.gather.outputs[0].shape}, of which {one.where} only needs sums or extremes'
        )
        text = (
            f'leave out the all_gather at {line}: reduce the part of each device, {shape}, and '
            f'then the results with jax.lax.psum, pmean or pmax over {axes}, at {one.where}; an '
            'element that is picked by its number counts on the device that has it'
        )
    else:
        made, where = one.product.outputs[0], view.line_of(one.product)
        own = tuple(size // one.n if e == one.d else size for e, size in enumerate(made.shape))
        why = (
            f'{rows} of the product at {where}, so that each of them computes all of {made.shape}, '
            'although only sums of it are used'
        )
        text = (
            f'leave out this all_gather at {line}, so that each device computes {own} of the '
            f'product at {where} for its own rows, and not all of {made.shape}; sum what follows '
            f'over the rows with jax.lax.psum or pmean over {axes}'
        )
    yield Told(
        match=match,
        line=line,
        why=why,
        change=CodeChange(source=line, text=text),
        effect=view.saving(moved),
    )
