"""Reshapes, slices and concatenations that cannot keep the layout of their operand.

A reshape keeps a sharded dimension if the part that becomes the major one is divided as before.
With rows over 8 devices of 'data', and a kernel whose columns are sharded over 4 of 'tensor',

    x.reshape(4, 1024, 256)                   # 4,096 rows as 4 microbatches: rows move
    x.reshape(1024, 4, 256).swapaxes(0, 1)    # each device keeps its rows

    (h @ kernel).reshape(16, 256, 64, 8)      # each device has 16 of the 64 elements of all heads
    (h @ kernel).reshape(16, 256, 8, 64)      # each device has 2 heads

The order of a kernel's columns decides which of them belong to a head, and nothing else, so a trace
can be edited to try it. Where rows are in another order, only the author can write it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshwright.advice.candidates import SUMS, Candidate, Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import FunctionView
from meshwright.advice.subject import Layout, with_change
from meshwright.causes.cause import CodeChange, SplitChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.wording import in_words
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.values import Axes, Dim, Value
from meshwright.program.collectives import Collective
from meshwright.user_lines import array_at

_NEAR = 60  # values before a product that are looked at
_CUTTING = {'slice': 'slices', 'split': 'splits', 'concatenate': 'concatenates', 'pad': 'pads'}
_HALO = 0.2  # an exchange of a smaller share of the operand only moves the edges of the parts
Split = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class _Split(NamedTuple):
    """A reshape that splits a sharded dimension.

    Attributes:
      value: its result.
      start: the dimension of the result that is the first part.
      parts: the number of parts.
    """

    value: Value
    start: int
    parts: int


def order_splits(view: FunctionView) -> Iterator[tuple[float, Candidate]]:
    """Other orders of the parts over whose first one a product of two activations sums.

    Args:
      view: the arrays of the function.
    """
    seen = set[SplitChange]()
    for product in view.values:
        if product.primitive != 'dot_general' or product.backward or product.manual:
            continue
        weight, _ = view.near_values.get(id(product), (0.0, product))
        change = _reorder(view, product) if weight else None
        if change is not None and change not in seen:
            seen.add(change)
            yield weight, Candidate(change)


def _reorder(view: FunctionView, product: Value) -> SplitChange | None:
    """The change of the splits of both operands of a product, or None."""
    assert product.maker is not None
    parameters = {path for path, row in view.rows.items() if row.role != 'other'}
    operands = product.operands[:2]
    if any(value.argument in parameters for value in operands):
        return None
    (left, right), _ = product.maker.params['dimension_numbers']
    for pair in zip(left, right, strict=True):
        dims = [value.dims[d] for value, d in zip(operands, pair, strict=True)]
        axes = {a for dim in dims if dim is not None for a in dim.axes} - {*view.rows_axes}
        devices = view.num_devices(axes)
        if devices == 1 or None in dims:
            continue
        found = [_find_split(v, dim) for v, dim in zip(operands, dims, strict=True) if dim]
        splits = [split for split in found if split is not None]
        orders = [_order(split, devices) for split in splits]
        if len(splits) == len(operands) and None not in orders:
            return _change(splits, [o for o in orders if o], tuple(sorted(axes)), devices)
    return None


def _find_split(value: Value, dim: Dim) -> _Split | None:
    """The reshape before a value that makes a dimension the first part of a larger one."""
    pending, seen = [value], {id(value)}
    while pending and len(seen) < _NEAR:
        current = pending.pop(0)
        if current.primitive == 'reshape' and current.maker is not None and dim in current.dims:
            first = current.dims.index(dim)
            factors = find_factors(current.maker)
            own = factors.outputs[0][first]
            for parts in factors.inputs[0] if factors.known else ():
                if len(parts) > 1 and own and own == parts[:1]:
                    return _Split(current, first, len(parts))
        for operand in current.operands:
            if id(operand) not in seen and dim in operand.dims:
                seen.add(id(operand))
                pending.append(operand)
    return None


def _order(split: _Split, devices: int) -> tuple[int, ...] | None:
    """The dimensions of a split with a part first that devices divide, or None."""
    shape, first = split.value.shape, split.start
    others = range(first + 1, first + split.parts)
    fits = next((d for d in others if shape[d] % devices == 0), None)
    if fits is None:
        return None
    rest = (d for d in range(first, len(shape)) if d != fits)
    return (*range(first), fits, *rest)


def _change(
    splits: list[_Split], orders: list[tuple[int, ...]], axes: tuple[str, ...], devices: int
) -> SplitChange:
    split, order = splits[0], orders[0]
    value, shape = split.value, split.value.shape
    new = ', '.join(str(shape[d]) for d in order)
    lines = ' and '.join(dict.fromkeys(one.value.line for one in splits))
    return SplitChange(
        source=value.line,
        splits=tuple(
            dict.fromkeys(
                (one.value.operands[0].shape, one.value.shape, o)
                for one, o in zip(splits, orders, strict=True)
            )
        ),
        text=(
            f'write reshape({new}) in place of reshape({", ".join(map(str, shape))}) at {lines}, '
            f'and merge in the same order: {over(axes)} then shards the part of '
            f'{shape[order[split.start]]:,}, which {devices} devices divide, in place of the part '
            f'of {shape[split.start]:,}, over which a product sums'
        ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Misfit:
    """An operation that cannot keep the layout of its operand.

    Attributes:
      line: its line.
      axes: the mesh axes that it cannot keep.
      shapes: the sizes above 1 of its operand and of its result, sorted.
      array: the operand, in words.
      nbytes: the size of the operand on a device, in bytes.
      why: why it exchanges data.
      text: what to write.
      splits: the reshapes of its line that could split rows in another order.
    """

    line: str
    axes: Axes
    shapes: frozenset[tuple[int, ...]]
    array: str
    nbytes: float
    why: str
    text: str
    splits: tuple[Split, ...] = ()

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        """Whether it makes an exchange, which moves more than the edges of the parts."""
        if evidence is None or collective.total_bytes < _HALO * self.nbytes * collective.count:
            return False
        if self.line in (evidence.made_at, evidence.used_at, collective.source):
            return True
        value = evidence.value  # compilers also write a gather as a sum of parts and zeros
        return collective.kind not in SUMS and value is not None and shape_of(value) in self.shapes


def find_misfits(view: FunctionView) -> Iterator[Told]:
    """Finds the operations of the forward pass that cannot keep the layout of their operand."""
    found: dict[tuple[str, Axes], _Misfit] = {}
    for value in view.values:
        if value.backward or value.manual or not value.operands or not view.is_used(value):
            continue
        search = _Search(value, view)
        for one in search.reshaped() if value.primitive == 'reshape' else search.cut():
            first = found.setdefault((one.line, one.axes), one)
            first = first if first.nbytes >= one.nbytes else one
            splits = tuple(dict.fromkeys([*found[one.line, one.axes].splits, *one.splits]))
            found[one.line, one.axes] = dataclasses.replace(first, splits=splits)
    for one in found.values():
        change = SplitChange(source=one.line, splits=one.splits, text='')
        yield Told(
            match=Match(axes=one.axes, partly=True, moves=True, also=one.is_of),
            line=one.line,
            array=one.array,
            why=one.why,
            change=CodeChange(source=one.line, text=one.text),
            trial=functools.partial(with_change, view.subject, change) if one.splits else None,
        )


@dataclasses.dataclass(frozen=True)
class _Search:
    value: Value
    view: FunctionView

    def reshaped(self) -> Iterator[_Misfit]:
        """Splits whose major part is not divided, and merges behind another dimension."""
        value, given = self.value, self.value.operands[0]
        factors = find_factors(value.maker) if value.maker is not None else None
        layout = self._layout(given)
        if factors is None or not factors.known or not any(layout):
            return
        for d, axes in enumerate(layout):
            parts = [f for f in factors.inputs[0][d] if factors.sizes[f] > 1]
            if not axes or not parts:
                continue
            n = self.view.num_devices(axes)
            made = next(o for o, dim in enumerate(factors.outputs[0]) if parts[0] in dim)
            merged = [f for f in factors.outputs[0][made] if factors.sizes[f] > 1]
            if len(parts) > 1 and factors.sizes[parts[0]] % n:
                yield self._split(d, axes, n, made)
            elif merged[0] != parts[0]:
                group = [e for e, dim in enumerate(factors.inputs[0]) if {*dim} & {*merged}]
                yield self._merged(d, axes, group)

    def _split(self, d: int, axes: Axes, n: int, made: int) -> _Misfit:
        given, shape = self.value.operands[0], list(self.value.shape)
        why = (
            f'{self._reshape} splits dimension {d} of {given.shape[d]:,} elements, which is '
            f'sharded over {over(axes)}, into a first part of {shape[made]:,}, which {n} devices '
            'do not divide, so the elements of each device are spread over all of them'
        )
        whole, last = given.shape[d], made
        while math.prod(shape[made : last + 1]) < whole:
            last += 1
        fits = next((o for o in range(made + 1, last + 1) if shape[o] % n == 0), None)
        if fits is None:
            text = f'split dimension {d} at {self.line} so that {n} divides the first part'
            return self._misfit(axes, why, text)
        order = (*range(made), fits, *(o for o in range(made, len(shape)) if o != fits))
        new = ', '.join(str(shape[o]) for o in order)
        if self._is_of_rows(given, d):
            text = (
                f'write jnp.moveaxis({self._array}.reshape({new}), {made}, {fits}) at {self.line}, '
                'and the same for all arrays with these rows, so that each device keeps its rows'
            )
            splits = ((given.shape, self.value.shape, order),)
            return dataclasses.replace(self._misfit(axes, why, text), splits=splits)
        text = (
            f'write reshape({new}) at {self.line}, with the part of {shape[fits]:,} that {n} '
            f'devices divide first, or keep {shape[made]:,} arrays in place of one'
        )
        return self._misfit(axes, why, text)

    @property
    def _array(self) -> str:
        text = array_at(self.line, ('reshape', 'ravel', 'flatten', 'rearrange'))
        return f'({text})' if ' ' in text else text

    @property
    def _reshape(self) -> str:
        given = self.value.operands[0].shape
        return f'the reshape from {given} to {self.value.shape} at {self.line}'

    def _merged(self, d: int, axes: Axes, group: Sequence[int]) -> _Misfit:
        """A merge of dimensions in which a sharded one does not come first."""
        given, made = self.value.operands[0], self.value.shape
        why = (
            f'{self._reshape} merges dimension {d} of {given.shape[d]:,} elements, which is '
            f'sharded over {over(axes)}, behind the dimension before it, so the elements of each '
            'device are spread over all of them'
        )
        text = (
            f'move dimension {d} in front of those that it is merged with before the reshape at '
            f'{self.line}, as with jnp.moveaxis, or keep the dimensions apart'
        )
        misfit, first = self._misfit(axes, why, text), min(group)
        if not all(self._is_given(given, e) for e in group):
            return misfit
        new = ', '.join(map(str, made))
        text = (
            f'write jnp.moveaxis({self._array}, {d}, {first}).reshape({new}) at {self.line}, and '
            'the same for all arrays with these rows, so that each device keeps its rows; or keep '
            'the dimensions apart'
        )
        rest = (e for e in range(first, len(given.shape)) if e != d)
        splits = ((made, given.shape, (*range(first), d, *rest)),)
        return dataclasses.replace(misfit, text=text, splits=splits)

    def _is_given(self, value: Value, d: int) -> bool:
        """Whether a dimension does not come from a parameter, whose order of elements is fixed."""
        dim = value.dims[d]
        row = self.view.rows.get(dim.argument) if dim is not None else None
        return row is None or row.role == 'other'

    def cut(self) -> Iterator[_Misfit]:
        """Slices, splits, concatenations and paddings along a sharded dimension."""
        value, given = self.value, max(self.value.operands, key=lambda one: one.size)
        does = _CUTTING.get(value.primitive)
        if does is None or len(given.shape) != len(value.shape) or value.update_of:
            return
        for d, (before, after) in enumerate(zip(given.shape, value.shape, strict=True)):
            largest = value if after > before else given
            axes = self._layout(largest)[d]
            axes = axes or (self._layout(given)[d] if largest is value else ())
            if before == after or not axes or value.rolls_stages(d, self.view.sizes):
                continue
            why = (
                f'{value.primitive} at {self.line} {does} dimension {d} of {largest.shape[d]:,} '
                f'elements, which is sharded over {over(axes)}, so the parts of the devices move'
            )
            yield self._misfit(axes, why, self._uncut(given, d, axes), given)

    def _uncut(self, given: Value, d: int, axes: Axes) -> str:
        value = self.value
        before, after = given.shape[d], value.shape[d]
        if after < before and before % after == 0 and after > 1:
            parts, dim = before // after, given.dims[d]
            row = self.view.rows.get(dim.argument) if dim is not None else None
            fused = f' in place of {row.path}' if row is not None and row.role != 'other' else ''
            shape = (*given.shape[:d], parts, after, *given.shape[d + 1 :])
            return (
                f'keep {parts} arrays{fused}, one for each part, or split the dimension as '
                f'{shape} with {over(axes)} on the part of {after:,}, and index the part of '
                f'{parts} at {self.line}'
            )
        alike = {one.shape for one in value.operands} == {given.shape}
        if value.primitive == 'concatenate' and alike and self._is_of_rows(given, d):
            n, new = len(value.operands), ', '.join(map(str, value.shape))
            arrays = array_at(self.line, ('concatenate', 'concat', 'vstack', 'hstack'))
            arrays = 'arrays' if arrays == 'x' else arrays
            return (
                f'write jnp.stack({arrays}, {d + 1}).reshape({new}) at {self.line}, so that each '
                f'device keeps its rows, and x.reshape({before}, {n}, ...)[:, i] for the part i of '
                'what is computed from it'
            )
        if value.primitive == 'concatenate':
            return (
                f'compute with the parts apart, or concatenate along a dimension that {over(axes)} '
                f'does not shard, at {self.line}'
            )
        if value.primitive == 'pad':
            return f'make dimension {d} {after:,} elements before it is sharded, at {self.line}'
        return (
            f'keep all {before:,} elements of dimension {d} and mask those that do not count, in '
            f'place of {value.primitive} at {self.line}'
        )

    @property
    def line(self) -> str:
        return self.value.line

    def _layout(self, value: Value) -> Layout:
        """The mesh axes of each dimension: of a constraint, or of the arguments it comes from.

        Parameters are gathered over the axes of the rows before they are used.
        """
        if value.layout is not None:
            return tuple(
                tuple(a for a in axes if self.view.sizes.get(a, 1) > 1) for axes in value.layout
            )
        found: list[Axes] = [()] * len(value.shape)
        taken = set[str]()
        for of_rows in (True, False):
            for d, dim in enumerate(value.dims):
                row = self.view.rows.get(dim.argument) if dim is not None else None
                if dim is None or of_rows != (row is None or row.role == 'other'):
                    continue
                axes = [a for a in dim.axes if self.view.sizes.get(a, 1) > 1 and a not in taken]
                found[d] = tuple(a for a in axes if of_rows or a not in self.view.data_axes)
                taken |= {*found[d]}
        return tuple(found)

    def _is_of_rows(self, value: Value, d: int) -> bool:
        dim = value.dims[d]
        row = self.view.rows.get(dim.argument) if dim is not None else None
        return row is not None and row.role == 'other' and dim is not None and dim.number == 0

    def _misfit(self, axes: Axes, why: str, text: str, given: Value | None = None) -> _Misfit:
        given = given or self.value.operands[0]
        shards = math.prod(self.view.sizes[a] for own in self._layout(given) for a in own)
        return _Misfit(
            line=self.line,
            axes=axes,
            shapes=frozenset({shape_of(given), shape_of(self.value)}),
            array=in_words(given),
            nbytes=given.nbytes / shards,
            why=why,
            text=text,
        )
