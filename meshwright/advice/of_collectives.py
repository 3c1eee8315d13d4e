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

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from meshwright.advice.candidates import GATHERS as GATHERING, SUMS, Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import LEAST, FunctionView, line_of
from meshwright.advice.loop_edits import skip_sums
from meshwright.advice.rewriting import Edit, Rewriting, rewrite
from meshwright.causes.cause import CodeChange, over
from meshwright.jax_private import TracedCall
from meshwright.jaxpr.implied_exchanges import KINDS, exchange_axes
from meshwright.jaxpr.primitives import ELEMENTWISE, GATHERS, MOVES, PSUMS
from meshwright.jaxpr.values import TO_GLOBAL, Axes, Step, Value

_NEAR = 12  # steps in which the place of a slice is computed
_SMALLER = 8  # how often less something small has


def find_kept_parts(view: FunctionView) -> Iterator[Told]:
    """Finds sums and gathers in shard_maps of which all uses are slices at the device's place."""
    returned = {id(v) for step in view.steps for body in step.bodies for v in body.outputs}
    for step in view.steps:
        gathers = step.name in GATHERS and bool(step.params.get('tiled'))
        if not (gathers or step.name in PSUMS) or step.params.get('axis_index_groups'):
            continue
        axes: Axes = tuple(exchange_axes(step))
        n = math.prod(view.sizes.get(axis, 1) for axis in axes)
        for number, made in enumerate(step.outputs):
            if made.shard_bytes(view.sizes) < LEAST or not made.manual or n == 1:
                continue
            slices = _slices_of(made, view)
            if not slices or id(made) in returned:
                continue
            parts = {_part(one, n, axes, view) for one in slices}
            if None in parts or len(parts) > 1:
                continue
            (d,) = parts
            assert d is not None
            line, where = map(line_of, (step, slices[0]))
            dimension = step.params['all_gather_dimension'] if gathers else None
            if not gathers:
                text = (
                    f'write jax.lax.psum_scatter(x, {_written(axes)}, scatter_dimension={d}, '
                    f'tiled=True) in place of the psum at {line} and the slice at {where}'
                )
                edit = skip_sums({step.params.get('number', number)})
            elif d != dimension and all(one.inputs[0] is made for one in slices):
                text = (
                    f'write jax.lax.all_to_all(x, {_written(axes)}, split_axis={d}, '
                    f'concat_axis={dimension}, tiled=True) in place of the all_gather at {line} '
                    f'and the slice at {where}'
                )
                edit = _leave_out
            else:
                continue
            yield Told(
                match=Match(
                    axes=axes,
                    kinds=GATHERING if gathers else SUMS,
                    lines=frozenset([line]),
                    shapes=frozenset([shape_of(made)]),
                ),
                line=line,
                why=(
                    f'the {"gather" if gathers else "sum"} at {line} gives all {n} devices along '
                    f'{over(axes)} all of {made.shape}, of which each keeps its own part at {where}'
                ),
                change=CodeChange(source=line, text=text),
                trial=functools.partial(
                    _exchange_parts,
                    view,
                    exchange=step.place.equation,
                    edit=edit,
                    slices=tuple(one.place.equation for one in slices),
                    keep=functools.partial(_keep_part, axes=axes, d=d, gathered=dimension),
                ),
            )


def _written(axes: Axes) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


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


def _part(one: Step, n: int, axes: Axes, view: FunctionView) -> int | None:
    """The dimension that a slice at the place of the device cuts into as many parts, or None."""
    given, made = one.inputs[0].shape, one.outputs[0].shape
    cut = [d for d, (a, b) in enumerate(zip(given, made, strict=True)) if a != b]
    if len(cut) != 1 or given[cut[0]] != n * made[cut[0]]:
        return None
    pending, seen = [one.inputs[1 + cut[0]]], 0
    while pending and seen < _NEAR:
        step = view.makers.get(id(pending.pop(0)))
        seen += 1
        if step is not None and step.name == 'axis_index':
            name = step.params['axis_name']
            return cut[0] if {*((name,) if isinstance(name, str) else name)} == {*axes} else None
        pending += step.inputs if step is not None else []
    return None


def _exchange_parts(
    view: FunctionView, *, exchange: Any, edit: Edit, slices: tuple[Any, ...], keep: Edit
) -> TracedCall:
    """The function that exchanges only what devices keep, where it slices now."""
    return rewrite(view.subject.call, {id(exchange): edit, **{id(one): keep for one in slices}})


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
        n = math.prod(view.sizes.get(axis, 1) for axis in axes)
        for given, made in zip(step.inputs, step.outputs, strict=True):
            if n == 1 or not made.manual or made.shard_bytes(view.sizes) < LEAST:
                continue
            selected = _is_of_one(given, axes, view)
            ends = list(_Reduced(view, axes, any_function=selected).ends(made))
            if not ends or None in ends:
                continue
            line, where = line_of(step), next(line_of(end) for end in ends if end is not None)
            who = (
                f'only one device along {over(axes)} has what is not zero'
                if selected
                else ('it is computed from it by adding and scaling')
            )
            number = f'jax.lax.psum(jnp.where(..., x, 0), {_written(axes)})'
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
            name = step.params['axis_name']
            found |= {*((name,) if isinstance(name, str) else name)} == {*axes}
        elif step.name in ELEMENTWISE | MOVES | {'pvary', 'broadcast_in_dim'}:
            pending += step.inputs
        else:
            return False
    return found and not pending


class _Reduced:
    """Follows what is computed from a sum over devices until it is small.

    Args:
      view: the function.
      axes: the mesh axes of the sum.
      any_function: whether any function counts, or only linear ones.
    """

    def __init__(self, view: FunctionView, axes: Axes, *, any_function: bool):
        self._view, self._axes, self._any = view, axes, any_function
        self._seen = set[int]()

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
                if reader.place.is_backward or self._is_for_backward(reader):
                    continue
                if not self._is_allowed(reader):
                    yield None
                    return
                small = [one.size * _SMALLER < made.size for one in reader.outputs]
                if all(small):
                    yield reader
                pending += [
                    o for o, is_small in zip(reader.outputs, small, strict=True) if not is_small
                ]

    def _is_for_backward(self, reader: Step) -> bool:
        """Whether a step is the end of a shard_map, and only a backward pass takes its result."""
        readers = self._view.readers
        return reader.name == TO_GLOBAL and all(
            one.place.is_backward or one.is_border
            for o in reader.outputs
            for one in readers.get(id(o), [])
        )

    def _is_allowed(self, step: Step) -> bool:
        if step.bodies or step.is_border or step.name in KINDS:
            return False
        others = [one for one in step.inputs if id(one) not in self._seen]
        if any({*self._axes} & self._view.varying.axes_of(one) for one in others):
            return False
        if self._any or step.name in MOVES | {'reduce_sum', 'broadcast_in_dim', 'neg', 'pvary'}:
            return True
        if step.name in ('add', 'sub', 'add_any'):
            return not others
        return (step.name in ('mul', 'dot_general') and len(others) == 1) or (
            step.name == 'div' and id(step.inputs[1]) not in self._seen
        )
