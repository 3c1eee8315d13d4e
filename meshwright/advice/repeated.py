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
from collections.abc import Iterator, Mapping, Sequence

from meshwright.advice.advised import Told
from meshwright.advice.estimates import Estimate, shape_of
from meshwright.advice.loop_edits import EarlyStep, LaterSum, NeedlessSum, try_edits
from meshwright.causes.cause import CodeChange, Effect, over
from meshwright.causes.evidence import Evidence
from meshwright.jaxpr import TracedProgram
from meshwright.jaxpr.implied_exchanges import KINDS, exchange_axes
from meshwright.jaxpr.primitives import ELEMENTWISE, GATHERS, MOVES, PSUMS, names_in
from meshwright.jaxpr.values import Axes, Block, Step, Value, carries, is_backward, ties
from meshwright.jaxpr.varying import Varying
from meshwright.program.collectives import RING_SHARES, Collective
from meshwright.user_lines import user_line
from partitioning.amounts import bytes_str
from partitioning.hardware import Chip

_SCATTERS = names_in('reduce_scatter psum_scatter')
_SUMS_AS = frozenset(['all-reduce', 'reduce-scatter'])
_LEAST = 4096  # bytes of an array on a device
_HELD = '<held>'  # stands for the bytes that the changes of a line hold
FREE = 0.9  # the share of the memory of a device that a function may use with the change


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeated(Told):
    """An exchange that sends what was sent before.

    Attributes:
      kinds: the kinds of exchanges that a compiler makes of it.
      axes: the mesh axes, sorted.
      shape: the sizes of its operand above 1, sorted.
      count: how often it is executed at least, if it is repeated as the program is compiled.
      effect: what the function sends and holds without the repetitions of its line, by formula.
      edit: the change of the trace that tries it.
      backward: whether it is a part of a backward pass.
    """

    kinds: frozenset[str]
    axes: Axes
    shape: tuple[int, ...]
    count: int
    effect: Effect
    edit: LaterSum | EarlyStep | NeedlessSum
    backward: bool

    @property
    def is_of_equals(self) -> bool:
        """Whether it is a sum of what all devices have already."""
        return not isinstance(self.edit, LaterSum | EarlyStep)

    @property
    def is_held_longer(self) -> bool:
        return not self.is_of_equals

    def is_of(self, collective: Collective, evidence: Evidence | None) -> bool:
        if collective.kind not in self.kinds or not {*collective.axes} <= {*self.axes}:
            return False
        if collective.count < self.count:  # the compiler has moved it out of the loop
            return False
        if evidence is None:
            return self.line == collective.source
        if evidence.value is not None and shape_of(evidence.value) != self.shape:
            return False
        if evidence.path and is_backward(evidence.path) != self.backward:
            return False
        return self.line in (collective.source, evidence.made_at)


def find_repeated(
    laid_out: TracedProgram, base: Estimate, sends: float, chip: Chip | None
) -> tuple[Repeated, ...]:
    """Finds gathers in loops of what does not change there, and sums of what is summed already.

    Args:
      laid_out: the function.
      base: the function by formula.
      sends: the bytes that a device sends in the compiled program.
      chip: the chip; a gather before a loop must leave room in its memory.
    """
    search = _Search(laid_out, base, sends)
    limit = None if chip is None else FREE * chip.hbm_bytes_per_device
    loops = list(search.in_loops(laid_out.block, 1))
    if limit is not None and base.peak + sum(_held(one) for one in loops) > limit:
        loops = []
    return tuple(_added_up([*loops, *search.sums(laid_out.block, 1)], laid_out.axis_sizes))


def _held(one: Repeated) -> int:
    before, after = one.effect.peak
    return after - before


def _added_up(found: Sequence[Repeated], sizes: Mapping[str, int]) -> Iterator[Repeated]:
    """The exchanges, each with the effect and the text for all of its line."""
    groups: dict[str, list[Repeated]] = collections.defaultdict(list)
    for one in found:
        groups[one.change.text].append(one)
    for text, group in groups.items():
        (sends, _), (peak, _) = group[0].effect.sent, group[0].effect.peak
        saved = sum(one.effect.sent[0] - one.effect.sent[1] for one in group)
        held = sum(map(_held, group))
        change = CodeChange(source=group[0].line, text=text.replace(_HELD, bytes_str(held)))
        effect = Effect(sent=(sends, max(sends - saved, 0.0)), peak=(peak, peak + held))
        edits = tuple(one.edit for one in group)
        trial = functools.partial(try_edits, edits=edits, sizes=sizes)
        for one in group:
            yield dataclasses.replace(one, change=change, effect=effect, trial=trial)


@dataclasses.dataclass(frozen=True)
class _Search:
    laid_out: TracedProgram
    base: Estimate
    sends: float

    @functools.cached_property
    def makers(self) -> dict[int, Step]:
        """The step that makes each value, by the id of the value."""
        return dict(_makers(self.laid_out.block))

    def in_loops(self, block: Block, times: int) -> Iterator[Repeated]:
        """What the loops of a block gather anew, and sum in each iteration before they add it."""
        for step in block.steps:
            inner = times * step.times
            for body in step.bodies:
                yield from self.in_loops(body, inner)
            if step.times < 2:
                continue
            for one in _of_constants(step):
                nbytes = one.inputs[0].shard_bytes(self.laid_out.axis_sizes)
                if one.name in GATHERS and nbytes >= _LEAST:
                    yield self._gather(one, step, inner)
            for number, (given, returned) in enumerate(carries(step)):
                alone = _count_uses(given, step.bodies) == 1  # what is summed does not depend on it
                summed = self._added(given, returned) if alone else None
                if summed is not None and given.shard_bytes(self.laid_out.axis_sizes) >= _LEAST:
                    yield self._sum_in_loop(*summed, step, number, inner)

    def _gather(self, one: Step, loop: Step, times: int) -> Repeated:
        saved = self._bytes(one) * (times - times // loop.times)
        held = one.outputs[0].shard_bytes(self.laid_out.axis_sizes)
        line, around = _line(one), _line(loop)
        where = f'the loop at {around}' if around != line else 'its loop'
        return self._made(
            one,
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
            edit=EarlyStep(loop.place.equation, one.place.equation),
        )

    def _sum_in_loop(self, one: Step, operand: int, loop: Step, carry: int, times: int) -> Repeated:
        sizes = self.laid_out.axis_sizes
        held = one.inputs[0].shard_bytes(sizes) - one.outputs[0].shard_bytes(sizes)
        line, around = _line(one), _line(loop)
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
        return self._made(
            one,
            saved=self._bytes(one) * (times - times // loop.times),
            held=round(held),
            count=times,
            why=(
                f'each of the {loop.times:,} iterations of the loop at {around} sums an array over '
                f'{over(exchange_axes(one))}, and adds the sum to the one before'
            ),
            text=text,
            edit=LaterSum(loop.place.equation, carry, one.place.equation, operand),
        )

    def _added(self, given: Value, returned: Value) -> tuple[Step, int] | None:
        """The sum over devices that an iteration adds to its carry, if that is all it does.

        Returns:
          The sum of one array, and the number of the array among those that the equation sums.
        """
        step = self.makers.get(id(returned))
        if step is None or step.name not in ('add', 'add_any'):
            return None
        others = [value for value in step.inputs if value is not given]
        if len(others) != 1:
            return None
        (value,) = others
        while (made := self.makers.get(id(value))) is not None and _is_multiple(made):
            value = made.inputs[0]
        if made is None or made.name not in PSUMS | _SCATTERS:
            return None
        number = next(n for n, output in enumerate(made.outputs) if output is value)
        one = dataclasses.replace(made, inputs=[made.inputs[number]], outputs=[value])
        return one, made.params.get('number', number)

    def sums(self, block: Block, times: int) -> Iterator[Repeated]:
        """The sums over devices of what all of them have already."""
        for step in block.steps:
            for body in step.bodies:
                yield from self.sums(body, times * step.times)
            if step.name not in PSUMS or step.params.get('axis_index_groups'):
                continue
            for number, value in enumerate(step.inputs):
                if value.shard_bytes(self.laid_out.axis_sizes) < _LEAST or not value.manual:
                    continue
                first = self._summed_before(value, {*exchange_axes(step)})
                # What jax sums in a backward pass is only needless without check_vma=False.
                is_same = not {*exchange_axes(step)} & self.varying.axes_of(value)
                if first is not None or (is_same and not step.place.is_backward):
                    yield self._needless(step, number, first, times)

    def _needless(self, step: Step, number: int, first: Step | None, times: int) -> Repeated:
        axes, line = over(exchange_axes(step)), _line(step)
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
                f'the array is summed over {axes} at {_line(first)} already, so that all devices '
                'have the same'
            )
        return self._made(
            dataclasses.replace(step, inputs=[step.inputs[number]]),
            saved=self._bytes(step) * times,
            held=0,
            why=why,
            text=text,
            edit=NeedlessSum(step.place.equation, step.params.get('number', number)),
        )

    @functools.cached_property
    def varying(self) -> Varying:
        """Along which axes the devices have different arrays."""
        return Varying(self.laid_out.block)

    def _summed_before(self, value: Value, axes: set[str]) -> Step | None:
        """The sum over some mesh axes that a value is a copy or a multiple of, or None."""
        while (step := self.makers.get(id(value))) is not None:
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
            size *= self.laid_out.axis_sizes.get(axis, 1)
        nbytes = step.inputs[0].shard_bytes(self.laid_out.axis_sizes)
        return RING_SHARES[KINDS[step.name]](size) * nbytes if size > 1 else 0.0

    def _made(
        self,
        step: Step,
        *,
        saved: float,
        held: int,
        why: str,
        text: str,
        edit: LaterSum | EarlyStep | NeedlessSum,
        count: int = 1,
    ) -> Repeated:
        peak, sends = self.base.peak, max(self.sends - saved, 0.0)
        return Repeated(
            line=_line(step),
            why=why,
            change=CodeChange(source=_line(step), text=text),
            kinds=_SUMS_AS if KINDS[step.name] in _SUMS_AS else frozenset([KINDS[step.name]]),
            count=count,
            axes=tuple(sorted(exchange_axes(step))),
            shape=shape_of(step.inputs[0]),
            edit=edit,
            backward=step.place.is_backward,
            effect=Effect(sent=(self.sends, sends), peak=(peak, peak + held)),
        )


def _count_uses(value: Value, blocks: Sequence[Block]) -> int:
    """How many steps of some blocks take a value, loops and branches as one step each."""
    return sum(one is value for block in blocks for step in block.steps for one in step.inputs)


def _line(step: Step) -> str:
    return user_line(step.place.lines) or step.place.source


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


def _makers(block: Block) -> Iterator[tuple[int, Step]]:
    """Each value of a block and its bodies, by its id, with the step that makes it."""
    for step in block.steps:
        yield from ((id(value), step) for value in step.outputs)
        for body in step.bodies:
            yield from _makers(body)
