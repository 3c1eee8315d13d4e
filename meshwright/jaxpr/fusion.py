"""Which arrays of a traced function are in memory, and which exist only inside of fused loops.

Compilers fuse an operation that computes each element from a few others with the operations that
use its result. These arrays remain in memory: the results of products, kernels, loops, lookups and
exchanges, the operands of these, and arrays that are too expensive to compute twice.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

from meshwright.jaxpr.implied_exchanges import SLICE
from meshwright.jaxpr.primitives import ELEMENTWISE, REDUCTIONS, SCATTERS, names_in
from meshwright.jaxpr.values import TO_GLOBAL, TO_LOCAL, Block, Step, Value
from partitioning.products.flops import PRODUCTS

# The result is the operand, or has its elements in another order that its readers can follow.
VIEWS = names_in(
    'name sharding_constraint optimization_barrier stop_gradient copy copy_p reshape squeeze '
    'transpose bitcast_convert_type pvary pcast random_wrap random_unwrap'
) | {TO_LOCAL, TO_GLOBAL}
_FUSED = (
    ELEMENTWISE
    | names_in('broadcast_in_dim tile iota slice pad dynamic_slice rev concatenate split stack')
    | {SLICE}
) - VIEWS
# Results that take the place of their first operand.
IN_PLACE = SCATTERS | {'dynamic_update_slice'}
# These can compute what they read by themselves.
_FUSING = _FUSED | REDUCTIONS | PRODUCTS | IN_PLACE
_SLICES = names_in('slice dynamic_slice')
# A slice of less than this share of an array is computed at once, to free the array.
_MUCH_LESS = 4


class Fusion:
    """Which arrays of one block are in memory.

    Args:
      block: the steps, with their exchanges.
      fuses_products: whether a product is computed in one loop with what is computed from its
        elements, if that is one array.
    """

    def __init__(self, block: Block, *, fuses_products: bool = False):
        self._fuses_products = fuses_products
        self._readers: dict[int, list[Step]] = collections.defaultdict(list)
        self._maker: dict[int, Step] = {}
        self._base: dict[int, Value] = {}
        self._in_memory: dict[int, bool] = {}
        self._roots: dict[int, tuple[Value, ...]] = {}
        for step in block.steps:
            for value in step.outputs:
                self._maker[id(value)] = step
            if step.name in VIEWS:
                self._base[id(step.outputs[0])] = self.base(step.inputs[0])
        self._returned = {id(self.base(value)) for value in block.outputs}
        for step in block.steps:
            if step.name not in VIEWS:
                for key in {id(self.base(value)): None for value in step.inputs}:
                    self._readers[key].append(step)
        for step in block.steps:  # in this order, no chain of operations is followed twice
            self.roots(step.outputs)

    def base(self, value: Value) -> Value:
        """The array that another one is a view of."""
        return self._base.get(id(value), value)

    def maker(self, value: Value) -> Step | None:
        """The step that makes an array, or None for what the block is given."""
        return self._maker.get(id(value))

    def in_memory(self, value: Value) -> bool:
        """Whether an array, which is no view, is in memory."""
        known = self._in_memory.get(id(value))
        if known is None:
            known = self._in_memory[id(value)] = self._decide(value)
        return known

    def _decide(self, value: Value) -> bool:
        maker = self._maker.get(id(value))
        if maker is None or id(value) in self._returned:
            return True
        readers = self._readers[id(value)]
        if maker.name in PRODUCTS and self._fuses_products:
            return not self._continued(value, readers)
        if maker.name not in _FUSED or not all(reader.name in _FUSING for reader in readers):
            return True
        if maker.name in _SLICES:
            read = sum(root.nbytes for root in self.roots(maker.inputs))
            return _MUCH_LESS * value.nbytes <= read
        return sum(reader.name in PRODUCTS for reader in readers) > 1

    def _continued(self, value: Value, readers: list[Step]) -> bool:
        """Whether all that is read of a product is one array that its elements are turned into."""
        if not all(reader.name in ELEMENTWISE for reader in readers):
            return False
        ends: dict[int, Value] = {}
        seen, waiting = {id(value)}, [value]
        while waiting:
            for reader in self._readers[id(waiting.pop())]:
                for output in reader.outputs:
                    if reader.name not in ELEMENTWISE or self.in_memory(output):
                        ends[id(output)] = output
                    elif id(output) not in seen:
                        seen.add(id(output))
                        waiting.append(output)
        return len(ends) == 1 and all(end.shape == value.shape for end in ends.values())

    def roots(self, values: Iterable[Value]) -> tuple[Value, ...]:
        """The arrays in memory that are read to compute arrays."""
        found: dict[int, Value] = {}
        for value in values:
            base = self._base.get(id(value), value)
            if (roots := self._roots.get(id(base))) is None:
                maker = self._maker.get(id(base))
                inside = maker is not None and not self.in_memory(base)
                roots = self.roots(maker.inputs) if maker and inside else (base,)
                self._roots[id(base)] = roots
            found |= {id(root): root for root in roots}
        return tuple(found.values())
