"""Plans of layouts: made by hand or by planners, read by people, kept in files.

`sharding_plan`, `sharder`: PyTorch's ShardingPlan, ShardingPlanner and Sharder; `entries`: what a
plan says of each array; `resolved`, `rows`, `matching`: what that comes to on a mesh, and for a
state; `modules`, `outputs`: models laid out by a plan; `plan_file`, `difference`: plans as JSON,
and what changes from one to another; `trees`: parameters by path. `shards`: tensors that others
have cut; `autodist`: AutoDist's planners.
"""

from partitioning.plans.difference import Change, PlanDiff, diff
from partitioning.plans.modules import shard_module
from partitioning.plans.outputs import constrain_outputs
from partitioning.plans.plan_file import from_json, load_plan, save_plan, to_json
from partitioning.plans.resolved import ResolvedPlan
from partitioning.plans.rows import PlannedArray
from partitioning.plans.sharder import Sharder, place
from partitioning.plans.sharding_plan import ShardingPlan, ShardingPlanner
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
