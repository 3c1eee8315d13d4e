"""Gathers in shard_maps that come before each device makes something smaller of each row.

    everyone = jax.lax.all_gather(features, 'data', tiled=True)     # (rows, 2048)
    keys = normalize(everyone @ projection)                         # (rows, 128)

Each device could project its own rows, and gather 128 numbers of each in place of 2,048.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.advice.candidates import GATHERS as GATHERING, Match, Told
from meshwright.advice.figures import LEAST_SAVED, shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.causes.cause import CodeChange, over
from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.implied_exchanges import KINDS, exchange_axes
from meshwright.jaxpr.primitives import GATHERS
from meshwright.jaxpr.values import Axes, Step, Value
from meshwright.user_lines import array_at

_SMALLER = 0.6  # the share of the elements that may be left; casts are told elsewhere
_KINDS = GATHERING | {'reduce-scatter'}  # which jax makes of a gather in a backward pass


class _Early(NamedTuple):
    """A gather that could come later.

    Attributes:
      step: the gather.
      later: what could be gathered in its place.
    """

    step: Step
    later: tuple[Value, ...]


def find_early_gathers(view: FunctionView) -> Iterator[Told]:
    """Finds these gathers; the gathers over the same mesh axes are one change."""
    groups: dict[Axes, list[_Early]] = {}
    for step in view.steps:
        axes: Axes = tuple(exchange_axes(step)) if step.name in GATHERS else ()
        n = view.num_devices(axes)
        made = step.outputs[0] if n > 1 else None
        if made is None or step.place.is_backward or step.params.get('axis_index_groups'):
            continue
        later = _find_later(view, step, axes)
        less = later and sum(one.size for one in later) <= _SMALLER * made.size
        if made.shard_bytes(view.sizes) >= LEAST and less:
            groups.setdefault(axes, []).append(_Early(step, tuple(later)))
    for axes, group in groups.items():
        yield from _tell(view, axes, group)


def _tell(view: FunctionView, axes: Axes, group: list[_Early]) -> Iterator[Told]:
    lines = list(dict.fromkeys(one.step.line for one in group))
    saved = 0.0
    matches = []
    for one in group:
        made = one.step.outputs[0]
        match = Match(
            axes=axes,
            kinds=_KINDS,
            lines=frozenset([one.step.line]),
            shapes=frozenset([shape_of(made), shape_of(one.step.inputs[0])]),
        )
        moved = view.sent_by(match)
        left = sum(v.shard_bytes(view.sizes) for v in one.later) / made.shard_bytes(view.sizes)
        saved += (1 - left) * moved
        matches.append(match)
    if saved <= LEAST_SAVED * view.sends:
        return
    first = group[0]
    made, small = first.step.outputs[0], first.later[0]
    array = array_at(first.step.line, ('all_gather',))
    where = _line_beside(view, small, first.step)
    more = f', and the same for {" and ".join(lines[1:])}' if lines[1:] else ''
    change = CodeChange(
        source=lines[0],
        text=(
            f'leave out the all_gather at {lines[0]}, compute what {where} makes from {array} '
            f'only, and gather the result, {small.shape}{more}'
        ),
    )
    for one, match in zip(group, matches, strict=True):
        yield Told(
            match=match,
            line=one.step.line,
            why=(
                f'the gather at {one.step.line} gives all devices along {over(axes)} all of '
                f'{one.step.outputs[0].shape}, of which each row is only used for its row of '
                f'{one.later[0].shape}, at {_line_beside(view, one.later[0], one.step)}'
            ),
            change=change,
            effect=view.saving(saved),
        )


def _line_beside(view: FunctionView, value: Value, step: Step) -> str:
    """The line that makes a value, in the function in which a step is."""
    maker = view.makers[id(value)]
    mine, others = [*reversed(maker.place.lines)], [*reversed(step.place.lines)]
    pairs = zip(mine, others, strict=False)
    return next((one for one, other in pairs if one != other), view.line_of(maker))


def _find_later(view: FunctionView, gather: Step, axes: Axes) -> list[Value]:
    """The fewest elements that could be gathered after some steps in place of an array, if any.

    The steps compute each row from the same row and from what all devices have.
    """
    made = gather.outputs[0]
    rows = {id(made): (made, gather.params['all_gather_dimension'])}
    best: tuple[int, list[Value]] = made.size, []
    done = set[int]()
    order = [step for step in view.steps if not view.is_for_backward(step)]
    for step in order[order.index(gather) + 1 :]:
        given = [value for value in step.inputs if id(value) in rows]
        if not given:
            continue
        dims = _rows_after(view, step, rows, axes)
        if dims is None:
            continue
        done.add(id(step))
        rows |= {id(o): (o, d) for o, d in zip(step.outputs, dims, strict=True)}
        left = [value for value, _ in rows.values() if _is_needed(view, value, done)]
        total = sum(value.size for value in left)
        if left and total < best[0]:
            best = total, left
    return best[1]


def _is_needed(view: FunctionView, value: Value, done: set[int]) -> bool:
    """Whether another step than these needs an array, outside of backward passes."""
    readers = view.readers.get(id(value), [])
    return any(id(one) not in done and not view.is_for_backward(one) for one in readers)


def _rows_after(
    view: FunctionView, step: Step, rows: dict[int, tuple[Value, int]], axes: Axes
) -> list[int] | None:
    """The dimension of the rows in each result, if a step computes each row for itself."""
    if step.bodies or step.is_border or step.name in KINDS:
        return None
    factors = find_factors(step)
    pairs = list(zip(step.inputs, factors.inputs, strict=True))
    mine = {array[rows[id(value)][1]] for value, array in pairs if id(value) in rows}
    if len(mine) != 1 or not factors.known:
        return None
    (dim,) = mine
    if len(dim) != 1 or dim[0] in factors.summed:
        return None
    size = next(value.shape[d] for value, d in rows.values())
    if factors.sizes[dim[0]] != size:
        return None
    for value, array in pairs:
        if id(value) not in rows:
            differs = bool({*axes} & view.varying.axes_of(value))
            if differs or any(dim[0] in own for own in array):
                return None
    found = [[d for d, own in enumerate(array) if own == dim] for array in factors.outputs]
    return [own[0] for own in found] if all(len(own) == 1 for own in found) else None
