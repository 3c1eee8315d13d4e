"""A train state with the rules applied: the plan of the state."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from partitioning.plan.building import PlanBuilder, is_array
from partitioning.plan.by_layout import lay_out_state
from partitioning.plan.findings import Finding, row_findings, rule_findings
from partitioning.plan.layouts import RuleLayout, RuleSet
from partitioning.plan.plan import Plan, Unplanned
from partitioning.plan.rows import (
    NO_NAMES,
    NOT_COVERED,
    OF_LAYERS,
    SAID_NONE,
    SMALL,
    Decision,
    PlanRow,
    without_name,
)
from partitioning.rules import (
    AxisNames,
    MeshLike,
    Problem,
    Report,
    ResolvedDimension,
    axis_sizes,
    describe_axes,
    raise_problem,
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
    return _RuleBuilder(rules, mesh, report, {} if replicate else _too_large(tree)).plan(
        tree, rules
    )


def lint(rules: RuleSet, mesh: MeshLike, state: Any = None) -> tuple[Finding, ...]:
    """Everything that is wrong or suspicious, errors first, even if there is no valid plan.

    Args:
      rules: the rules.
      mesh: the mesh, or the sizes of its axes.
      state: a train state with names, abstract or not; by default only the rules are examined.
    """
    findings: list[Finding] = []

    def report(path: str, problem: Problem) -> None:
        findings.append(Finding('error', problem.kind, path, problem.message))

    rows: tuple[PlanRow, ...] = ()
    if state is not None:
        try:
            rows = build_plan(state, rules, mesh, report).rows
        except ValueError as error:  # the state as a whole has no names, or a rule has no effect
            findings.append(Finding('error', 'names', 'the state', str(error)))
    wrong = {finding.where for finding in findings}
    findings += [f for f in row_findings(rows, rules) if f.where not in wrong]
    findings += rule_findings(rules, mesh, rows)
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.severity))


def _ignore(path: str, problem: Problem) -> None:
    """Accepts an array without names, which the policy replicates."""


class _RuleBuilder(PlanBuilder):
    """Lays out parameters by logical axis rules, and reports `large` arrays without names."""

    def __init__(self, rules: RuleSet, mesh: MeshLike, report: Report, large: Shapes):
        super().__init__(mesh, report)
        self._rules, self._large = rules, large

    def resolve(self, role: Role, parameter: Parameter) -> Decision:
        return _resolve_parameter(role, parameter, self._rules, self.mesh)

    def nameless(self, leaf: Leaf) -> PlanRow | Unplanned:
        if leaf.said_none:
            alone = () if leaf.array is None else ((leaf.path, leaf.array),)
            for path, array in (*alone, *leaf.covered):
                self.covered.append(self.replicated(path, array, leaf.role, SAID_NONE))
            return _without_axes(len(leaf.dims))
        if leaf.path in self._large:
            self.report('/'.join(leaf.path), _replicated_silently(leaf, self._large, self.mesh))
        return self.replicated(leaf.path, leaf.array, leaf.role, NO_NAMES)


@functools.cache
def _without_axes(rank: int) -> Unplanned:
    """The entry of an array for which the state names no axes."""
    return Unplanned(AxisNames(*(None,) * rank), None)


def _resolve_parameter(
    role: Role, parameter: Parameter, rules: RuleSet, mesh: MeshLike
) -> Decision:
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


def _too_large(tree: StateTree[Leaf]) -> Shapes:
    """The arrays that nobody names and that are too large to be replicated silently."""
    return {
        x.path: shape_of(x.array)
        for x in tree.leaves
        if isinstance(x, Leaf) and x.parameter is None and not (x.said_none or x.problematic)
        if is_array(x.array) and nbytes(x.array) > SMALL
    }


def _replicated_silently(leaf: Leaf, large: Shapes, mesh: MeshLike) -> Problem:
    """The problem of one of the `large` arrays, with what to write for all of them."""
    others = len(large) - 1
    alike = f' So would the bytes of {others} more arrays.' if others else ''
    return Problem(
        'names',
        f'Missing axis names: an array of shape {shape_of(leaf.array)} has no names and follows no '
        f'parameter, so all of its {nbytes(leaf.array):,} bytes would be on each of the '
        f'{math.prod(axis_sizes(mesh).values())} devices ({describe_axes(mesh)}).{alike} To '
        'replicate on purpose, add to params_axes_names_override '
        f'{replicating_rules(large, {path: ["/".join(path)] for path in large})[1:-1]}, with '
        "names in place of None to shard; or write only layout='fsdp'",
    )
