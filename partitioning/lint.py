"""What is wrong, or suspicious, with rules, a mesh and a state: all of it, not the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    MeshAxes,
    MeshLike,
    ResolvedDimension,
    as_tuple,
    axis_sizes,
    describe_axes,
    nearest,
    try_resolve,
)
from partitioning.state import Leaf, Parameter, PathRules, walk

Rule = tuple[str, MeshAxes]


class Finding(NamedTuple):
    """One finding.

    Attributes:
      severity: 'error' where a layout cannot be decided, 'warning' where it may surprise.
      kind: of errors 'repeated name', 'rank', 'absent axis', 'conflict', 'unmatched',
        'indivisible', 'names'; of warnings 'unused', 'shadowed', 'size 1', 'policy'.
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
    sizes, leaves = dict(axis_sizes(mesh)), []
    findings: list[Finding] = []
    if state is not None:
        try:
            leaves = walk(state, params_axes_names_override).arrays
        except ValueError as error:
            findings.append(Finding('error', 'names', 'the state', str(error)))
    optimizer = [leaf for leaf in leaves if leaf.role == 'optimizer']
    others = [leaf for leaf in leaves if leaf.role != 'optimizer']
    if optimizer_axis_rules is None:
        others += optimizer
    else:
        findings += _of_rules('optimizer rule', AxisRules(optimizer_axis_rules), sizes, optimizer)
    findings += _of_rules('rule', AxisRules(rules), sizes, others)
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.severity))


def _of_rules(
    called: str, rules: AxisRules, sizes: Mapping[str, int], leaves: Sequence[Leaf]
) -> Iterator[Finding]:
    """Findings in a set of rules, and in the leaves that it is for."""
    alone = [*_of_rules_alone(called, rules, sizes)]
    yield from alone
    resolved: list[ResolvedDimension] = []
    for leaf in leaves:
        if leaf.parameter is not None:
            dimensions, findings = _of_array(rules, sizes, leaf.parameter)
            resolved += dimensions
            yield from findings
    if leaves:
        known = {finding.where for finding in alone if finding.kind == 'shadowed'}
        yield from (f for f in _unused(called, rules, resolved) if f.where not in known)


def _of_rules_alone(called: str, rules: AxisRules, sizes: Mapping[str, int]) -> Iterator[Finding]:
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


def _of_array(
    rules: AxisRules, sizes: Mapping[str, int], parameter: Parameter
) -> tuple[Sequence[ResolvedDimension], list[Finding]]:
    if parameter.rules:
        rules = rules.with_rules((*parameter.rules, *rules))
    dimensions, problems = try_resolve(
        parameter.names,
        rules,
        mesh=sizes,
        shape=parameter.shape,
        axes_as_names=parameter.axes_as_names,
    )
    path = '/'.join(parameter.path)
    findings = [Finding('error', p.kind, path, p.message) for p in problems]
    findings += [
        Finding('warning', 'policy', path, f'{d.name}: {d.policy}, {d.reason}')
        for d in dimensions
        if d.policy is not None
    ]
    return dimensions, findings


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
