"""Finds the arrays of a traced function that are in memory when it needs the most memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from meshwright.jaxpr.fusion import IN_PLACE, VIEWS, Fusion
from meshwright.jaxpr.implied_exchanges import KINDS
from meshwright.jaxpr.primitives import ELEMENTWISE
from meshwright.jaxpr.values import Block, Step, Value, carries, loop_counts
from meshwright.live_buffers import buffers_at_peak, count_bytes
from partitioning.products.flops import PRODUCTS


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
    """A place in memory.

    Attributes:
      value: the array that it was made for.
      maker: the step that makes it.
      nbytes: its size on a device in bytes; 0 if it is in a place that exists anyway.
      last: the number of the last step that reads it.
    """

    value: Value
    maker: Step | None
    nbytes: int
    last: int = -1


def find_peak(
    block: Block,
    size_of: Callable[[Value], int],
    results: Sequence[Value | None] = (),
    *,
    fuses_products: bool = False,
) -> list[Buffer]:
    """Finds the buffers that are in memory when a block needs the most, besides what it is given.

    Args:
      block: the steps, in the order in which they run.
      size_of: the size of an array on a device in bytes.
      results: for each result, the input whose place it takes if that is free by then, or None.
      fuses_products: whether what is computed from the elements of a product is fused with it.

    Returns:
      The buffers.
    """
    return _Run(block, size_of, results, fuses_products).peak()


class _Run:
    """The run of one block: the buffers of its arrays, and until when they are read."""

    def __init__(
        self,
        block: Block,
        size_of: Callable[[Value], int],
        results: Sequence[Value | None],
        fuses_products: bool,
    ):
        self._block, self._size_of, self._fuses_products = block, size_of, fuses_products
        self._fusion = Fusion(block, fuses_products=fuses_products)
        self._buffers: dict[int, Buffer] = {}
        self._made: list[list[Buffer]] = [[] for _ in block.steps]
        self._given = {id(value) for value in block.inputs}
        # The arrays in memory that each step reads; none if it is computed elsewhere.
        self._reads: list[tuple[Value, ...]] = []
        for step in block.steps:
            is_run = step.name not in VIEWS and any(map(self._fusion.in_memory, step.outputs))
            self._reads.append(self._fusion.roots(step.inputs) if is_run else ())
        self._last: dict[int, int] = {}
        for time, reads in enumerate([*self._reads, self._fusion.roots(block.outputs)]):
            self._last.update(dict.fromkeys(map(id, reads), time))
        self._place(results)

    def _place(self, results: Sequence[Value | None]) -> None:
        """Decides where each array is: in a new buffer, or in the place of another."""
        kept = {}
        for value, place in zip(self._block.outputs, results, strict=False):
            if place is not None:
                kept[id(self._fusion.base(value))] = place
        for time, step in enumerate(self._block.steps):
            if step.name in VIEWS:
                continue
            for number, value in enumerate(step.outputs):
                if not self._fusion.in_memory(value):
                    continue
                last = self._last.get(id(value), time)
                if step.name in KINDS:
                    # Compilers let exchanges overlap with products, and so neither begin nor free
                    # what they exchange at the last moment.
                    steps = self._block.steps
                    following = range(last + 1, len(steps))
                    last = next((t for t in following if steps[t].name in PRODUCTS), last)
                buffer = Buffer(value, step, self._size_of(value), last)
                place = kept.get(id(value))
                if place is not None and self._last.get(id(place), -1) <= time:
                    buffer.nbytes = 0
                elif (old := self._replaced(step, number, time, buffer)) is not None:
                    old.last = max(old.last, buffer.last)
                    self._buffers[id(value)] = old
                    continue
                self._buffers[id(value)] = buffer
                self._made[time].append(buffer)

    def _replaced(self, step: Step, number: int, time: int, new: Buffer) -> Buffer | None:
        """The buffer of an operand that is not read any more, whose place a result can take."""
        candidates: Sequence[Value] = ()
        if step.name in IN_PLACE:
            candidates = self._fusion.roots(step.inputs[:1])
        elif step.name in ELEMENTWISE:
            candidates = self._reads[time]
        elif step.bodies:
            consts, carry = loop_counts(step)
            loop = step.inputs[consts:][:carry]
            candidates = [self._fusion.base(loop[number])] if number < len(loop) else ()
        for value in candidates:
            old = self._buffers.get(id(value))
            if old is None or old.last > time or not old.nbytes >= new.nbytes > 0:
                continue
            if step.bodies or step.name in IN_PLACE or old.nbytes == new.nbytes:
                return old
        return None

    def peak(self) -> list[Buffer]:
        steps = enumerate(self._block.steps)
        inside = {time: self._peak_inside(step) for time, step in steps if step.bodies}
        return buffers_at_peak(self._made, inside)

    def _peak_inside(self, step: Step) -> list[Buffer]:
        """The buffers of a loop or a branch, in the iteration that needs the most."""
        peaks = []
        for body in step.bodies:
            places: list[Value | None] = [None] * len(body.outputs)
            for i, (given, _) in enumerate(carries(step)):
                places[i] = given
            fuses = self._fuses_products
            peaks.append(find_peak(body, self._size_of, places, fuses_products=fuses))
        return max(peaks, key=count_bytes, default=[])
