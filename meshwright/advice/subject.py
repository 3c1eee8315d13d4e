"""A traced function, what is known of its state, and the same function with a change.

Nothing of the user's code runs again. The equations of the trace are edited, and what the function
says about its arguments and results is replaced. For `train_step(state, batch)` that returns
`(state, loss)`, result 0 has the paths of the argument `state`, and each array of it is computed
from the array with the same path, element by element:

    state['w'] -> sub -> result[0]['w']       is the next call's state['w']
    state['w'] -> dot_general -> result[1]    is not: a gradient or a loss
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.calls.plain_call import jax_paths, parts_of_name
from meshwright.causes.cause import (
    Change,
    ConstraintChange,
    ConstraintRemoval,
    JoinedChange,
    LayoutChange,
    SplitChange,
    StateChange,
)
from meshwright.causes.editing import edit_jaxpr, edit_splits
from meshwright.jax_private import TracedCall, evaluate, trace_again
from meshwright.jaxpr.naming import TracedValues, shared_end
from meshwright.jaxpr.primitives import ARITHMETIC, ELEMENTWISE, MOVES, SCATTERS, names_in
from meshwright.jaxpr.values import Axes, Block, Value, carries, ties
from meshwright.jaxpr.writing_out import write_out
from partitioning.plan.rows import PlanRow
from partitioning.rules import from_tuple

# A result of these replaces their first operand, as in a cache.
UPDATES = SCATTERS | names_in('dynamic_update_slice')
_KEEPING = ELEMENTWISE | MOVES | names_in('random_fold_in random_split cond while')
_CHANGED_SHAPE = names_in('slice dynamic_slice squeeze reshape transpose expand_dims gather')
Layout = tuple[Axes, ...]
Path = tuple[str, ...]


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
        return _again(subject.call, jaxpr=edit_splits(subject.call.jaxpr, change))
    if isinstance(change, LayoutChange):
        return _with_layouts(subject, *_layouts_of(subject, change))
    if isinstance(change, StateChange):
        return _with_layouts(subject, dict(change.layouts), dict(change.results))
    return None


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


def pair_results(call: TracedCall, block: Block, paths: Sequence[str]) -> dict[int, int]:
    """Returns the number of the argument of each result that the next call of a function takes.

    Args:
      call: the trace of the function.
      block: its steps, without exchanges.
      paths: the path of each argument, as the user sees it.
    """
    by_user = [tuple(path.split('/')) for path in paths]
    pairs = zip(jax_paths(call), by_user, strict=True)
    known = [[by_jax, path, ('', *path)] for by_jax, path in pairs]
    return pair_state(block, known, [parts_of_name(name) for name in call.result_names])


def pair_state(
    block: Block, argument_paths: Sequence[Sequence[Path]], result_paths: Sequence[Path]
) -> dict[int, int]:
    """Returns the number of the argument of each result that the next call takes.

    Args:
      block: the steps of the function, without exchanges.
      argument_paths: for each argument, its possible paths: by jax's names or by the user's.
      result_paths: the path of each result, which begins with 'result' and positions.
    """
    sources = _Sources(block)
    found: dict[int, list[int]] = {}
    for number, path in enumerate(result_paths):
        made = block.outputs[number]
        near = [i for i in sources.of(made) if block.inputs[i].shape == made.shape]
        named = [i for i in near if any(_fits(path, own) for own in argument_paths[i])]
        if named:
            found[number] = named
    pairs: dict[int, int] = {}
    while found:  # results that can be one argument only come first
        number = min(found, key=lambda n: (len(found[n]), n))
        candidates = found.pop(number)
        longest = max(
            candidates,
            key=lambda i: max(shared_end(result_paths[number], p) for p in argument_paths[i]),
        )
        pairs[number] = longest
        found = {
            n: left for n, given in found.items() if (left := [i for i in given if i != longest])
        }
    return pairs


def _fits(result: Path, argument: Path) -> bool:
    """Whether a result can be an argument: ('result', '0', 'w') and ('state', 'w')."""
    tail = argument[1:]
    before = result[: len(result) - len(tail)]
    return result[len(before) :] == tail and bool(before) and all(p.isdigit() for p in before[1:])


class _Sources:
    """Finds the arguments from which a value is computed element by element."""

    def __init__(self, block: Block):
        self._from: dict[int, list[Value]] = {}
        self._inputs = {id(value): i for i, value in enumerate(block.inputs)}
        self._read(block)

    def of(self, value: Value) -> list[int]:
        """The numbers of these arguments."""
        found, seen, waiting = list[int](), set[int](), [value]
        while waiting:
            one = waiting.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if id(one) in self._inputs:
                found.append(self._inputs[id(one)])
            waiting += self._from.get(id(one), [])
        return sorted(found)

    def _read(self, block: Block) -> None:
        for step in block.steps:
            if step.bodies:
                for body in step.bodies:
                    self._read(body)
                for tie in ties(step):
                    if not tie.stacked:
                        source, made = (
                            (tie.inner, tie.outer) if tie.output else (tie.outer, tie.inner)
                        )
                        self._add(made, source)
                for given, returned in carries(step):
                    self._add(given, returned)
            elif step.name in UPDATES:
                self._add(step.outputs[0], step.inputs[0])
            elif step.name in _KEEPING or step.is_border:
                for made, source in _of_equal_shape(step.inputs, step.outputs, step.name):
                    self._add(made, source)

    def _add(self, made: Value, source: Value) -> None:
        self._from.setdefault(id(made), []).append(source)


def _of_equal_shape(
    inputs: Sequence[Value], outputs: Sequence[Value], name: str
) -> Iterator[tuple[Value, Value]]:
    if name in ('optimization_barrier', 'device_put'):
        yield from zip(outputs, inputs, strict=True)
        return
    for made in outputs:
        for source in inputs:
            if source.shape == made.shape or name in _CHANGED_SHAPE:
                yield made, source
