"""Shard_maps whose specs do not use a mesh axis, although their work could be divided along it.

    attention = jax.shard_map(f, mesh=mesh, in_specs=(P('data'), P('data')), out_specs=P('data'))
    attention(q, k)                               # (batch, heads, length, features)

If the heads of q and k are sharded over 'model', they are gathered, and all devices along 'model'
compute the same. The specs can have 'model' for the heads. Only the author can write them. They are
tried by leaving the division of the heads to the compiler, which then does the same work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.advice.candidates import SUMS, Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import FunctionView
from meshwright.advice.rewriting import make_automatic, rewrite
from meshwright.causes.cause import CodeChange, over
from meshwright.causes.evidence import Evidence
from meshwright.causes.wording import spec_text
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.mapped_dimensions import (
    MappedFunction,
    find_mapped_functions,
    line_of_shard_map,
    lines_of_shard_maps,
    shard_maps_of,
)
from meshwright.jaxpr.primitives import PSUMS
from meshwright.jaxpr.values import Axes, Block, Value
from meshwright.program.collectives import Collective
from partitioning.rules import from_tuple, spec_str

Specs = Mapping[int, tuple[Axes, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class WholeShardMap:
    """A shard_map that does the same on all devices along a mesh axis, and need not.

    Attributes:
      mapped: the shard_map.
      axis: the mesh axis.
      given, made: the layout to write for each argument and result that has the axis, by its number
        among all of them.
      whole: the arguments that are gathered along the axis, as they are before that.
    """

    mapped: MappedFunction
    axis: str
    given: Specs
    made: Specs
    whole: tuple[Value, ...]

    @property
    def line(self) -> str:
        """The 'file:line' of its specs."""
        return self.mapped.line

    def which_spec(self, where: str) -> str:
        """Says which spec lacks the axis.

        Args:
          where: the shard_map, in words: 'this shard_map'.
        """
        names = [self.mapped.names[n] for n in self.given] if self.mapped.names else []
        if not self.mapped.has_spec(self.axis):
            return f'no spec of {where}'
        return f'in {where}, no spec of {" and ".join(names) or "an argument"}'

    def what_to_write(self) -> str:
        """The specs, in words: "P('data', 'model') in in_specs and out_specs"."""
        specs = {*self.given.values(), *self.made.values()}
        inputs, outputs = self.mapped.equation.invars, self.mapped.made
        if len(specs) == 1 and len(self.given) == len(inputs) and len(self.made) == len(outputs):
            return f'{_spec(specs.pop())} in in_specs and out_specs'
        shapes = [tuple(variable.aval.shape) for variable in inputs]
        names = self.mapped.names or [f'the arguments of shape {shape}' for shape in shapes]
        parts = [
            *_said(self.given, names, 'in_specs', len(inputs)),
            *_said(self.made, [], 'out_specs', len(outputs)),
        ]
        return ', and '.join(parts)


def _said(specs: Specs, names: Sequence[str], where: str, count: int) -> Iterator[str]:
    for spec in dict.fromkeys(specs.values()):
        numbers = [n for n, one in specs.items() if one == spec]
        told = list(dict.fromkeys(names[n] for n in numbers if n < len(names)))
        told = told if len(told) < 4 else [told[0], f'{len(told) - 1} more']
        which = f' for {" and ".join(told)}' if count > 1 and told else ''
        yield f'{_spec(spec)} in {where}{which}'


def _spec(axes: Sequence[Axes]) -> str:
    return spec_str(PartitionSpec(*(from_tuple(own) for own in axes)))


def find_whole_shard_maps(
    block: Block, sizes: Mapping[str, int], weights: frozenset[str] = frozenset()
) -> Iterator[WholeShardMap]:
    """Finds the shard_maps that gather an argument along an axis, and could divide it instead.

    Args:
      block: the steps of a function, whose arrays are laid out.
      sizes: the size of each mesh axis that has several devices.
      weights: the paths of the parameters, which FSDP gathers before they are used.
    """
    for mapped in find_mapped_functions(block):
        for axis in sizes:
            for border, value in zip(mapped.given, mapped.before, strict=True):
                lost = [d for d, own in enumerate(value.axes) if axis in (own or ())]
                if not lost or value.argument in weights or axis not in mapped.given_axes:
                    continue
                if any(axis in (own or ()) for own in border.inputs[0].axes):
                    continue
                found = divide_shard_map(mapped, axis, border.outputs[0], lost[0], sizes)
                found = found or _divide_sums(mapped, axis)
                if found is not None:
                    yield found
                    break


def _divide_sums(mapped: MappedFunction, axis: str) -> WholeShardMap | None:
    """What to write if the devices along an axis have the same, and add it up or average it.

    As in data parallel training whose specs of the batch lack the axis.
    """
    exchanges = list(mapped.exchanges(axis))
    if mapped.has_spec(axis) or not exchanges or any(s.name not in PSUMS for s in exchanges):
        return None
    given = {
        border.params['number']: tuple(
            tuple(axes or ()) if axes and axis in axes else tuple(own or ())
            for axes, own in zip(value.axes, border.inputs[0].axes, strict=True)
        )
        for border, value in zip(mapped.given, mapped.before, strict=True)
        if any(axis in (own or ()) for own in value.axes)
    }
    return WholeShardMap(mapped, axis, given, {}, tuple(_whole(mapped, axis)))


def divide_shard_map(
    mapped: MappedFunction, axis: str, part: Value, d: int, sizes: Mapping[str, int]
) -> WholeShardMap | None:
    """What to write so that a shard_map divides its work along a mesh axis; None if it cannot.

    Args:
      mapped: the shard_map.
      axis: the mesh axis.
      part: an argument or a result, as one device has it.
      d: the dimension of the part to divide.
      sizes: the size of each mesh axis.
    """
    group = mapped.independent(part, d)
    if group is None:
        return None
    for step in mapped.exchanges(axis):
        if any(id(value) in group for value in (*step.inputs, *step.outputs)):
            return None
    specs: list[dict[int, tuple[Axes, ...]]] = []
    for borders, is_given in ((mapped.given, True), (mapped.made, False)):
        own = dict[int, tuple[Axes, ...]]()
        for border in borders:
            whole, local = border.inputs[0], border.outputs[0]
            whole, local = (whole, local) if is_given else (local, whole)
            if (e := group.get(id(local))) is None:
                continue
            if local.shape[e] % sizes[axis] or any(axis in (axes or ()) for axes in whole.axes):
                return None
            own[border.params['number']] = tuple(
                (*(axes or ()), axis) if n == e else axes or () for n, axes in enumerate(whole.axes)
            )
        specs.append(own)
    if not all(specs):
        return None
    return WholeShardMap(mapped, axis, specs[0], specs[1], tuple(_whole(mapped, axis)))


def _whole(mapped: MappedFunction, axis: str) -> Iterator[Value]:
    """The arguments that are sharded along an axis before, and not inside."""
    for border, value in zip(mapped.given, mapped.before, strict=True):
        kept = {a for own in border.inputs[0].axes for a in own or ()}
        if axis not in kept and any(axis in (own or ()) for own in value.axes):
            yield value


def find_missing_specs(view: FunctionView) -> Iterator[Told]:
    """Finds the gathers for shard_maps whose specs do not use the mesh axes of the gather."""
    sizes = {axis: n for axis, n in view.sizes.items() if n > 1}
    groups: dict[tuple[str, str], list[WholeShardMap]] = {}
    for one in find_whole_shard_maps(view.laid_out.block, sizes):
        groups.setdefault((one.line, one.axis), []).append(one)
    places = shard_maps_of(view.laid_out.block) if groups else {}
    for (line, axis), found in groups.items():
        equations = {key for key, place in places.items() if line_of_shard_map(place) == line}
        yield _missing(view, line, axis, found, equations)


def _missing(
    view: FunctionView,
    line: str,
    axis: str,
    found: Sequence[WholeShardMap],
    equations: Collection[int],
) -> Told:
    first, trial = found[0], None
    if not any(one.mapped.has_spec(axis) for one in found):
        trial = functools.partial(_divide, view, axis, found, equations)
    value, others = first.whole[0], len(first.whole) - 1
    held = spec_text([own or () for own in value.axes])
    more = f', and {others} more' if others else ''
    shapes = frozenset(shape_of(value) for one in found for value in one.whole)
    return Told(
        match=Match(axes=(axis,), also=functools.partial(_is_of, line, shapes)),
        line=line,
        change=CodeChange(
            source=line, text=f'in the shard_map at {line}, write {first.what_to_write()}'
        ),
        why=(
            f'{first.which_spec(f"the shard_map at {line}")} uses {over([axis])}, so it gathers '
            f'{value.shape} as {held}{more}, and all {view.sizes[axis]} devices along '
            f'{over([axis])} compute the same'
        ),
        trial=trial,
        is_of_specs=True,
    )


def _is_of(
    line: str, shapes: Collection[tuple[int, ...]], _: Collective, evidence: Evidence | None
) -> bool:
    """Whether a shard_map without an axis makes an exchange.

    No exchange inside is the user's: jax sums the gradients of what has no such axis.
    """
    if evidence is None or evidence.value is None:
        return False
    if evidence.kind == 'all-gather':
        return shape_of(evidence.value) in shapes
    return evidence.kind in SUMS and line in lines_of_shard_maps(evidence.value.place)


def _divide(
    view: FunctionView, axis: str, found: Sequence[WholeShardMap], equations: Collection[int]
) -> TracedCall:
    """The function whose shard_maps of a line divide their work along an axis."""
    edits = dict.fromkeys(equations, make_automatic(axis))
    for one in found:
        constrain = functools.partial(_constrain, one, view.subject.mesh)
        edits[id(one.mapped.equation)] = make_automatic(axis, constrain)
    return rewrite(view.subject.call, edits)


def _constrain(one: WholeShardMap, mesh: Mesh, array: Any, number: int, is_given: bool) -> Any:
    layout = (one.given if is_given else one.made).get(number)
    if layout is None:
        return array
    spec = PartitionSpec(*(from_tuple(own) for own in layout))
    return with_sharding_constraint(array, NamedSharding(mesh, spec))
