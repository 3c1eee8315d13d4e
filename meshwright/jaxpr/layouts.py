"""Finds the layout of every array of a traced function, from the layouts that the program states.

As in XLA, layouts spread from where they are stated to the arrays next to them, in both
directions, until nothing changes: first through operations that keep the elements of an array, then
through all operations. A dimension that no layout reaches is whole on every device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.factors import Dimension, Factors
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
_ROUNDS = 12  # of sweeps; nested loops need a few


@dataclasses.dataclass(frozen=True)
class Division:
    """How a step is divided over the mesh.

    Attributes:
      axes: the mesh axes of each factor.
      factors: the factors.
    """

    axes: tuple[Axes, ...]
    factors: Factors

    def layout(self, array: Sequence[Dimension]) -> list[Axes]:
        """The mesh axes of each dimension of an array with these factors."""
        return [tuple(axis for f in dim for axis in self.axes[f]) for dim in array]

    @property
    def partial(self) -> Axes:
        """The axes along which each device has a part of the sums in the result."""
        return tuple(axis for f in sorted(self.factors.summed) for axis in self.axes[f])


def propagate(block: Block, sizes: Mapping[str, int]) -> None:
    """Decides the layout of all arrays of a block, and of the bodies in it.

    Args:
      block: the steps. Dimensions that are `fixed` keep their layout.
      sizes: the size of each mesh axis.
    """
    sweeps = _Sweeps(sizes)
    for everything in (False, True):
        for _ in range(_ROUNDS):
            changed = sweeps.sweep(block, everything, forward=True)
            changed |= sweeps.sweep(block, everything, forward=False)
            if not changed:
                break


class _Sweeps:
    """Sweeps over steps, which pass by those around which nothing has changed."""

    def __init__(self, sizes: Mapping[str, int]):
        self._sizes = sizes
        self._seen: dict[int, list[list[Axes | None]]] = {}
        self._tied: dict[int, list[tuple[Value, Value, int]]] = {}

    def sweep(self, block: Block, everything: bool, *, forward: bool) -> bool:
        changed = False
        for step in block.steps if forward else reversed(block.steps):
            if step.bodies:
                changed |= self._tie(step)
                for body in step.bodies:
                    changed |= self.sweep(body, everything, forward=forward)
                changed |= self._tie(step)
            elif step.name in (TO_LOCAL, TO_GLOBAL):
                changed |= _tie_border(step)
            elif everything or step.name in _KEEPING:
                changed |= self._visit(step)
        return changed

    def _tie(self, step: Step) -> bool:
        """Gives arrays inside and outside of a body the same layout where it is open."""
        if (pairs := self._tied.get(id(step))) is None:
            pairs = [(tie.inner, tie.outer, int(tie.stacked)) for tie in ties(step)]
            pairs += [(given, returned, 0) for given, returned in carries(step)]
            self._tied[id(step)] = pairs
        changed = False
        for inner, outer, first in pairs:
            changed |= _agree(inner, outer, first)
        return changed

    def _visit(self, step: Step) -> bool:
        before = [list(value.axes) for value in (*step.inputs, *step.outputs)]
        if self._seen.get(id(step)) == before:
            return False
        changed = _spread(step, find_factors(step), self._sizes)
        self._seen[id(step)] = [list(value.axes) for value in (*step.inputs, *step.outputs)]
        return changed


def divide(step: Step, factors: Factors, sizes: Mapping[str, int]) -> Division:
    """Decides how a step is divided: each axis goes to the factor with the most bytes for it.

    As in XLA, a sum is divided if all of its operands are, and only then: otherwise, what is
    divided along the sum is gathered.
    """
    votes: dict[str, dict[int, float]] = {}
    orders: list[list[str]] = [[] for _ in factors.sizes]
    for value, array in _arrays(step, factors):
        weight = max(value.nbytes, 1) if any(value.axes) else 0
        for dim, axes in zip(array, value.axes, strict=True):
            for factor, axis in _assign(dim, axes, factors.sizes, sizes) if axes else ():
                counts = votes.setdefault(axis, {})
                counts[factor] = counts.get(factor, 0.0) + weight
                if axis not in orders[factor]:
                    orders[factor].append(axis)
    for axis, counts in votes.items():
        winner = _choose(axis, counts, step, factors)
        for factor in counts:
            if factor != winner:
                orders[factor].remove(axis)
    return Division(tuple(map(tuple, orders)), factors)


def _choose(axis: str, votes: Mapping[int, float], step: Step, factors: Factors) -> int:
    """The factor that an axis divides."""
    sums = [f for f in votes if f in factors.summed]
    for f in sums:
        given = zip(step.inputs, factors.inputs, strict=True)
        if all(_divides(axis, f, v, array) for v, array in given if any(f in d for d in array)):
            return f
    others = [f for f in votes if f not in sums] or sums
    return max(others, key=lambda f: (votes[f], -f))


def _divides(axis: str, factor: int, value: Value, array: Sequence[Dimension]) -> bool:
    pairs = zip(array, value.axes, strict=True)
    return any(factor in dim and axis in (axes or ()) for dim, axes in pairs)


def _arrays(step: Step, factors: Factors) -> Iterator[tuple[Value, tuple[Dimension, ...]]]:
    arrays = (*factors.inputs, *factors.outputs)
    return zip((*step.inputs, *step.outputs), arrays, strict=True)


def _assign(
    dim: Dimension, axes: Axes, factor_sizes: Sequence[int], sizes: Mapping[str, int]
) -> Iterator[tuple[int, str]]:
    """The factors that the axes of a dimension divide: the major one until it is used up."""
    left = list(axes)
    for factor in dim:
        remaining = factor_sizes[factor]
        while left and (remaining % sizes[left[0]] == 0 or (factor == dim[-1] and remaining > 1)):
            axis = left.pop(0)
            remaining = max(remaining // sizes[axis], 1)
            yield factor, axis
        if left and remaining > 1:
            return  # the next factor would be divided within parts of this one


def _spread(step: Step, factors: Factors, sizes: Mapping[str, int]) -> bool:
    """Gives the open dimensions around a step the layout of those that they belong to."""
    division = divide(step, factors, sizes)
    if not any(division.axes):
        return False
    changed = False
    for value, array in _arrays(step, factors):
        for d, dim in enumerate(array):
            wanted = tuple(axis for f in dim for axis in division.axes[f])
            changed |= _refine(value, d, wanted, sizes)
    return changed


def _refine(value: Value, d: int, wanted: Axes, sizes: Mapping[str, int]) -> bool:
    """Shards an open dimension, or shards it further, along axes that the array does not use."""
    current = value.axes[d] or ()
    elsewhere = {a for i, axes in enumerate(value.axes) if i != d for a in axes or ()}
    elsewhere |= value.manual
    wanted = tuple(axis for axis in wanted if axis not in elsewhere)
    if value.fixed[d] or len(wanted) <= len(current) or wanted[: len(current)] != current:
        return False
    if math.prod(sizes[axis] for axis in wanted) > value.shape[d]:
        return False
    value.axes[d] = wanted
    return True


def _agree(inner: Value, outer: Value, first: int = 0) -> bool:
    """Gives two arrays the same layout where it is open. `outer` may have dimensions in front."""
    changed = False
    for d, (own, other) in enumerate(zip(inner.axes, outer.axes[first:], strict=True)):
        if own != other:
            changed |= _adopt(inner, d, other) or _adopt(outer, d + first, own)
    return changed


def _tie_border(step: Step) -> bool:
    """Gives an array on both sides of a shard_map the axes that it leaves to the compiler.

    Inside, the array is already divided along the other axes.
    """
    manual = step.params['axes']
    outer, inner = step.inputs[0], step.outputs[0]
    if step.name == TO_GLOBAL:
        outer, inner = inner, outer
    changed = False
    for d in range(len(inner.shape)):
        axes = outer.axes[d] or ()
        changed |= _adopt(inner, d, tuple(axis for axis in axes if axis not in manual))
        own = tuple(axis for axis in axes if axis in manual)
        changed |= _adopt(outer, d, own + (inner.axes[d] or ()))
    return changed


def _adopt(value: Value, d: int, axes: Axes | None) -> bool:
    if not axes or value.fixed[d] or value.axes[d]:
        return False
    used = {a for i, other in enumerate(value.axes) if i != d for a in other or ()} | value.manual
    if used & {*axes}:
        return False
    value.axes[d] = axes
    return True
