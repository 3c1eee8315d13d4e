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

from partitioning.compat.autodist.all_reduce_planners import (
    AllReduce,
    AllReducePlanner,
    PartitionedAR,
    RandomAxisPartitionAR,
)
from partitioning.compat.autodist.compression import (
    CompressionState,
    compress_gradients,
    compression_specs,
)
from partitioning.compat.autodist.nodes import GraphConfig, NodeConfig
from partitioning.compat.autodist.partitioner_config import PartitionerConfig
from partitioning.compat.autodist.placement import servers_of, split_axis
from partitioning.compat.autodist.planner import AutoDistPlanner
from partitioning.compat.autodist.server_planners import (
    PS,
    Parallax,
    PartitionedPS,
    PSLoadBalancing,
    ServerPlanner,
    UnevenPartitionedPS,
)
from partitioning.compat.autodist.splits import (
    even_shards,
    split_offsets,
    split_rows,
    split_sizes,
    uneven_shards,
)
from partitioning.compat.autodist.strategy import Strategy
from partitioning.compat.autodist.variable_partitioner import (
    PartitionedVariables,
    VariablePartitioner,
)
from partitioning.compat.autodist.variables import Variable, describe_variables

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
