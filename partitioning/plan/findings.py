"""What is wrong, or suspicious, with rules, a mesh and a state: all of it, not the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from partitioning.plan.rule_set import ResolvedLeaf, RuleSet, resolve_leaves
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    MeshLike,
    Problem,
    ResolvedDimension,
    Rule,
    as_tuple,
    axis_sizes,
    describe_axes,
    nearest,
)
from partitioning.state import PathRules, Role, check_path_rules


class Finding(NamedTuple):
    """One finding.

    Attributes:
      severity: 'error' where a layout cannot be decided, 'warning' where it may surprise.
      kind: of errors 'repeated name', 'rank', 'absent axis', 'conflict', 'unmatched',
        'indivisible', 'names', 'policy', 'rules'; of warnings 'unused', 'shadowed', 'size 1',
        'policy', 'no names'.
      where: the path of an array, or a rule as code.
      message: what is wrong, and what to write instead.
    """

    severity: Literal['error', 'warning']
    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f'{self.severity}: {self.where}: {self.message}'


def lint(
    rules: LogicalAxisRules,
    mesh: MeshLike,
    state: Any = None,
    *,
    optimizer_axis_rules: LogicalAxisRules | None = None,
    params_axes_names_override: PathRules = (),
) -> tuple[Finding, ...]:
    """Everything that is wrong or suspicious, errors first.

    Args:
      rules: logical axis rules.
      mesh: the mesh, or the sizes of its axes.
      state: a train state with names, abstract or not; without one only the rules are looked at.
      optimizer_axis_rules: those of the optimizer's state, where they differ.
      params_axes_names_override: path rules that name its parameters.

    Raises:
      ValueError: rules that are none.
    """
    sizes = axis_sizes(mesh)
    rule_set = RuleSet(
        rules=AxisRules(rules),
        optimizer_rules=None if optimizer_axis_rules is None else AxisRules(optimizer_axis_rules),
        overrides=check_path_rules(params_axes_names_override),
    )
    findings: list[Finding] = []
    leaves = [] if state is None else _resolved(state, rule_set, mesh, findings)
    for called, checked, roles in _sets(rule_set):
        of_rules = [*_of_rules(called, checked, sizes)]
        findings += of_rules
        if leaves:
            dimensions = [d for x in leaves if x.leaf.role in roles for d in x.dimensions if d]
            known = {finding.where for finding in of_rules if finding.kind == 'shadowed'}
            unused = _unused(called, checked, dimensions)
            findings += [finding for finding in unused if finding.where not in known]
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.severity))


def _sets(rules: RuleSet) -> Iterator[tuple[str, AxisRules, Sequence[Role]]]:
    """What each set of rules is called, the rules, and the roles of the arrays they are for."""
    if rules.optimizer_rules is None:
        yield 'rule', rules.rules, ('parameters', 'optimizer', 'other')
    else:
        yield 'optimizer rule', rules.optimizer_rules, ('optimizer',)
        yield 'rule', rules.rules, ('parameters', 'other')


def _resolved(
    state: Any, rules: RuleSet, mesh: MeshLike, findings: list[Finding]
) -> list[ResolvedLeaf]:
    """The leaves of a state, with every problem that resolving it met added to `findings`."""

    def report(path: str, problem: Problem) -> None:
        findings.append(Finding('error', problem.kind, path, problem.message))

    try:
        arrays = resolve_leaves(state, rules, mesh, report).arrays
    except ValueError as error:
        findings.append(Finding('error', 'names', 'the state', str(error)))
        return []
    for x in arrays:
        if x.leaf.parameter is None and x.leaf.dims and not x.leaf.problematic:
            path, shape = '/'.join(x.leaf.path), x.leaf.array.shape
            message = f'of shape {shape} has no names and follows no parameter: it is replicated'
            findings.append(Finding('warning', 'no names', path, message))
        for d in x.dimensions:
            if d is not None and d.policy is not None and x.leaf.parameter is not None:
                path = '/'.join(x.leaf.parameter.path)
                message = f'{d.name}: {d.policy}, {d.reason}'
                findings.append(Finding('warning', 'policy', path, message))
    return arrays


def _of_rules(called: str, rules: AxisRules, sizes: Mapping[str, int]) -> Iterator[Finding]:
    for place, rule in enumerate(rules):
        axes = as_tuple(rule[1])
        for axis in axes:
            if axis not in sizes:
                message = f'the mesh is {describe_axes(sizes)}.{nearest(axis, sizes)}'
                yield _warn(called, 'absent axis', rule, message)._replace(severity='error')
        if axes and all(sizes.get(axis) == 1 for axis in axes):
            yield _warn(called, 'size 1', rule, 'an axis of size 1 splits nothing')
        # A rule is skipped when one of its axes is taken, and then so is any rule with these too.
        before = [r for r in rules[:place] if r[0] == rule[0] and {*as_tuple(r[1])} <= {*axes}]
        if before:
            message = f'it can never win: wherever it could, {before[0]!r} before it does'
            yield _warn(called, 'shadowed', rule, message)


def _unused(
    called: str, rules: AxisRules, resolved: Sequence[ResolvedDimension]
) -> Iterator[Finding]:
    """Rules that decided nothing, and why."""
    won = {dimension.rule for dimension in resolved}
    names = {dimension.name for dimension in resolved}
    lost = {rule: why for dimension in resolved for rule, why in dimension.lost}
    for rule in rules:
        if rule in won:
            continue
        why = lost.get(rule, f'no array of the state has {rule[0]!r} (activations may)')
        if rule[0] not in names:
            why += nearest(rule[0], {str(name) for name in names if name})
        yield _warn(called, 'unused', rule, why)


def _warn(called: str, kind: str, rule: Rule, message: str) -> Finding:
    return Finding('warning', kind, f'{called} {rule!r}', message)
