"""What an exchange of data moves: which value, which of its dimensions, for which line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from partitioning.aot.blame.data_flow import Place
from partitioning.aot.blame.known_layouts import Axes, KnownLayouts
from partitioning.aot.blame.matching import Matcher
from partitioning.aot.blame.moved_dimensions import Dim
from partitioning.aot.blame.user_lines import user_line
from partitioning.aot.blame.values import Value
from partitioning.aot.compiled.collectives import Collective
from partitioning.aot.compiled.hlo_text import ArrayType, Instruction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an exchange moves.

    Attributes:
      kind: 'all-gather', 'all-reduce', ...
      axes: the mesh axes along which it exchanges data.
      value: the value of the traced function that it moves, or None.
      array: the type of the array that a device gives.
      layout: the mesh axes of each dimension of the value before the exchange, as far as the sizes
        tell.
      dim: the number of the dimension of the value that it gathers, or None.
      taken_by: the values that are computed from the result.
      returned: whether the result is a result of the function.
      made_at: the user's line that makes the value.
      used_at: the user's line that needs the result.
      path: the path of the jax operation.
    """

    kind: str
    axes: Axes
    value: Value | None
    array: ArrayType
    layout: tuple[Axes, ...] = ()
    dim: int | None = None
    taken_by: tuple[Value, ...] = ()
    returned: bool = False
    made_at: str = ''
    used_at: str = ''
    path: str = ''

    @property
    def moved(self) -> Dim | None:
        """The dimension that the exchange gathers."""
        if self.value is None or self.dim is None or self.dim >= len(self.value.dims):
            return None
        return self.value.dims[self.dim]


def find_evidence(
    collective: Collective, matcher: Matcher, layouts: KnownLayouts
) -> Evidence | None:
    """Finds what a collective moves, or None if the program's text does not have it.

    Of a collective of several arrays, the largest one counts.
    """
    place = matcher.flow.place_of(collective.instruction)
    if place is None or not place.instruction.operands:
        return None
    instruction, computation, _ = place
    operands = [computation.instructions[n] for n in instruction.operands]
    number = max(range(len(operands)), key=lambda n: operands[n].nbytes)
    arrays = operands[number].outputs
    if not arrays:
        return None
    array = arrays[0]
    makers = matcher.flow.makers(Place(operands[number], computation))
    value, maker = _held(makers, instruction, array, matcher)
    index = number if len(operands) > 1 else None
    takers = matcher.flow.takers(place._replace(index=index))
    taken_by = [
        found[0]
        for taker in takers
        if taker.instruction.opcode not in ('tuple', 'parameter')
        and (found := matcher.values_of(taker.instruction))
    ]
    layout = layout_of(value, array, layouts, collective, gathered=False) if value else ()
    own_line = matcher.source_of(instruction)
    used_at = next((line for t in takers if (line := matcher.source_of(t.instruction))), '')
    return Evidence(
        kind=collective.kind,
        axes=collective.axes,
        value=value,
        array=array,
        layout=layout,
        dim=_gathered(instruction, value, array, layout, collective, matcher),
        taken_by=tuple(taken_by),
        returned=any(t.instruction.is_root and t.index != -1 for t in takers),
        made_at=(matcher.source_of(maker.instruction) if maker else '') or own_line,
        used_at=used_at or own_line,
        path=collective.op_name,
    )


def _held(
    makers: Sequence[Place], instruction: Instruction, array: ArrayType, matcher: Matcher
) -> tuple[Value | None, Place | None]:
    """The value that an operand holds, and what makes it."""
    weak: tuple[Value | None, Place | None] = None, None
    for maker in makers:
        argument = matcher.argument_of(maker)
        if argument is not None:
            scanned = _without_layers(argument, array, matcher)
            if scanned is not None:
                return scanned, maker
            weak = weak if weak[0] else (argument, maker)
            continue
        for value in matcher.values_of(maker.instruction, array.shape)[:1]:
            if matcher.is_shard(array.shape, value.shape):
                return value, maker
            weak = weak if weak[0] else (value, maker)
    for value in matcher.values_of(instruction, array.shape)[:1]:
        if matcher.is_shard(array.shape, value.shape):
            return value, makers[0] if makers else None
    return weak


def _without_layers(argument: Value, array: ArrayType, matcher: Matcher) -> Value | None:
    """An argument, or one element along its first dimension, if the array can be its shard."""
    kept = [n for n in array.shape if n > 1]
    if len(kept) < sum(n > 1 for n in argument.shape) and matcher.is_shard(
        array.shape, argument.shape[1:]
    ):
        return dataclasses.replace(argument, shape=argument.shape[1:], dims=argument.dims[1:])
    if matcher.is_shard(array.shape, argument.shape):
        return argument
    return None


def layout_of(
    value: Value,
    array: ArrayType,
    layouts: KnownLayouts,
    collective: Collective | None = None,
    *,
    gathered: bool = False,
) -> tuple[Axes, ...]:
    """The mesh axes of each dimension of a value of which a device holds an array.

    The sizes tell how many shards there are. Where several axes are possible, those that the
    dimension has elsewhere are preferred.
    """
    del collective, gathered
    order = Matcher_order(layouts, array.shape, value.shape)
    if order is None:
        return ((),) * len(value.shape)
    kept = [i for i, n in enumerate(value.shape) if n > 1]
    shards = {
        dim: value.shape[dim] // (array.shape[part] if part >= 0 else 1)
        for dim, part in zip(kept, order, strict=True)
    }
    names = value.names
    wanted = layouts.wanted(names, value.shape) if any(names) else ((),) * len(names)
    free = [a for a, n in layouts.sizes.items() if n > 1]
    found: list[Axes] = [()] * len(value.shape)
    for dim, count in shards.items():
        mine = value.dims[dim]
        for axes in (wanted[dim], mine.axes if mine else (), *_choices(free, layouts)):
            size = 1
            for axis in axes:
                size *= layouts.sizes.get(axis, 1)
            if count > 1 and size == count and set(axes) <= set(free):
                found[dim] = tuple(axes)
                free = [a for a in free if a not in axes]
                break
    return tuple(found)


def Matcher_order(
    layouts: KnownLayouts, shape: Sequence[int], whole: Sequence[int]
) -> tuple[int, ...] | None:
    raise NotImplementedError
