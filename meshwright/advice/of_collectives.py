"""Sums and gathers in shard_maps of which each device needs a part only.

    total = jax.lax.psum(partial, 'model')                        # all devices get all of it
    mine = jax.lax.dynamic_slice_in_dim(total, jax.lax.axis_index('model') * n, n, 1)

`jax.lax.psum_scatter(partial, 'model', scatter_dimension=1, tiled=True)` sends half of it. If a
device gathers one dimension and keeps its part of another one, `jax.lax.all_to_all` exchanges these
parts only, and sends 1/n as much.
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
from meshwright.jaxpr.implied_exchanges import exchange_axes
from meshwright.jaxpr.primitives import GATHERS, MOVES, PSUMS
from meshwright.jaxpr.values import Axes, Step, Value

_NEAR = 12  # steps in which the place of a slice is computed


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
