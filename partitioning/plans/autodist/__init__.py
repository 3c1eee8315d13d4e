"""AutoDist's variable partitioner on a mesh: its planners, their strategies, and what they shard.

`partitioner_config`, `splits`: how one variable is cut; `variables`, `placement`, `nodes`,
`strategy`, `strategy_file`: what is decided for all; `planner`, `server_planners`,
`all_reduce_planners`: who decides; `variable_partitioner`: train states laid out by any of them;
`compression`: gradients that travel in few bits.

Usage:
  planner = PartitionedPS()
  print(planner.build(params, servers=['A', 'B']).report())  # AutoDist's decisions
  params = shard_module(params, planner.build_plan(params, mesh), mesh)  # on a mesh
"""

from partitioning.plans.autodist.all_reduce_planners import (
    AllReduce,
    AllReducePlanner,
    PartitionedAR,
    RandomAxisPartitionAR,
)
from partitioning.plans.autodist.compression import (
    CompressionState,
    compress_gradients,
    compression_specs,
)
from partitioning.plans.autodist.nodes import GraphConfig, NodeConfig
from partitioning.plans.autodist.partitioner_config import PartitionerConfig
from partitioning.plans.autodist.placement import servers_of, split_axis
from partitioning.plans.autodist.planner import AutoDistPlanner
from partitioning.plans.autodist.server_planners import (
    PS,
    Parallax,
    PartitionedPS,
    PSLoadBalancing,
    ServerPlanner,
    UnevenPartitionedPS,
)
from partitioning.plans.autodist.splits import (
    even_shards,
    split_offsets,
    split_rows,
    split_sizes,
    uneven_shards,
)
from partitioning.plans.autodist.strategy import Strategy
from partitioning.plans.autodist.variable_partitioner import (
    PartitionedVariables,
    VariablePartitioner,
)
from partitioning.plans.autodist.variables import Variable, describe_variables

__all__ = [
    'PS',
    'AllReduce',
    'AllReducePlanner',
    'AutoDistPlanner',
    'CompressionState',
    'GraphConfig',
    'NodeConfig',
    'PSLoadBalancing',
    'Parallax',
    'PartitionedAR',
    'PartitionedPS',
    'PartitionedVariables',
    'PartitionerConfig',
    'RandomAxisPartitionAR',
    'ServerPlanner',
    'Strategy',
    'UnevenPartitionedPS',
    'Variable',
    'VariablePartitioner',
    'compress_gradients',
    'compression_specs',
    'describe_variables',
    'even_shards',
    'servers_of',
    'split_axis',
    'split_offsets',
    'split_rows',
    'split_sizes',
    'uneven_shards',
]
