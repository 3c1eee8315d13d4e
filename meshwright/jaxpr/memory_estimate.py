"""The memory of a traced function on each device, without a compiler."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from meshwright.jaxpr.fusion import VIEWS, Fusion
from meshwright.jaxpr.live_ranges import find_peak
from meshwright.jaxpr.primitives import ELEMENTWISE
from meshwright.jaxpr.tracing import TracedProgram
from meshwright.jaxpr.values import Block, Step, Value, carries, item_size, ties
from meshwright.program.peak_memory import LiveArray, join_equal
from partitioning.hardware import Chip

_ROWS, _COLUMNS = 8, 128  # the tiles of TPUs for the last two dimensions
_SHORT_NAMES = {'float': 'f', 'bfloat': 'bf', 'int': 's', 'uint': 'u', 'bool': 'pred'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory that a device needs, estimated by formula, in bytes.

    Attributes:
      peak: the most memory that is in use at any time, arguments included.
      arguments: all arguments.
      gradients: what the backward pass hands to the steps after it.
      activations: what the forward pass keeps for the backward pass.
      buffers: the arrays at the peak besides the arguments, the largest first.
      values: for each of these buffers, the value that it holds.
    """

    peak: int
    arguments: int
    gradients: int
    activations: int
    buffers: tuple[LiveArray, ...]
    values: tuple[Value, ...]


def estimate_memory(traced: TracedProgram, chip: Chip | None = None) -> MemoryEstimate:
    """Estimates the memory of a device from the live ranges of the arrays of a traced function.

    Steps run in the order of the program, loops are fused as XLA fuses them, and results take the
    place of donated arguments.

    Args:
      traced: the function.
      chip: the chip. TPUs keep arrays in tiles, and compute on the results of products before
        they write them.
    """
    on_tpu = chip is not None and chip.platform == 'tpu'
    size_of = _sizes(traced, on_tpu)
    live = find_peak(traced.block, size_of, _donations(traced), fuses_products=on_tpu)
    arguments = sum(map(size_of, traced.block.inputs))
    gradients, activations = find_kept(traced.block, traced.donated, size_of)
    buffers = join_equal(
        (
            LiveArray(
                array=array_name(buffer.value, traced.axis_sizes),
                nbytes=buffer.nbytes,
                count=1,
                op_name=buffer.maker.op_name if buffer.maker else '',
                source=buffer.maker.place.source if buffer.maker else '',
            ),
            buffer.value,
        )
        for buffer in live
    )
    return MemoryEstimate(
        peak=arguments + sum(buffer.nbytes for buffer in live),
        arguments=arguments,
        gradients=gradients,
        activations=activations,
        buffers=tuple(array for array, _ in buffers),
        values=tuple(value for _, value in buffers),
    )


def _sizes(traced: TracedProgram, on_tpu: bool) -> Callable[[Value], int]:
    """The sizes of arrays on a device, on TPUs in tiles."""
    sizes = traced.axis_sizes
    ratios = kernel_ratios(traced.block, sizes) if on_tpu else {}

    def size_of(value: Value) -> int:
        if value.on_host:
            return 0
        if not on_tpu:
            return value.shard_bytes(sizes)
        if (ratio := ratios.get(id(value))) is not None:
            return math.ceil(value.shard_bytes(sizes) * ratio)
        return padded_bytes(value.shard_shape(sizes), value.dtype)

    return size_of


def _donations(traced: TracedProgram) -> list[Value | None]:
    """For each result, the first donated argument of its type and layout, whose memory it takes."""
    free: dict[tuple, list[Value]] = collections.defaultdict(list)
    for value, donated in zip(traced.block.inputs, traced.donated, strict=True):
        if donated:
            free[_like(value)].append(value)
    return [
        free[_like(value)].pop(0) if free[_like(value)] else None for value in traced.block.outputs
    ]


def _like(value: Value) -> tuple:
    return value.shape, str(value.dtype), tuple(axes or () for axes in value.axes)


def array_name(value: Value, sizes: Mapping[str, int]) -> str:
    """The type of an array on one device, as compiled programs write it: 'bf16[16,128]'."""
    return f'{short_type(value.dtype)}[{",".join(map(str, value.shard_shape(sizes)))}]'


def short_type(dtype: object) -> str:
    """The name of a type, as compiled programs write it: 's8' for int8."""
    letters = (name := str(dtype)).rstrip('0123456789')
    return f'{_SHORT_NAMES.get(letters, letters)}{name[len(letters) :]}'


def find_kept(
    block: Block, donated: Sequence[bool], size_of: Callable[[Value], int]
) -> tuple[int, int]:
    """Finds what the passes of a function keep for each other, in bytes on a device.

    Args:
      block: the steps. jax marks the steps of a backward pass.
      donated: for each input, whether it belongs to the state that the function replaces.
      size_of: the size of an array on a device in bytes.

    Returns:
      The gradients, which the backward pass hands to the steps after it; and the activations, which
      the forward pass keeps for the backward pass. Copies of parameters in another type, which only
      depend on the donated arguments, are not activations.
    """
    fusion, gradients, activations = Fusion(block), dict[int, Value](), dict[int, Value]()
    data = {id(v) for v, is_state in zip(block.inputs, donated, strict=True) if not is_state}
    inside = 0, 0
    for step in block.steps:
        if any(id(value) in data for value in step.inputs):
            data.update(id(value) for value in step.outputs)
        if step.name in VIEWS or not any(map(fusion.in_memory, step.outputs)):
            continue
        for value in fusion.roots(step.inputs):
            maker = fusion.maker(value)
            if maker is None or maker.place.is_backward == step.place.is_backward:
                continue
            if step.place.is_backward and id(value) in data:
                activations[id(value)] = value
            elif maker.place.is_backward:
                gradients[id(value)] = value
        if not step.place.is_backward:
            for body in step.bodies:  # of microbatches
                given = step.inputs[len(step.inputs) - len(body.inputs) :]  # no index of a `cond`
                found = find_kept(body, [id(value) not in data for value in given], size_of)
                inside = max(inside, found, key=lambda kept: kept[1])
    for value in fusion.roots(block.outputs):
        maker = fusion.maker(value)
        if maker is not None and maker.place.is_backward:
            gradients[id(value)] = value
    return (
        sum(map(size_of, gradients.values())) or inside[0],
        sum(map(size_of, activations.values())) + inside[1],
    )


def padded_bytes(shape: Sequence[int], dtype: object) -> int:
    """The bytes of an array in memory, in the order of dimensions that wastes the least.

    Args:
      shape: its shape on one device.
      dtype: its type.
    """
    elements = math.prod(shape)
    if len(shape) < 2 or not elements:
        return math.ceil(elements * item_size(dtype))
    best = min(_tiled(elements, a, b) for a, b in itertools.permutations(shape, 2))
    return math.ceil(best * item_size(dtype))


def row_major_ratio(shape: Sequence[int]) -> float:
    """The size of an array in memory in row-major order, as a multiple of its unpadded size."""
    elements = math.prod(shape)
    return _tiled(elements, *shape[-2:]) / elements if len(shape) > 1 and elements else 1.0


def _tiled(elements: int, rows: int, columns: int) -> int:
    tile = min(_ROWS, 1 << max(rows - 1, 0).bit_length())  # tiles of few rows are smaller
    return elements // (rows * columns) * _round_up(rows, tile) * _round_up(columns, _COLUMNS)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def kernel_ratios(block: Block, sizes: Mapping[str, int]) -> dict[int, float]:
    """The memory with padding of the arrays that kernels read and write, relative to their sizes.

    Kernels fix the order of the dimensions, so XLA cannot choose the one that wastes the least.
    Loops and operations on single elements pass this order on to their operands and results.

    Args:
      block: the steps.
      sizes: the size of each mesh axis.

    Returns:
      For the id of each padded array, its size in memory as a multiple of its unpadded size.
    """
    ratios: dict[int, float] = {}
    while _spread(block, sizes, ratios):
        pass
    return ratios


def _spread(block: Block, sizes: Mapping[str, int], ratios: dict[int, float]) -> bool:
    before = len(ratios)
    for step in (*reversed(block.steps), *block.steps):
        if step.name == 'pallas_call':
            for value in (*step.inputs, *step.outputs):
                if (ratio := row_major_ratio(value.shard_shape(sizes))) > 1:
                    ratios.setdefault(id(value), ratio)
        elif step.bodies:
            _spread_through(step, sizes, ratios)
        elif step.name in VIEWS or step.name in ELEMENTWISE:
            _share([*step.inputs, *step.outputs], sizes, ratios)
    return len(ratios) > before


def _spread_through(step: Step, sizes: Mapping[str, int], ratios: dict[int, float]) -> None:
    for body in step.bodies:
        _spread(body, sizes, ratios)
    pairs = [(tie.outer, tie.inner) for tie in ties(step)] + list(carries(step))
    for pair in pairs:
        known = next((ratios[id(value)] for value in pair if id(value) in ratios), None)
        if known is not None:
            for value in pair:
                ratios.setdefault(id(value), known)


def _share(values: Sequence[Value], sizes: Mapping[str, int], ratios: dict[int, float]) -> None:
    """Copies the ratio of one array to all arrays of equal size, which have the same order."""
    marked = [value for value in values if id(value) in ratios]
    for one in marked[:1]:
        size = math.prod(one.shard_shape(sizes))
        for value in values:
            if math.prod(value.shard_shape(sizes)) == size:
                ratios.setdefault(id(value), ratios[id(one)])
