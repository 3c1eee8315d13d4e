"""AutoDist's partitioner on a mesh.

Usage:
  planner = PartitionedPS()
  print(planner.build(params, servers=['A', 'B']).report())  # AutoDist's decisions
  state, plan = VariablePartitioner(mesh).apply(state, planner)  # on a mesh
"""

from partitioning.compat.autodist.compression import compress_gradients as compress_gradients
from partitioning.compat.autodist.compression import compression_specs as compression_specs
from partitioning.compat.autodist.planners import PS as PS
from partitioning.compat.autodist.planners import AllReduce as AllReduce
from partitioning.compat.autodist.planners import Parallax as Parallax
from partitioning.compat.autodist.planners import PartitionedAR as PartitionedAR
from partitioning.compat.autodist.planners import PartitionedPS as PartitionedPS
from partitioning.compat.autodist.planners import PSLoadBalancing as PSLoadBalancing
from partitioning.compat.autodist.planners import RandomAxisPartitionAR as RandomAxisPartitionAR
from partitioning.compat.autodist.planners import UnevenPartitionedPS as UnevenPartitionedPS
from partitioning.compat.autodist.splits import PartitionerConfig as PartitionerConfig
from partitioning.compat.autodist.splits import split_rows as split_rows
from partitioning.compat.autodist.splits import split_sizes as split_sizes
from partitioning.compat.autodist.strategy import Strategy as Strategy
from partitioning.compat.autodist.variable_partitioner import (
    VariablePartitioner as VariablePartitioner,
)
from partitioning.compat.autodist.variable_partitioner import shard_gradients as shard_gradients
from partitioning.compat.autodist.variables import Variable as Variable
