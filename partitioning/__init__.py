"""Named array axes onto any mesh of TPUs, GPUs or CPUs.

Usage:
  from partitioning import PjitPartitioner
  partitioner = PjitPartitioner(num_partitions=2)
"""

from typing import Any

from partitioning.constraints import constrain, global_mesh_defined, with_sharding_constraint
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
    get_cpu_mesh,
    get_gpu_mesh,
    get_mesh,
    mesh_table,
)
from partitioning.partitioner import (
    BasePartitioner,
    BasePjitPartitioner,
    MoePjitPartitioner,
    PjitPartitioner,
)
from partitioning.partitioner.partitioned import (
    CompiledPartitionedCallable,
    PartitionedCallable,
    PjittedFnWithContext,
)
from partitioning.pictures import ShardingPicture, draw_audit, draw_mesh, visualize_sharding
from partitioning.plan.array_layouts import ArrayLayout
from partitioning.plan.audit import Audit
from partitioning.plan.findings import Finding, lint
from partitioning.plan.fixed_point import check_compiled_once, check_fixed_point
from partitioning.plan.tables import layout_table
from partitioning.rules import (
    AxisNames,
    AxisRules,
    LogicalAxisRules,
    PaddedSpec,
    ResolvedDimension,
    add_axis,
    fsdp_logical_axis_rules,
    logical_to_mesh_axes,
    remove_axis,
    resolve_axes,
    standard_logical_axis_rules,
)
from partitioning.state import (
    TrainState,
    get_logical_axes,
    override_params_axes_names,
    unbox,
)

_OF_LINEN = (
    'LogicallyPartitioned',
    'Partitioned',
    'with_logical_partitioning',
    'with_partitioning',
)
_OF_CONVERSION = ('to_linen_boxes', 'to_nnx_state', 'to_params_axes')


def __getattr__(name: str) -> Any:
    """What is for flax alone, with which flax is imported."""
    if name in _OF_LINEN:
        from partitioning.state import linen

        return getattr(linen, name)
    if name in _OF_CONVERSION:
        from partitioning.state import conversion

        return getattr(conversion, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


__all__ = [
    'CHIPS',
    'ArrayLayout',
    'Audit',
    'AxisNames',
    'AxisRing',
    'AxisRules',
    'AxisTypes',
    'BasePartitioner',
    'BasePjitPartitioner',
    'Chip',
    'CompiledPartitionedCallable',
    'DataLayout',
    'Finding',
    'HardwareMesh',
    'JaxDevice',
    'LocalChunkInfo',
    'LocalChunker',
    'LogicalAxisRules',
    'LogicallyPartitioned',
    'MoePjitPartitioner',
    'OtherMesh',
    'PaddedSpec',
    'Partitioned',
    'PartitionedCallable',
    'PjitPartitioner',
    'PjittedFnWithContext',
    'ResolvedDimension',
    'ShardingPicture',
    'Topology',
    'TpuMesh',
    'TrainState',
    'add_axis',
    'axis_rings',
    'bounds_from_last_device',
    'check_compiled_once',
    'check_fixed_point',
    'constrain',
    'create_hybrid_mesh',
    'create_mesh',
    'default_mesh',
    'default_moe_mesh',
    'describe_topology',
    'draw_audit',
    'draw_mesh',
    'fsdp_logical_axis_rules',
    'get_coords',
    'get_cpu_mesh',
    'get_gpu_mesh',
    'get_logical_axes',
    'get_mesh',
    'global_mesh_defined',
    'host_local_array_to_global_array',
    'layout_table',
    'lint',
    'logical_to_mesh_axes',
    'mesh_table',
    'override_params_axes_names',
    'remove_axis',
    'resolve_axes',
    'standard_logical_axis_rules',
    'to_linen_boxes',
    'to_nnx_state',
    'to_params_axes',
    'unbox',
    'visualize_sharding',
    'with_logical_partitioning',
    'with_partitioning',
    'with_sharding_constraint',
]
