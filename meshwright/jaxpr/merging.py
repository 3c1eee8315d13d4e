"""Merges exchanges as XLA does: sums of sums, and sums that each device keeps only a part of."""

from __future__ import annotations

import collections
import dataclasses

from meshwright.jaxpr.implied_exchanges import SLICE, exchange_axes
from meshwright.jaxpr.values import Block, Step, Value


def merge_exchanges(block: Block) -> None:
    """Merges the exchanges of a block and of its bodies.

    Two all-reduces whose results are only added become one all-reduce of the sum. An all-reduce of
    whose result each device only keeps a part becomes a reduce-scatter.
    """
    for step in block.steps:
        for body in step.bodies:
            merge_exchanges(body)
    _add_before_reducing(block)
    _scatter_where_sliced(block)


class _Uses:
    """Who makes and who reads the arrays of a block."""

    def __init__(self, block: Block):
        self.maker = {id(value): step for step in block.steps for value in step.outputs}
        self.readers: dict[int, list[Step]] = collections.defaultdict(list)
        for step in block.steps:
            for value in step.inputs:
                self.readers[id(value)].append(step)
        self._returned = set(map(id, block.outputs))

    def only_reader(self, value: Value) -> Step | None:
        """The one step that reads an array, or None if there are several, or it is returned."""
        readers = self.readers[id(value)]
        return readers[0] if len(readers) == 1 and id(value) not in self._returned else None


def _add_before_reducing(block: Block) -> None:
    uses = _Uses(block)
    removed: set[int] = set()
    steps: list[Step] = []
    for step in block.steps:
        reduced = [uses.maker.get(id(value)) for value in step.inputs]
        if step.name in ('add', 'add_any') and (
            len({id(r) for r in reduced}) == 2
            and all(r is not None and r.name == 'all-reduce' for r in reduced)
            and len({exchange_axes(r) for r in reduced if r is not None}) == 1
            and all(uses.only_reader(value) is step for value in step.inputs)
        ):
            first = reduced[0]
            assert first is not None
            total = step.outputs[0]
            sums = dataclasses.replace(total, axes=list(total.axes), fixed=list(total.fixed))
            removed.update(id(r) for r in reduced)
            step.inputs = [r.inputs[0] for r in reduced if r is not None]
            step.outputs = [sums]
            again = dataclasses.replace(first, inputs=[sums], outputs=[total])
            uses.maker[id(total)] = again
            steps += [step, again]
        else:
            steps.append(step)
    block.steps = [step for step in steps if id(step) not in removed]


def _scatter_where_sliced(block: Block) -> None:
    uses = _Uses(block)
    removed: set[int] = set()
    for step in block.steps:
        if step.name != 'all-reduce':
            continue
        following = uses.only_reader(step.outputs[0])
        between = []
        while following is not None and following.name == 'sharding_constraint':
            between.append(following)
            following = uses.only_reader(following.outputs[0])
        if following is None or following.name != SLICE:
            continue
        if set(following.params['axes']) == set(exchange_axes(step)):
            removed.update(map(id, [*between, following]))
            step.name, step.outputs = 'reduce-scatter', following.outputs
    block.steps = [step for step in block.steps if id(step) not in removed]
