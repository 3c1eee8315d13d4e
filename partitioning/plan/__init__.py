"""Plans, which say how each array of a state is laid out on a mesh, and why.

`plan` has the type of a plan, and `rows` the type of its rows. `building` makes the rows from the
leaves of a state, or matches them to another plan. `by_rules` lays out a state by logical axis
rules, by a word such as 'fsdp', or by partition rules (`layouts`). `audit` says what devices hold
and whether arrays stay in place, and `findings` lists what is suspicious. `plan_file` is the file
format, `difference` compares two plans, `tables` prints them, and `rule_proposals` finds rules for
the names of a state.
"""

from partitioning.plan.audit import Audit as Audit
from partitioning.plan.building import (
    check_mesh as check_mesh,
    impose_plan as impose_plan,
    suffixes as suffixes,
)
from partitioning.plan.by_rules import build_plan as build_plan, lint as lint
from partitioning.plan.difference import PlanDiff as PlanDiff, plan_diff as plan_diff
from partitioning.plan.findings import Finding as Finding
from partitioning.plan.layouts import PartitionRules as PartitionRules, RuleSet as RuleSet
from partitioning.plan.plan import InitProgram as InitProgram, Plan as Plan
from partitioning.plan.rows import PlanRow as PlanRow, make_row as make_row
from partitioning.plan.rule_proposals import (
    batch_axes as batch_axes,
    with_proposal as with_proposal,
)
