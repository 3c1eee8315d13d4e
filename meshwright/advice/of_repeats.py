"""Exchanges in shard_maps that send the same again, and how to send it once.

    def body(total, batch):                            # 4 iterations
        whole = jax.lax.all_gather(w, 'fsdp')          # w is the same in all of them

        return total + jax.lax.psum(loss(whole, batch), 'fsdp')

    g = jax.grad(loss)(w)                              # w is whole: jax sums its gradient
    g = jax.lax.pmean(g, 'data')                       # it is the same on all devices already

The gather can be written before the loop, the sum after it, and the second sum can be left out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence

from meshwright.advice.candidates import SUMS, Match, Told
from meshwright.advice.figures import shape_of
from meshwright.advice.function_view import LEAST, FunctionView
from meshwright.advice.loop_edits import RepeatedStep, try_edits
from meshwright.causes.cause import CodeChange, Effect, over
from meshwright.jaxpr.implied_exchanges import KINDS, exchange_axes
from meshwright.jaxpr.primitives import ELEMENTWISE, GATHERS, MOVES, PSUMS, names_in
from meshwright.jaxpr.values import Block, Step, Value, carries, ties
from meshwright.program.collectives import RING_SHARES
from partitioning.amounts import bytes_str

_SCATTERS = names_in('reduce_scatter psum_scatter')
_HELD = '<held>'  # stands for the bytes that the changes of a line hold


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Repeat:
    """An exchange that sends what was sent before.

    Attributes:
      step: its step, with one array.
      why: why it sends the same again.
      text: what to write.
      saved: the bytes that a device need not send.
      edit: the change of the trace that tries it.
      held: the bytes that a device holds more with the change.
      count: how often it is executed at least, if it is repeated as the program is compiled.
    """

    step: Step
    why: str
    text: str
    saved: float
    edit: RepeatedStep
    held: int = 0
    count: int = 1


def find_repeated(view: FunctionView) -> Iterator[Told]:
    """Finds gathers in loops of what does not change there, and sums of what is summed already.

    A gather before a loop must leave room in the memory of a device.
    """
    search = _Search(view)
    loops = list(search.in_loops(view.laid_out.block, 1))
    if not view.can_hold(sum(one.held for one in loops)):
        loops = []
    groups: dict[str, list[_Repeat]] = collections.defaultdict(list)
    for one in (*loops, *search.sums(view.laid_out.block, 1)):
        groups[one.text].append(one)
    for group in groups.values():
        yield from _tell(view, group)


def _tell(view: FunctionView, group: Sequence[_Repeat]) -> Iterator[Told]:
    """The exchanges of a line, each with the effect and the text for all of them."""
    held, line = sum(one.held for one in group), group[0].step.line
    sends = max(view.sends - sum(one.saved for one in group), 0.0)
    text = group[0].text.replace(_HELD, bytes_str(held))
    effect = Effect(sent=(view.sends, sends), peak=(view.base.peak, view.base.peak + held))
    edits = tuple(one.edit for one in group)
    for one in group:
        kind, axes = KINDS[one.step.name], tuple(sorted(exchange_axes(one.step)))
        is_same = one.edit.loop is None
        yield Told(
            match=Match(
                axes=axes,
                kinds=SUMS if kind in SUMS else frozenset([kind]),
                lines=frozenset([line]),
                shapes=frozenset([shape_of(one.step.inputs[0])]),
                backward=one.step.place.is_backward,
                count=one.count,  # the compiler may have moved it out of the loop
            ),
            line=line,
            why=one.why,
            change=CodeChange(source=line, text=text),
            trial=functools.partial(try_edits, view.subject.call, edits=edits, sizes=view.sizes),
            effect=effect,
            is_held_longer=not is_same,
            equal_axes=axes if is_same else (),
        )


@dataclasses.dataclass(frozen=True)
class _Search:
    view: FunctionView

    def in_loops(self, block: Block, times: int) -> Iterator[_Repeat]:
        """What the loops of a block gather anew, and sum in each iteration before they add it."""
        for step in block.steps:
            inner = times * step.times
            for body in step.bodies:
                yield from self.in_loops(body, inner)
            if step.times < 2:
                continue
            for one in _of_constants(step):
                nbytes = one.inputs[0].shard_bytes(self.view.sizes)
                if one.name in GATHERS and nbytes >= LEAST:
                    yield self._gather(one, step, inner)
            for number, (given, returned) in enumerate(carries(step)):
                alone = _count_uses(given, step.bodies) == 1  # what is summed does not depend on it
                summed = self._added(given, returned) if alone else None
                if summed is not None and given.shard_bytes(self.view.sizes) >= LEAST:
                    yield self._sum_in_loop(*summed, step, number, inner)

    def _gather(self, one: Step, loop: Step, times: int) -> _Repeat:
        saved = self._bytes(one) * (times - times // loop.times)
        held = one.outputs[0].shard_bytes(self.view.sizes)
        line, around = one.line, loop.line
        where = f'the loop at {around}' if around != line else 'its loop'
        return _Repeat(
            step=one,
            saved=saved,
            held=round(held),
            count=times,
            why=(
                f'all {loop.times:,} iterations of {where} gather the same array, which does not '
                'change there'
            ),
            text=(
                f'write the {one.name} of {line} before {where}{_outside(loop)}, which holds '
                f'{_HELD} in the meantime'
            ),
            edit=RepeatedStep(one.place.equation, loop=loop.place.equation),
        )

    def _sum_in_loop(self, one: Step, operand: int, loop: Step, carry: int, times: int) -> _Repeat:
        sizes = self.view.sizes
        held = one.inputs[0].shard_bytes(sizes) - one.outputs[0].shard_bytes(sizes)
        line, around = one.line, loop.line
        more = f', which holds {_HELD} more in the meantime' if held else ''
        name = 'psum or pmean' if one.name in PSUMS else one.name
        text = (
            f'leave out the {name} over {over(exchange_axes(one))} of {line}, and write it once '
            f'for the total after the loop at {around}{_outside(loop)}{more}'
        )
        if one.name == 'psum_invariant' and one.place.is_backward:  # jax has written it
            names = ', '.join(map(repr, exchange_axes(one)))
            text = (
                f"write jax.lax.pcast(x, ({names},), to='varying') before the loop at {around} for "
                f'the array x of {line}, so that jax sums its gradient once{more}'
            )
        return _Repeat(
            step=one,
            saved=self._bytes(one) * (times - times // loop.times),
            held=round(held),
            count=times,
            why=(
                f'each of the {loop.times:,} iterations of the loop at {around} sums an array over '
                f'{over(exchange_axes(one))}, and adds the sum to the one before'
            ),
            text=text,
            edit=RepeatedStep(one.place.equation, operand, loop.place.equation, carry),
        )

    def _added(self, given: Value, returned: Value) -> tuple[Step, int] | None:
        """The sum over devices that an iteration adds to its carry, if that is all it does.

        Returns:
          The sum of one array, and the number of the array among those that the equation sums.
        """
        step = self.view.makers.get(id(returned))
        if step is None or step.name not in ('add', 'add_any'):
            return None
        others = [value for value in step.inputs if value is not given]
        if len(others) != 1:
            return None
        (value,) = others
        while (made := self.view.makers.get(id(value))) is not None and _is_multiple(made):
            value = made.inputs[0]
        if made is None or made.name not in PSUMS | _SCATTERS:
            return None
        number = next(n for n, output in enumerate(made.outputs) if output is value)
        one = dataclasses.replace(made, inputs=[made.inputs[number]], outputs=[value])
        return one, made.params.get('number', number)

    def sums(self, block: Block, times: int) -> Iterator[_Repeat]:
        """The sums over devices of what all of them have already."""
        for step in block.steps:
            for body in step.bodies:
                yield from self.sums(body, times * step.times)
            if step.name not in PSUMS or step.params.get('axis_index_groups'):
                continue
            for number, value in enumerate(step.inputs):
                if value.shard_bytes(self.view.sizes) < LEAST or not value.manual:
                    continue
                first = self._summed_before(value, {*exchange_axes(step)})
                # What jax sums in a backward pass is only needless without check_vma=False.
                is_same = not {*exchange_axes(step)} & self.view.varying.axes_of(value)
                if first is not None or (is_same and not step.place.is_backward):
                    yield self._needless(step, number, first, times)

    def _needless(self, step: Step, number: int, first: Step | None, times: int) -> _Repeat:
        axes, line = over(exchange_axes(step)), step.line
        why = (
            f'nothing from which the array is computed differs along {axes}, so that all devices '
            'have the same'
        )
        text = (
            f'leave out the psum or pmean over {axes} at {line}: a mean of equal arrays is the '
            'array, and a sum multiplies it by the number of devices'
        )
        if first is not None:
            why = (
                f'the array is summed over {axes} at {first.line} already, so that all devices '
                'have the same'
            )
        return _Repeat(
            step=dataclasses.replace(step, inputs=[step.inputs[number]]),
            saved=self._bytes(step) * times,
            why=why,
            text=text,
            edit=RepeatedStep(step.place.equation, step.params.get('number', number)),
        )

    def _summed_before(self, value: Value, axes: set[str]) -> Step | None:
        """The sum over some mesh axes that a value is a copy or a multiple of, or None."""
        while (step := self.view.makers.get(id(value))) is not None:
            if step.name in PSUMS:
                return step if axes <= {*exchange_axes(step)} else None
            arrays = [one for one in step.inputs if one.constant is None and one.shape]
            if step.name not in MOVES | ELEMENTWISE or len(arrays) != 1:
                return None
            (value,) = arrays
        return None

    def _bytes(self, step: Step) -> float:
        """What a device sends for one execution, in bytes."""
        size = 1
        for axis in exchange_axes(step):
            size *= self.view.sizes.get(axis, 1)
        nbytes = step.inputs[0].shard_bytes(self.view.sizes)
        return RING_SHARES[KINDS[step.name]](size) * nbytes if size > 1 else 0.0


def _count_uses(value: Value, blocks: Sequence[Block]) -> int:
    """How many steps of some blocks take a value, loops and branches as one step each."""
    return sum(one is value for block in blocks for step in block.steps for one in step.inputs)


def _outside(loop: Step) -> str:
    """Where to write what is done around a loop that is a part of a differentiated function."""
    is_differentiated = 'jvp(' in loop.place.path or loop.place.is_backward
    return ', outside of what is differentiated there' if is_differentiated else ''


def _is_multiple(step: Step) -> bool:
    """Whether a result is its first operand, moved or times a number, as in a mean over devices."""
    others = step.inputs[1:]
    return step.name in MOVES or (
        step.name in ('mul', 'div') and not any(one.shape for one in others)
    )


def _of_constants(loop: Step) -> Iterator[Step]:
    """The steps of a loop whose results are the same in all iterations."""
    carried = {id(given) for given, _ in carries(loop)}
    same = {
        id(tie.inner)
        for tie in ties(loop)
        if not (tie.output or tie.stacked or id(tie.inner) in carried)
    }
    for body in loop.bodies:
        for step in body.steps:
            known = (id(value) in same or value.constant is not None for value in step.inputs)
            if not step.bodies and step.inputs and all(known):
                same |= {id(value) for value in step.outputs}
                yield step
