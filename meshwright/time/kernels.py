"""The work of hand-written kernels, from the jaxpr of a function.

Compilers estimate neither kernels of Pallas nor those of cuDNN. Kernels of splash attention skip
the blocks that their mask rules out. The mask of blocks is one of their arguments and almost always
a constant, and so is the number of a layer, which decides between kinds of attention. The search
therefore follows constants through the jaxpr.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshwright.time.jaxpr_constants import Values, bodies_of, evaluate, value_of
from meshwright.time.work import KernelWork
from partitioning.products.flops import RECOMPUTED, count_jaxpr_flops

# The matrix products of attention: two forward; backward five, two of which are recomputed scores.
_FORWARD, _BACKWARD = 2, 5
_HEADS_FIRST = 1  # jax's number of the layout (batch, heads, length, size) of cuDNN's arrays
# Of a mask that is computed in the step, half of the blocks count: that of causal attention.
_SHARE_OF_UNKNOWN_MASKS = 0.5


def find_kernel_work(jaxpr: Any, *, backward: bool = True) -> tuple[KernelWork, ...]:
    """Finds the kernels of a function and what one device computes and moves in them.

    Kernels in a `shard_map` have the shapes of one device; those outside count with the shapes that
    they have. A kernel reads and writes each of its arrays once.

    Args:
      jaxpr: the ClosedJaxpr of a function, such as `traced.jaxpr`.
      backward: whether to find those of the backward pass too.
    """
    search = _Search(backward)
    inner = getattr(jaxpr, 'jaxpr', jaxpr)
    _, kernels = search.run(jaxpr, [None] * len(inner.invars))
    found: dict[str, list[KernelWork]] = collections.defaultdict(list)
    for kernel in kernels:
        found[kernel.name].append(kernel)
    return tuple(_add(same) for same in found.values())


# What is known of the results of a jaxpr, None for the others, and its kernels.
_Outcome = tuple[Sequence[Any], list[KernelWork]]


class _Search:
    """A walk through a jaxpr that finds the kernels, with or without those of a backward pass."""

    def __init__(self, backward: bool) -> None:
        self._backward = backward
        # By the id of a jaxpr, which is kept here so that no other one gets its id.
        self._has_kernels: dict[int, tuple[Any, bool]] = {}
        self._equations: dict[int, tuple[Any, list[tuple[Any, list[Any]]]]] = {}
        self._of_unknown: dict[int, tuple[Any, _Outcome]] = {}

    def run(self, body: Any, given: Sequence[Any]) -> _Outcome:
        """Walks through a jaxpr that runs once.

        Args:
          body: a Jaxpr or a ClosedJaxpr.
          given: the values of its arguments, None if unknown.
        """
        if any(value is not None for value in given):
            return self._walk(body, given)
        # Layers run the same bodies on unknown arguments many times.
        if id(body) not in self._of_unknown:
            self._of_unknown[id(body)] = body, self._walk(body, given)
        return self._of_unknown[id(body)][1]

    def _walk(self, body: Any, given: Sequence[Any]) -> _Outcome:
        jaxpr = getattr(body, 'jaxpr', body)
        values: Values = dict(zip(jaxpr.constvars, getattr(body, 'consts', ()), strict=False))
        values |= {v: x for v, x in zip(jaxpr.invars, given, strict=True) if _fits(v, x)}
        kernels: list[KernelWork] = []
        for equation, bodies in self._list_equations(jaxpr):
            arguments = [value_of(atom, values) for atom in equation.invars]
            results, found = self._equation(equation, bodies, arguments)
            kernels += found
            values |= dict(zip(equation.outvars, results, strict=False))
        return [value_of(atom, values) for atom in jaxpr.outvars], kernels

    def _list_equations(self, jaxpr: Any) -> list[tuple[Any, list[Any]]]:
        """The equations of a jaxpr that count, with their bodies."""
        if id(jaxpr) not in self._equations:
            kept = [e for e in jaxpr.eqns if self._backward or not _is_backward(e)]
            self._equations[id(jaxpr)] = jaxpr, [(e, bodies_of(e.params)) for e in kept]
        return self._equations[id(jaxpr)][1]

    def _equation(self, equation: Any, bodies: Sequence[Any], arguments: list[Any]) -> _Outcome:
        name, params = equation.primitive.name, equation.params
        if name == 'pallas_call':
            flops = count_jaxpr_flops(params['jaxpr']) * _blocks(params)
            flops *= _share_of_blocks(params, arguments)
            return (), [_kernel(params['name'], equation, flops)]
        if name.startswith('dot_product_attention_'):
            return (), [_kernel(name, equation, _attention_flops(equation))]
        if name == 'scan':
            return (), self._scan(params, arguments)
        if name == 'cond':
            return self._cond(params, arguments)
        if not bodies:
            return evaluate(equation, arguments), []
        results: Sequence[Any] = ()
        kernels: list[KernelWork] = []
        for body in bodies:
            count = len(getattr(body, 'jaxpr', body).invars)
            fits = count == len(arguments)
            results, found = self.run(body, arguments if fits else [None] * count)
            kernels += found
        return results if len(results) == len(equation.outvars) else (), kernels

    def _scan(self, params: Mapping[str, Any], arguments: Sequence[Any]) -> list[KernelWork]:
        """A loop whose iterations differ only in a `cond` runs once for each iteration."""
        body, length = params['jaxpr'], params['length']
        constants, carried = _count_constants_and_carried(params)
        fixed = [*arguments[:constants], *[None] * carried]
        rows = arguments[constants + carried :]
        if not self._chooses_kernels(body):
            _, found = self.run(body, [*fixed, *[None] * len(rows)])
            return [_add([kernel], times=length) for kernel in found]
        return [
            kernel
            for i in range(length)
            for kernel in self.run(body, [*fixed, *[x if x is None else x[i] for x in rows]])[1]
        ]

    def _cond(self, params: Mapping[str, Any], arguments: Sequence[Any]) -> _Outcome:
        """Of branches that no constant decides between, the one with the most FLOPs runs."""
        branches, chosen = params['branches'], arguments[0]
        if chosen is None:
            chosen = int(np.argmax([count_jaxpr_flops(branch.jaxpr) for branch in branches]))
        return self.run(branches[min(int(chosen), len(branches) - 1)], arguments[1:])

    def _chooses_kernels(self, body: Any, inside: bool = False) -> bool:
        """Whether a jaxpr has a `cond` with a kernel in it."""
        if not inside and id(body) in self._has_kernels:
            return self._has_kernels[id(body)][1]
        found = False
        for equation in getattr(body, 'jaxpr', body).eqns:
            name = equation.primitive.name
            if name == 'pallas_call' or name.startswith('dot_product_attention_'):
                found |= inside
            else:
                within = inside or name == 'cond'
                found |= any(self._chooses_kernels(b, within) for b in bodies_of(equation.params))
        if not inside:
            self._has_kernels[id(body)] = body, found
        return found


def _kernel(name: Any, equation: Any, flops: float) -> KernelWork:
    arrays = [atom.aval for atom in (*equation.invars, *equation.outvars)]
    nbytes = sum(a.size * a.dtype.itemsize for a in arrays if hasattr(a, 'size'))
    return KernelWork(name=str(name), flops=flops, nbytes=nbytes, count=1)


def _add(kernels: Sequence[KernelWork], times: int = 1) -> KernelWork:
    """Kernels of the same name as one that runs as often as all of them, some times."""
    return KernelWork(
        name=kernels[0].name,
        flops=math.fsum(kernel.flops for kernel in kernels) * times,
        nbytes=math.fsum(kernel.nbytes for kernel in kernels) * times,
        count=sum(kernel.count for kernel in kernels) * times,
    )


def _is_backward(equation: Any) -> bool:
    """Whether the backward pass runs an equation."""
    stack = str(equation.source_info.name_stack)
    return 'transpose(' in stack or RECOMPUTED in stack


def _count_constants_and_carried(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many arguments of a `scan` all iterations share, and how many they pass on."""
    if 'num_consts' in params:
        return params['num_consts'], params['num_carry']
    constants, carried, _ = params['ft_in'].unpack()  # from jax 0.12 on
    return len(constants), len(carried)


def _fits(variable: Any, value: Any) -> bool:
    """Whether a value is whole inside of a body: a `shard_map` gives each device a part."""
    return value is not None and getattr(variable.aval, 'shape', None) == np.shape(value)


def _blocks(params: Mapping[str, Any]) -> int:
    return math.prod(n for n in params['grid_mapping'].grid if isinstance(n, int))


def _share_of_blocks(params: Mapping[str, Any], arguments: Sequence[Any]) -> float:
    """The share of the blocks of a kernel's grid that its mask does not rule out.

    Splash attention takes the mask of its blocks as its second argument, with 0 for blocks that it
    skips.
    """
    if not str(params['name']).startswith('splash'):
        return 1.0
    if arguments[1] is None:
        return _SHARE_OF_UNKNOWN_MASKS
    return float(np.mean(np.asarray(arguments[1]) != 0))


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
