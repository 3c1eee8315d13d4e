"""Gathers in shard_maps of which each device keeps a part: its own, and some of its neighbours'.

    field = jax.lax.all_gather(u, 'x', tiled=True)                     # 2,048 rows
    wide = jax.lax.dynamic_slice_in_dim(jnp.pad(field, ...), axis_index('x') * 256, 258)

Two of the 258 rows are of other devices. `jax.lax.ppermute` sends only these.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.advice.candidates import GATHERS as GATHERING, Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.causes.cause import CodeChange, over
from meshwright.jaxpr.implied_exchanges import exchange_axes
from meshwright.jaxpr.primitives import ELEMENTWISE, GATHERS, MOVES
from meshwright.jaxpr.values import Step
from meshwright.user_lines import array_at

_FEW = 0.6  # the share of the gathered dimension that a device may keep
_KINDS = GATHERING | {'reduce-scatter'}
_FOLLOWED = ELEMENTWISE | MOVES | {'concatenate', 'pad', 'pvary'}


def find_halos(view: FunctionView) -> Iterator[Told]:
    """Finds the gathers of which only slices at the place of the device are used."""
    for step in view.steps:
        if step.name not in GATHERS or step.place.is_backward or not step.params.get('tiled'):
            continue
        axes, made = tuple(exchange_axes(step)), step.outputs[0]
        n = view.num_devices(axes)
        if n == 1 or step.params.get('axis_index_groups') or made.nbytes < LEAST:
            continue
        d = step.params['all_gather_dimension']
        slices = _slices(view, step, d)
        own = made.shape[d] // n
        kept = max((one.outputs[0].shape[d] for one in slices), default=0)
        if own <= kept <= _FEW * made.shape[d]:
            yield _tell(view, step, slices[0], kept, own)


def _slices(view: FunctionView, gather: Step, d: int) -> list[Step]:
    """The slices at the place of a device; [] if anything else uses what is gathered."""
    axes = {*exchange_axes(gather)}
    found, pending, seen = list[Step](), [gather.outputs[0]], set[int]()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for reader in view.readers.get(id(value), []):
            if view.is_for_backward(reader):
                continue
            place = reader.inputs[1:] if reader.name == 'dynamic_slice' else []
            if place and reader.inputs[0] is value and axes <= view.varying.axes_of(place[d]):
                found.append(reader)
            elif reader.name in _FOLLOWED and len(reader.outputs[0].shape) == len(value.shape):
                pending += reader.outputs
            else:
                return []
    return found


def _tell(view: FunctionView, step: Step, keeps: Step, kept: int, own: int) -> Told:
    line, made = step.line, step.outputs[0]
    d, axes = step.params['all_gather_dimension'], tuple(exchange_axes(step))
    shapes = frozenset(shape_of(v) for v in (*step.inputs, made))
    match = Match(axes=axes, kinds=_KINDS, lines=frozenset([line]), shapes=shapes)
    moved = view.sent_by(match)
    others, where = kept - own, view.line_of(keeps)
    saved = moved * (1 - others / (made.shape[d] - own))
    array = array_at(line, ('all_gather',))
    text = f'leave out the all_gather at {line}, and use {array} in place of the slice at {where}'
    if others:
        text = (
            f'send only the {others:,} elements of dimension {d} that the neighbours need, with '
            f'jax.lax.ppermute over {over(axes)}, in place of the all_gather at {line}, and join '
            f'them with the {own:,} of {array} in place of the slice at {where}'
        )
    return Told(
        match=match,
        line=line,
        why=(
            f'the gather at {line} gives all devices along {over(axes)} all {made.shape[d]:,} '
            f'elements of dimension {d}, of which each keeps {kept:,} at {where}, and has {own:,} '
            'itself'
        ),
        change=CodeChange(source=line, text=text),
        effect=view.saving(saved),
    )
