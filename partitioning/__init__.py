"""Named array axes onto any mesh of TPUs, GPUs or CPUs.

Usage:
  from partitioning import PjitPartitioner
  partitioner = PjitPartitioner(num_partitions=2)
"""

from partitioning.audit import ArrayLayout, array_layouts, layout_table
from partitioning.constrain import constrain, global_mesh_defined, with_sharding_constraint
from partitioning.hardware import (
    HardwareMesh,
    JaxDevice,
    OtherMesh,
    TpuMesh,
    bounds_from_last_device,
    get_coords,
)
from partitioning.layout import (
    DataLayout,
    LocalChunker,
    LocalChunkInfo,
    host_local_array_to_global_array,
)
from partitioning.mesh import default_mesh, get_cpu_mesh, get_gpu_mesh, get_mesh
from partitioning.partitioned import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    PjittedFnWithContext,
)
from partitioning.partitioner import (
    BasePartitioner,
    BasePjitPartitioner,
    PjitPartitioner,
    TrainState,
)
from partitioning.rules import (
    AxisNames,
    LogicalAxisRules,
    ResolvedDimension,
    logical_to_mesh_axes,
    resolve_axes,
    standard_logical_axis_rules,
)
from partitioning.state import unbox

__all__ = [
    'ArrayLayout',
    'AxisNames',
    'BasePartitioner',
    'BasePjitPartitioner',
    'CompiledPartitionedCallable',
    'DataLayout',
    'HardwareMesh',
    'JaxDevice',
    'LocalChunkInfo',
    'LocalChunker',
    'LogicalAxisRules',
    'OtherMesh',
    'PartitionedCallable',
    'PjitPartitioner',
    'PjittedFnWithContext',
    'ResolvedDimension',
    'TpuMesh',
    'TrainState',
    'array_layouts',
    'bounds_from_last_device',
    'constrain',
    'default_mesh',
    'get_coords',
    'get_cpu_mesh',
    'get_gpu_mesh',
    'get_mesh',
    'global_mesh_defined',
    'host_local_array_to_global_array',
    'layout_table',
    'logical_to_mesh_axes',
    'resolve_axes',
    'standard_logical_axis_rules',
    'unbox',
    'with_sharding_constraint',
]
