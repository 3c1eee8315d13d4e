"""Named array axes onto any mesh of TPUs, GPUs or CPUs.

Usage:
  from partitioning import PjitPartitioner
  partitioner = PjitPartitioner(num_partitions=2)
"""

from partitioning.audit import ArrayLayout, array_layouts, layout_table
from partitioning.constrain import constrain, global_mesh_defined, with_sharding_constraint
from partitioning.hardware import (
    CHIPS,
    Chip,
    HardwareMesh,
    JaxDevice,
    OtherMesh,
    Topology,
    TpuMesh,
    bounds_from_last_device,
    describe_topology,
    get_coords,
)
from partitioning.layout import (
    DataLayout,
    LocalChunker,
    LocalChunkInfo,
    host_local_array_to_global_array,
)
from partitioning.mesh import (
    AxisRing,
    AxisTypes,
    axis_rings,
    create_hybrid_mesh,
    create_mesh,
    default_mesh,
    default_moe_mesh,
    draw_mesh,
    get_cpu_mesh,
    get_gpu_mesh,
    get_mesh,
    mesh_table,
)
from partitioning.partitioned import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    PjittedFnWithContext,
)
from partitioning.partitioner import (
    BasePartitioner,
    BasePjitPartitioner,
    MoePjitPartitioner,
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
    'CHIPS',
    'ArrayLayout',
    'AxisNames',
    'AxisRing',
    'AxisTypes',
    'BasePartitioner',
    'BasePjitPartitioner',
    'Chip',
    'CompiledPartitionedCallable',
    'DataLayout',
    'HardwareMesh',
    'JaxDevice',
    'LocalChunkInfo',
    'LocalChunker',
    'LogicalAxisRules',
    'MoePjitPartitioner',
    'OtherMesh',
    'PartitionedCallable',
    'PjitPartitioner',
    'PjittedFnWithContext',
    'ResolvedDimension',
    'Topology',
    'TpuMesh',
    'TrainState',
    'array_layouts',
    'axis_rings',
    'bounds_from_last_device',
    'constrain',
    'create_hybrid_mesh',
    'create_mesh',
    'default_mesh',
    'default_moe_mesh',
    'describe_topology',
    'draw_mesh',
    'get_coords',
    'get_cpu_mesh',
    'get_gpu_mesh',
    'get_mesh',
    'global_mesh_defined',
    'host_local_array_to_global_array',
    'layout_table',
    'logical_to_mesh_axes',
    'mesh_table',
    'resolve_axes',
    'standard_logical_axis_rules',
    'unbox',
    'with_sharding_constraint',
]
