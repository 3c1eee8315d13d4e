"""The work of hand-written kernels, from the jaxpr of a function.

Compilers estimate neither kernels of Pallas nor those of cuDNN. Kernels that skip blocks of a mask
say so in an argument, which is a constant of the jaxpr.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from partitioning.aot.timing.work import KernelWork
from partitioning.aot.traced.flops import count_jaxpr_flops

# The matrix products of attention: two forward; backward five, two of which are recomputed scores.
_FORWARD, _BACKWARD = 2, 5
_HEADS_FIRST = 1  # jax's number of the layout (batch, heads, length, size) of cuDNN's arrays


def find_kernel_work(jaxpr: Any) -> tuple[KernelWork, ...]:
    """Finds the kernels of a function and what one device computes and moves in them.

    Kernels in a `shard_map` have the shapes of one device; those outside count with the shapes that
    they have. A kernel reads and writes each of its arrays once.

    Args:
      jaxpr: the ClosedJaxpr of a function, such as `traced.jaxpr`.
    """
    groups: dict[str, list[KernelWork]] = collections.defaultdict(list)
    inner = getattr(jaxpr, 'jaxpr', jaxpr)
    known = dict(zip(inner.constvars, getattr(jaxpr, 'consts', ()), strict=False))
    for kernel in _find(inner, known, 1):
        groups[kernel.name].append(kernel)
    return tuple(
        KernelWork(
            name=name,
            flops=math.fsum(kernel.flops for kernel in kernels),
            nbytes=math.fsum(kernel.nbytes for kernel in kernels),
            count=sum(kernel.count for kernel in kernels),
        )
        for name, kernels in groups.items()
    )


def _find(jaxpr: Any, known: dict[Any, Any], times: int) -> Iterator[KernelWork]:
    """Yields the kernels of a jaxpr that runs some times; `known` are variables with a value."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        values = [_value(atom, known) for atom in equation.invars]
        if name == 'pallas_call':
            flops = count_jaxpr_flops(params['jaxpr']) * math.prod(_grid(params))
            flops *= _share_of_blocks(params, values)
            yield _work(params['name'], equation, flops, times)
        elif name.startswith('dot_product_attention_') and not _bodies(params):
            yield _work(name, equation, _attention_flops(equation), times)
        else:
            inner_times = times * (params['length'] if name == 'scan' else 1)
            found = [list(_find(*body, inner_times)) for body in _enter(params, values)]
            if name == 'cond':  # one of the branches runs
                found = [max(found, key=lambda works: sum(work.flops for work in works))]
            for works in found:
                yield from works
        if name in ('convert_element_type', 'broadcast_in_dim', 'copy', 'sharding_constraint'):
            known.update(zip(equation.outvars, values[:1], strict=False))


def _enter(params: Any, values: Sequence[Any]) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """The jaxprs in the parameters of an equation, each with the values of its variables."""
    for body in _bodies(params):
        inner = getattr(body, 'jaxpr', body)
        known = dict(zip(inner.constvars, getattr(body, 'consts', ()), strict=False))
        # The last arguments are those of the body: `cond` has the index of the branch before them.
        given = values[len(values) - len(inner.invars) :]
        pairs = zip(inner.invars, given, strict=False) if len(given) == len(inner.invars) else ()
        yield inner, known | {v: x for v, x in pairs if x is not None and _fits(v, x)}


def _bodies(params: Any) -> list[Any]:
    def find(value: Any) -> Iterator[Any]:
        if hasattr(value, 'eqns') or hasattr(getattr(value, 'jaxpr', None), 'eqns'):
            yield value
        elif isinstance(value, tuple | list):
            for one in value:
                yield from find(one)

    return [body for value in params.values() for body in find(value)]


def _fits(variable: Any, value: Any) -> bool:
    return getattr(variable.aval, 'shape', None) == np.shape(value)


def _value(atom: Any, known: dict[Any, Any]) -> Any:
    if hasattr(atom, 'val'):
        return atom.val
    return known.get(atom)


def _grid(params: Any) -> list[int]:
    return [n for n in params['grid_mapping'].grid if isinstance(n, int)]


def _share_of_blocks(params: Any, values: Sequence[Any]) -> float:
    """The share of the blocks of a kernel's grid that its mask does not rule out.

    Splash attention takes the mask of its blocks as its second argument, with 0 for blocks that it
    skips.
    """
    if not str(params['name']).startswith('splash') or len(values) < 2 or values[1] is None:
        return 1.0
    return float(np.mean(np.asarray(values[1]) != 0))


def _attention_flops(equation: Any) -> float:
    """The FLOPs of attention by cuDNN, forward or backward."""
    params = equation.params
    query, key = (atom.aval.shape for atom in equation.invars[:2])
    length = 2 if params.get('layout') == _HEADS_FIRST else 1
    batch, heads, queries, keys = query[0], query[3 - length], query[length], key[length]
    size, seen = query[3], float(keys)
    if 'CAUSAL' in str(params.get('mask_type')):
        seen = keys / 2
    if window := params.get('sliding_window_length') or 0:
        seen = min(seen, window)
    products = _BACKWARD if '_bwd' in equation.primitive.name else _FORWARD
    return products * 2.0 * batch * heads * queries * seen * size


def _work(name: str, equation: Any, flops: float, times: int) -> KernelWork:
    arrays = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    nbytes = sum(a.size * a.dtype.itemsize for a in arrays if hasattr(a, 'size'))
    return KernelWork(name=str(name), flops=flops * times, nbytes=nbytes * times, count=times)
