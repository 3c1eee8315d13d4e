"""Turns a traced function into steps, with calls inlined, unused results and zeros removed.

jit(f)(x) = jit(g)(x) + 1        becomes        tanh  x -> a
jit(g)(x) = tanh(x)                             add   a, 1 -> b
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from meshwright.jaxpr.primitives import PAIRWISE
from meshwright.jaxpr.values import (
    TO_GLOBAL,
    TO_LOCAL,
    Axes,
    Block,
    Place,
    Step,
    Value,
    loop_counts,
)
from meshwright.jaxpr.zeros import drop_zeros
from partitioning.hardware.jax_private import manual_axes
from partitioning.products.flops import count_runs, open_jaxpr

_NOT_CALLS = {'scan', 'while', 'cond', 'shard_map', 'pallas_call', 'custom_partitioning'}


def write_out(
    jaxpr: Any, sizes: Mapping[str, int] | None = None, *, with_unused: bool = False
) -> Block:
    """Turns a ClosedJaxpr into steps. Called functions and shard_maps are written out in place.

    Args:
      jaxpr: the function.
      sizes: the size of each mesh axis. Axes of size 1 divide nothing, and are left out.
      with_unused: whether to keep steps whose results nothing uses, and additions of zeros.
    """
    block = _Writer(sizes or {}, frozenset(), Place()).block(jaxpr)
    if not with_unused:
        drop_zeros(block)
        remove_unused(block)
    return block


def remove_unused(block: Block) -> None:
    """Removes steps whose results nothing uses, as compilers do, from a block and its bodies."""
    used = set(map(id, block.outputs))
    kept = []
    for step in reversed(block.steps):
        is_used = any(id(output) in used for output in step.outputs)
        if not is_used and not getattr(step.place.equation, 'effects', None):
            continue
        if step.name == 'scan':
            _drop_unused_stacks(step, used)
        for body in step.bodies:
            remove_unused(body)
        used.update(map(id, step.inputs))
        kept.append(step)
    block.steps = kept[::-1]


def _drop_unused_stacks(step: Step, used: set[int]) -> None:
    (body,) = step.bodies
    _, count = loop_counts(step)
    keep = [i for i, output in enumerate(step.outputs) if i < count or id(output) in used]
    step.outputs = [step.outputs[i] for i in keep]
    body.outputs = [body.outputs[i] for i in keep]


class _Writer:
    """Writes out the equations of a jaxpr.

    Args:
      sizes: the size of each mesh axis.
      manual: the mesh axes of the shard_maps around them.
      around: the place of the call or loop around them.
    """

    def __init__(self, sizes: Mapping[str, int], manual: frozenset[str], around: Place):
        self._sizes, self._manual, self._around = sizes, manual, around

    def block(self, jaxpr: Any) -> Block:
        inner, consts = open_jaxpr(jaxpr)
        inputs = [self._new(var.aval) for var in inner.invars]
        steps: list[Step] = []
        outputs = self._write(inner, consts, inputs, steps)
        return Block(inputs, steps, outputs)

    def _write(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], steps: list[Step]
    ) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, constant in itertools.zip_longest(jaxpr.constvars, consts):
            values[var] = self._new(var.aval, constant=constant)

        def read(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                return self._new(atom.aval, constant=atom.val)
            return values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            results = self._step(equation, given, steps)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, equation: Any, given: list[Value], steps: list[Step]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        own = str(equation.source_info.name_stack)
        path = '/'.join(filter(None, (self._around.path, own)))
        place = Place(path, self._around.functions, equation, self._around)
        if name == 'shard_map':
            return self._shard_map(equation, given, steps, place)
        called = params.get('jaxpr', params.get('call_jaxpr', params.get('fun_jaxpr')))
        if called is not None and name not in _NOT_CALLS:
            inner, consts = open_jaxpr(called)
            if len(inner.invars) == len(given):
                functions = place.functions | {str(params.get('name', ''))}
                within = dataclasses.replace(place, functions=functions)
                return self._at(within)._write(inner, consts, given, steps)
        outputs = [self._new(var.aval) for var in equation.outvars]
        if name == 'sharding_constraint' and hasattr(params['sharding'], 'spec'):
            rank = len(outputs[0].shape)
            outputs[0].fix(spec_axes(params['sharding'].spec, rank, self._sizes))
        if name in PAIRWISE:  # one step per pair
            for number, (one, other) in enumerate(zip(given, outputs, strict=True)):
                about = params if len(given) == 1 else {**params, 'number': number}
                steps.append(Step(name, about, [one], [other], place=place))
            return outputs
        jaxprs: Sequence[Any] = ()
        if name == 'scan':
            jaxprs = (params['jaxpr'],)
        elif name == 'while':
            # The condition is a comparison: only the body matters.
            given = given[params['cond_nconsts'] :]
            jaxprs = (params['body_jaxpr'],)
        elif name == 'cond':
            jaxprs = params['branches']
        bodies = tuple(self._at(place).block(body) for body in jaxprs)
        times = count_runs(equation) if name == 'scan' else 1
        steps.append(Step(name, params, given, outputs, bodies, times, place))
        return outputs

    def _at(self, place: Place, manual: frozenset[str] = frozenset()) -> _Writer:
        """Writes out what is inside of a call, a loop or a shard_map."""
        return _Writer(self._sizes, self._manual | manual, place)

    def _shard_map(
        self, equation: Any, given: list[Value], steps: list[Step], place: Place
    ) -> list[Value]:
        params = equation.params
        manual = manual_axes(params)
        inner, consts = open_jaxpr(params['jaxpr'])
        inside = self._at(place, manual)
        inputs = []
        triples = zip(given, params['in_specs'], inner.invars, strict=True)
        for number, (value, spec, var) in enumerate(triples):
            whole, local = self._new(var.aval, value.shape), inside._new(var.aval)
            whole.fix(self._border(spec, len(whole.shape), params))
            stated = Step('sharding_constraint', {}, [value], [whole], place=place, is_border=True)
            about = {'axes': manual, 'number': number}
            border = Step(TO_LOCAL, about, [whole], [local], place=place, is_border=True)
            steps += [stated, border]
            inputs.append(local)
        outputs = []
        results = inside._write(inner, consts, inputs, steps)
        triples = zip(results, params['out_specs'], equation.outvars, strict=True)
        for number, (local, spec, var) in enumerate(triples):
            whole = self._new(var.aval)
            whole.fix(self._border(spec, len(whole.shape), params))
            about = {'axes': manual, 'number': number}
            steps.append(Step(TO_GLOBAL, about, [local], [whole], place=place, is_border=True))
            outputs.append(whole)
        return outputs

    def _border(self, spec: Any, rank: int, params: Mapping[str, Any]) -> list[Axes | None]:
        """The layout of an array at the border of a shard_map; other axes stay open."""
        inside = self._manual | manual_axes(params)
        found = spec_axes(spec, rank, self._sizes)
        is_whole = inside >= set(params['mesh'].axis_names)
        return found if is_whole else [axes or None for axes in found]

    def _new(self, aval: Any, shape: tuple[int, ...] | None = None, constant: Any = None) -> Value:
        shape = tuple(getattr(aval, 'shape', ())) if shape is None else shape
        dtype = getattr(aval, 'dtype', np.dtype('bool'))  # tokens have no dtype
        on_host = _is_on_host(getattr(aval, 'memory_space', None))
        axes: list[Axes | None] = [None] * len(shape)
        fixed, dims = [False] * len(shape), (None,) * len(shape)
        return Value(shape, dtype, axes, fixed, dims, self._manual, on_host, constant)


@functools.cache
def _is_on_host(memory_space: Any) -> bool:
    """Whether a memory space of jax is the host's. Cached, because making the name is slow."""
    return 'host' in str(memory_space).lower()


def spec_axes(spec: Any, rank: int, sizes: Mapping[str, int]) -> list[Axes | None]:
    """The mesh axes of each dimension in a PartitionSpec; None for those that it leaves open."""
    found: list[Axes | None] = []
    for entry in [*spec, *(None,) * (rank - len(spec))]:
        if entry is None or isinstance(entry, str | tuple):
            axes = (entry,) if isinstance(entry, str) else entry or ()
            found.append(tuple(axis for axis in axes if sizes.get(axis, 1) > 1))
        else:
            found.append(None)  # UNCONSTRAINED
    return found
