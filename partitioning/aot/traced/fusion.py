"""Which arrays of a traced function are in memory, and which exist only inside of fused loops.

Compilers fuse operations that compute each element from few others with those that use them. What
remains in memory are the results of products, kernels, loops, lookups and exchanges, what they
read, and what is too expensive to compute twice.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from partitioning.aot.traced.exchanges import KINDS, SLICE
from partitioning.aot.traced.factors import ELEMENTWISE
from partitioning.aot.traced.steps import TO_GLOBAL, TO_LOCAL, Block, Step, Value

# The result is the operand, or has its elements in another order that its readers can follow.
VIEWS = frozenset(
    'name sharding_constraint optimization_barrier stop_gradient copy copy_p reshape squeeze '
    'transpose bitcast_convert_type pvary pcast random_wrap random_unwrap'.split()
) | {TO_LOCAL, TO_GLOBAL}
_FUSED = (
    ELEMENTWISE
    | {'broadcast_in_dim', 'iota', 'slice', 'pad', 'dynamic_slice', 'rev', 'concatenate', 'split'}
    | {SLICE, 'stack', 'expand_dims'}
) - VIEWS
REDUCTIONS = frozenset(
    'reduce_sum reduce_max reduce_min reduce_and reduce_or reduce_xor reduce_prod argmax argmin'
    .split()
)
# Results that take the place of their first operand.
IN_PLACE = frozenset(
    'dynamic_update_slice scatter scatter-add scatter_add scatter-mul scatter-min scatter-max'
    .split()
)
# Computed at once if that is all that is needed of something large.
_SHRINKING = frozenset({'slice', 'dynamic_slice'})
_PRODUCTS = frozenset({'dot_general', 'ragged_dot', 'conv_general_dilated'})


class Fusion:
    """Which arrays of one block are in memory.

    Args:
      block: the steps, with their exchanges.
      in_place: results that must be in memory even though nothing in the block reads them.
    """

    def __init__(self, block: Block):
        self._readers: dict[int, list[Step]] = collections.defaultdict(list)
        self._maker: dict[int, Step] = {}
        self._viewed: dict[int, Value] = {}
        self._roots: dict[int, tuple[Value, ...]] = {}
        self._returned = {id(self.base(value)) for value in block.outputs}
        for step in block.steps:
            for value in step.outputs:
                self._maker[id(value)] = step
            if step.name in VIEWS:
                self._viewed[id(step.outputs[0])] = step.inputs[0]
        self._returned = {id(self.base(value)) for value in block.outputs}
        for step in block.steps:
            if step.name not in VIEWS:
                for key in {id(self.base(value)): None for value in step.inputs}:
                    self._readers[key].append(step)

    def base(self, value: Value) -> Value:
        """The array that another one is a view of."""
        while id(value) in self._viewed:
            value = self._viewed[id(value)]
        return value

    def maker(self, value: Value) -> Step | None:
        """The step that makes an array, or None for what the block is given."""
        return self._maker.get(id(value))

    def in_memory(self, value: Value) -> bool:
        """Whether an array, which is no view, is in memory."""
        maker = self._maker.get(id(value))
        if maker is None or maker.name not in _FUSED:
            return True
        if id(value) in self._returned:
            return True
        readers = self._readers[id(value)]
        products = sum(reader.name in _PRODUCTS for reader in readers)
        if any(not _fuses(reader) for reader in readers):
            return True
        if products > 1:
            return True
        return maker.name in _SHRINKING and 4 * value.nbytes <= sum(
            root.nbytes for root in self.roots(maker.inputs)
        )

    def roots(self, values: Iterable[Value]) -> tuple[Value, ...]:
        """The arrays in memory that are read to compute arrays."""
        found: dict[int, Value] = {}
        for value in values:
            for root in self._roots_of(self.base(value)):
                found[id(root)] = root
        return tuple(found.values())

    def _roots_of(self, value: Value) -> tuple[Value, ...]:
        known = self._roots.get(id(value))
        if known is None:
            maker = self._maker.get(id(value))
            if maker is None or self.in_memory(value):
                known = (value,)
            else:
                known = self.roots(maker.inputs)
            self._roots[id(value)] = known
        return known


def _fuses(reader: Step) -> bool:
    """Whether a step can compute what it reads by itself."""
    return (
        reader.name in _FUSED
        or reader.name in REDUCTIONS
        or reader.name in _PRODUCTS
        or reader.name in ('dynamic_update_slice', 'scatter', 'scatter-add')
    )


def is_exchange(step: Step) -> bool:
    """Whether a step exchanges data with other devices."""
    return step.name in KINDS
