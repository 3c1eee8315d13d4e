"""AutoDist's partitioner on a mesh.

`splits`: how one variable is cut; `variables`, `strategy`: the decisions about all of them;
`planners`: who makes the decisions; `variable_partitioner`: train states laid out by them;
`compression`: gradients averaged in few bits.

Usage:
  planner = PartitionedPS()
  print(planner.build(params, servers=['A', 'B']).report())  # AutoDist's decisions
  state, plan = VariablePartitioner(mesh).apply(state, planner)  # on a mesh
"""

from partitioning.compat.autodist.compression import compress_gradients, compression_specs
from partitioning.compat.autodist.planners import (
    PS,
    AllReduce,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    UnevenPartitionedPS,
)
from partitioning.compat.autodist.splits import PartitionerConfig, split_rows, split_sizes
from partitioning.compat.autodist.strategy import Strategy
from partitioning.compat.autodist.variable_partitioner import VariablePartitioner, shard_gradients
from partitioning.compat.autodist.variables import Variable

__all__ = [
    'PS',
    'AllReduce',
    'PSLoadBalancing',
    'Parallax',
    'PartitionedAR',
    'PartitionedPS',
    'PartitionerConfig',
    'RandomAxisPartitionAR',
    'Strategy',
    'UnevenPartitionedPS',
    'Variable',
    'VariablePartitioner',
    'compress_gradients',
    'compression_specs',
    'shard_gradients',
    'split_rows',
    'split_sizes',
]
