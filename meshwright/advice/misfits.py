"""Operations that cannot keep the layout of their operand, and what to write in their place.

A reshape keeps a sharded dimension if the part that becomes the major one is divided as before.
With rows over 8 devices of 'data',

    x.reshape(4, 1024, 256)                   # 4,096 rows as 4 microbatches: rows move
    x.reshape(1024, 4, 256).swapaxes(0, 1)    # each device keeps its rows

Only the author can write it, because the order of the elements is another one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping

from meshwright.advice.advised import Told
from meshwright.advice.estimates import shape_of
from meshwright.advice.variants import with_splits
from meshwright.causes.cause import CodeChange, SplitChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.layouts import axes_of_row
from meshwright.causes.wording import in_words
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.values import Axes, Value
from meshwright.program.collectives import Collective
from partitioning.plan.rows import PlanRow

_SUMS = ('all-reduce', 'reduce-scatter')
_CUTTING = {'slice': 'slices', 'split': 'splits', 'concatenate': 'concatenates', 'pad': 'pads'}
_HALO = 0.2  # an exchange of a smaller share of the operand only moves the edges of the parts

Layout = tuple[Axes, ...]
Split = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Misfit(Told):
    """An operation that cannot keep the layout of its operand.

    Attributes:
      axes: the mesh axes that it cannot keep.
      shapes: the sizes above 1 of its operand and of its result, sorted.
      nbytes: the size of the operand on a device, in bytes.
      splits: the reshapes of its line that could split rows in another order.
    """

    axes: Axes
    shapes: frozenset[tuple[int, ...]]
    nbytes: float
    splits: tuple[Split, ...] = ()

    def with_trial(self) -> Misfit:
        """The same, which can be tried if rows need only be split in another order."""
        if not self.splits:
            return self
        change = SplitChange(source=self.line, splits=self.splits, text='')
        return dataclasses.replace(self, trial=functools.partial(with_splits, change=change))

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        if evidence is None or not {*collective.axes} & {*self.axes}:
            return False
        if collective.total_bytes < _HALO * self.nbytes * collective.count:
            return False
        value = evidence.value
        here = self.line in (evidence.made_at, evidence.used_at, collective.source)
        if collective.kind in _SUMS:  # compilers also write a gather as a sum of parts and zeros
            moved = value is not None and not value.gradient_of and not value.contracted
            return here and moved
        return here or (value is not None and shape_of(value) in self.shapes)


def find_misfits(
    values: Iterable[Value],
    rows: Mapping[str, PlanRow],
    sizes: Mapping[str, int],
) -> tuple[Misfit, ...]:
    """Finds the operations of the forward pass that cannot keep the layout of their operand.

    Args:
      values: the values of the function.
      rows: the layout of each argument, by its path.
      sizes: the size of each mesh axis.
    """
    given = [row for row in rows.values() if row.role == 'other']
    row_axes = frozenset(axis for row in given for axes in axes_of_row(row) for axis in axes)
    found: dict[tuple[str, Axes], Misfit] = {}
    for value in values:
        if value.backward or value.manual or not value.operands:
            continue
        search = _Search(value, rows, sizes, row_axes)
        for one in search.reshaped() if value.primitive == 'reshape' else search.cut():
            first = found.setdefault((one.line, one.axes), one)
            first = first if first.nbytes >= one.nbytes else one
            splits = tuple(dict.fromkeys([*found[one.line, one.axes].splits, *one.splits]))
            found[one.line, one.axes] = dataclasses.replace(first, splits=splits)
    return tuple(one.with_trial() for one in found.values())


@dataclasses.dataclass(frozen=True)
class _Search:
    value: Value
    rows: Mapping[str, PlanRow]
    sizes: Mapping[str, int]
    row_axes: frozenset[str]

    def reshaped(self) -> Iterator[Misfit]:
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
            n = math.prod(self.sizes[a] for a in axes)
            made = next(o for o, dim in enumerate(factors.outputs[0]) if parts[0] in dim)
            merged = [f for f in factors.outputs[0][made] if factors.sizes[f] > 1]
            if len(parts) > 1 and factors.sizes[parts[0]] % n:
                yield self._split(d, axes, n, made)
            elif merged[0] != parts[0]:
                yield self._misfit(axes, *self._merged(d, axes))

    def _split(self, d: int, axes: Axes, n: int, made: int) -> Misfit:
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
                f'write jnp.moveaxis(x.reshape({new}), {made}, {fits}) at {self.line}, so that '
                'each device keeps its rows'
            )
            splits = ((given.shape, self.value.shape, order),)
            return dataclasses.replace(self._misfit(axes, why, text), splits=splits)
        text = (
            f'write reshape({new}) at {self.line}, with the part of {shape[fits]:,} that {n} '
            f'devices divide first, or keep {shape[made]:,} arrays in place of one'
        )
        return self._misfit(axes, why, text)

    @property
    def _reshape(self) -> str:
        given = self.value.operands[0].shape
        return f'the reshape from {given} to {self.value.shape} at {self.line}'

    def _merged(self, d: int, axes: Axes) -> tuple[str, str]:
        given = self.value.operands[0]
        why = (
            f'{self._reshape} merges dimension {d} of {given.shape[d]:,} elements, which is '
            f'sharded over {over(axes)}, behind the dimension before it, so the elements of each '
            'device are spread over all of them'
        )
        return why, (
            f'move dimension {d} in front of those that it is merged with before the reshape at '
            f'{self.line}, as with jnp.moveaxis, or keep the dimensions apart'
        )

    def cut(self) -> Iterator[Misfit]:
        """Slices, splits, concatenations and paddings along a sharded dimension."""
        value, given = self.value, max(self.value.operands, key=lambda one: one.size)
        does = _CUTTING.get(value.primitive)
        if does is None or len(given.shape) != len(value.shape) or value.update_of:
            return
        for d, (before, after) in enumerate(zip(given.shape, value.shape, strict=True)):
            largest = value if after > before else given
            axes = self._layout(largest)[d]
            axes = axes or (self._layout(given)[d] if largest is value else ())
            if before == after or not axes or value.rolls_stages(d, self.sizes):
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
            row = self.rows.get(dim.argument) if dim is not None else None
            fused = f' in place of {row.path}' if row is not None and row.role != 'other' else ''
            shape = (*given.shape[:d], parts, after, *given.shape[d + 1 :])
            return (
                f'keep {parts} arrays{fused}, one for each part, or split the dimension as '
                f'{shape} with {over(axes)} on the part of {after:,}, and index the part of '
                f'{parts} at {self.line}'
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
                tuple(a for a in axes if self.sizes.get(a, 1) > 1) for axes in value.layout
            )
        found: list[Axes] = [()] * len(value.shape)
        taken = set[str]()
        for of_rows in (True, False):
            for d, dim in enumerate(value.dims):
                row = self.rows.get(dim.argument) if dim is not None else None
                if dim is None or of_rows != (row is None or row.role == 'other'):
                    continue
                axes = [a for a in dim.axes if self.sizes.get(a, 1) > 1 and a not in taken]
                found[d] = tuple(a for a in axes if of_rows or a not in self.row_axes)
                taken |= {*found[d]}
        return tuple(found)

    def _is_of_rows(self, value: Value, d: int) -> bool:
        dim = value.dims[d]
        row = self.rows.get(dim.argument) if dim is not None else None
        return row is not None and row.role == 'other' and dim is not None and dim.number == 0

    def _misfit(self, axes: Axes, why: str, text: str, given: Value | None = None) -> Misfit:
        given = given or self.value.operands[0]
        shards = math.prod(self.sizes[a] for own in self._layout(given) for a in own)
        return Misfit(
            line=self.line,
            axes=axes,
            shapes=frozenset({shape_of(given), shape_of(self.value)}),
            array=in_words(given),
            nbytes=given.nbytes / shards,
            why=why,
            change=CodeChange(source=self.line, text=text),
        )
