"""A traced function with a change: with other constraints, or with other layouts of its arguments.

Nothing of the user's code runs again. The equations of the trace are edited, and what the function
says about its arguments and results is replaced.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.advice.state_pairs import pair_results
from meshwright.causes.cause import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    JoinedChange,
    LayoutChange,
    SplitChange,
    StateChange,
)
from meshwright.causes.editing import edit_jaxpr, with_bodies
from meshwright.jax_private import TracedCall, evaluate, trace_again
from meshwright.jaxpr.naming import TracedValues, shared_end
from meshwright.jaxpr.primitives import ARITHMETIC
from meshwright.jaxpr.values import Axes, Value
from meshwright.jaxpr.writing_out import write_out
from partitioning.plan.rows import PlanRow
from partitioning.products.flops import bodies_of
from partitioning.rules import from_tuple

Layout = tuple[Axes, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A function, and what is known of its arguments and results.

    Attributes:
      call: the trace.
      mesh: the mesh.
      rows: the layout of each array of the arguments.
      parameter_of: the path of the parameter that each array of the optimizer belongs to.
      returned: for each result, the path of the argument that it replaces; '' for other results.
      replaced: the same, with the path of the parameter in place of an array of the optimizer.
      helpers: lines that only lay out what they are given, which stand for their callers.
    """

    call: TracedCall
    mesh: Mesh
    rows: tuple[PlanRow | None, ...]
    parameter_of: Mapping[str, str]
    returned: tuple[str, ...]
    replaced: tuple[str, ...]
    helpers: frozenset[str] | None = None

    @property
    def by_path(self) -> dict[str, PlanRow]:
        """The rows of the arguments by their paths."""
        return {row.path: row for row in self.rows if row is not None}


def make_subject(
    call: TracedCall, mesh: Mesh, rows: Sequence[PlanRow | None], traced: TracedValues
) -> Subject:
    """Finds which parameter each array of the optimizer belongs to, and what results replace.

    Args:
      call: the trace.
      mesh: the mesh.
      rows: the layout of each array of the arguments.
      traced: the values of the trace, with their names.
    """
    known = {row.path: row for row in rows if row is not None}
    owners = find_owners(known, traced.values)
    paths = [row.path if row is not None else f'argument {n}' for n, row in enumerate(rows)]
    pairs = pair_results(call, write_out(call.jaxpr), paths)
    returned = tuple(
        paths[pairs[number]] if number in pairs else value.update_of or value.argument
        for number, value in enumerate(traced.results)
    )
    return Subject(
        call=call,
        mesh=mesh,
        rows=tuple(rows),
        parameter_of=owners,
        returned=returned,
        replaced=tuple(owners.get(path, path) for path in returned),
        helpers=traced.helpers,
    )


def find_owners(rows: Mapping[str, PlanRow], values: Iterable[Value]) -> dict[str, str]:
    """Finds the parameter of each array of the optimizer, by its path or by what updates it.

    Args:
      rows: the layout of each argument, by its path.
      values: the values of the function, with their names.
    """
    together: dict[str, list[str]] = collections.defaultdict(list)
    for value in values:
        if value.primitive in ARITHMETIC and value.update_of:
            paths = {o.update_of or o.gradient_of or o.argument for o in value.operands}
            held = [rows[path] for path in paths if path in rows]
            owners = [row.path for row in held if row.role == 'parameters']
            for row in held:
                together[row.path] += owners if row.role == 'optimizer' else []
    found = dict[str, str]()
    for row in rows.values():
        if row.role != 'optimizer' or not row.shape:
            continue
        like = [r for r in rows.values() if r.role == 'parameters' and r.shape == row.shape]
        own = row.path.split('/')
        ends = {r.path: shared_end(r.path.split('/'), own) for r in like}
        longest = [path for path, n in ends.items() if n and n == max(ends.values())]
        named = [path for path in together[row.path] if path in ends]
        owner = longest if len(longest) == 1 else [p for p in named if p in longest] or named
        if owner:
            found[row.path] = owner[0]
    return found


def with_change(subject: Subject, change: Change) -> TracedCall | None:
    """The function with a change, traced but not lowered; None if the change cannot be made here.

    Raises:
      ValueError: if the change does not fit the function.
    """
    if isinstance(change, JoinedChange):
        call: TracedCall | None = subject.call
        for part in change.parts:
            if call is not None:
                call = with_change(dataclasses.replace(subject, call=call), part)
        return call
    if isinstance(change, ConstraintChange | ConstraintRemoval):
        edited = edit_jaxpr(subject.call.jaxpr, change, subject.mesh, subject.helpers)
        return _again(subject.call, jaxpr=edited)
    if isinstance(change, SplitChange):
        return with_splits(subject.call, change)
    if isinstance(change, LayoutChange):
        return _with_layouts(subject, *_layouts_of(subject, change))
    if isinstance(change, StateChange):
        return _with_layouts(subject, dict(change.layouts), dict(change.results))
    return None


def with_splits(call: TracedCall, change: SplitChange) -> TracedCall:
    """The function whose dimensions are split into their parts in another order.

    Raises:
      ValueError: if it has no such split.
    """
    return _again(call, jaxpr=edit_splits(call.jaxpr, change))


def _layouts_of(
    subject: Subject, change: LayoutChange
) -> tuple[dict[str, Layout], dict[int, Layout]]:
    """The layouts that a change gives to arguments and results: moments follow their parameters."""
    if change.result is not None:
        return {}, {change.result: change.layout}
    paths = {change.path, *change.likewise}
    paths |= {moment for moment, owner in subject.parameter_of.items() if owner in paths}
    return dict.fromkeys(paths, change.layout), {}


def _with_layouts(
    subject: Subject, layouts: Mapping[str, Layout], results: Mapping[int, Layout]
) -> TracedCall:
    """The function with other layouts of arguments, and of the results in their place."""
    call, mesh = subject.call, subject.mesh
    given, returned = list(call.arguments), list(call.results)
    before: dict[tuple[str, tuple[int, ...], str], Any] = {}
    for number, row in enumerate(subject.rows):
        if row is None or row.path not in layouts:
            continue
        new = _sharding(mesh, layouts[row.path], given[number])
        owner = subject.parameter_of.get(row.path, row.path)
        before[owner, tuple(row.shape), _spec_of(given[number], len(row.shape))] = new
        given[number] = new
    for number, aval in enumerate(call.jaxpr.out_avals):
        held = returned[number]
        key = (subject.replaced[number], tuple(aval.shape), _spec_of(held, len(aval.shape)))
        if number in results:
            returned[number] = _sharding(mesh, results[number], held)
        elif isinstance(held, NamedSharding) and key in before:
            returned[number] = before[key]
    return _again(call, arguments=tuple(given), results=tuple(returned))


def _spec_of(sharding: Any, rank: int) -> str:
    spec = sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
    return str(PartitionSpec(*spec, *[None] * (rank - len(spec))))


def _sharding(mesh: Mesh, layout: Layout, before: Any) -> NamedSharding:
    kind = getattr(before, 'memory_kind', None)
    spec = PartitionSpec(*(from_tuple(axes) for axes in layout))
    return NamedSharding(mesh, spec, memory_kind=kind)


def _again(call: TracedCall, **changes: Any) -> TracedCall:
    """The call with other equations or layouts, which is traced again when it is lowered."""
    changed = dataclasses.replace(call, **changes)

    def lower() -> Any:
        jaxpr = changed.jaxpr

        def function(*args: Any) -> list[Any]:
            return evaluate(jaxpr.jaxpr, jaxpr.consts, args)

        return trace_again(changed, function, lambda sharding: sharding).lower()

    return dataclasses.replace(changed, lower=lower)


def edit_splits(jaxpr: Any, change: SplitChange) -> Any:
    """Returns a ClosedJaxpr whose reshapes split and merge in another order.

    For a split of 512 features into 64 elements of 8 heads, with the heads first, and for merges of
    the same parts in the forward and in the backward pass:

        b = reshape[(4, 64, 8)] a    ->  t = reshape[(4, 8, 64)] a;  b = transpose[(0, 2, 1)] t
        d = reshape[(4, 512)] c      ->  t = transpose[(0, 2, 1)] c;  d = reshape[(4, 512)] t

    Args:
      jaxpr: the ClosedJaxpr.
      change: the reshapes and the order of their parts.

    Raises:
      ValueError: if it has none of the reshapes.
    """
    editor = _Editor(change)
    edited = jaxpr.replace(jaxpr=editor.edit(jaxpr.jaxpr))
    if not editor.count:
        raise ValueError(f'no reshape of {change.source} matches "{change}"')
    return edited


class _Editor:
    def __init__(self, change: SplitChange):
        self._splits = {(before, after): order for before, after, order in change.splits}
        self.count = 0

    def edit(self, jaxpr: Any) -> Any:
        equations: list[Any] = []
        for equation in jaxpr.eqns:
            if bodies_of(equation):
                equations.append(with_bodies(equation, self.edit))
            else:
                equations += self._reorder(equation)
        return jaxpr.replace(eqns=equations)

    def _reorder(self, equation: Any) -> list[Any]:
        """The equations in place of one: a reshape and a move of its parts, or itself."""
        if equation.primitive.name != 'reshape' or equation.params.get('dimensions') is not None:
            return [equation]
        given, made = equation.invars[0].aval, equation.outvars[0].aval
        split = self._splits.get((tuple(given.shape), tuple(made.shape)))
        merged = self._splits.get((tuple(made.shape), tuple(given.shape)))
        if split is not None:
            new = tuple(made.shape[d] for d in split)
            back = tuple(int(d) for d in np.argsort(split))
            written = jax.make_jaxpr(lambda x: x.reshape(new).transpose(back))
        elif merged is not None:
            written = jax.make_jaxpr(lambda x: x.transpose(merged).reshape(made.shape))
        else:
            return [equation]
        self.count += 1
        found = written(jax.ShapeDtypeStruct(given.shape, given.dtype)).jaxpr.eqns
        info = {'source_info': equation.source_info}
        first = found[0].replace(invars=[equation.invars[0]], **info)
        last = found[-1].replace(outvars=list(equation.outvars), **info)
        return [first, last]
