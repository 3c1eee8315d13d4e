"""Traces a function again, with some of its equations in another form, to compile and compare it.

A sum over devices in a loop, which could be made once after it, is a change of the code that only
its author can write. Its effect can be seen all the same: the trace is evaluated again, and the
edited equations do what they would do in the new code.

    scan body:  s = psum g;  t2 = add t s        scan body:  t2 = add t g;    after it:  psum t

Equations without an edit, around or inside of them, are evaluated as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.jax_private import TracedCall, at_line_of, bind, trace_again
from meshwright.jaxpr.primitives import CHECKPOINTS, PSUMS
from partitioning.hardware.jax_private import manual_axes
from partitioning.products.flops import bodies_of, count_scan_arguments, open_jaxpr

# Does what an equation does in another way: of the trace, the equation, and its operands.
Edit = Callable[['Rewriting', Any, list[Any]], list[Any]]
CALLS = ('jit', 'pjit', 'closed_call', 'core_call', 'custom_jvp_call', 'custom_vjp_call')
_AGAIN = (*CALLS, *CHECKPOINTS, 'scan', 'while', 'cond', 'shard_map')
_MARKS = ('pvary', 'pbroadcast', 'pcast')  # they say along which axes arrays differ
_SAME = (*PSUMS, 'pmax', 'pmin')  # of what is the same everywhere


def rewrite(call: TracedCall, edits: Mapping[int, Edit]) -> TracedCall:
    """The function with edits, traced but not lowered.

    Args:
      call: the function.
      edits: what to do in place of equations, by their ids.

    Raises:
      ValueError: if an edit is inside of an operation that cannot be traced again.
    """
    jaxpr, consts = open_jaxpr(call.jaxpr)

    def function(*args: Any) -> list[Any]:
        return Rewriting(edits).run(jaxpr, consts, args)

    return trace_again(call, function, lambda sharding: sharding)


class Rewriting:
    """Evaluates a trace with edits.

    In a shard_map that is traced again, arrays do not say along which axes they differ, because an
    edit may change that.

    Args:
      edits: what to do in place of equations, by their ids.
      is_inside: whether it evaluates what is inside of a shard_map.
      without: a mesh axis that the shard_map does not take apart any more; '' for none.
    """

    def __init__(self, edits: Mapping[int, Edit], *, is_inside: bool = False, without: str = ''):
        self._edits, self._is_inside, self._without = dict(edits), is_inside, without
        self._is_concerned: dict[int, bool] = {}

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Does what a Jaxpr does."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, core.Literal):
                return values[atom]
            # A constant remembers the mesh of its first use. A copy does not.
            aval: Any = atom.aval
            return np.array(atom.val, aval.dtype) if self._is_inside else atom.val

        for equation in jaxpr.eqns:
            made = self.do(equation, [read(atom) for atom in equation.invars])
            values.update(zip(equation.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def body(self, jaxpr: Any) -> Callable[..., tuple[Any, ...]]:
        """A function that does what the body of an equation does."""
        opened, consts = open_jaxpr(jaxpr)
        return lambda *args: tuple(self.run(opened, consts, args))

    @contextlib.contextmanager
    def also(self, edits: Mapping[int, Edit]) -> Iterator[None]:
        """Has further edits for a while."""
        before, self._edits = self._edits, {**self._edits, **edits}
        self._is_concerned = {}
        try:
            yield
        finally:
            self._edits = before

    def do(self, equation: Any, args: list[Any]) -> list[Any]:
        """Does what an equation does, or its edit."""
        if (edit := self._edits.get(id(equation))) is not None:
            with at_line_of(equation):
                return edit(self, equation, args)
        if self._is_inside:
            return self._do_inside(equation, args)
        if self._concerns(equation):
            with at_line_of(equation):
                return self.again(equation, args)
        return bind(equation, args)

    def _do_inside(self, equation: Any, args: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if self._without and _names_axis(equation, self._without):
            return _without_axis(equation, args, self._without)
        if bodies_of(equation) and (self._concerns(equation) or name in _AGAIN):
            with at_line_of(equation):
                return self.again(equation, args)
        if name in _MARKS:
            return args
        with at_line_of(equation):
            if name == 'psum_invariant':
                return list(jax.lax.psum(args, params['axes']))
            if name == 'all_gather_invariant':
                d, tiled = params['all_gather_dimension'], params['tiled']
                return [jax.lax.all_gather(args[0], params['axis_name'], axis=d, tiled=tiled)]
        if self._without:
            params = {n: self._automatic(value) for n, value in params.items()}
        return bind(equation.replace(params=params), args, in_context=not self._without)

    def _automatic(self, param: Any) -> Any:
        """A parameter of an equation; a sharding is of a mesh with an automatic axis."""
        if not isinstance(param, NamedSharding):
            return param
        types = zip(param.mesh.axis_names, param.mesh.axis_types, strict=True)
        kinds = tuple(AxisType.Auto if name == self._without else kind for name, kind in types)
        mesh = param.mesh.abstract_mesh.update(axis_types=kinds)
        return NamedSharding(mesh, param.spec, memory_kind=param.memory_kind)

    def _concerns(self, equation: Any) -> bool:
        """Whether an edit is inside of an equation."""
        if (known := self._is_concerned.get(id(equation))) is None:
            inner = (e for body in bodies_of(equation) for e in open_jaxpr(body)[0].eqns)
            known = any(id(e) in self._edits or self._concerns(e) for e in inner)
            self._is_concerned[id(equation)] = known
        return known

    def again(self, equation: Any, args: list[Any]) -> list[Any]:
        """Does what an equation does with its bodies, which are traced again."""
        name, params = equation.primitive.name, equation.params
        if name == 'scan':
            return list(scan(equation, args, self.body(params['jaxpr'])))
        if name == 'while':
            counts = params['cond_nconsts'], params['body_nconsts']
            condition, consts, carry = _cut(args, *counts)
            test, body = self.body(params['cond_jaxpr']), self.body(params['body_jaxpr'])
            return list(
                jax.lax.while_loop(
                    lambda c: test(*condition, *c)[0], lambda c: body(*consts, *c), tuple(carry)
                )
            )
        if name == 'cond':
            branches = [self.body(branch) for branch in params['branches']]
            return list(jax.lax.switch(args[0].astype('int32'), branches, *args[1:]))
        if name == 'shard_map':
            return self.map_shards(equation, args)
        if name in (*CALLS, *CHECKPOINTS) and bodies_of(equation):
            if name in CHECKPOINTS and params.get('differentiated') and params.get('prevent_cse'):
                args = list(jax.lax.optimization_barrier(args))
            return list(self.body(bodies_of(equation)[0])(*args))
        raise ValueError(f'{name} cannot be traced again')

    def map_shards(self, equation: Any, args: Sequence[Any], without: str = '') -> list[Any]:
        """Does what a shard_map does, automatic along a mesh axis if one is given."""
        params, gone = equation.params, {without, self._without}
        axes = manual_axes(params) - gone
        inner = Rewriting(self._edits, is_inside=True, without=without or self._without)
        body = inner.body(params['jaxpr'])
        if not axes:
            return list(body(*args))
        in_specs, out_specs = (
            tuple(_leave_out(spec, gone) for spec in params[name])
            for name in ('in_specs', 'out_specs')
        )
        mapped = jax.shard_map(
            body,
            mesh=params['mesh'],
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axes,
            check_vma=False,
        )
        return list(mapped(*args))


def scan(equation: Any, args: Sequence[Any], body: Callable[..., Sequence[Any]]) -> tuple[Any, ...]:
    """Does what a scan does with another body, which is given constants, carry and slices."""
    params = equation.params
    consts, carry, slices = _cut(args, *count_scan_arguments(params))

    def iteration(c: Any, xs: Any) -> Any:
        made = body(*consts, *c, *xs)
        return tuple(made[: len(carry)]), tuple(made[len(carry) :])

    last, stacked = jax.lax.scan(
        iteration,
        tuple(carry),
        tuple(slices),
        length=params['length'],
        reverse=params['reverse'],
        unroll=params['unroll'],
    )
    return (*last, *stacked)


def _cut(args: Sequence[Any], first: int, second: int) -> tuple[Sequence[Any], ...]:
    return args[:first], args[first : first + second], args[first + second :]


def make_automatic(axis: str, constrain: Callable[[Any, int, bool], Any] | None = None) -> Edit:
    """An edit of a shard_map that leaves the work along a mesh axis to the compiler.

    A shard_map whose specs do not use an axis does the same on all devices along it. If its
    arguments are sharded along it, and the compiler divides its work, a device does what it would
    do if the specs had the axis.

    Args:
      axis: the mesh axis.
      constrain: lays out an argument or a result, by its number and whether it is an argument.
    """

    def edit(rewriting: Rewriting, equation: Any, args: list[Any]) -> list[Any]:
        if constrain is not None:
            args = [constrain(arg, n, True) for n, arg in enumerate(args)]
        made = rewriting.map_shards(equation, args, axis)
        if constrain is not None:
            made = [constrain(one, n, False) for n, one in enumerate(made)]
        return made

    return edit


def _leave_out(spec: Any, gone: set[str]) -> Any:
    """A spec without mesh axes."""
    kept = []
    for own in spec:
        if isinstance(own, tuple):
            own = tuple(axis for axis in own if axis not in gone) or None
        kept.append(None if isinstance(own, str) and own in gone else own)
    return PartitionSpec(*kept)


def axes_of(equation: Any) -> tuple[str, Any]:
    """The parameter of an exchange that has its mesh axes, and what it is."""
    for name in ('axes', 'axis_name', 'axis_names'):
        found = equation.params.get(name)
        if isinstance(found, str) or (
            isinstance(found, tuple) and found and all(isinstance(axis, str) for axis in found)
        ):
            return name, found
    return '', ()


def _names_axis(equation: Any, axis: str) -> bool:
    _, axes = axes_of(equation)
    return axis == axes or (isinstance(axes, tuple) and axis in axes)


def _without_axis(equation: Any, args: list[Any], axis: str) -> list[Any]:
    """Does what a sum does without a mesh axis, along which all devices have the same."""
    name, axes = axes_of(equation)
    if equation.primitive.name not in (*_MARKS, *_SAME):
        raise ValueError(f'{equation.primitive.name} uses {axis!r}')
    kept = tuple(one for one in axes if one != axis) if isinstance(axes, tuple) else ()
    if not kept or equation.primitive.name in _MARKS:
        return args
    if equation.primitive.name == 'psum_invariant':
        return list(jax.lax.psum(args, kept))
    changed = equation.replace(params={**equation.params, name: kept})
    return bind(changed, args, in_context=False)
