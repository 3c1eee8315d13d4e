"""Plans: a state laid out on a mesh, array by array, with reasons.

`plan` is the type and `rows` its rows, which `building` makes of the leaves of a state: `by_rules`
from logical axis rules, `by_layout` from one of the `layouts`, which are words and
`partition_rules`, and `matching` from another plan. `audit` says what devices hold and whether
arrays stay in place, `findings` what is suspicious. `plan_file` is the file format and `difference`
compares two plans; `tables` prints them.
"""

from partitioning.plan.audit import (
    Audit as Audit,
)
from partitioning.plan.by_rules import (
    build_plan as build_plan,
    lint as lint,
)
from partitioning.plan.difference import (
    PlanDiff as PlanDiff,
    diff as diff,
)
from partitioning.plan.findings import (
    Finding as Finding,
)
from partitioning.plan.layouts import (
    RuleSet as RuleSet,
)
from partitioning.plan.matching import (
    check_mesh as check_mesh,
    impose_plan as impose_plan,
    suffixes as suffixes,
)
from partitioning.plan.partition_rules import (
    PartitionRules as PartitionRules,
)
from partitioning.plan.plan import (
    InitProgram as InitProgram,
    Plan as Plan,
)
from partitioning.plan.rows import (
    PlanRow as PlanRow,
    make_row as make_row,
)
