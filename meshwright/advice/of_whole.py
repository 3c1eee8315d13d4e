"""Operations that need whole dimensions, of arrays that are sharded there.

    logits = constrain(x @ head, P('data', 'model'))      # 8 devices along 'model'
    values, ids = jax.lax.top_k(logits, 64)               # gathers 128,256 logits of each row

    waves = jnp.fft.fftn(field, axes=(1, 2, 3))           # 'slab' shards x: gathers all of it

The best of all are among the best 64 of each part, so 8 * 64 candidates are enough. A transform of
several dimensions is one of each after the other: those that are whole first, and the sharded one
once an all-to-all has moved the shards to another one. Compilers write neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.advice.candidates import Match, Told
from meshwright.advice.figures import LEAST_SAVED, shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.causes.cause import CodeChange, over
from meshwright.causes.wording import spec_text
from meshwright.jaxpr.primitives import names_in
from meshwright.jaxpr.values import Axes, Step, Value, item_size

_SCANS = names_in('cumsum cumprod cummax cummin cumlogsumexp')
_BEST = names_in('top_k sort argmax argmin')
_MATRICES = names_in('cholesky triangular_solve lu qr householder_product eigh eig svd')
_INDEX = 4  # bytes of the number of an element
_FEW = 8  # a slice of a sorted dimension has at most so small a part of each shard


class _Operation(NamedTuple):
    """An operation on an array that is sharded.

    Attributes:
      step: the operation.
      given: its operand, before it is gathered.
      whole: the dimensions that it needs whole.
      layout: the mesh axes of each dimension.
      n: the number of devices along the axes of the dimensions that it needs whole.
      rows: the number of elements of the other dimensions on a device.
    """

    step: Step
    given: Value
    whole: tuple[int, ...]
    layout: tuple[Axes, ...]
    n: int
    rows: int

    @property
    def axes(self) -> Axes:
        """The mesh axes of the dimensions that it needs whole."""
        return tuple(axis for d in self.whole for axis in self.layout[d])

    @property
    def sharded(self) -> int:
        """The dimension of them that is sharded."""
        return next(d for d in self.whole if self.layout[d])

    def divisible(self, dims: Sequence[int]) -> int | None:
        """The largest of some dimensions that could have its mesh axes, or None."""
        free = [d for d in dims if not self.layout[d] and self.given.shape[d] % self.n == 0]
        return max(free, key=lambda d: self.given.shape[d], default=None)


class _Written(NamedTuple):
    """What to write, the bytes that it sends, and the share that it leaves of what is sent now."""

    text: str
    nbytes: float = 0.0
    share: float = 0.0


def find_whole_operations(view: FunctionView) -> Iterator[Told]:
    """Finds the operations that gather a dimension, although they could work on its parts."""
    found: dict[tuple[str, str, tuple[int, ...]], Told] = {}
    for step in view.steps:
        one = _read(step, view) if not step.place.is_backward else None
        written = None if one is None else _write(one, view)
        if one is not None and written is not None:
            key = step.line, step.name, shape_of(one.given)
            if key not in found and (told := _tell(one, written, view)) is not None:
                found[key] = told
    yield from found.values()


def _read(step: Step, view: FunctionView) -> _Operation | None:
    """An operation that needs whole dimensions, if its operand is sharded."""
    if step.name not in _SCANS | _BEST | _MATRICES | {'fft'} or not step.inputs:
        return None
    given = view.before_exchange(step.inputs[0])
    if given.manual or len(given.shape) != len(step.inputs[0].shape):
        return None
    layout = tuple(tuple(a for a in own or () if view.sizes[a] > 1) for own in given.axes)
    whole = _whole_dimensions(step)
    if not any(layout) or given.shard_bytes(view.sizes) < LEAST:
        return None
    n = math.prod(view.sizes[a] for d in whole for a in layout[d])
    shard = given.shard_shape(view.sizes)
    rows = math.prod(size for d, size in enumerate(shard) if d not in whole)
    return _Operation(step, given, whole, layout, n, rows)


def _whole_dimensions(step: Step) -> tuple[int, ...]:
    params, shape = step.params, step.inputs[0].shape
    if step.name == 'top_k':
        made = step.outputs[0].shape
        return tuple(d for d, size in enumerate(shape) if made[d] != size)
    if step.name == 'sort':
        return (params['dimension'],)
    if step.name in ('argmax', 'argmin'):
        return tuple(params['axes'])
    if step.name in _SCANS:
        return (params['axis'],)
    last = len(params['fft_lengths']) if step.name == 'fft' else 2
    return tuple(range(len(shape) - last, len(shape)))


def _write(one: _Operation, view: FunctionView) -> _Written | None:
    """What to write in place of an operation, or None if there is nothing better."""
    name, line = one.step.name, view.line_of(one.step)
    if one.n == 1:  # only the compiler needs it
        if name in _SCANS | {'sort', 'argmax', 'argmin'}:
            return None
        spec = spec_text(one.layout)
        return _Written(
            f'call it at {line} in a shard_map with {spec} for its operand and its results: the '
            'compiler gathers the operand, and no device needs more than its own part'
        )
    if name in _BEST:
        return _of_the_best(one, view, line)
    if name in _SCANS:
        return _Written(
            f'{name} the part of each device at {line} in a shard_map, all_gather the last element '
            f'of each part over {over(one.axes)}, and add those of the parts before (or what the '
            'scan does in place of adding)',
            nbytes=(one.n - 1) * one.rows * item_size(one.given.dtype),
        )
    return _of_transform(one, line) if name == 'fft' else _of_matrices(one, line)


def _of_the_best(one: _Operation, view: FunctionView, line: str) -> _Written | None:
    k = _best(one.step, view)
    if k is None or len(one.whole) > 1 or k * one.n * 2 > one.given.shape[one.sharded]:
        return None
    what = f'the best {k:,}' if k > 1 else 'the best'
    element = item_size(one.given.dtype) + _INDEX
    first = 'argmax and max' if one.step.name.startswith('arg') else f'top_k(x, {k})'
    return _Written(
        f'take {what} of each part of the {one.given.shape[one.sharded]:,} elements at {line}: '
        f'in a shard_map with {spec_text(one.layout)} for the operand, write '
        f'{first} of the part, add the start of the part to the indices, all_gather these '
        f'{one.n} * {k:,} candidates over {over(one.axes)}, and take {what} of them',
        nbytes=(one.n - 1) * k * one.rows * element,
    )


def _best(step: Step, view: FunctionView) -> int | None:
    """How many elements of a dimension an operation selects; None for a sort that is used whole."""
    if step.name in ('argmax', 'argmin'):
        return 1
    if step.name == 'top_k':
        (d,) = _whole_dimensions(step) or (0,)
        return step.outputs[0].shape[d]
    d, most = step.params['dimension'], 0
    for made in step.outputs:
        for reader in view.readers.get(id(made), []):
            if reader.name != 'slice':
                return None
            most = max(most, reader.outputs[0].shape[d])
    return most if 0 < most * _FEW <= step.inputs[0].shape[d] else None


def _of_transform(one: _Operation, line: str) -> _Written | None:
    """A transform of the dimensions that are whole, an exchange, and one of the sharded one."""
    d, shape, n = one.sharded, one.given.shape, one.n
    moved = f'jax.lax.all_to_all over {over(one.axes)}'
    other = one.divisible(one.whole)
    if other is not None and len([e for e in one.whole if one.layout[e]]) == 1:
        rest = [e for e in one.whole if not one.layout[e]]
        which = ' and '.join(map(str, rest))
        return _Written(
            f'transform the dimensions one after the other at {line}, in a shard_map: '
            f'dimension{"s" if len(rest) > 1 else ""} {which} of {shape}, which each device has '
            f'whole, then {moved}, so that dimension {other} is sharded in place of dimension {d}, '
            f'then dimension {d}; the result is sharded along dimension {other}',
            share=1 / n,
        )
    row = one.divisible([e for e in range(len(shape)) if e not in one.whole])
    if row is None:
        return None
    return _Written(
        f'{moved} at {line} in a shard_map, so that dimension {row} of {shape} is sharded in place '
        f'of dimension {d}, transform there, and move it back',
        share=2 / n,
    )


def _of_matrices(one: _Operation, line: str) -> _Written | None:
    """Whole matrices on each device, as many as it has parts of now."""
    row = one.divisible([e for e in range(len(one.given.shape)) if e not in one.whole])
    if row is None:
        return None
    wanted = tuple(
        one.axes if d == row else () if d in one.whole else own for d, own in enumerate(one.layout)
    )
    return _Written(
        f'give each device whole matrices at {line}: constrain the operand to {spec_text(wanted)} '
        f'and call {one.step.name} in a shard_map with this spec, so that an all-to-all moves the '
        'parts, and each matrix is computed once',
        share=2 / one.n,
    )


def _tell(one: _Operation, written: _Written, view: FunctionView) -> Told | None:
    """What to write, if the compiled program gathers the operand."""
    given, line, made = one.given, view.line_of(one.step), one.step.outputs[0]
    shapes = frozenset([shape_of(given), *([shape_of(made)] if one.step.name == 'fft' else [])])
    match = Match(
        axes=tuple(view.sizes),
        lines=frozenset([line, one.step.line]),
        shapes=shapes,
        moves=True,
    )
    gone = [c for c, e in view.exchanges if match.fits(c, e)]
    now = sum(c.total_bytes for c in gone)
    after = written.share * now + written.nbytes * max((c.count for c in gone), default=1)
    if now - after <= LEAST_SAVED * view.sends:
        return None
    dims = ' and '.join(map(str, one.whole))
    needs = (
        f'{one.step.name} at {line} needs dimension{"s" if len(one.whole) > 1 else ""} {dims} of '
        f'{given.shape} whole'
    )
    why = (
        f'{needs}, and {over(one.axes)} shards dimension {one.sharded}, so the operand is gathered'
        if one.n > 1
        else f'{needs}, and they are, but the compiler gathers the operand, which is laid out as '
        f'{spec_text(one.layout)}'
    )
    return Told(
        match=match,
        line=line,
        why=why,
        change=CodeChange(source=line, text=written.text),
        effect=view.saving(now - after),
    )
