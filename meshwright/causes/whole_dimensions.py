"""Operations that need a dimension of their operand whole, and what to write instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from meshwright.causes.cause import Change, CodeChange
from meshwright.causes.layouts import KnownLayouts
from meshwright.causes.value_graph import ValueGraph
from meshwright.jaxpr.primitives import MOVES
from meshwright.jaxpr.values import Value, item_size

_RESIZED = 'an operation that does not cut or join a sharded dimension'
_MERGED = 'an operation that does not merge a sharded dimension into the one before it'
_RUNNING = 'an operation over blocks of the dimension'
_GATHERING = ('all_gather', 'all_gather_invariant', 'sharding_constraint', 'reshard')
_TYPES = {'float64': 'f64', 'float32': 'f32', 'bfloat16': 'bf16', 'float16': 'f16'}
_STEPS = 6  # the number of moves between two values that are looked at
_WHOLE = {
    'gather': 'a one-hot product, such as jnp.sum(x * jax.nn.one_hot(indices, x.shape[-1]), -1)',
    'sort': 'an operation that does not sort over a sharded dimension',
    'top_k': (
        'top_k over each part of the dimension, which is x.reshape(..., devices, -1) with a '
        'constraint on the devices, and then top_k over what is left,'
    ),
    **dict.fromkeys(['cumsum', 'cumprod', 'cummax', 'cummin', 'cumlogsumexp', 'fft'], _RUNNING),
    'rev': 'an operation that does not reverse a sharded dimension',
    **dict.fromkeys(['slice', 'split', 'pad', 'concatenate'], _RESIZED),
}


def written_otherwise(value: Value, line: str, layouts: KnownLayouts) -> Iterator[Change]:
    """What to write in place of the operation that makes a value, if it needs a dimension whole."""
    scatters = value.primitive.startswith('scatter')
    needed = _WHOLE.get('gather' if scatters else value.primitive)
    if needed is None or value.gradient_of or any(o.argument for o in value.operands[:1]):
        return
    if needed == _WHOLE['gather'] and not _picks_one_of_each_row(value):
        return  # A lookup in a table, for example: its result keeps the other dimensions.
    resized = _resized(value, layouts.sizes)
    if needed != _RESIZED or any(_is_sharded(value, dim, layouts) for dim in resized):
        yield CodeChange(source=line, text=f'write {needed} at {line}')


def _picks_one_of_each_row(value: Value) -> bool:
    """Whether a gather takes one element of each row, as the logit of a target.

    The scatter of its gradient adds one element to each row.
    """
    operand, *others = value.operands or (value,)
    picked = others[1] if value.primitive.startswith('scatter') and len(others) > 1 else value
    return picked.size * operand.shape[-1] == operand.size


def cast_late(value: Value, graph: ValueGraph, dtype: str) -> Iterator[CodeChange]:
    """What to write in place of a gather whose result is only used after a cast to a smaller type.

    Args:
      value: the value that is gathered.
      graph: its uses.
      dtype: the type in which it is gathered, as XLA writes it.
    """
    for user in graph.users(value) or graph.users_of_argument(value.argument):
        after = graph.users(user)
        casts = [one for one in after if one.primitive == 'convert_element_type']
        if user.primitive not in _GATHERING or not casts or len(casts) < len(after):
            continue
        cast = casts[0].dtype
        if item_size(cast) < item_size(user.dtype) and dtype == _TYPES.get(str(user.dtype)):
            what = f'cast to {cast} before {user.primitive} at {user.line}, in place of after it'
            yield CodeChange(source=user.line, text=what)


def written_for(
    user: Value, value: Value, dim: int | None, sizes: Mapping[str, int]
) -> Iterator[CodeChange]:
    """What to write in place of an operation that needs the sharded dimension of its operand.

    Args:
      user: the result of the operation.
      value: the operand, or what the operand is a reshaped copy of.
      dim: the number of the sharded dimension, or None if it is not known.
      sizes: the size of each mesh axis.
    """
    merged = next((one for one in _copies(value, user) if _merges(one, dim)), None)
    line = (merged or user).line
    if merged is not None:
        yield CodeChange(source=line, text=f'write {_MERGED} at {line}')
        return
    needed = _WHOLE.get(user.primitive)
    if needed is None:
        return
    if needed == _RESIZED:
        wanted = dim is not None and dim in _resized(user, sizes) and not user.update_of
    elif user.primitive != 'gather':
        wanted = True
    elif dim is None or not user.operands:
        wanted = _picks_one_of_each_row(user)
    else:
        wanted = _picks_one_of_each_row(user) and user.operands[0].shape == value.shape
        wanted &= any(d is not None and d == value.dims[dim] for d in user.contracted)
    if wanted:
        yield CodeChange(source=line, text=f'write {needed} at {line}')


def _copies(value: Value, user: Value) -> Iterator[Value]:
    """The copies of a value that another one is computed from, and the other one itself."""
    yield user
    for operand in user.operands:
        for _ in range(_STEPS):
            if operand.primitive not in MOVES or operand is value or not operand.operands:
                break
            yield operand
            operand = operand.operands[0]


def _merges(copy: Value, dim: int | None) -> bool:
    """Whether a value is a reshape that merges a dimension into the one before it."""
    if copy.primitive != 'reshape' or dim is None or not copy.operands:
        return False
    before = copy.operands[0].shape
    starts = itertools.accumulate(copy.shape, lambda n, size: n * size, initial=1)
    return dim < len(before) and math.prod(before[:dim]) not in {*starts}


def _resized(value: Value, sizes: Mapping[str, int]) -> list[int]:
    """The dimensions that an operation cuts, joins or pads, other than the stages of pipelines."""
    if not value.operands or len(value.operands[0].shape) != len(value.shape):
        return []
    pairs = zip(value.operands[0].shape, value.shape, strict=True)
    cut = [number for number, (before, after) in enumerate(pairs) if before != after]
    return [number for number in cut if not value.rolls_stages(number, sizes)]


def _is_sharded(value: Value, dim: int, layouts: KnownLayouts) -> bool:
    """Whether a dimension that an operation resizes would be sharded where it is largest."""
    largest = max(value.operands[0], value, key=lambda one: one.shape[dim])
    dims = (*largest.dims[:dim], value.dims[dim] or largest.dims[dim], *largest.dims[dim + 1 :])
    return bool(layouts.wanted(dims, largest.shape)[dim])
