"""What an exchange of data moves: which value, which of its dimensions, for which line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from meshwright.causes.data_flow import Place
from meshwright.causes.known_layouts import Axes, KnownLayouts
from meshwright.causes.shard_shapes import likely_axes, shard_counts, shard_dimensions
from meshwright.causes.value_matching import Matcher
from meshwright.jaxpr.values import Dim, Value
from meshwright.program.collectives import Collective
from meshwright.program.hlo_text import ArrayType, Instruction


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
      result: the number of the result of the function that it becomes, or None.
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
    result: int | None = None
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
    # What is summed over devices is not sharded over them, before or after.
    summed = collective.kind in ('all-reduce', 'reduce-scatter')
    whole_along = collective.axes if summed else ()
    value, maker = _held(makers, instruction, array, matcher, whole_along)
    index = number if len(operands) > 1 else None
    takers = matcher.flow.takers(place._replace(part=index))
    taken_by = [
        found[0]
        for taker in takers
        if taker.instruction.opcode not in ('tuple', 'parameter')
        and (found := matcher.values_of(taker.instruction))
    ]
    layout = layout_of(value, array, layouts) if value else ()
    own_line = matcher.source_of(instruction)
    used_at = next((line for t in takers if (line := matcher.source_of(t.instruction))), '')
    return Evidence(
        kind=collective.kind,
        axes=collective.axes,
        value=value,
        array=array,
        layout=layout,
        dim=_gathered(instruction, array, layout, collective.axes),
        taken_by=tuple(taken_by),
        result=next((t.part or 0 for t in takers if t.instruction.is_root and t.part != -1), None),
        made_at=(matcher.source_of(maker.instruction) if maker else '') or own_line,
        used_at=used_at or own_line,
        path=collective.op_name,
    )


def _held(
    makers: Sequence[Place],
    instruction: Instruction,
    array: ArrayType,
    matcher: Matcher,
    whole_along: Axes,
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
        for value in matcher.values_of(maker.instruction, array.shape, whole_along)[:1]:
            if matcher.is_shard(array.shape, value.shape, whole_along):
                return value, maker
            weak = weak if weak[0] else (value, maker)
    for value in matcher.values_of(instruction, array.shape, whole_along)[:1]:
        if matcher.is_shard(array.shape, value.shape, whole_along):
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


def layout_of(value: Value, array: ArrayType, layouts: KnownLayouts) -> tuple[Axes, ...]:
    """The mesh axes of each dimension of a value of which each device holds an array."""
    counts = shard_counts(layouts.sizes)
    shards = shard_dimensions(array.shape, value.shape, counts)
    if shards is None:
        return ()
    wanted = layouts.wanted(value.dims, value.shape)
    preferred = [
        (by_rules, dim.axes if dim else ())
        for by_rules, dim in zip(wanted, value.dims, strict=True)
    ]
    return likely_axes(shards, preferred, layouts.sizes)


def _gathered(
    instruction: Instruction, array: ArrayType, layout: Sequence[Axes], axes: Axes
) -> int | None:
    """The dimension of the value that an exchange gathers or divides anew."""
    found = [dim for dim, mine in enumerate(layout) if set(mine) & set(axes)]
    if len(found) == 1 or not instruction.opcode.startswith('all-gather'):
        return found[0] if found else None
    listed = re.search(r'dimensions=\{(\d+)', instruction.attributes)
    if listed is None or not found:
        return found[0] if found else None
    # The dimensions of 1 are not those of the value, so the sharded ones are counted.
    before = sum(n > 1 for n in array.shape[: int(listed[1])])
    return min(found, key=lambda dim: abs(dim - before))
