"""Exchanges of something wider than what it is computed from, on each device for itself.

    weight = codes.astype(jnp.float32) * scale         # codes: int8, sharded over 'fsdp'
    y = x @ constrain(weight, P())                     # 4 bytes of each element are gathered

    k = jnp.repeat(k, heads // kv_heads, axis=2)       # in a shard_map, before a ring
    k = jax.lax.ppermute(k, 'seq', turn)

The codes can be gathered and then cast and scaled, and the heads can be repeated after they have
moved. So it is with casts to a wider type, sums and products of broadcasts, one_hot, and
concatenations with constants. Only the author can write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshwright.advice.candidates import Match, Told
from meshwright.advice.figures import LEAST_SAVED, shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.causes.cause import CodeChange, over
from meshwright.jaxpr.implied_exchanges import KINDS, exchange_axes
from meshwright.jaxpr.memory_estimate import short_type
from meshwright.jaxpr.primitives import ELEMENTWISE, names_in
from meshwright.jaxpr.values import TO_LOCAL, Axes, Block, Step, Value, carries, ties
from meshwright.program.collectives import Collective
from partitioning.amounts import bytes_str

_MOVING = frozenset(['all-gather', 'collective-permute', 'all-to-all'])
# Each device does these for itself: what it has of the result comes from what it has of operands.
_WIDENING = (ELEMENTWISE - names_in('random_bits threefry2x32 random_fold_in')) | names_in(
    'broadcast_in_dim reshape transpose squeeze expand_dims concatenate pad optimization_barrier '
    'pvary pbroadcast iota rev'
)
_SMALLER = 0.6  # the share of the bytes that a cut may have to be told
_DEEP = 40  # steps that are walked back
_NAMED = 0.1  # the share of the largest array that others need to be named


class _Cut(NamedTuple):
    """Arrays from which each device can compute another one.

    Attributes:
      nbytes: what a device would exchange of them, in bytes.
      arrays: the arrays that it would exchange.
      last: the step that uses the largest of them; None for the array itself.
    """

    nbytes: float
    arrays: tuple[Value, ...]
    last: Step | None


def find_wider_exchanges(view: FunctionView) -> Iterator[Told]:
    """Finds exchanges of arrays that are computed from smaller ones on each device for itself."""
    search = _Search(view)
    found: dict[tuple[str, Axes], dict[tuple[int, ...], tuple[Step, _Cut]]] = {}
    for step in view.steps:
        kind, given = KINDS.get(step.name, ''), step.inputs[0] if step.inputs else None
        if given is None or kind not in _MOVING or step.place.is_backward:
            continue
        axes, now = tuple(sorted(exchange_axes(step))), given.shard_bytes(view.sizes)
        cut = search.cut(given, frozenset(axes))
        if now >= LEAST and cut.last is not None and cut.nbytes <= _SMALLER * now:
            found.setdefault((step.line, axes), {}).setdefault(shape_of(given), (step, cut))
    for (_, axes), group in found.items():
        yield from _tell(view, axes, group)


def _tell(
    view: FunctionView, axes: Axes, group: Mapping[tuple[int, ...], tuple[Step, _Cut]]
) -> Iterator[Told]:
    """What to write for the exchanges of a line, by their shapes, if what it saves is worth it."""
    saved = 0.0
    for shape, (step, cut) in group.items():
        match = _match(view, axes, step, cut, frozenset([shape]))
        moved = view.sent_by(match)
        saved += (1 - cut.nbytes / step.inputs[0].shard_bytes(view.sizes)) * moved
    if saved <= LEAST_SAVED * view.sends:
        return
    step, cut = max(group.values(), key=lambda pair: pair[0].inputs[0].shard_bytes(view.sizes))
    line, widened = view.line_of(step), view.line_of(cut.last or step)
    small, given = _name_large(view, cut.arrays), step.inputs[0]
    given_small = f'{bytes_str(round(cut.nbytes))}{f" of {small}" if small else ""}'
    more = f', and {len(group) - 1} more' if len(group) > 1 else ''
    yield Told(
        match=_match(view, axes, step, cut, frozenset(group)),
        line=line,
        why=(
            f'{line} exchanges {bytes_str(given.shard_bytes(view.sizes))} of '
            f'{given.dtype}{[*given.shape]} on each device over {over(axes)}, which the device has '
            f'computed from {given_small} by itself, at {widened}{more}'
        ),
        change=CodeChange(source=line, text=_text(step, cut, line, widened, small)),
        effect=view.saving(saved),
    )


def _match(
    view: FunctionView, axes: Axes, step: Step, cut: _Cut, shapes: frozenset[tuple[int, ...]]
) -> Match:
    return Match(
        axes=axes,
        lines=frozenset([view.line_of(step), view.line_of(cut.last or step), step.line]),
        shapes=shapes,
        moves=True,
        also=_Types(frozenset(one.dtype for one in cut.arrays) - {step.inputs[0].dtype}).fits,
    )


def _name_large(view: FunctionView, arrays: Sequence[Value]) -> str:
    """The largest of some arrays, in words."""
    most = max((one.shard_bytes(view.sizes) for one in arrays), default=0)
    large = [one for one in arrays if one.shard_bytes(view.sizes) > _NAMED * most]
    return ' and '.join(f'{one.dtype}{[*one.shape]}' for one in large)


def _text(step: Step, cut: _Cut, line: str, widened: str, small: str) -> str:
    """What to write in place of an exchange of something wide."""
    given = step.inputs[0]
    if not cut.arrays:
        return f'compute the array of {line} where it is used: all devices can without an exchange'
    is_cast = max(cut.arrays, key=lambda one: one.nbytes).size == given.size
    how = 'cast and scale it' if is_cast else 'widen it'
    if given.manual:
        return (
            f'exchange {small} at {line}, and {how} after that, as {widened} does before the '
            'exchange now'
        )
    return (
        f'constrain {small}, before it is widened at {widened}, to the layout that {line} asks '
        f'for, and {how} after that'
    )


class _Types(NamedTuple):
    """The types of the small arrays."""

    small: frozenset[object]

    def fits(self, collective: Collective, _: object) -> bool:
        """Whether the compiler exchanges the wide array, and not a small one already."""
        short = {short_type(one) for one in self.small}
        return not any(text.split('[')[0] in short for text in collective.arrays)


class _Search:
    """Finds the fewest bytes from which a device can compute an array for itself."""

    def __init__(self, view: FunctionView):
        self._view = view
        self._outer: dict[int, tuple[Value, int]] = {}
        self._add_outer(view.laid_out.block)
        self._known: dict[tuple[int, frozenset[str]], _Cut] = {}

    def _add_outer(self, block: Block) -> None:
        """Notes what the inputs of loops and calls are outside, and what part of it they are."""
        for step in block.steps:
            carried = {id(given): returned for given, returned in carries(step)}
            for tie in ties(step):
                moved = carried.get(id(tie.inner))
                if not tie.output and (moved is None or self._is_moved(tie.inner, moved)):
                    self._outer[id(tie.inner)] = tie.outer, step.times if tie.stacked else 1
            for body in step.bodies:
                self._add_outer(body)

    def _is_moved(self, given: Value, returned: Value) -> bool:
        """Whether an iteration only passes an array on, to itself or to another device."""
        value = returned
        while value is not given:
            step = self._view.makers.get(id(value))
            moves = ('pvary', 'pbroadcast', 'optimization_barrier', 'ppermute')
            if step is None or step.name not in moves or len(step.inputs) != 1:
                return False
            value = step.inputs[0]
        return True

    def cut(self, value: Value, axes: frozenset[str], depth: int = 0) -> _Cut:
        """The fewest bytes of a device from which it can compute an array."""
        key = id(value), axes
        if key not in self._known:
            own = _Cut(self._nbytes(value, axes), (value,), None)
            self._known[key] = own  # while its operands are looked at
            self._known[key] = self._less(value, own, axes, depth)
        return self._known[key]

    def _less(self, value: Value, own: _Cut, axes: frozenset[str], depth: int) -> _Cut:
        if own.nbytes == 0 or depth == _DEEP:
            return own if own.nbytes else own._replace(arrays=())
        if id(value) in self._outer:
            outer, parts = self._outer[id(value)]
            found = self.cut(outer, axes, depth + 1)
            return found._replace(nbytes=found.nbytes / parts) if found.last else own
        step = self._view.makers.get(id(value))
        if step is not None and step.name == TO_LOCAL:
            found = self.cut(step.inputs[0], axes, depth + 1)
            return found if found.last else own
        if step is None or step.bodies or step.name not in _WIDENING:
            return own
        found = self._joined(step, [self.cut(one, axes, depth + 1) for one in step.inputs])
        return found if found.nbytes < own.nbytes else own

    @staticmethod
    def _joined(step: Step, cuts: Iterable[_Cut]) -> _Cut:
        """The cut of all operands of a step, without arrays that nothing is sent for."""
        arrays: dict[int, Value] = {}
        nbytes, last, most = 0.0, step, -1.0
        for cut in cuts:
            new = [one for one in cut.arrays if id(one) not in arrays]
            if new or not cut.arrays:
                nbytes += cut.nbytes
            arrays |= {id(one): one for one in new}
            if cut.nbytes > most:
                most, last = cut.nbytes, cut.last or step
        return _Cut(nbytes, tuple(arrays.values()), last)

    def _nbytes(self, value: Value, axes: frozenset[str]) -> float:
        """What a device exchanges of an array over mesh axes; none of what all of them have."""
        if value.constant is not None or not value.shape:
            return 0.0
        step = self._view.makers.get(id(value))
        if step is not None and not step.inputs:
            return 0.0
        if value.manual:
            differs = bool(axes & self._view.varying.axes_of(value))
        else:
            differs = bool(axes & {axis for own in value.axes for axis in own or ()})
        return float(value.shard_bytes(self._view.sizes)) if differs else 0.0
