"""Writes a traced function out as steps: calls in place, without results that nothing uses."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core

from meshwright.jaxpr.primitives import PAIRWISE
from meshwright.jaxpr.steps import (
    TO_GLOBAL,
    TO_LOCAL,
    Axes,
    Block,
    Step,
    Value,
    loop_counts,
)

# The parameters that hold the body of a primitive that calls a function once.
_CALLED = ('jaxpr', 'call_jaxpr', 'fun_jaxpr')
_NOT_CALLS = {'scan', 'while', 'cond', 'shard_map', 'pallas_call', 'custom_partitioning'}


def write_out(jaxpr: Any, sizes: Mapping[str, int]) -> Block:
    """Turns a ClosedJaxpr into steps. Called functions and shard_maps are written out in place.

    Args:
      jaxpr: the function.
      sizes: the size of each mesh axis. Those of size 1 divide nothing, and are left out.
    """
    block = _Writer(sizes, frozenset()).block(jaxpr)
    remove_unused(block)
    return block


def remove_unused(block: Block) -> None:
    """Removes the steps whose results nothing uses, as compilers do, also from the bodies."""
    used = set(map(id, block.outputs))
    kept = []
    for step in reversed(block.steps):
        if not any(id(output) in used for output in step.outputs) and not _has_effects(step):
            continue
        if step.name == 'scan':
            _drop_unused_stacks(step, used)
        for body in step.bodies:
            remove_unused(body)
        used.update(map(id, step.inputs))
        kept.append(step)
    block.steps = kept[::-1]


def _drop_unused_stacks(step: Step, used: set[int]) -> None:
    """Removes the stacked results of a scan that nothing uses."""
    (body,) = step.bodies
    _, count = loop_counts(step)
    keep = [i for i, output in enumerate(step.outputs) if i < count or id(output) in used]
    step.outputs = [step.outputs[i] for i in keep]
    body.outputs = [body.outputs[i] for i in keep]


def _has_effects(step: Step) -> bool:
    return step.equation is not None and bool(getattr(step.equation, 'effects', None))


class _Writer:
    """Writes out the equations of a jaxpr.

    Args:
      sizes: the size of each mesh axis.
      manual: the mesh axes of the shard_maps around them.
      stack: the names of the transformations and scopes around them.
    """

    def __init__(self, sizes: Mapping[str, int], manual: frozenset[str], stack: str = ''):
        self._sizes, self._manual, self._stack = sizes, manual, stack

    def block(self, jaxpr: Any) -> Block:
        inner, consts = _open(jaxpr)
        inputs = [self._new(var.aval) for var in inner.invars]
        steps: list[Step] = []
        outputs = self._write(inner, consts, inputs, steps)
        return Block(inputs, steps, outputs)

    def _write(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value], steps: list[Step]
    ) -> list[Value]:
        values: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for var in jaxpr.constvars:
            values[var] = self._new(var.aval)

        def read(atom: Any) -> Value:
            return self._new(atom.aval) if isinstance(atom, core.Literal) else values[atom]

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            results = self._step(equation, given, steps)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _step(self, equation: Any, given: list[Value], steps: list[Step]) -> list[Value]:
        name, params = equation.primitive.name, equation.params
        own = str(equation.source_info.name_stack)
        stack = '/'.join(filter(None, (self._stack, own)))
        inside = _Writer(self._sizes, self._manual, stack)
        if name == 'shard_map':
            return self._shard_map(equation, given, steps, stack)
        called = next((params[key] for key in _CALLED if key in params), None)
        if called is not None and name not in _NOT_CALLS:
            inner, consts = _open(called)
            if len(inner.invars) == len(given):
                return inside._write(inner, consts, given, steps)
        outputs = [self._new(var.aval) for var in equation.outvars]
        if name == 'sharding_constraint' and hasattr(params['sharding'], 'spec'):
            rank = len(outputs[0].shape)
            outputs[0].fix(spec_dims(params['sharding'].spec, rank, self._sizes))
        if name in PAIRWISE:  # one step per pair
            for one, other in zip(given, outputs, strict=True):
                steps.append(Step(name, params, [one], [other], (), 1, equation, stack))
            return outputs
        bodies: tuple[Block, ...] = ()
        times = 1
        if name == 'scan':
            bodies, times = (inside.block(params['jaxpr']),), params['length']
        elif name == 'while':
            # The condition is a comparison: only the body matters.
            given = given[params['cond_nconsts'] :]
            bodies = (inside.block(params['body_jaxpr']),)
        elif name == 'cond':
            bodies = tuple(map(inside.block, params['branches']))
        steps.append(Step(name, params, given, outputs, bodies, times, equation, stack))
        return outputs

    def _shard_map(
        self, equation: Any, given: list[Value], steps: list[Step], stack: str
    ) -> list[Value]:
        params = equation.params
        manual = frozenset(params['newly_manual_axes'])
        inner, consts = _open(params['jaxpr'])
        inside = _Writer(self._sizes, self._manual | manual, stack)
        inputs = []
        for value, spec, var in zip(given, params['in_specs'], inner.invars, strict=True):
            whole, local = self._new(var.aval, value.shape), inside._new(var.aval)
            whole.fix(self._border(spec, len(whole.shape), params))
            border = (), 1, equation, stack
            steps.append(Step('sharding_constraint', {}, [value], [whole], *border))
            steps.append(Step(TO_LOCAL, {'axes': manual}, [whole], [local], *border))
            inputs.append(local)
        outputs = []
        results = inside._write(inner, consts, inputs, steps)
        for local, spec, var in zip(results, params['out_specs'], equation.outvars, strict=True):
            whole = self._new(var.aval)
            whole.fix(self._border(spec, len(whole.shape), params))
            steps.append(
                Step(TO_GLOBAL, {'axes': manual}, [local], [whole], (), 1, equation, stack)
            )
            outputs.append(whole)
        return outputs

    def _border(self, spec: Any, rank: int, params: Mapping[str, Any]) -> list[Axes | None]:
        """The layout of an array at the border of a shard_map, whose other axes stay open."""
        inside = self._manual | frozenset(params['newly_manual_axes'])
        dims = spec_dims(spec, rank, self._sizes)
        whole = inside >= set(params['mesh'].axis_names)
        return dims if whole else [axes or None for axes in dims]

    def _new(self, aval: Any, shape: tuple[int, ...] | None = None) -> Value:
        shape = tuple(getattr(aval, 'shape', ())) if shape is None else shape
        dtype = getattr(aval, 'dtype', np.dtype('bool'))  # tokens have none
        on_host = _is_on_host(getattr(aval, 'memory_space', None))
        rank = len(shape)
        return Value(shape, dtype, [None] * rank, [False] * rank, self._manual, on_host)


@functools.cache
def _is_on_host(memory_space: Any) -> bool:
    """Whether a memory space of jax is that of the host. Their names take long to make."""
    return 'host' in str(memory_space).lower()


def _open(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr in a ClosedJaxpr and its constants; a Jaxpr has none."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, 'jaxpr') else (jaxpr, ())


def spec_dims(spec: Any, rank: int, sizes: Mapping[str, int]) -> list[Axes | None]:
    """The mesh axes of each dimension in a PartitionSpec; None for those that it leaves open."""
    found: list[Axes | None] = []
    for entry in [*spec, *(None,) * (rank - len(spec))]:
        if entry is None or isinstance(entry, str | tuple):
            axes = (entry,) if isinstance(entry, str) else entry or ()
            found.append(tuple(axis for axis in axes if sizes.get(axis, 1) > 1))
        else:
            found.append(None)  # UNCONSTRAINED
    return found
