"""Evidence: what a compiled program says about one exchange of data.

For a layer that gathers the sharded heads of an activation of shape (8, 64, 16, 32), the text of
the program has

    %all-gather.7 = f32[2,64,16,32] all-gather(%fusion.3), dimensions={2}, ...

with a stack frame for each instruction. The evidence is then

    kind 'all-gather', axes ('model',)
    value   the activation that the fused operation makes, of shape (8, 64, 16, 32)
    layout  (('data',), (), ('model',), ()): a device has (2, 64, 4, 32) before the exchange
    dim     2, the heads
    made_at 'model.py:31', used_at 'model.py:40'
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from meshwright.causes.data_flow import Place
from meshwright.causes.layouts import KnownLayouts
from meshwright.causes.shard_shapes import likely_axes, shard_counts, shard_dimensions
from meshwright.causes.value_matching import Matcher
from meshwright.jaxpr.values import Axes, Dim, Value
from meshwright.program.collectives import Collective
from meshwright.program.hlo_text import ArrayType, Instruction


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What an exchange moves, over which axes, and where the program makes and uses it.

    Attributes:
      kind: 'all-gather', 'all-reduce', ...
      axes: the mesh axes along which it exchanges data.
      value: the value of the traced function that it moves, or None.
      layout: the mesh axes of each dimension of the value before the exchange; () if the shapes
        do not tell.
      dim: the index of the first dimension of the value that is sharded over `axes`, or None.
      taken_by: the values that are computed from the result.
      result: the index of the function's result that the moved array becomes, or None.
      made_at: the user's line that makes the value.
      used_at: the user's line that needs the result.
      asked_at: the user's line of the exchange itself, as far as the program has one.
      path: the path of the jax operation.
      dtype: the type of its elements, as XLA writes it.
      combined: how many arrays the compiler has joined into the one that it moves.
    """

    kind: str
    axes: Axes
    value: Value | None
    layout: tuple[Axes, ...] = ()
    dim: int | None = None
    taken_by: tuple[Value, ...] = ()
    result: int | None = None
    made_at: str = ''
    used_at: str = ''
    asked_at: str = ''
    path: str = ''
    dtype: str = ''
    combined: int = 1

    @property
    def moved(self) -> Dim | None:
        """The dimension of the value at `dim`, which a gather makes whole, or None."""
        if self.value is None or self.dim is None or self.dim >= len(self.value.dims):
            return None
        return self.value.dims[self.dim]


def find_evidence(
    collective: Collective, matcher: Matcher, layouts: KnownLayouts
) -> Evidence | None:
    """Returns what a collective moves, or None if the text of the program does not contain it.

    If a collective moves several arrays, the largest one counts.
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
    # A sum over devices shards its operand and its result over other mesh axes only.
    summed = collective.kind in ('all-reduce', 'reduce-scatter')
    whole_along = collective.axes if summed else ()
    given = Place(operands[number], computation)
    while summed and (first := matcher.flow.summed_before(given)) is not None:
        # Of the phases of one sum, the first one has what is summed.
        inside = first.computation.instructions
        given = Place(inside[first.instruction.operands[first.part or 0]], first.computation)
        array = given.instruction.outputs[0]
        makers = matcher.flow.makers(given)
    joined = _joined(makers)
    if joined:  # as GPUs do to send small arrays at once
        given = max(joined, key=lambda place: place.instruction.nbytes)
        array, makers = given.instruction.outputs[0], matcher.flow.makers(given)
        flat = [m for m in makers if m.instruction.nbytes == given.instruction.nbytes]
        array = flat[0].instruction.outputs[0] if flat else array
    value, maker = _find_operand(makers, instruction, array, matcher, whole_along)
    index = number if len(operands) > 1 else None
    takers = matcher.flow.takers(place._replace(part=index))
    taken_by = [found[0] for taker in takers if (found := matcher.values_of(taker.instruction))]
    layout = layout_of(value, arrays[0], layouts) if value else ()
    own_line = matcher.source_of(instruction)
    used_at = next((line for t in takers if (line := matcher.source_of(t.instruction))), '')
    return Evidence(
        kind=collective.kind,
        axes=collective.axes,
        value=value,
        layout=layout,
        dim=next((n for n, own in enumerate(layout) if set(own) & {*collective.axes}), None),
        taken_by=tuple(taken_by),
        result=next((t.part or 0 for t in takers if t.instruction.is_root and t.part != -1), None),
        made_at=(matcher.source_of(maker.instruction) if maker else '') or own_line,
        used_at=used_at or own_line,
        asked_at=own_line,
        path=collective.op_name,
        dtype=arrays[0].dtype,
        combined=max(len(joined), 1),
    )


def _joined(makers: Sequence[Place]) -> list[Place]:
    """The arrays that the compiler has joined into one for an exchange, or [].

    It is the compiler's if the operation has no place in the program.
    """
    if len(makers) != 1 or makers[0].instruction.opcode != 'concatenate':
        return []
    instruction, computation, _ = makers[0]
    if instruction.op_name:
        return []
    return [Place(computation.instructions[name], computation) for name in instruction.operands]


def layout_of(value: Value, array: ArrayType, layouts: KnownLayouts) -> tuple[Axes, ...]:
    """Returns the mesh axes of each dimension of a value, from the array that each device holds.

    Several layouts can have the same shape. The layout by the rules is preferred.
    """
    shards = shard_dimensions(array.shape, value.shape, shard_counts(layouts.sizes))
    if shards is None:
        return ()
    return likely_axes(shards, layouts.wanted(value.dims, value.shape), layouts.sizes)


def _find_operand(
    makers: Sequence[Place],
    instruction: Instruction,
    array: ArrayType,
    matcher: Matcher,
    whole_along: Axes,
) -> tuple[Value | None, Place | None]:
    """The value that an operand holds, and the instruction that makes it.

    It is the first value that the array can be a shard of, or else the first value of a maker.
    """
    other: tuple[Value | None, Place | None] = None, None
    for maker in makers:
        argument = matcher.argument_of(maker)
        if argument is not None:
            scanned = _without_layers(argument, array, matcher)
            if scanned is not None:
                return scanned, maker
            other = other if other[0] else (argument, maker)
            continue
        for value in matcher.values_of(maker.instruction, array.shape, whole_along)[:1]:
            if matcher.is_shard(array.shape, value.shape, whole_along):
                return value, maker
            other = other if other[0] else (value, maker)
    for value in matcher.values_of(instruction, array.shape, whole_along)[:1]:
        if matcher.is_shard(array.shape, value.shape, whole_along):
            return value, makers[0] if makers else None
    return other


def _without_layers(argument: Value, array: ArrayType, matcher: Matcher) -> Value | None:
    """An argument, or its part for one layer in a loop, if the array can be a shard of it."""
    kept = [n for n in array.shape if n > 1]
    if len(kept) < sum(n > 1 for n in argument.shape) and matcher.is_shard(
        array.shape, argument.shape[1:]
    ):
        return dataclasses.replace(argument, shape=argument.shape[1:], dims=argument.dims[1:])
    if matcher.is_shard(array.shape, argument.shape):
        return argument
    return None
