"""Sums and gathers in shard_maps of which each device needs a part only.

    total = jax.lax.psum(partial, 'model')                        # all devices get all of it
    mine = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index('model') * n, n, 1)

`jax.lax.psum_scatter(partial, 'model', scatter_dimension=1, tiled=True)` sends half of it. If a
device gathers one dimension and keeps its part of another one, `jax.lax.all_to_all` exchanges these
parts only, and sends 1/n as much. If all devices get what only one of them has, to compute a number
from it, the device can compute the number:

    outputs = jax.lax.psum(jnp.where(stage == last, outputs, 0), 'stage')     # all outputs are sent
    loss = jnp.mean((outputs - y) ** 2)

    loss = jnp.mean((outputs - y) ** 2)
    loss = jax.lax.psum(jnp.where(stage == last, loss, 0), 'stage')           # one number is
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from meshwright.advice.candidates import GATHERS as GATHERING, SUMS, Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.advice.loop_edits import skip_sums
from meshwright.advice.rewriting import Edit, Rewriting, rewrite
from meshwright.causes.cause import CodeChange, over
from meshwright.jaxpr.implied_exchanges import KINDS, exchange_axes
from meshwright.jaxpr.primitives import ELEMENTWISE, GATHERS, MOVES, PSUMS
from meshwright.jaxpr.values import Axes, Step, Value, steps_in
from meshwright.user_lines import array_at
from partitioning.rules import from_tuple

_NEAR = 40  # steps in which the place of a slice is computed
_SCATTERING = ('reduce_scatter', 'psum_scatter')
_SMALLER = 8  # how often less something small has


def find_kept_parts(view: FunctionView) -> Iterator[Told]:
    """Finds sums and gathers in shard_maps of which all uses are slices at the device's place."""
    groups: dict[str, list[_Kept]] = collections.defaultdict(list)
    for one in _kept_parts(view):
        groups[one.text].append(one)
    scattered = list(_scattered_parts(view)) if groups else []
    for text, group in groups.items():
        first, line = group[0], group[0].step.line
        what = 'gather' if first.gathered is not None else 'sum'
        edits = {key: edit for one in group for key, edit in one.edits()}
        edits |= {key: edit for where, key, edit in scattered if where == line}
        trial = functools.partial(rewrite, view.subject.call, edits)
        for one in group:
            yield Told(
                match=Match(
                    axes=one.axes,
                    kinds=SUMS if one.gathered is None else GATHERING,
                    lines=frozenset([line]),
                    shapes=frozenset([shape_of(one.made)]),
                ),
                line=line,
                why=(
                    f'the {what} at {line} gives all {one.n} devices along {over(one.axes)} all of '
                    f'{one.made.shape}, of which each keeps its own part at {one.where}'
                ),
                change=CodeChange(source=line, text=text),
                trial=trial,
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept:
    """A sum or a gather over devices of whose result each device keeps a part.

    Attributes:
      step: the exchange.
      numbers: the numbers of the arrays that its equation exchanges for nothing.
      made: the result.
      slices: the steps that keep the parts.
      axes, n: the mesh axes, and the number of devices along them.
      d: the dimension whose part a device keeps.
      gathered: the dimension that is gathered; None for a sum.
    """

    step: Step
    numbers: set[int]
    made: Value
    slices: tuple[Step, ...]
    axes: Axes
    n: int
    d: int
    gathered: int | None

    @property
    def where(self) -> str:
        """The line of the slices."""
        return self.slices[0].line

    @property
    def text(self) -> str:
        """What to write."""
        line, axes = self.step.line, repr(from_tuple(self.axes))
        array = array_at(line, ('psum', 'all_gather'))
        if self.gathered is None:
            return (
                f'write jax.lax.psum_scatter({array}, {axes}, scatter_dimension={self.d}, '
                f'tiled=True) in place of the psum at {line} and the slice at {self.where}'
            )
        return (
            f'write jax.lax.all_to_all({array}, {axes}, split_axis={self.d}, concat_axis='
            f'{self.gathered}, tiled=True) in place of the all_gather at {line} and the slice at '
            f'{self.where}'
        )

    def edits(self) -> Iterator[tuple[int, Edit]]:
        """The edits with which only what devices keep is exchanged, where it is sliced now."""
        leave_out = _leave_out if self.gathered is not None else skip_sums(self.numbers)
        yield id(self.step.place.equation), leave_out
        keep = functools.partial(_keep_part, axes=self.axes, d=self.d, gathered=self.gathered)
        for one in self.slices:
            yield id(one.place.equation), keep


def _kept_parts(view: FunctionView) -> Iterator[_Kept]:
    returned = {id(v) for step in view.steps for body in step.bodies for v in body.outputs}
    numbers: dict[int, set[int]] = collections.defaultdict(set)
    for step in view.steps:
        gathers = step.name in GATHERS and bool(step.params.get('tiled'))
        if not (gathers or step.name in PSUMS) or step.params.get('axis_index_groups'):
            continue
        axes: Axes = tuple(exchange_axes(step))
        n = view.num_devices(axes)
        for number, made in enumerate(step.outputs):
            if made.shard_bytes(view.sizes) < LEAST or not made.manual or n == 1:
                continue
            slices = _slices_of(made, view)
            parts = {_part(o.inputs[0], o.outputs[0], o.inputs[1:], axes, view) for o in slices}
            if len(parts) != 1 or None in parts or id(made) in returned:
                continue
            (d,) = parts
            assert d is not None
            gathered = step.params['all_gather_dimension'] if gathers else None
            if gathers and (d == gathered or any(o.inputs[0] is not made for o in slices)):
                continue
            own = numbers[id(step.place.equation)]
            own.add(step.params.get('number', number))
            yield _Kept(
                step=step,
                numbers=own,
                made=made,
                slices=tuple(slices),
                axes=axes,
                n=n,
                d=d,
                gathered=gathered,
            )


def _scattered_parts(view: FunctionView) -> Iterator[tuple[str, int, Edit]]:
    """The edits of what jax makes of a gather and a slice in a backward pass, with its line.

    It puts the part of a device among zeros, and sums and scatters all parts.
    """
    for step in view.steps:
        put = view.makers.get(id(step.inputs[0])) if step.name in _SCATTERING else None
        if put is None or put.name != 'dynamic_update_slice' or not step.place.is_backward:
            continue
        axes: Axes = tuple(exchange_axes(step))
        d = _part(put.inputs[0], put.inputs[1], put.inputs[2:], axes, view)
        scattered = step.params['scatter_dimension']
        if d is None or d == scattered:
            continue
        yield step.line, id(put.place.equation), lambda r, e, args: [args[1]]
        keep = functools.partial(_keep_part, axes=axes, d=scattered, gathered=d)
        yield step.line, id(step.place.equation), keep


def _slices_of(made: Value, view: FunctionView) -> list[Step]:
    """The slices of an array, if nothing else is done with it; [] otherwise."""
    found, pending = list[Step](), [made]
    while pending:
        value = pending.pop()
        for reader in view.readers.get(id(value), []):
            if reader.name == 'dynamic_slice' and reader.inputs[0] is value:
                found.append(reader)
            elif reader.name in MOVES | {'pvary'} and len(reader.inputs) == 1:
                pending += reader.outputs
            else:
                return []
    return found


def _part(
    whole: Value, part: Value, places: Sequence[Value], axes: Axes, view: FunctionView
) -> int | None:
    """The dimension whose part at the place of the device is one of as many parts, or None."""
    cut = [d for d, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    n = view.num_devices(axes)
    if len(cut) != 1 or whole.shape[cut[0]] != n * part.shape[cut[0]]:
        return None
    pending = [places[cut[0]]]
    for _ in range(_NEAR):
        value = pending.pop(0) if pending else None
        step = None if value is None else view.makers.get(id(value))
        if step is not None and step.name == 'axis_index':
            return cut[0] if {*_axes_of_place(step)} == {*axes} else None
        pending += [] if value is None else view.sources_of(value)
    return None


def _axes_of_place(step: Step) -> Axes:
    """The mesh axes of the number of a device."""
    name = step.params['axis_name']
    return (name,) if isinstance(name, str) else tuple(name)


def _leave_out(rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
    return list(args)


def _keep_part(
    rewriting: Rewriting,
    equation: Any,
    args: list[Any],
    *,
    axes: Axes,
    d: int,
    gathered: int | None,
) -> list[Any]:
    """The part of dimension d: of a sum, or of what would be gathered along another dimension."""
    x = args[0]
    if gathered is None:
        return [jax.lax.psum_scatter(x, axes, scatter_dimension=d, tiled=True)]
    return [jax.lax.all_to_all(x, axes, split_axis=d, concat_axis=gathered, tiled=True)]


def find_early_sums(view: FunctionView) -> Iterator[Told]:
    """Finds sums in shard_maps whose result is only used for something small.

    If one device has all that is summed, any function of the sum can be computed before it. So can
    a linear function of any sum.
    """
    for step in view.steps:
        if step.name not in PSUMS or step.place.is_backward or step.params.get('axis_index_groups'):
            continue
        axes: Axes = tuple(exchange_axes(step))
        n = view.num_devices(axes)
        for given, made in zip(step.inputs, step.outputs, strict=True):
            if n == 1 or not made.manual or made.shard_bytes(view.sizes) < LEAST:
                continue
            selected = _is_of_one(given, axes, view)
            ends = list(Reduced(view, axes, any_function=selected).ends(made))
            if not ends or None in ends:
                continue
            line, where = step.line, next(end.line for end in ends if end is not None)
            who = (
                f'only one device along {over(axes)} has what is not zero'
                if selected
                else ('it is computed from it by adding and scaling')
            )
            small = array_at(where)
            number = f'jax.lax.psum(jnp.where(..., {small}, 0), {from_tuple(axes)!r})'
            yield Told(
                match=Match(
                    axes=axes,
                    kinds=SUMS,
                    lines=frozenset([line]),
                    shapes=frozenset([shape_of(made)]),
                ),
                line=line,
                why=(
                    f'the sum at {line} gives all {n} devices along {over(axes)} all of '
                    f'{made.shape}, of which only what {where} computes is used, and {who}'
                ),
                change=CodeChange(
                    source=line,
                    text=(
                        f'leave out the psum over {over(axes)} at {line}, and sum what {where} '
                        f'computes over {over(axes)}'
                        + (f': write {number} for it' if selected else '')
                    ),
                ),
            )


def _is_of_one(value: Value, axes: Axes, view: FunctionView) -> bool:
    """Whether one device along some axes has an array, and the others have zeros.

    It is selected, or multiplied with a mask, by comparing the number of the device.
    """
    step = view.makers.get(id(value))
    while step is not None and step.name in MOVES | {'pvary'}:
        step = view.makers.get(id(step.inputs[0]))
    if step is None or step.name not in ('select_n', 'mul'):
        return False
    masks = step.inputs[:1] if step.name == 'select_n' else step.inputs
    return any(_compares_place(mask, axes, view) for mask in masks)


def _compares_place(mask: Value, axes: Axes, view: FunctionView) -> bool:
    """Whether a value only says if the number of the device along an axis is a certain one."""
    pending, found = [mask], False
    for _ in range(_NEAR):
        if not pending:
            break
        value = pending.pop()
        step = view.makers.get(id(value))
        if step is None:
            if value.constant is None and value.size > 1:
                return False
        elif step.name == 'axis_index':
            found |= {*_axes_of_place(step)} == {*axes}
        elif step.name in ELEMENTWISE | MOVES | {'pvary', 'broadcast_in_dim'}:
            pending += step.inputs
        else:
            return False
    return found and not pending


class Reduced:
    """Follows what is computed from a sum over devices until it is small.

    Args:
      view: the function.
      axes: the mesh axes of the sum.
      any_function: whether any function counts, or only linear ones.
      rows: the number of rows of what is gathered, of which no more than a number each is small.

    Attributes:
      steps: the steps that were followed.
    """

    def __init__(self, view: FunctionView, axes: Axes, *, any_function: bool, rows: int = 0):
        self._view, self._axes, self._any, self._rows = view, axes, any_function, rows
        self._seen = set[int]()
        self.steps: list[Step] = []

    def ends(self, made: Value) -> Iterator[Step | None]:
        """The steps that make something small of an array; None where it is needed as it is.

        What a backward pass takes over is not needed: it follows the forward pass.
        """
        pending = [made]
        while pending:
            value = pending.pop()
            if id(value) in self._seen:
                continue
            self._seen.add(id(value))
            for reader in self._view.readers.get(id(value), []):
                if self._view.is_for_backward(reader):
                    continue
                if not self._is_allowed(reader):
                    yield None
                    return
                self.steps.append(reader)
                small = [self._is_small(one, made) for one in reader.outputs]
                if all(small):
                    yield reader
                pending += [
                    o for o, is_small in zip(reader.outputs, small, strict=True) if not is_small
                ]

    def _is_small(self, value: Value, made: Value) -> bool:
        has_rows = self._rows in value.shape and value.size > self._rows > 0
        return value.size * _SMALLER < made.size and not has_rows

    def others(self, step: Step) -> list[Value]:
        """The operands of a step that are not computed from the array."""
        return [one for one in step.inputs if id(one) not in self._seen]

    def _is_allowed(self, step: Step) -> bool:
        inside = [one for body in step.bodies for one in steps_in(body)]
        if any(one.is_border or one.name in KINDS for one in (step, *inside)):
            return False
        if step.bodies and not self._any:
            return False
        others = self.others(step)
        if any({*self._axes} & self._view.varying.axes_of(one) for one in others):
            return False
        if self._any or step.name in MOVES | {'reduce_sum', 'broadcast_in_dim', 'neg', 'pvary'}:
            return True
        if step.name in ('add', 'sub', 'add_any'):
            return not others
        return (step.name in ('mul', 'dot_general') and len(others) == 1) or (
            step.name == 'div' and id(step.inputs[1]) not in self._seen
        )
