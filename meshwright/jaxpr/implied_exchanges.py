"""Adds the exchanges that layouts imply to the steps of a function, and merges them as XLA does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.layouts import divide, is_settled, layout_of
from meshwright.jaxpr.lookups import find_lookups
from meshwright.jaxpr.primitives import PSUMS, names_in
from meshwright.jaxpr.values import (
    TO_GLOBAL,
    TO_LOCAL,
    Axes,
    Block,
    Step,
    Value,
    carries,
    readers_of,
    ties,
)

# The exchanges that `insert_exchanges` adds.
_ADDED = ('all-reduce', 'all-gather', 'reduce-scatter', 'all-to-all')
# These, and what jax calls the exchanges of a shard_map.
KINDS = {
    **{kind: kind for kind in _ADDED},
    **dict.fromkeys([*PSUMS, 'pmax', 'pmin'], 'all-reduce'),
    **dict.fromkeys(names_in('all_gather all_gather_invariant'), 'all-gather'),
    **dict.fromkeys(names_in('reduce_scatter psum_scatter'), 'reduce-scatter'),
    'all_to_all': 'all-to-all',
    'ragged_all_to_all': 'ragged-all-to-all',
    'ppermute': 'collective-permute',
}
# Each device keeps a part of what it has: nothing is sent.
SLICE = 'keep-own-part'
# The steps that `insert_exchanges` adds. They move a value, and change nothing else about it.
ADDED = {*_ADDED, SLICE}


def exchange_axes(step: Step) -> Axes:
    """The mesh axes along which a step exchanges data; () if it does not."""
    if step.name not in KINDS:
        return ()
    found: Any = step.params.get('axes', step.params.get('axis_name', ()))
    found = (found,) if isinstance(found, str) else tuple(found)
    return tuple(axis for axis in found if isinstance(axis, str))


def insert_exchanges(block: Block, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Adds the exchanges that layouts imply to a block and its bodies, and returns what is unknown.

    Args:
      block: steps whose arrays have layouts.
      sizes: the size of each mesh axis.

    Returns:
      The primitives that no rule describes, whose results were taken to be whole or like their
      operands.
    """
    writer = _Exchanges(sizes, find_lookups(block))
    writer.rewrite(block)
    return tuple(sorted(writer.unknown))


class _Exchanges:
    def __init__(self, sizes: Mapping[str, int], lookups: frozenset[int]):
        self._sizes, self._lookups = sizes, lookups
        self.unknown = set[str]()
        self._same: dict[int, Value] = {}  # the array that a constraint leaves as it is

    def rewrite(self, block: Block) -> None:
        steps, block.steps = block.steps, []
        moved: dict[tuple[int, tuple[Axes, ...]], Value] = {}
        for step in steps:
            if step.bodies:
                self._around(step, block.steps, moved)
            elif step.name in (TO_LOCAL, TO_GLOBAL):
                block.steps.append(step)
            else:
                self._step(step, block.steps, moved)

    def _step(self, step: Step, out: list[Step], moved: dict) -> None:
        if step.name == 'sharding_constraint':
            step.inputs = [self._move(step.inputs[0], step.outputs[0].axes, step, out, moved)]
            given = step.inputs[0]
            self._same[id(step.outputs[0])] = self._same.get(id(given), given)
            out.append(step)
            return
        factors = find_factors(step)
        if not factors.known:
            self.unknown.add(step.name)
        if is_settled(step, factors):
            out.append(step)
            return
        is_lookup = id(step) in self._lookups
        divided = divide(step, factors, self._sizes, is_lookup=is_lookup)
        step.inputs = [
            self._move(value, [layout_of(dim, divided) for dim in array], step, out, moved)
            for value, array in zip(step.inputs, factors.inputs, strict=True)
        ]
        out.append(step)
        partial = tuple([axis for f in sorted(factors.summed) for axis in divided[f]])
        for i, array in enumerate(factors.outputs):
            final, natural = step.outputs[i], [layout_of(dim, divided) for dim in array]
            if not partial and _same(natural, final.axes):
                continue
            made = final.with_axes(natural)
            step.outputs[i] = made
            self._move_into(made, final, partial, step, out)

    def _around(self, step: Step, out: list[Step], moved: dict) -> None:
        """Moves what a loop or a branch is given and returns to where it is needed."""
        for body in step.bodies:
            self.rewrite(body)
        offset = len(step.inputs) - len(step.bodies[0].inputs)
        for i, tie in enumerate(t for t in ties(step) if not t.output):
            index = offset + i % max(len(step.bodies[0].inputs), 1)
            lead = [()] if tie.stacked else []  # each device takes part in all iterations
            wanted = [*lead, *tie.inner.axes]
            step.inputs[index] = self._move(tie.outer, wanted, step, out, moved)
        given = {id(returned): first for first, returned in carries(step)}
        for body in step.bodies:
            for i, (inner, outer) in enumerate(zip(body.outputs, step.outputs, strict=True)):
                wanted = given[id(inner)].axes if id(inner) in given else outer.axes
                wanted = wanted[len(wanted) - len(inner.shape) :]
                body.outputs[i] = self._move(inner, wanted, step, body.steps, {})
        out.append(step)

    def _move(
        self,
        value: Value,
        wanted: Sequence[Axes | None],
        step: Step,
        out: list[Step],
        moved: dict,
    ) -> Value:
        """Returns an array in the layout that a step needs. Equal moves happen once."""
        if _same(wanted, value.axes):
            return value
        target = tuple(axes or () for axes in wanted)
        value = self._same.get(id(value), value)
        key = id(value), target
        if key not in moved:
            moved[key] = value.with_axes(target)
            self._move_into(value, moved[key], (), step, out)
        return moved[key]

    def _move_into(
        self, source: Value, target: Value, partial: Axes, step: Step, out: list[Step]
    ) -> None:
        """Adds the steps that bring an array into the layout of another."""
        for kind, axes, dims in plan_moves(source.axes, target.axes, partial):
            made = source.with_axes(dims)
            out.append(_between(kind, axes, source, made, step))
            source = made
        if out[-1].outputs == [source]:
            out[-1].outputs = [target]
        else:
            out.append(_between('sharding_constraint', (), source, target, step))


def plan_moves(
    source: Sequence[Axes | None], target: Sequence[Axes | None], partial: Axes = ()
) -> list[tuple[str, Axes, list[Axes]]]:
    """The exchanges that bring an array from one layout into another.

    Args:
      source, target: the mesh axes of each dimension.
      partial: the axes along which devices hold parts of a sum.

    Returns:
      For each exchange its kind, its axes, and the layout after it.
    """
    dims = [axes or () for axes in source]
    goal = [axes or () for axes in target]
    moves: list[tuple[str, Axes, list[Axes]]] = []
    used = {axis for axes in dims for axis in axes}
    wanted = {axis: d for d, axes in enumerate(goal) for axis in axes}

    def move(kind: str, axes: Axes) -> None:
        if axes:
            moves.append((kind, axes, list(dims)))

    scattered = tuple(axis for axis in partial if axis in wanted and axis not in used)
    for axis in scattered:
        dims[wanted[axis]] = (*dims[wanted[axis]], axis)
    move('reduce-scatter', scattered)
    move('all-reduce', tuple(axis for axis in partial if axis not in scattered))
    own = tuple(a for a in wanted if a not in used and a not in partial)
    for axis in own:
        dims[wanted[axis]] = (*dims[wanted[axis]], axis)
    move(SLICE, own)
    exchanged = []
    for d, axes in enumerate(dims):
        for axis in axes:
            if wanted.get(axis, d) != d:
                exchanged.append((axis, d))
    for axis, d in exchanged:
        dims[d] = tuple(a for a in dims[d] if a != axis)
        dims[wanted[axis]] = (*dims[wanted[axis]], axis)
    move('all-to-all', tuple(axis for axis, _ in exchanged))
    gathered = tuple(axis for axes in dims for axis in axes if axis not in wanted)
    for d, axes in enumerate(dims):
        dims[d] = tuple(axis for axis in axes if axis in wanted)
    move('all-gather', gathered)
    return moves


def _same(a: Sequence[Axes | None], b: Sequence[Axes | None]) -> bool:
    return [*a] == [*b] or all(set(x or ()) == set(y or ()) for x, y in zip(a, b, strict=True))


def _between(kind: str, axes: Axes, source: Value, target: Value, step: Step) -> Step:
    return Step(kind, {'axes': axes}, [source], [target], place=step.place)


def merge_exchanges(block: Block) -> None:
    """Merges the exchanges of a block and of its bodies.

    Two all-reduces whose results are only added become one all-reduce of the sum. An all-reduce
    becomes a reduce-scatter if each device keeps only a part of its result.
    """
    for step in block.steps:
        for body in step.bodies:
            merge_exchanges(body)
    _add_before_reducing(block)
    _scatter_where_sliced(block)


class _Uses:
    """Finds the steps that make and read each array of a block."""

    def __init__(self, block: Block):
        self.maker = {id(value): step for step in block.steps for value in step.outputs}
        self.readers = readers_of(block.steps)
        self._returned = set(map(id, block.outputs))

    def only_reader(self, value: Value) -> Step | None:
        """The only step that reads an array, or None if the block returns it or several read it."""
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
