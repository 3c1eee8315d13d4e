"""Sums and gathers in shard_maps of which each device keeps its own part.

    total = jax.lax.psum(partial, 'model')                        # all devices get all of it
    mine = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index('model') * n, n, 1)

`jax.lax.psum_scatter(partial, 'model', scatter_dimension=1, tiled=True)` sends half of it. If the
parts are those of another dimension of a gather, `jax.lax.all_to_all` sends one of n parts of it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from meshwright.advice.advised import Told
from meshwright.advice.estimates import shape_of
from meshwright.advice.loop_edits import skip_sums
from meshwright.advice.rewriting import Edit, Rewriting, rewrite
from meshwright.causes.cause import CodeChange, over
from meshwright.causes.evidence import Evidence
from meshwright.jax_private import TracedCall
from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.implied_exchanges import exchange_axes
from meshwright.jaxpr.primitives import GATHERS, MOVES, PSUMS
from meshwright.jaxpr.values import Axes, Step, Value, readers_of, steps_in
from meshwright.program.collectives import Collective
from meshwright.user_lines import user_line

_SUMS, _GATHERS = ('all-reduce', 'reduce-scatter'), ('all-gather',)
_LEAST = 4096  # bytes of the sum on a device
_NEAR = 12  # steps in which the place of a slice is computed


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptPart(Told):
    """A sum or a gather over devices of which each device keeps a part.

    Attributes:
      shape: the sizes of the result above 1, sorted.
      kinds: the exchanges that it may be.
    """

    shape: tuple[int, ...]
    kinds: tuple[str, ...]

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        if collective.kind not in self.kinds or {*collective.axes} != {*self.axes}:
            return False
        if evidence is None or evidence.value is None:
            return self.line == collective.source
        here = self.line in (evidence.made_at, collective.source)
        return here and shape_of(evidence.value) == self.shape


def find_kept_parts(laid_out: TracedProgram) -> Iterator[KeptPart]:
    """Finds the sums and gathers in shard_maps of which all uses are slices at the device's place.

    Args:
      laid_out: the function, with the layout of its arrays.
    """
    steps = list(steps_in(laid_out.block))
    readers = readers_of(steps)
    makers = {id(value): step for step in steps for value in step.outputs}
    returned = {id(v) for step in steps for body in step.bodies for v in body.outputs}
    for step in steps:
        gathers = step.name in GATHERS and bool(step.params.get('tiled'))
        if not (gathers or step.name in PSUMS) or step.params.get('axis_index_groups'):
            continue
        axes: Axes = tuple(exchange_axes(step))
        n = math.prod(laid_out.axis_sizes.get(axis, 1) for axis in axes)
        for number, made in enumerate(step.outputs):
            if made.shard_bytes(laid_out.axis_sizes) < _LEAST or not made.manual or n == 1:
                continue
            slices = _slices_of(made, readers)
            if not slices or id(made) in returned:
                continue
            parts = {_part(one, n, axes, makers) for one in slices}
            if None in parts or len(parts) > 1:
                continue
            (d,) = parts
            assert d is not None
            if not gathers:
                yield _scattered(step, number, slices, axes, n, d)
            elif d != step.params['all_gather_dimension'] and all(
                one.inputs[0] is made for one in slices
            ):
                yield _turned(step, slices, axes, n, d)


def _scattered(
    step: Step, number: int, slices: Sequence[Step], axes: Axes, n: int, d: int
) -> KeptPart:
    """A sum, which can be scattered."""
    line, where = _lines_of(step, slices)
    text = (
        f'write jax.lax.psum_scatter(x, {_written(axes)}, scatter_dimension={d}, tiled=True) in '
        f'place of the psum at {line} and the slice at {where}'
    )
    trial = functools.partial(
        _try_scatter,
        total=step.place.equation,
        number=step.params.get('number', number),
        slices=tuple(one.place.equation for one in slices),
        axes=axes,
        d=d,
    )
    made = step.outputs[number]
    return KeptPart(
        line=line,
        axes=axes,
        shape=shape_of(made),
        kinds=_SUMS,
        why=_why('sum', line, where, made, axes, n),
        change=CodeChange(source=line, text=text),
        trial=trial,
    )


def _turned(step: Step, slices: Sequence[Step], axes: Axes, n: int, d: int) -> KeptPart:
    """A gather of one dimension, of which each device keeps its part of another."""
    line, where = _lines_of(step, slices)
    gathered = int(step.params['all_gather_dimension'])
    text = (
        f'write jax.lax.all_to_all(x, {_written(axes)}, split_axis={d}, concat_axis={gathered}, '
        f'tiled=True) in place of the all_gather at {line} and the slice at {where}'
    )
    trial = functools.partial(
        _try_turn,
        gather=step.place.equation,
        slices=tuple(one.place.equation for one in slices),
        axes=axes,
        d=d,
    )
    made = step.outputs[0]
    return KeptPart(
        line=line,
        axes=axes,
        shape=shape_of(made),
        kinds=_GATHERS,
        why=_why('gather', line, where, made, axes, n),
        change=CodeChange(source=line, text=text),
        trial=trial,
    )


def _lines_of(step: Step, slices: Sequence[Step]) -> tuple[str, str]:
    """The lines of an exchange and of the first slice of its result."""
    line, where = (user_line(one.place.lines) or one.place.source for one in (step, slices[0]))
    return line, where


def _written(axes: Axes) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def _why(what: str, line: str, where: str, made: Value, axes: Axes, n: int) -> str:
    return (
        f'the {what} at {line} gives all {n} devices along {over(axes)} all of {made.shape}, of '
        f'which each keeps its own part at {where}'
    )


def _slices_of(made: Value, readers: Mapping[int, list[Step]]) -> list[Step]:
    """The slices of an array, if nothing else is done with it; [] otherwise."""
    found, pending = list[Step](), [made]
    while pending:
        value = pending.pop()
        for reader in readers.get(id(value), []):
            if reader.name == 'dynamic_slice' and reader.inputs[0] is value:
                found.append(reader)
            elif reader.name in MOVES | {'pvary'} and len(reader.inputs) == 1:
                pending += reader.outputs
            else:
                return []
    return found


def _part(one: Step, n: int, axes: Axes, makers: Mapping[int, Step]) -> int | None:
    """The dimension that a slice at the place of the device cuts into as many parts, or None."""
    given, made = one.inputs[0].shape, one.outputs[0].shape
    cut = [d for d, (a, b) in enumerate(zip(given, made, strict=True)) if a != b]
    if len(cut) != 1 or given[cut[0]] != n * made[cut[0]]:
        return None
    pending, seen = [one.inputs[1 + cut[0]]], 0
    while pending and seen < _NEAR:
        step = makers.get(id(pending.pop(0)))
        seen += 1
        if step is not None and step.name == 'axis_index':
            name = step.params['axis_name']
            return cut[0] if {*((name,) if isinstance(name, str) else name)} == {*axes} else None
        pending += step.inputs if step is not None else []
    return None


def _try_scatter(
    call: TracedCall, *, total: Any, number: int, slices: tuple[Any, ...], axes: Axes, d: int
) -> TracedCall:
    """The function that scatters a sum in place of slicing it."""

    def scatter(rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
        return [jax.lax.psum_scatter(args[0], axes, scatter_dimension=d, tiled=True)]

    edits: dict[int, Edit] = {id(one): scatter for one in slices}
    return rewrite(call, {id(total): skip_sums({number}), **edits})


def _try_turn(
    call: TracedCall, *, gather: Any, slices: tuple[Any, ...], axes: Axes, d: int
) -> TracedCall:
    """The function that exchanges parts for parts in place of gathering and slicing."""
    dimension = gather.params['all_gather_dimension']

    def turn(rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
        part = jax.lax.all_to_all(args[0], axes, split_axis=d, concat_axis=dimension, tiled=True)
        return [part]

    edits: dict[int, Edit] = {id(one): turn for one in slices}
    return rewrite(call, {id(gather): lambda rewriting, equation, args: [args[0]], **edits})
