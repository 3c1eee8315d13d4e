"""Operations that need a dimension of their operand whole, and what to write instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from meshwright.causes.cause import Change, CodeChange
from meshwright.causes.layouts import KnownLayouts
from meshwright.jaxpr.primitives import MOVES
from meshwright.jaxpr.values import Value

_RESIZED = 'an operation that does not cut or join a sharded dimension'
_MERGED = 'an operation that does not merge a sharded dimension into the one before it'
_RUNNING = 'an operation over blocks of the dimension'
_STEPS = 6  # the number of moves between two values that are looked at
_WHOLE = {
    'gather': 'a one-hot product, such as jnp.sum(x * jax.nn.one_hot(indices, x.shape[-1]), -1)',
    **dict.fromkeys(['sort', 'top_k'], 'an operation that does not sort over a sharded dimension'),
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
    if needed != _RESIZED or any(_is_sharded(value, dim, layouts) for dim in _resized(value)):
        yield CodeChange(source=line, text=f'write {needed} at {line}')


def written_for(user: Value, value: Value, dim: int | None) -> Iterator[CodeChange]:
    """What to write in place of an operation that needs the sharded dimension of its operand.

    Args:
      user: the result of the operation.
      value: the operand, or what the operand is a reshaped copy of.
      dim: the number of the sharded dimension, or None if it is not known.
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
        wanted = dim is not None and dim in _resized(user) and not user.update_of
    elif user.primitive != 'gather' or dim is None or not user.operands:
        wanted = True
    else:
        wanted = user.operands[0].shape == value.shape and any(
            d is not None and d == value.dims[dim] for d in user.contracted
        )
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


def _resized(value: Value) -> list[int]:
    """The dimensions that an operation cuts, joins or pads."""
    if not value.operands or len(value.operands[0].shape) != len(value.shape):
        return []
    pairs = zip(value.operands[0].shape, value.shape, strict=True)
    return [number for number, (before, after) in enumerate(pairs) if before != after]


def _is_sharded(value: Value, dim: int, layouts: KnownLayouts) -> bool:
    """Whether a dimension that an operation resizes would be sharded where it is largest."""
    largest = max(value.operands[0], value, key=lambda one: one.shape[dim])
    dims = (*largest.dims[:dim], value.dims[dim] or largest.dims[dim], *largest.dims[dim + 1 :])
    return bool(layouts.wanted(dims, largest.shape)[dim])
