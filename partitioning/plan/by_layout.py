"""A train state laid out without logical axis rules, by one word or by partition rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from partitioning.plan.by_pattern import unmatched_problem
from partitioning.plan.plan import Plan, Unplanned
from partitioning.plan.rows import NOT_OF_PARAMETER, SMALL, PlanRow, make_row, without_name
from partitioning.plan.rule_set import Layout, RuleSet
from partitioning.plan.stacked_layers import stacked_dimensions
from partitioning.plan.subject import Decision, Subject, whole
from partitioning.rules import MeshLike, Problem, Report, ResolvedDimension, raise_problem
from partitioning.state import Leaf, Path, key_names, nbytes, shape_of, walk
from partitioning.state.boxes import array_of, carried_names, is_carrier, is_metadata
from partitioning.state.naming import parameter_roots
from partitioning.state.traversal import StateTree

_STACKS = ('layers', 'stack', 'stage')  # logical axes that count layers


def lay_out_state(
    state: Any, layout: Layout, rules: RuleSet, mesh: MeshLike, report: Report = raise_problem
) -> Plan:
    """Lays out a train state by the paths and sizes of its arrays.

    The parameters are laid out first; the state of the optimizer follows them, and every other
    array is laid out like a parameter.

    Args:
      state: a pytree, abstract or not, with or without names.
      layout: decides the dimensions of one array.
      rules: the rules of the partitioner, for the plan.
      mesh: the mesh, or the sizes of its axes.
      report: receives every problem; by default it raises.

    Raises:
      ValueError: with the path of the first array that cannot have its layout.
    """
    builder = _Builder(layout, mesh, _without_t5x_words if report is raise_problem else report)
    subjects = _parameters(state)
    exact = {path: builder.decide(subject) for path, subject in subjects.items()}
    tree = walk(state, exact=exact, report=lambda path, problem: None)
    entries = tuple(x if is_metadata(x) else builder.entry(x) for x in tree.leaves)
    builder.finish()
    rows = tuple(x for x in entries if isinstance(x, PlanRow))
    return Plan(mesh, rows, tree=StateTree(entries, tree.treedef), rules=rules)


def _without_t5x_words(path: str, problem: Problem) -> None:
    """Raises a problem of an array, which has no logical axes to map."""
    raise ValueError(problem.message if problem.kind == 'unmatched' else f'{path}: {problem[1]}')


class _Builder:
    """The entries of one plan."""

    def __init__(self, layout: Layout, mesh: MeshLike, report: Report):
        self._layout, self._mesh, self._report = layout, mesh, report
        self._unmatched: list[str] = []
        self._known: dict[Any, PlanRow] = {}

    def decide(self, subject: Subject) -> tuple[ResolvedDimension, ...]:
        """The dimensions of an array; what is wrong is reported."""
        return self._reported(subject, self._layout.decide(subject, self._mesh))

    def _reported(self, subject: Subject, decision: Decision) -> tuple[ResolvedDimension, ...]:
        dimensions, problems = decision
        for problem in problems:
            if problem.kind == 'unmatched':
                self._unmatched.append('/'.join(subject.path))
            else:
                self._report('/'.join(subject.path), problem)
        return dimensions

    def entry(self, leaf: Leaf) -> PlanRow | Unplanned:
        """The row of a leaf: by its parameter, or decided for itself."""
        held = leaf.array
        if not hasattr(held, 'dtype') and not isinstance(held, complex | float | int):
            return Unplanned(leaf.names, PartitionSpec())  # a string or a function
        if leaf.parameter is None or _is_preconditioner(leaf):
            dimensions = self._alone(leaf)
        else:
            nothing = without_name(NOT_OF_PARAMETER)
            picked = leaf.pick(leaf.parameter.names)
            dimensions = tuple(nothing if d is None else d for d in picked)
        key = (dimensions, shape_of(held), getattr(held, 'dtype', type(held)), leaf.role)
        if (row := self._known.get(key)) is None:
            row = self._known[key] = make_row('', held, self._mesh, dimensions, leaf.role)
        return row._replace(path='/'.join(leaf.path))

    def finish(self) -> None:
        """Reports the arrays that no rule matches, as one problem."""
        if self._unmatched:
            self._report(self._unmatched[0], unmatched_problem(self._unmatched))

    def _alone(self, leaf: Leaf) -> tuple[ResolvedDimension, ...]:
        """The dimensions of an array that follows no parameter."""
        subject = Subject(leaf.path, leaf.array)
        decision = self._layout.decide(subject, self._mesh)
        if nbytes(leaf.array) <= SMALL and any(p.kind == 'unmatched' for p in decision[1]):
            return whole(subject, 'no partition rule matches this small array')
        return self._reported(subject, decision)


def _is_preconditioner(leaf: Leaf) -> bool:
    """Whether a statistic has dimensions that its parameter lacks, and would be whole therefore."""
    if leaf.parameter is None or None not in leaf.dims or nbytes(leaf.array) <= SMALL:
        return False
    return not any(d.mesh_axes for d in leaf.pick(leaf.parameter.names) if d is not None)


def _parameters(state: Any) -> Mapping[Path, Subject]:
    """The parameters of a state, or all of its arrays if nothing distinguishes them."""
    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_carrier)
    entries = [(key_names(path), x) for path, x in flat if not is_metadata(x)]
    candidates = [e for e in _outside_optimizers(state, entries) if not _is_bookkeeping(*e)]
    roots = parameter_roots(candidates or entries)
    held = dict(entries)
    shapes = {'/'.join(path): shape_of(array_of(held[path])) for path in roots}
    stacked = stacked_dimensions(shapes)
    subjects = {}
    for path, root in roots.items():
        carried = carried_names(held[path], path) if is_carrier(held[path]) else None
        names = () if carried is None else carried.names
        named = next((dim for dim, name in enumerate(names) if name in _STACKS), None)
        layers = stacked.get('/'.join(path), named)
        subjects[path] = Subject(path, array_of(held[path]), len(root), names, layers)
    return subjects


def _is_bookkeeping(path: Path, leaf: Any) -> bool:
    """Whether a leaf is a step number or a random key, next to the trees of the state."""
    dtype = getattr(array_of(leaf), 'dtype', None)
    return len(path) == 1 and (dtype is None or not jax.numpy.issubdtype(dtype, jax.numpy.inexact))


def _outside_optimizers(state: Any, entries: list[tuple[Path, Any]]) -> list[tuple[Path, Any]]:
    """The leaves that are not in a NamedTuple like those that hold the state of optax."""

    def is_optimizer(x: Any) -> bool:
        named = isinstance(x, tuple) and hasattr(x, '_fields')
        return named and x is not state and type(x).__name__.endswith('State')

    flat = jax.tree_util.tree_leaves_with_path(
        state, is_leaf=lambda x: is_carrier(x) or is_optimizer(x)
    )
    inside = {key_names(path) for path, x in flat if is_optimizer(x)}
    return [e for e in entries if not any(e[0][:n] in inside for n in range(len(e[0]) + 1))]
