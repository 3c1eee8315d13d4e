"""How the arrays of a function are laid out if layouts travel forward only, from the arguments on.

The compiler also lets layouts travel backward, so that an array may be sharded because of what it
is used for. A layout that only arises in this way is not what the author wrote: an activation that
is sharded over 'model' because the next weights are has been cut, and its product must be summed.

For x ('data', None) and w ('model', None) of a product over the second dimension of x and the first
of w, x is whole along 'model' here, although each device could use a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshwright.jaxpr.factor_rules import find_factors
from meshwright.jaxpr.factors import Factors
from meshwright.jaxpr.layouts import divide, layout_of
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

# For each dimension of a value, the mesh axes that were lost on the way to it without a sum, such
# as by a slice of a sharded dimension, or because another dimension of an operation has them, which
# the compiler may keep in one way or another.
Lost = dict[int, list[frozenset[str]]]
DENSE_PRODUCTS = ('dot_general', 'conv_general_dilated')


class ForwardLayouts:
    """Lays out the values of a block in the order of its steps.

    Args:
      block: the steps, whose values get the axes of their dimensions. Those of the inputs must be
        known; dimensions that are `fixed` keep theirs.
      sizes: the size of each mesh axis.
    """

    def __init__(self, block: Block, sizes: Mapping[str, int]):
        self._sizes = sizes
        self._lost: Lost = {}
        self._run(block)

    def may_have(self, value: Value, d: int, axis: str) -> bool:
        """Whether a dimension of a value is, or may be, sharded along a mesh axis."""
        return axis in (value.axes[d] or ()) or axis in self._lost_of(value)[d]

    def _lost_of(self, value: Value) -> list[frozenset[str]]:
        return self._lost.get(id(value)) or [frozenset()] * len(value.shape)

    def _run(self, block: Block) -> None:
        for step in block.steps:
            if step.bodies:
                self._run_bodies(step)
            elif step.name in (TO_LOCAL, TO_GLOBAL):
                self._cross_border(step)
            else:
                self._spread(step)

    def _run_bodies(self, step: Step) -> None:
        for tie in ties(step):
            if not tie.output:
                self._copy(tie.outer, tie.inner, drop=int(tie.stacked))
        for _ in range(2 if any(True for _ in carries(step)) else 1):
            for body in step.bodies:
                self._run(body)
            for given, returned in carries(step):
                self._copy(returned, given)
        for tie in ties(step):
            if tie.output:
                self._copy(tie.inner, tie.outer, add=int(tie.stacked))

    def _cross_border(self, step: Step) -> None:
        """Brings an array into or out of a shard_map, inside of which it is divided already."""
        given, made = step.inputs[0], step.outputs[0]
        manual = step.params['axes']
        for d, axes in enumerate(given.axes):
            if not made.fixed[d]:
                made.axes[d] = tuple(axis for axis in axes or () if axis not in manual)
        self._lost[id(made)] = self._lost_of(given)

    def _copy(self, source: Value, target: Value, drop: int = 0, add: int = 0) -> None:
        axes = [(), *source.axes] if add else source.axes[drop:]
        lost = self._lost_of(source)
        lost = [frozenset(), *lost] if add else lost[drop:]
        for d, one in enumerate(axes):
            # What two branches, or the first and the other iterations, do not share is not known.
            before = target.axes[d]
            if not target.fixed[d] and not before:
                target.axes[d] = one
        known = self._lost_of(target)
        self._lost[id(target)] = [a | b for a, b in zip(known, lost, strict=True)]

    def _spread(self, step: Step) -> None:
        factors = find_factors(step)
        if step.name == 'sharding_constraint':
            given, made = step.inputs[0], step.outputs[0]
            for d, axes in enumerate(given.axes):
                if not made.fixed[d]:
                    made.axes[d] = axes
            return
        for output in step.outputs:
            for d, is_fixed in enumerate(output.fixed):
                if not is_fixed:
                    output.axes[d] = None
        divided = divide(step, factors, self._sizes)
        lost = [frozenset[str]()] * len(factors.sizes)
        everything = frozenset[str]()
        for value, array in zip(step.inputs, factors.inputs, strict=True):
            for d, dim in enumerate(array):
                here = self._lost_of(value)[d]
                kept = {axis for factor in dim for axis in divided[factor]}
                gone = frozenset(value.axes[d] or ()) - kept
                # A lookup in a sharded dimension is a sum over the devices.
                gone = frozenset() if step.name == 'gather' else gone
                everything |= gone | here
                for factor in dim:
                    others = (axes for n, axes in enumerate(divided) if n not in dim)
                    taken = gone & {axis for axes in others for axis in axes}
                    lost[factor] |= here | (gone if factors.sizes[factor] == 1 else taken)
        if step.name in DENSE_PRODUCTS:
            self._add_cut(step, factors, lost)
        for output, array in zip(step.outputs, factors.outputs, strict=True):
            for d, dim in enumerate(array):
                if not output.fixed[d]:
                    output.axes[d] = self._fitting(output, d, layout_of(dim, divided))
            whole = not factors.known or _has_unrelated(array, output)
            self._lost[id(output)] = [
                everything if whole else frozenset[str]().union(*(lost[f] for f in dim))
                for dim in array
            ]

    def _add_cut(self, step: Step, factors: Factors, lost: list[frozenset[str]]) -> None:
        """Adds the axes of a sum that only one operand of a product has, for its other dimensions.

        Only the first of several products that follow from one wrong layout is then seen as wrong.
        """
        for value, array in zip(step.inputs, factors.inputs, strict=True):
            others = {a for v in step.inputs if v is not value for own in v.axes for a in own or ()}
            summed = [d for d, dim in enumerate(array) if set(dim) & factors.summed]
            cut = {a for d in summed for a in value.axes[d] or ()} - others
            for factor in {f for dim in array for f in dim} - factors.summed if cut else ():
                lost[factor] |= cut

    def _fitting(self, value: Value, d: int, axes: Axes) -> Axes:
        """The axes of a dimension that no other dimension uses already."""
        others = {a for i, own in enumerate(value.axes[:d]) if i != d for a in own or ()}
        return tuple(axis for axis in axes if axis not in others)


def _has_unrelated(array: Sequence[tuple[int, ...]], output: Value) -> bool:
    """Whether a dimension of a result with several elements comes from no operand's dimension."""
    return any(not dim and n > 1 for dim, n in zip(array, output.shape, strict=True))
