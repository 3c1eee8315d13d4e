"""Finds the layout of every array of a traced function, from the layouts that the program states.

As in XLA, layouts spread from where they are stated to the arrays next to them, in both
directions, until nothing changes: first through operations that keep the elements of an array, then
through all operations. A dimension that no layout reaches is whole on every device.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence

from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.factors import Dimension, Factors
from meshwright.jaxpr.lookups import choose_smaller
from meshwright.jaxpr.primitives import ELEMENTWISE
from meshwright.jaxpr.values import (
    TO_GLOBAL,
    TO_LOCAL,
    Axes,
    Block,
    Step,
    Value,
    carries,
    ties,
)

_KEEPING = ELEMENTWISE | {'transpose', 'reshape', 'squeeze', 'optimization_barrier'}
_IN_ORDER = tuple((n,) for n in range(64))  # the factors of an array whose dimensions are theirs
_ROUNDS = 12  # of sweeps; nested loops need a few


def propagate(block: Block, sizes: Mapping[str, int]) -> None:
    """Decides the layout of all arrays of a block, and of the bodies in it.

    Args:
      block: the steps. Dimensions that are `fixed` keep their layout.
      sizes: the size of each mesh axis.
    """
    sweeps = _Sweeps(block, sizes)
    for everything in (False, True):
        for _ in range(_ROUNDS):
            changed = sweeps.sweep(block, everything, forward=True)
            changed |= sweeps.sweep(block, everything, forward=False)
            if not changed:
                break


class _Sweeps:
    """Sweeps over steps, which pass by those around which nothing has changed."""

    def __init__(self, block: Block, sizes: Mapping[str, int]):
        self._sizes = sizes
        self._users: dict[int, list[int]] = collections.defaultdict(list)
        self._changed = set[int]()  # the steps around which arrays have changed
        # The pairs of dimensions that are the same inside and outside of the bodies of a step.
        self._ties: dict[int, list[tuple[Value, int, Value, int]]] = {}
        self._watch(block)

    def _watch(self, block: Block) -> None:
        """Registers which steps are visited again when the layout of an array changes."""
        for step in block.steps:
            values = {id(value) for value in (*step.inputs, *step.outputs)}
            if step.bodies:
                pairs = [(tie.inner, tie.outer, int(tie.stacked)) for tie in ties(step)]
                pairs += [(given, returned, 0) for given, returned in carries(step)]
                self._ties[id(step)] = [
                    (one, d, other, d + first)
                    for one, other, first in pairs
                    for d in range(len(one.shape))
                ]
                values.update(id(value) for pair in pairs for value in pair[:2])
            for body in step.bodies:
                self._watch(body)
            self._changed.add(id(step))
            for value in values:
                self._users[value].append(id(step))

    def sweep(self, block: Block, everything: bool, *, forward: bool) -> bool:
        """Visits the steps of a block and its bodies; returns whether a layout has changed."""
        changed = False
        for step in block.steps if forward else reversed(block.steps):
            if step.bodies:
                changed |= self._tie(step)
                for body in step.bodies:
                    changed |= self.sweep(body, everything, forward=forward)
                changed |= self._tie(step)
            elif id(step) in self._changed:
                if step.name in (TO_LOCAL, TO_GLOBAL):
                    changed |= self._tie_border(step)
                elif everything or step.name in _KEEPING:
                    changed |= self._spread(step)
        return changed

    def _set(self, value: Value, d: int, axes: Axes) -> None:
        value.axes[d] = axes
        self._changed.update(self._users[id(value)])

    def _spread(self, step: Step) -> bool:
        """Gives the open dimensions around a step the layout of those that they belong to."""
        factors, changed = find_factors(step), False
        if is_settled(step, factors):
            self._changed.discard(id(step))
            return False
        divided = divide(step, factors, self._sizes)
        if any(divided):
            for value, array in _arrays(step, factors):
                for d, dim in enumerate(array):
                    wanted = layout_of(dim, divided)
                    if wanted and not value.fixed[d]:
                        changed |= self._refine(value, d, wanted)
        self._changed.discard(id(step))
        return changed

    def _refine(self, value: Value, d: int, wanted: Axes) -> bool:
        """Shards an open dimension, or shards it further, along axes that are free in the array."""
        current, elsewhere = value.axes[d] or (), _used_elsewhere(value, d)
        wanted = tuple([axis for axis in wanted if axis not in elsewhere])
        if len(wanted) <= len(current) or wanted[: len(current)] != current:
            return False
        if math.prod(map(self._sizes.__getitem__, wanted)) > value.shape[d]:
            return False
        self._set(value, d, wanted)
        return True

    def _tie(self, step: Step) -> bool:
        """Gives arrays inside and outside of a body the same layout where it is open."""
        if id(step) not in self._changed:
            return False
        self._changed.discard(id(step))
        changed = False
        for one, d, other, e in self._ties[id(step)]:
            mine, theirs = one.axes[d], other.axes[e]
            if theirs and not mine:
                changed |= self._adopt(one, d, theirs)
            elif mine and not theirs:
                changed |= self._adopt(other, e, mine)
        return changed

    def _tie_border(self, step: Step) -> bool:
        """The same for a shard_map: both sides have the axes that it leaves to the compiler.

        Inside, the array is already divided along the other axes.
        """
        self._changed.discard(id(step))
        manual, changed = step.params['axes'], False
        outer, inner = step.inputs[0], step.outputs[0]
        if step.name == TO_GLOBAL:
            outer, inner = inner, outer
        for d in range(len(inner.shape)):
            axes = outer.axes[d] or ()
            if open_axes := tuple([axis for axis in axes if axis not in manual]):
                changed |= self._adopt(inner, d, open_axes)
            own = tuple([axis for axis in axes if axis in manual])
            if whole := own + (inner.axes[d] or ()):
                changed |= self._adopt(outer, d, whole)
        return changed

    def _adopt(self, value: Value, d: int, axes: Axes) -> bool:
        if value.fixed[d] or value.axes[d] or not _used_elsewhere(value, d).isdisjoint(axes):
            return False
        self._set(value, d, axes)
        return True


def is_settled(step: Step, factors: Factors) -> bool:
    """Whether all arrays of an operation on single elements have the same layout already.

    Most operations are such, and `divide` says nothing new about them. Of dimensions that several
    axes shard, or that have one element, it may say more.
    """
    if factors.summed or not factors.known:
        return False
    first: Value | None = None
    for values, arrays in ((step.inputs, factors.inputs), (step.outputs, factors.outputs)):
        for value, array in zip(values, arrays, strict=True):
            if not array:  # a scalar
                continue
            if first is None:
                first = value
                if factors.sizes != value.shape:
                    return False
            if value.axes != first.axes or array != _IN_ORDER[: len(array)]:
                return False
    if first is None:
        return True
    return all(
        not a or (len(a) == 1 and n > 1) for a, n in zip(first.axes, first.shape, strict=True)
    )


def _used_elsewhere(value: Value, d: int) -> set[str]:
    """The mesh axes that an array uses for other dimensions than this one."""
    return {a for i, axes in enumerate(value.axes) if i != d for a in axes or ()} | value.manual


def divide(
    step: Step, factors: Factors, sizes: Mapping[str, int], *, is_lookup: bool = False
) -> tuple[Axes, ...]:
    """Decides the mesh axes of each factor: an axis goes to the factor with the most bytes for it.

    As in XLA, a sum is divided if all of its operands are, and only then: otherwise, what is
    divided along the sum is gathered.

    Args:
      step: the operation.
      factors: the factors of its arrays.
      sizes: the size of each mesh axis.
      is_lookup: whether to choose as `find_lookups` says.
    """
    votes: dict[str, dict[int, list[Value]]] = {}
    orders: list[list[str]] = [[] for _ in factors.sizes]
    for value, array in _arrays(step, factors):
        if not any(value.axes):
            continue
        for dim, axes in zip(array, value.axes, strict=True):
            for factor, axis in _assign(dim, axes, factors.sizes, sizes) if axes else ():
                votes.setdefault(axis, {}).setdefault(factor, []).append(value)
                if axis not in orders[factor]:
                    orders[factor].append(axis)
    winner = dict[str, int]()
    for axis, found in votes.items():
        one = next(iter(found)) if len(found) == 1 else None
        if one is None and is_lookup:
            one = choose_smaller(axis, votes, step, factors, sizes)
        winner[axis] = _choose(axis, found, step, factors) if one is None else one
    for factor, order in enumerate(orders):
        if order:
            orders[factor] = [axis for axis in order if winner[axis] == factor]
    return tuple(map(tuple, orders))


def layout_of(dim: Dimension, divided: Sequence[Axes]) -> Axes:
    """The mesh axes of a dimension that has these factors, from the mesh axes of each factor."""
    return divided[dim[0]] if len(dim) == 1 else tuple([a for f in dim for a in divided[f]])


def _choose(axis: str, voters: Mapping[int, Sequence[Value]], step: Step, factors: Factors) -> int:
    votes = {f: sum(float(max(v.nbytes, 1)) for v in values) for f, values in voters.items()}
    sums = [f for f in votes if f in factors.summed]
    # The rows of a lookup stay where their indices are, whatever shards the table.
    is_lookup = step.name == 'gather' and len(sums) < len(votes)
    for f in sums if not is_lookup else ():
        given = zip(step.inputs, factors.inputs, strict=True)
        if all(_divides(axis, f, v, array) for v, array in given if any(f in d for d in array)):
            return f
    others = [f for f in votes if f not in sums] or sums
    return max(others, key=lambda f: (votes[f], -f)) if len(others) > 1 else others[0]


def _divides(axis: str, factor: int, value: Value, array: Sequence[Dimension]) -> bool:
    pairs = zip(array, value.axes, strict=True)
    return any(factor in dim and axis in (axes or ()) for dim, axes in pairs)


def _arrays(step: Step, factors: Factors) -> list[tuple[Value, tuple[Dimension, ...]]]:
    """The operands and results of a step, each with the factors of its dimensions."""
    arrays = list(zip(step.inputs, factors.inputs, strict=True))
    return arrays + list(zip(step.outputs, factors.outputs, strict=True))


def _assign(
    dim: Dimension, axes: Axes, factor_sizes: Sequence[int], sizes: Mapping[str, int]
) -> list[tuple[int, str]]:
    """The factors that the axes of a dimension divide: the major one until it is used up."""
    if len(dim) == len(axes) == 1:  # nearly all
        size = factor_sizes[dim[0]]
        return [(dim[0], axes[0])] if size > 1 or size % sizes[axes[0]] == 0 else []
    left, found = list(axes), list[tuple[int, str]]()
    for factor in dim:
        remaining = factor_sizes[factor]
        while left and (remaining % sizes[left[0]] == 0 or (factor == dim[-1] and remaining > 1)):
            axis = left.pop(0)
            remaining = max(remaining // sizes[axis], 1)
            found.append((factor, axis))
        if left and remaining > 1:
            break  # the next factor would be divided within parts of this one
    return found
