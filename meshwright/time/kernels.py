"""The work of hand-written kernels, from the jaxpr of a function.

Compilers do not estimate the kernels of Pallas and cuDNN. What a kernel does is counted in its body
and its grid, or if it has no grid, is what it states itself. Kernels of splash attention skip the
blocks that their mask rules out. The mask of blocks is one of their arguments and almost always
a constant, and so is the number of a layer, which decides between kinds of attention. The search
therefore follows constants through the steps of the function:

    scan over i = [0, 1, 2, 3]           runs 4 times, because its body has the next line
      cond i % 2 == 0                    is known in each iteration
        splash(q, mask [[1, 0], [1, 1]]) counts twice, each time with 3 of 4 blocks
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshwright.jaxpr.primitives import names_in
from meshwright.jaxpr.values import Block, Step, Value, loop_counts
from meshwright.jaxpr.writing_out import write_out
from meshwright.time.work import KernelWork
from partitioning.products.flops import (
    RECOMPUTED,
    bodies_of,
    count_blocks,
    count_jaxpr_flops,
    open_jaxpr,
)

# The matrix products of attention: two forward; backward five, two of which are recomputed scores.
_FORWARD, _BACKWARD = 2, 5
_HEADS_FIRST = 1  # jax's number of the layout (batch, heads, length, size) of cuDNN's arrays
# If the step computes a mask, half of the blocks count, as in causal attention.
_SHARE_OF_UNKNOWN_MASKS = 0.5


def count_device_flops(
    jaxpr: Any, num_devices: int, kernels: Sequence[KernelWork]
) -> tuple[float, float]:
    """Counts the FLOPs of each device: for the model, and for the program.

    The first count is without recomputation. Kernels count without the blocks that their masks rule
    out. In the backward pass they compute some products again, so the model's count twice the
    forward pass there.

    Args:
      jaxpr: the ClosedJaxpr of a function.
      num_devices: the number of devices, which share the FLOPs evenly.
      kernels: what `find_kernel_work` finds in the function.
    """
    in_kernels = sum(kernel.flops for kernel in kernels)
    forward = sum(kernel.forward_flops for kernel in kernels)
    needed = 3 * forward if in_kernels > forward else forward
    model = count_jaxpr_flops(jaxpr.jaxpr, kernels=False, recomputed=False)
    program = count_jaxpr_flops(jaxpr.jaxpr, kernels=False)
    return model / num_devices + needed, program / num_devices + in_kernels


def find_kernel_work(jaxpr: Any, num_devices: int = 1) -> tuple[KernelWork, ...]:
    """Finds the kernels of a function and what one device computes and moves in them.

    Kernels in a `shard_map` have the shapes of one device. Outside, jax shards the attention of
    cuDNN over batch and heads, and it counts as shared evenly; each device runs whole kernels of
    Pallas. A kernel reads and writes each of its arrays once.

    Args:
      jaxpr: the ClosedJaxpr of a function, such as `traced.jaxpr`.
      num_devices: the number of devices.
    """
    block = write_out(jaxpr, with_unused=True)
    _, kernels = _search(block, [None] * len(block.inputs), num_devices)
    found: dict[str, list[KernelWork]] = collections.defaultdict(list)
    for kernel in kernels:
        found[kernel.name].append(kernel)
    return tuple(_add(same) for same in found.values())


# What is known of the results of a block, None for the others, and its kernels.
_Outcome = tuple[Sequence[Any], list[KernelWork]]


def _search(block: Block, given: Sequence[Any], num_devices: int) -> _Outcome:
    """Walks through a block that runs once.

    Args:
      block: the steps.
      given: its inputs, None for those that are not known.
      num_devices: the number of devices.
    """
    known: dict[int, Any] = {id(v): x for v, x in zip(block.inputs, given, strict=True)}

    def read(value: Value) -> Any:
        return known.get(id(value)) if value.constant is None else value.constant

    kernels: list[KernelWork] = []
    for step in block.steps:
        results, found = _search_step(step, [read(value) for value in step.inputs], num_devices)
        kernels += found
        known |= {id(v): x for v, x in zip(step.outputs, results, strict=False)}
    return [read(value) for value in block.outputs], kernels


def _search_step(step: Step, arguments: list[Any], num_devices: int) -> _Outcome:
    """The results of a step, or () if they are not simple or an argument is not known."""
    if step.name == 'cond':
        chosen = step.bodies[_choose_branch(step, arguments[0])]
        return _search(chosen, arguments[1:], num_devices)
    if step.bodies:
        return _search_loop(step, arguments, num_devices)
    if _is_kernel(step):
        return (), [_work_of(step, arguments, num_devices)]
    if step.is_border:
        known, to_shape = arguments[0], step.outputs[0].shape
        return ([] if known is None else [_cross_border(known, to_shape)]), []
    compute = _OPERATIONS.get(step.name)
    if compute is None or any(argument is None for argument in arguments):
        return (), []
    if any(value.size >= _LARGEST for value in step.outputs):
        return (), []
    return [np.asarray(compute(step.params, *arguments))], []


def _cross_border(known: np.ndarray, to_shape: Sequence[int]) -> np.ndarray | None:
    """An array on the other side of the border of a shard_map, where its shape is another one.

    The parts of all devices are equal if they are known inside, and are known inside only if they
    are equal.
    """
    known = np.asarray(known)
    if known.shape == tuple(to_shape):
        return known
    if 0 in known.shape or 0 in to_shape or max(known.size, math.prod(to_shape)) >= _LARGEST:
        return None
    counts = [-(-n // m) for n, m in zip(to_shape, known.shape, strict=True)]
    if known.size < math.prod(to_shape):
        whole = np.tile(known, counts)
        return whole if whole.shape == tuple(to_shape) else None
    part = known[tuple(slice(n) for n in to_shape)]
    counts = [n // m for n, m in zip(known.shape, to_shape, strict=True)]
    return part if np.array_equal(np.tile(part, counts), known) else None


def _search_loop(step: Step, arguments: Sequence[Any], num_devices: int) -> _Outcome:
    """A loop whose iterations differ in a `cond` is searched once for each iteration.

    What its iterations return is known if it is known in each: a backward pass reads there which
    branch the forward pass has taken.
    """
    (body,), (constants, carried) = step.bodies, loop_counts(step)
    fixed = [*arguments[:constants], *[None] * carried]
    rows = arguments[constants + carried :]
    if not _chooses_kernels(body):
        _, found = _search(body, [*fixed, *[None] * len(rows)], num_devices)
        return (), [_add([kernel], times=step.times) for kernel in found]
    runs = [
        _search(body, [*fixed, *[x if x is None else x[i] for x in rows]], num_devices)
        for i in range(step.times)
    ]
    returned = zip(*(results[carried:] for results, _ in runs), strict=True)
    stacked = [None if any(x is None for x in each) else np.stack(each) for each in returned]
    return [None] * carried + stacked, [kernel for _, found in runs for kernel in found]


def _choose_branch(step: Step, chosen: Any) -> int:
    """The branch that runs: the one with the most FLOPs, if no constant decides."""
    if chosen is None:
        return int(np.argmax([count_jaxpr_flops(b.jaxpr) for b in step.params['branches']]))
    return min(int(chosen), len(step.bodies) - 1)


def _chooses_kernels(block: Block, inside: bool = False) -> bool:
    """Whether a block has a `cond` with a kernel in it."""
    return any(
        (inside and _is_kernel(step))
        or any(_chooses_kernels(body, inside or step.name == 'cond') for body in step.bodies)
        for step in block.steps
    )


def _is_kernel(step: Step) -> bool:
    return step.name == 'pallas_call' or step.name.startswith('dot_product_attention_')


def _work_of(step: Step, arguments: Sequence[Any], num_devices: int) -> KernelWork:
    name, sharers = step.name, 1
    if name == 'pallas_call':
        name, size = str(step.params['name']), _width_of(step.params['jaxpr'])
        mapping = step.params['grid_mapping']
        bounds = arguments[: mapping.num_dynamic_grid_bounds]
        flops = _flops_of_block(step.params['jaxpr']) * count_blocks(mapping, bounds)
        flops *= _share_of_blocks(name, arguments, mapping)
        stated = step.params.get('cost_estimate')
        if stated is not None and not mapping.grid:  # it loops over blocks by itself
            flops = max(flops, float(stated.flops))
    else:
        sharers = 1 if step.inputs[0].manual else num_devices
        query, key = (value.shape for value in step.inputs[:2])
        length = 2 if step.params.get('layout') == _HEADS_FIRST else 1
        batch, heads, queries, keys = query[0], query[3 - length], query[length], key[length]
        size, seen = query[3], float(keys)
        if 'CAUSAL' in str(step.params.get('mask_type')):
            seen = keys / 2
        if window := step.params.get('sliding_window_length') or 0:
            seen = min(seen, window)
        products = _BACKWARD if '_bwd' in step.name else _FORWARD
        flops = products * 2.0 * batch * heads * queries * seen * size / sharers
    nbytes = sum(value.nbytes for value in (*step.inputs, *step.outputs)) / sharers
    is_backward = step.place.is_backward or RECOMPUTED in step.place.path
    return KernelWork(
        name=name,
        flops=flops,
        nbytes=nbytes,
        count=1,
        forward_flops=0 if is_backward else flops,
        width=size,
    )


def _width_of(jaxpr: Any) -> int:
    """The smallest side of what a kernel keeps in the matrix unit; 0 if it has no products.

    It is the right operand of a product, of summed elements and columns, through which the rows of
    the left one stream.
    """
    sizes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'dot_general':
            (_, summed), (_, batch) = equation.params['dimension_numbers']
            right = equation.invars[1].aval.shape
            columns = math.prod(n for d, n in enumerate(right) if d not in (*summed, *batch))
            sizes += [math.prod(right[d] for d in summed), columns]
        sizes += [n for n in (_width_of(open_jaxpr(b)[0]) for b in bodies_of(equation)) if n]
    return min(sizes, default=0)


def _add(kernels: Sequence[KernelWork], times: int = 1) -> KernelWork:
    """Kernels of the same name as one that runs as often as all of them, some times."""
    return KernelWork(
        name=kernels[0].name,
        flops=math.fsum(kernel.flops for kernel in kernels) * times,
        nbytes=math.fsum(kernel.nbytes for kernel in kernels) * times,
        count=sum(kernel.count for kernel in kernels) * times,
        forward_flops=math.fsum(kernel.forward_flops for kernel in kernels) * times,
        width=min(kernel.width for kernel in kernels),
    )


def _flops_of_block(jaxpr: Any) -> float:
    """The FLOPs of a kernel on one block.

    Kernels of attention have one path for blocks that are masked in part and one for whole blocks,
    each in a `cond` of its own: of conditions with the same products, one is true.
    """
    paths = collections.Counter(
        count_jaxpr_flops(jaxpr.replace(eqns=[equation]))
        for equation in jaxpr.eqns
        if equation.primitive.name == 'cond'
    )
    twice = math.fsum(flops * (count - 1) for flops, count in paths.items())
    return count_jaxpr_flops(jaxpr) - twice


def _share_of_blocks(name: str, arguments: Sequence[Any], mapping: Any) -> float:
    """The share of the blocks of a kernel's grid that its mask does not rule out.

    Splash attention takes the mask of its blocks as the second of its lists of blocks, or as the
    only one, with 0 for blocks that it skips. A grid of a length that it computes has only blocks
    that it needs, and its lists are as long.
    """
    if not name.startswith('splash') or mapping.num_dynamic_grid_bounds:
        return 1.0
    mask = arguments[min(1, mapping.num_index_operands - 1)]
    if mask is None:
        return _SHARE_OF_UNKNOWN_MASKS
    return float(np.mean(np.asarray(mask) != 0))


_LARGEST = 2**20  # elements; larger results are not computed


def _divide(_: Any, x: Any, y: Any) -> Any:
    """Divides as XLA does: integers are rounded towards zero."""
    whole = np.issubdtype(np.asarray(x).dtype, np.integer)
    return np.trunc(np.divide(x, y)).astype(np.asarray(x).dtype) if whole else np.divide(x, y)


def _broadcast(params: Any, x: Any, *_: Any) -> Any:
    shape = [1] * len(params['shape'])
    for dimension, size in zip(params['broadcast_dimensions'], np.shape(x), strict=True):
        shape[dimension] = size
    return np.broadcast_to(np.reshape(x, shape), params['shape'])


def _iota(params: Any) -> Any:
    shape = [1] * len(params['shape'])
    shape[params['dimension']] = -1
    line = np.arange(params['shape'][params['dimension']], dtype=params['dtype'])
    return np.broadcast_to(line.reshape(shape), params['shape'])


def _slice(params: Any, x: Any) -> Any:
    steps = params['strides'] or [1] * np.ndim(x)
    starts, limits = params['start_indices'], params['limit_indices']
    return np.asarray(x)[tuple(map(slice, starts, limits, steps))]


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, *arguments: function(*arguments)


_KEEPING = names_in('copy name sharding_constraint optimization_barrier')
_OPERATIONS: dict[str, Callable[..., Any]] = {
    'add': _plain(np.add),
    'sub': _plain(np.subtract),
    'mul': _plain(np.multiply),
    'div': _divide,
    'rem': _plain(np.fmod),
    'max': _plain(np.maximum),
    'min': _plain(np.minimum),
    'neg': _plain(np.negative),
    'sign': _plain(np.sign),
    'eq': _plain(np.equal),
    'ne': _plain(np.not_equal),
    'lt': _plain(np.less),
    'le': _plain(np.less_equal),
    'gt': _plain(np.greater),
    'ge': _plain(np.greater_equal),
    'and': _plain(np.bitwise_and),
    'or': _plain(np.bitwise_or),
    'xor': _plain(np.bitwise_xor),
    'not': _plain(np.invert),
    'clamp': _plain(lambda low, x, high: np.clip(x, low, high)),
    **dict.fromkeys(_KEEPING, _plain(np.asarray)),
    'convert_element_type': lambda params, x: np.asarray(x).astype(params['new_dtype']),
    'slice': _slice,
    'squeeze': lambda params, x: np.squeeze(x, tuple(params['dimensions'])),
    'reshape': lambda params, x: np.reshape(x, params['new_sizes']),
    'broadcast_in_dim': _broadcast,
    'iota': _iota,
    'select_n': _plain(lambda which, *cases: np.choose(np.asarray(which).astype(int), cases)),
}
