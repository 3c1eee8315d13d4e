"""Plans: a state laid out on a mesh, array by array, with reasons.

`plan` is the type and `rows` its rows; `building` makes one from rules, `matching` imposes one on a
state. `audit` says what devices hold, `findings` and `linting` what is suspicious, `fixed_point`
whether arrays stay in place. `plan_file` is the file format and `difference` compares two plans.
"""

from partitioning.plan.audit import Audit
from partitioning.plan.building import build_plan
from partitioning.plan.difference import Change, PlanDiff, diff
from partitioning.plan.findings import Finding
from partitioning.plan.linting import lint
from partitioning.plan.matching import check_mesh, impose_plan, suffixes
from partitioning.plan.plan import InitProgram, Plan
from partitioning.plan.rows import PlanRow, make_row
from partitioning.plan.rule_set import RuleSet
from partitioning.plan.tables import Table, shape_str, text_table

__all__ = [
    'Audit',
    'Change',
    'Finding',
    'InitProgram',
    'Plan',
    'PlanDiff',
    'PlanRow',
    'RuleSet',
    'Table',
    'build_plan',
    'check_mesh',
    'diff',
    'impose_plan',
    'lint',
    'make_row',
    'shape_str',
    'suffixes',
    'text_table',
]
