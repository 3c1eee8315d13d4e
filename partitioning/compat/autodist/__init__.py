"""Lays out variables on a mesh as AutoDist's planners decide.

Usage:
  planner = PartitionedPS()
  print(planner.build(params, servers=['A', 'B']).report())  # AutoDist's decisions
  state, plan = VariablePartitioner(mesh).apply(state, planner)  # on a mesh
"""

from partitioning.compat.autodist.compression import (
    compress_gradients as compress_gradients,
    compression_specs as compression_specs,
)
from partitioning.compat.autodist.planners import (
    PS as PS,
    AllReduce as AllReduce,
    Parallax as Parallax,
    PartitionedAR as PartitionedAR,
    PartitionedPS as PartitionedPS,
    PSLoadBalancing as PSLoadBalancing,
    RandomAxisPartitionAR as RandomAxisPartitionAR,
    UnevenPartitionedPS as UnevenPartitionedPS,
)
from partitioning.compat.autodist.splits import (
    PartitionerConfig as PartitionerConfig,
    split_rows as split_rows,
    split_sizes as split_sizes,
)
from partitioning.compat.autodist.strategy import Strategy as Strategy
from partitioning.compat.autodist.variable_partitioner import (
    VariablePartitioner as VariablePartitioner,
    shard_gradients as shard_gradients,
)
from partitioning.compat.autodist.variables import Variable as Variable
