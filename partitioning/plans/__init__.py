"""Plans of layouts: made by hand or by planners, read by people, kept in files.

`sharding_plan`: PyTorch's ShardingPlan, Sharder and ShardingPlanner; `modules`: models laid out by
one; `resolved`, `rows`: what a plan comes to on a mesh; `plan_file`, `difference`: plans as JSON,
and what changes from one to another; `trees`: parameters by path.
"""

from partitioning.plans.difference import Change, PlanDiff, diff
from partitioning.plans.modules import constrain_outputs, shard_module
from partitioning.plans.plan_file import from_json, load_plan, save_plan, to_json
from partitioning.plans.resolved import ResolvedPlan
from partitioning.plans.rows import PlannedArray
from partitioning.plans.sharding_plan import Sharder, ShardingPlan, ShardingPlanner, place
from partitioning.plans.trees import parameters

__all__ = [
    'Change',
    'PlanDiff',
    'PlannedArray',
    'ResolvedPlan',
    'Sharder',
    'ShardingPlan',
    'ShardingPlanner',
    'constrain_outputs',
    'diff',
    'from_json',
    'load_plan',
    'parameters',
    'place',
    'save_plan',
    'shard_module',
    'to_json',
]
