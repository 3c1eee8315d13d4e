"""A train state with the rules applied: the plan of the state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.plan.by_layout import lay_out_state
from partitioning.plan.by_pattern import RuleLayout
from partitioning.plan.plan import Plan, Unplanned
from partitioning.plan.rows import (
    NO_NAMES,
    NOT_COVERED,
    NOT_OF_PARAMETER,
    OF_LAYERS,
    SAID_NONE,
    SMALL,
    PlanRow,
    make_row,
    without_name,
)
from partitioning.plan.rule_set import RuleSet
from partitioning.rules import (
    AxisNames,
    MeshLike,
    Problem,
    Report,
    ResolvedDimension,
    axis_sizes,
    definite_problems,
    describe_axes,
    padding_problems,
    raise_problem,
    to_spec,
    try_resolve,
)
from partitioning.state import Leaf, Parameter, Path, Role, nbytes, shape_of, walk
from partitioning.state.naming import NoNamesError
from partitioning.state.path_names import replicating_rules
from partitioning.state.traversal import StateTree

Shapes = Mapping[Path, tuple[int, ...]]


def build_plan(
    state: Any, rules: RuleSet, mesh: MeshLike, report: Report = raise_problem, said: Any = None
) -> Plan:
    """Applies rules to a train state, in one walk over it.

    Args:
      state: a pytree, abstract or not; see `partitioning.state.walk`.
      rules: the rules and policies.
      mesh: the mesh, or the sizes of its axes.
      report: receives every problem; by default it raises.
      said: the logical axes of the state; by default the state itself determines them.

    Raises:
      ValueError: with the path of the first array whose layout the rules do not decide.
    """
    if rules.layout is not None:
        return lay_out_state(state, rules.layout, rules, mesh, report)
    replicate = rules.rules.on_unmatched == 'replicate'
    try:
        tree = walk(state, rules.overrides, _ignore if replicate else report, said=said)
    except NoNamesError:
        if not replicate:
            raise
        return lay_out_state(state, RuleLayout((), rules.rules), rules, mesh, report)
    builder = _Builder(rules, mesh, report, {} if replicate else _too_large(tree))
    entries = tuple(builder.entry(x) if isinstance(x, Leaf) else x for x in tree.leaves)
    rows = [x for x in entries if isinstance(x, PlanRow)] + builder.covered
    return Plan(mesh, tuple(rows), tree=StateTree(entries, tree.treedef), rules=rules)


def _ignore(path: str, problem: Problem) -> None:
    """Accepts an array without names, which the policy replicates."""


class _Builder:
    """The entries of one plan; layouts that many arrays share are resolved once."""

    def __init__(self, rules: RuleSet, mesh: MeshLike, report: Report, large: Shapes):
        self.covered: list[PlanRow] = []
        self._large = large
        self._rules, self._mesh, self._report = rules, mesh, report
        self._known: dict[Any, tuple[PlanRow | Unplanned, tuple[Problem, ...]]] = {}
        self._replicas: dict[Any, PlanRow] = {}

    def entry(self, leaf: Leaf) -> PlanRow | Unplanned:
        if leaf.parameter is None:
            return self._nameless(leaf)
        shape = getattr(leaf.array, 'shape', None)
        dtype = getattr(leaf.array, 'dtype', type(leaf.array))
        key = (leaf.parameter[1:], leaf.role, leaf.dims, shape, dtype)
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._resolve(leaf, leaf.parameter)
        entry, problems = known
        for problem in problems:
            self._report('/'.join(leaf.parameter.path), problem)
        return entry if type(entry) is Unplanned else PlanRow('/'.join(leaf.path), *entry[1:])

    def _nameless(self, leaf: Leaf) -> PlanRow | Unplanned:
        """An array that has no names and follows no parameter."""
        if leaf.said_none:
            if leaf.array is not None:
                self.covered.append(self._replicated(leaf.path, leaf.array, leaf.role, SAID_NONE))
            for path, array in leaf.covered:
                self.covered.append(self._replicated(path, array, leaf.role, SAID_NONE))
            return _without_axes(len(leaf.dims))
        if not _is_array(leaf.array):  # no array here, or a leaf such as a string
            return Unplanned(leaf.names, PartitionSpec())
        if leaf.path in self._large:
            self._report('/'.join(leaf.path), _replicated_silently(leaf, self._large, self._mesh))
        return self._replicated(leaf.path, leaf.array, leaf.role, NO_NAMES)

    def _replicated(self, path: Any, array: Any, role: Role, reason: str) -> PlanRow:
        shape = shape_of(array)
        key = (shape, getattr(array, 'dtype', type(array)), role, reason)
        if (row := self._replicas.get(key)) is None:
            dimensions = [without_name(reason)] * len(shape)
            row = make_row('/'.join(path), array, self._mesh, dimensions, role)
            self._replicas[key] = row
        return PlanRow('/'.join(path), *row[1:])

    def _resolve(
        self, leaf: Leaf, parameter: Parameter
    ) -> tuple[PlanRow | Unplanned, tuple[Problem, ...]]:
        """The entry of a leaf, taken from the layout of its parameter.

        If its names were resolved separately, they could get mesh axes that the parameter uses for
        other dimensions.
        """
        resolved, problems = _resolve_parameter(leaf.role, parameter, self._rules, self._mesh)
        nothing = without_name(NOT_OF_PARAMETER)
        dimensions = [nothing if d is None else d for d in leaf.pick(resolved)]
        problems = (
            *problems,
            *definite_problems(PartitionSpec(*(d.mesh_axes for d in dimensions))),
        )
        if any(d.policy == 'pad' for d in dimensions):
            problems = (*problems, *padding_problems(self._mesh))
        if problems:
            rank = len(dimensions) if leaf.array is None else len(shape_of(leaf.array))
            dimensions = [*dimensions, *[nothing] * rank][:rank]
            dimensions = [dataclasses.replace(d, mesh_axes=None, policy=None) for d in dimensions]
        if leaf.array is None:
            return Unplanned(leaf.names, to_spec(dimensions)), problems
        row = make_row('/'.join(leaf.path), leaf.array, self._mesh, dimensions, leaf.role)
        return row, problems


@functools.cache
def _without_axes(rank: int) -> Unplanned:
    """The entry of an array for which the state names no axes."""
    return Unplanned(AxisNames(*(None,) * rank), None)


def _resolve_parameter(
    role: Role, parameter: Parameter, rules: RuleSet, mesh: MeshLike
) -> tuple[tuple[ResolvedDimension, ...], tuple[Problem, ...]]:
    of_role = rules.of_role(role)
    if parameter.rules:
        of_role = of_role.with_rules((*parameter.rules, *of_role))
    resolved, problems = try_resolve(
        parameter.names,
        of_role,
        mesh=mesh,
        shape=parameter.shape,
        axes_as_names=parameter.axes_as_names,
    )
    if (covered := parameter.num_carried) is not None:
        resolved = (*resolved[:covered], *_not_covered(parameter))
        note = f'. The names cover the first {covered} of {len(resolved)} dimensions: {OF_LAYERS}'
        problems = tuple(p._replace(message=p.message + note) for p in problems)
    if parameter.mesh is not None and dict(parameter.mesh.shape) != dict(axis_sizes(mesh)):
        message = (
            f'the names are for the mesh {describe_axes(parameter.mesh.shape)}, but the mesh is '
            f'{describe_axes(mesh)}'
        )
        problems = (*problems, Problem('conflict', message))
    if role == 'optimizer' and rules.optimizer_rules is not None:
        note = ' (by optimizer_axis_rules)'
        problems = tuple(p._replace(message=p.message + note) for p in problems)
    return resolved, problems


def _not_covered(parameter: Parameter) -> list[ResolvedDimension]:
    """The dimensions after those that the names of a parameter cover."""
    names, rank = parameter.carried, len(parameter.names)
    reason = f'{NOT_COVERED}: the names {names} cover {len(names)} of {rank} dimensions'
    return [without_name(reason)] * (rank - len(names))


def _is_array(x: Any) -> bool:
    return hasattr(x, 'dtype') or isinstance(x, complex | float | int)


def _too_large(tree: StateTree[Leaf]) -> Shapes:
    """The arrays that nobody names and that are too large to be replicated silently."""
    return {
        x.path: shape_of(x.array)
        for x in tree.leaves
        if isinstance(x, Leaf) and x.parameter is None and not (x.said_none or x.problematic)
        if _is_array(x.array) and nbytes(x.array) > SMALL
    }


def _replicated_silently(leaf: Leaf, large: Shapes, mesh: MeshLike) -> Problem:
    """The problem of one of the `large` arrays, with what to write for all of them."""
    others = len(large) - 1
    alike = f' So would those of {others} more arrays.' if others else ''
    return Problem(
        'names',
        f'Missing axis names: an array of shape {shape_of(leaf.array)} has no names and follows no '
        f'parameter, so all of its {nbytes(leaf.array):,} bytes would be on each of the '
        f'{math.prod(axis_sizes(mesh).values())} devices ({describe_axes(mesh)}).{alike} To '
        'replicate on purpose, add to params_axes_names_override '
        f'{replicating_rules(large, {path: ["/".join(path)] for path in large})[1:-1]}, with '
        "names in place of None to shard; or write only layout='fsdp'",
    )
