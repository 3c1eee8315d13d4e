"""Plans: a state laid out on a mesh, array by array, with reasons.

`plan` is the type and `rows` its rows. `building` makes one from rules, and `matching` imposes one
on a state. `by_layout` makes one without rules: `by_size` has the layout of a word, `by_pattern`
that of partition rules, and both decide about one `subject` at a time. `audit` says what devices
hold, `findings` and `linting` what is suspicious, `fixed_point` whether arrays stay in place.
`plan_file` is the file format and `difference` compares two plans. `stacked_layers` finds the
dimensions of layers that a scan stacks.
"""

from partitioning.plan.audit import (
    Audit as Audit,
)
from partitioning.plan.building import (
    build_plan as build_plan,
)
from partitioning.plan.by_pattern import (
    PartitionRules as PartitionRules,
)
from partitioning.plan.difference import (
    PlanDiff as PlanDiff,
    diff as diff,
)
from partitioning.plan.findings import (
    Finding as Finding,
)
from partitioning.plan.linting import (
    lint as lint,
)
from partitioning.plan.matching import (
    check_mesh as check_mesh,
    impose_plan as impose_plan,
    suffixes as suffixes,
)
from partitioning.plan.plan import (
    InitProgram as InitProgram,
    Plan as Plan,
)
from partitioning.plan.rows import (
    PlanRow as PlanRow,
    make_row as make_row,
)
from partitioning.plan.rule_set import (
    RuleSet as RuleSet,
)
