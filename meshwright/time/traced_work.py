"""What a device has to do in a traced function, without a compiler."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from meshwright.jaxpr import TracedProgram, list_collectives
from meshwright.jaxpr.fusion import IN_PLACE, VIEWS, Fusion
from meshwright.jaxpr.implied_exchanges import KINDS, SLICE
from meshwright.jaxpr.values import Block, Step, Value
from meshwright.time.kernels import find_kernel_work
from meshwright.time.layers import Layers
from meshwright.time.work import KernelWork, Work
from partitioning.hardware import Chip
from partitioning.products.flops import PRODUCTS, product_flops

# Steps that are counted elsewhere, or do not touch the memory.
_NOT_MOVING = VIEWS | {*KINDS, 'pallas_call', 'iota', SLICE}
_PARTIAL_READS = ('slice', 'dynamic_slice', 'gather')


def estimate_work(
    traced: TracedProgram,
    chip: Chip,
    kernels: Sequence[KernelWork] | None = None,
    layers: Layers | None = None,
) -> Work:
    """Estimates the work of a traced function on each device, from its jaxpr and its layouts.

    Args:
      traced: the function, from `trace_function`.
      chip: the chip.
      kernels: its kernels, if they have been found already.
      layers: its products, from `describe_layers`, if they are known.
    """
    count = _Count(traced, chip)
    count.add(traced.block, 1)
    if kernels is None:
        kernels = find_kernel_work(traced.jaxpr, math.prod(traced.axis_sizes.values()))
    return Work(
        origin='jaxpr',
        chip=chip.name,
        matmul_flops=count.flops,
        matmul_seconds=None,
        other_seconds=None,
        other_bytes=count.other_bytes,
        kernels=tuple(kernels),
        collectives=list_collectives(traced),
        host_bytes=count.host_bytes,
        layers=layers,
    )


class _Count:
    """Adds up what the steps of a function compute and move."""

    def __init__(self, traced: TracedProgram, chip: Chip):
        self._sizes = traced.axis_sizes
        self._fuses_products = chip.platform == 'tpu'
        self._read: dict[int, Mapping[int, int]] = {}  # by step
        self.flops = self.other_bytes = self.host_bytes = 0.0

    def add(self, block: Block, times: int) -> None:
        """Adds the steps of a block that runs some times."""
        fusion = Fusion(block, fuses_products=self._fuses_products)
        for step in block.steps:
            for body in step.bodies:
                self.add(body, times * step.times)
            if step.name in PRODUCTS:
                self.flops += times * self._flops(step)
            elif step.name == 'device_put':
                result = step.outputs[0]
                if step.inputs[0].on_host != result.on_host:
                    self.host_bytes += times * self._bytes(result)
            elif not step.bodies and step.name not in _NOT_MOVING:
                self.other_bytes += times * self._moved(step, fusion)

    def _bytes(self, value: Value) -> int:
        return value.shard_bytes(self._sizes)

    def _flops(self, step: Step) -> float:
        arrays = *step.inputs[:2], step.outputs[0]
        shapes = (value.shard_shape(self._sizes) for value in arrays)
        return product_flops(step.name, step.params, *shapes)

    def _moved(self, step: Step, fusion: Fusion) -> float:
        """The bytes that a step reads and writes with everything that is fused with it."""
        written = [value for value in step.outputs if fusion.in_memory(value)]
        if not written:
            return 0
        if step.name in IN_PLACE:  # only the part that changes
            return 2 * self._bytes(step.inputs[-1 if 'scatter' in step.name else 1])
        read = sum(self._reads(step, fusion).values())
        return read + sum(map(self._bytes, written))

    def _reads(self, step: Step, fusion: Fusion) -> Mapping[int, int]:
        """The arrays in memory that a step reads, and how much of them."""
        if (known := self._read.get(id(step))) is not None:
            return known
        found: dict[int, int] = {}
        if step.name in _PARTIAL_READS:
            found[id(step)] = self._bytes(step.outputs[0])
        else:
            for value in map(fusion.base, step.inputs):
                maker = fusion.maker(value)
                if maker is None or fusion.in_memory(value):
                    found[id(value)] = self._bytes(value)
                else:
                    found |= self._reads(maker, fusion)
        self._read[id(step)] = found
        return found
