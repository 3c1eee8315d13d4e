"""Every finding about rules, a mesh and a state, even if they do not form a valid plan."""

from __future__ import annotations

from typing import Any

from partitioning.plan.building import build_plan
from partitioning.plan.findings import Finding, row_findings, rule_findings
from partitioning.plan.rows import PlanRow
from partitioning.plan.rule_set import RuleSet
from partitioning.rules import MeshLike, Problem


def lint(rules: RuleSet, mesh: MeshLike, state: Any = None) -> tuple[Finding, ...]:
    """Everything that is wrong or suspicious, errors first.

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
