"""What is wrong, or suspicious, with rules, a mesh and a state: all of it, not the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from partitioning.state import Leaf, PathRules, walk

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
    params_axes_names_override: PathRules = (),
) -> tuple[Finding, ...]:
    """Everything that is wrong or suspicious, errors first.

    Args:
      rules: logical axis rules.
      mesh: the mesh, or the sizes of its axes.
      state: a train state with names, abstract or not; without one only the rules are looked at.
      params_axes_names_override: path rules that name its parameters.

    Raises:
      ValueError: rules that are none.
    """
    checked, sizes = AxisRules(rules), dict(axis_sizes(mesh))
    findings = list(_of_rules(checked, sizes))
    if state is not None:
        findings += _of_state(checked, sizes, state, params_axes_names_override)
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: finding.severity))


def _of_rules(rules: AxisRules, sizes: dict[str, int]) -> Iterator[Finding]:
    for place, rule in enumerate(rules):
        axes = as_tuple(rule[1])
        for axis in axes:
            if axis not in sizes:
                message = f'the mesh is {describe_axes(sizes)}.{nearest(axis, sizes)}'
                yield _warn_rule('absent axis', rule, message)._replace(severity='error')
        if axes and all(sizes.get(axis) == 1 for axis in axes):
            yield _warn_rule('size 1', rule, 'an axis of size 1 splits nothing')
        # A rule is skipped when one of its axes is taken, and then so is any rule with these too.
        before = [r for r in rules[:place] if r[0] == rule[0] and {*as_tuple(r[1])} <= {*axes}]
        if before:
            message = f'it can never win: wherever it could, {before[0]!r} before it does'
            yield _warn_rule('shadowed', rule, message)


def _of_state(
    rules: AxisRules, sizes: dict[str, int], state: Any, overrides: PathRules
) -> list[Finding]:
    try:
        leaves = walk(state, overrides).arrays
    except ValueError as error:
        return [Finding('error', 'names', 'the state', str(error))]
    findings: list[Finding] = []
    resolved: list[ResolvedDimension] = []
    for leaf in leaves:
        if leaf.parameter is not None:
            dimensions, found = _of_array(rules, sizes, leaf)
            findings += found
            resolved += dimensions
    return [*findings, *_unused(rules, resolved)]


def _of_array(
    rules: AxisRules, sizes: dict[str, int], leaf: Leaf
) -> tuple[Sequence[ResolvedDimension], list[Finding]]:
    parameter = leaf.parameter
    assert parameter is not None
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


def _unused(rules: AxisRules, resolved: Sequence[ResolvedDimension]) -> Iterator[Finding]:
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
        yield _warn_rule('unused', rule, why)


def _warn_rule(kind: str, rule: Rule, message: str) -> Finding:
    return Finding('warning', kind, f'rule {rule!r}', message)
