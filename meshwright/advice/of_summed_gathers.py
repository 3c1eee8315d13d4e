"""Gathers in shard_maps of which only a sum, a maximum or a minimum over the devices is used.

    jax.lax.all_gather(partial, 'model').sum(0)

`jax.lax.psum(partial, 'model')` has the same result. A device sends twice its array at most, and
not its array to each of the other devices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from meshwright.advice.candidates import GATHERS as GATHERING, SUMS, Match, Told
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.advice.rewriting import Edit, Rewriting, rewrite
from meshwright.causes.cause import CodeChange, over
from meshwright.jaxpr.implied_exchanges import exchange_axes
from meshwright.jaxpr.primitives import GATHERS, MOVES
from meshwright.jaxpr.values import Axes, Step, Value
from meshwright.user_lines import array_at
from partitioning.rules import from_tuple

_REDUCING: Mapping[str, Any] = {
    'reduce_sum': jax.lax.psum,
    'reduce_max': jax.lax.pmax,
    'reduce_min': jax.lax.pmin,
}
_SCATTERING = ('reduce_scatter', 'psum_scatter')
_FEWEST = 3  # devices: two send as much either way


def find_summed_gathers(view: FunctionView) -> Iterator[Told]:
    """Finds these gathers, with what their devices would send in one sum."""
    for step in view.steps:
        axes: Axes = tuple(exchange_axes(step)) if step.name in GATHERS else ()
        n = view.num_devices(axes)
        if n < _FEWEST or step.place.is_backward or step.params.get('axis_index_groups'):
            continue
        made, d = step.outputs[0], step.params['all_gather_dimension']
        if step.params.get('tiled') or made.shard_bytes(view.sizes) < LEAST:
            continue
        ends = _reductions(made, d, view)
        names = {one.name for one in ends}
        if len(names) != 1:
            continue
        (end,) = names
        line, where = step.line, ends[0].line
        name = _REDUCING[end].__name__
        edits: dict[int, Edit] = {id(step.place.equation): _leave}
        reduce = functools.partial(_reduce, name=end, axes=axes)
        edits |= {id(one.place.equation): reduce for one in ends}
        edits |= dict(_transposed(view, line, axes))
        array = array_at(line, ('all_gather',))
        yield Told(
            match=Match(
                axes=axes, kinds=GATHERING | SUMS, lines=frozenset([line, where]), moves=True
            ),
            line=line,
            why=(
                f'the gather at {line} gives all {n} devices along {over(axes)} the arrays of all '
                f'of them, of which only the result of {end} at {where} is used'
            ),
            change=CodeChange(
                source=line,
                text=(
                    f'write jax.lax.{name}({array}, {from_tuple(axes)!r}) in place of the '
                    f'all_gather at {line} and the {end.removeprefix("reduce_")} at {where}'
                ),
            ),
            trial=functools.partial(rewrite, view.subject.call, edits),
        )


def _reductions(made: Value, d: int, view: FunctionView) -> list[Step]:
    """The steps that reduce an array over its dimension d only; [] if it is used otherwise."""
    found, pending = list[Step](), [made]
    while pending:
        for reader in view.readers.get(id(pending.pop()), []):
            if reader.name in _REDUCING and tuple(reader.params['axes']) == (d,):
                found.append(reader)
            elif reader.name in MOVES | {'pvary'} and reader.outputs[0].shape == made.shape:
                pending += reader.outputs
            elif not view.is_for_backward(reader):
                return []
    return found


def _transposed(view: FunctionView, line: str, axes: Axes) -> Iterator[tuple[int, Edit]]:
    """The edits of the backward pass: it scatters the sums of equal arrays to the devices."""
    for step in view.steps:
        put = view.makers.get(id(step.inputs[0])) if step.name in _SCATTERING else None
        if put is None or put.name != 'broadcast_in_dim' or step.line != line:
            continue
        if tuple(exchange_axes(step)) == axes:
            yield id(put.place.equation), _leave
            add = functools.partial(_reduce, name='reduce_sum', axes=axes)
            yield id(step.place.equation), add


def _leave(rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
    return [args[0]]


def _reduce(
    rewriting: Rewriting, equation: Any, args: list[Any], *, name: str, axes: Axes
) -> list[Any]:
    return [_REDUCING[name](args[0], axes)]
