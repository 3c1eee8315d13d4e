"""PyTorch's ShardingPlan on a mesh, and shards that PyTorch has cut."""

from partitioning.compat.pytorch.modules import shard_module
from partitioning.compat.pytorch.outputs import constrain_outputs
from partitioning.compat.pytorch.sharder import Sharder, place
from partitioning.compat.pytorch.sharding_plan import ShardingPlan, ShardingPlanner
from partitioning.compat.pytorch.trees import parameters

__all__ = [
    'Sharder',
    'ShardingPlan',
    'ShardingPlanner',
    'constrain_outputs',
    'parameters',
    'place',
    'shard_module',
]
