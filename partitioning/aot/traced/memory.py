"""The memory of a traced function on each device, without a compiler."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

from partitioning.aot.compiled.peak_memory import LiveArray
from partitioning.aot.traced.live_ranges import Buffer, find_peak
from partitioning.aot.traced.steps import Block, Step, Value
from partitioning.aot.traced.tracing import TracedProgram

_SHORT_NAMES = {'float': 'f', 'bfloat': 'bf', 'int': 's', 'uint': 'u', 'bool': 'pred'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory of a device by formula, in bytes.

    Attributes:
      peak: the most that is in use at any time, with the arguments.
      arguments: all arguments.
      argument_bytes: each array of the arguments, in the order of their leaves.
      gradients: what the backward pass hands to the steps after it.
      activations: what the forward pass keeps for the backward pass.
      buffers: the arrays at the peak besides the arguments, the largest first.
      unknown: the primitives whose layout was guessed.
    """

    peak: int
    arguments: int
    argument_bytes: tuple[int, ...]
    gradients: int
    activations: int
    buffers: tuple[LiveArray, ...]
    unknown: tuple[str, ...]


def estimate_memory(traced: TracedProgram) -> MemoryEstimate:
    """Estimates the memory of a device from the live ranges of the arrays of a traced function.

    Steps run in the order of the program, loops are fused as XLA fuses them, and results take the
    place of donated arguments.
    """
    sizes = traced.axis_sizes

    def size_of(value: Value) -> int:
        return int(value.shard_bytes(sizes))

    live = find_peak(traced.block, size_of, _donations(traced))
    arguments = traced.argument_bytes
    gradients, activations = _between_passes(traced, size_of)
    return MemoryEstimate(
        peak=sum(arguments) + sum(buffer.nbytes for buffer in live),
        arguments=sum(arguments),
        argument_bytes=arguments,
        gradients=gradients,
        activations=activations,
        buffers=_describe(live, traced),
        unknown=traced.unknown,
    )


def _donations(traced: TracedProgram) -> list[Value | None]:
    """For each result, the donated argument whose place it takes: the first that is like it."""
    free: dict[tuple, list[Value]] = collections.defaultdict(list)
    for value, donated in zip(traced.block.inputs, traced.donated, strict=True):
        if donated:
            free[_like(value)].append(value)
    return [
        free[_like(value)].pop(0) if free[_like(value)] else None for value in traced.block.outputs
    ]


def _like(value: Value) -> tuple:
    return value.shape, str(value.dtype), tuple(axes or () for axes in value.dims)


def _describe(live: list[Buffer], traced: TracedProgram) -> tuple[LiveArray, ...]:
    groups: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for buffer in live:
        shape = ','.join(map(str, buffer.value.shard_shape(traced.axis_sizes)))
        array = f'{_short_name(buffer.value)}[{shape}]'
        maker = buffer.maker
        name, source = (maker.op_name, maker.source) if maker else ('', '')
        groups[array, name, source].append(buffer.nbytes)
    arrays = [
        LiveArray(array=array, nbytes=sum(sizes), count=len(sizes), op_name=name, source=source)
        for (array, name, source), sizes in groups.items()
    ]
    return tuple(sorted(arrays, key=lambda a: -a.nbytes))


def _short_name(value: Value) -> str:
    """The name of a type in the text of compiled programs: 'bf16' for bfloat16."""
    name = str(value.dtype)
    letters = name.rstrip('0123456789')
    return _SHORT_NAMES.get(letters, letters) + name[len(letters) :]


def _between_passes(traced: TracedProgram, size_of) -> tuple[int, int]:
    return 0, 0
