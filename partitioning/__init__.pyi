"""The names of `partitioning`, each listed once with the module that has it.

`partitioning/__init__.py` reads this file and imports a module when one of its names is first used.
"""

from jax.sharding import (
    Mesh as Mesh,
)
from jax.sharding import (
    NamedSharding as NamedSharding,
)
from jax.sharding import (
    PartitionSpec as PartitionSpec,
)
from jax.tree_util import (
    PyTreeDef as PyTreeDef,
)

from partitioning.constraints import (
    constrain as constrain,
)
from partitioning.constraints import (
    global_mesh_defined as global_mesh_defined,
)
from partitioning.constraints import (
    with_sharding_constraint as with_sharding_constraint,
)
from partitioning.hardware import (
    CHIPS as CHIPS,
)
from partitioning.hardware import (
    Chip as Chip,
)
from partitioning.hardware import (
    HardwareMesh as HardwareMesh,
)
from partitioning.hardware import (
    JaxDevice as JaxDevice,
)
from partitioning.hardware import (
    OtherMesh as OtherMesh,
)
from partitioning.hardware import (
    Topology as Topology,
)
from partitioning.hardware import (
    TpuMesh as TpuMesh,
)
from partitioning.hardware import (
    bounds_from_last_device as bounds_from_last_device,
)
from partitioning.hardware import (
    describe_topology as describe_topology,
)
from partitioning.hardware import (
    get_coords as get_coords,
)
from partitioning.layout import (
    DataLayout as DataLayout,
)
from partitioning.layout import (
    LocalChunker as LocalChunker,
)
from partitioning.layout import (
    LocalChunkInfo as LocalChunkInfo,
)
from partitioning.layout import (
    host_local_array_to_global_array as host_local_array_to_global_array,
)
from partitioning.mesh import (
    AxisRing as AxisRing,
)
from partitioning.mesh import (
    AxisTypes as AxisTypes,
)
from partitioning.mesh import (
    MeshConfig as MeshConfig,
)
from partitioning.mesh import (
    axis_rings as axis_rings,
)
from partitioning.mesh import (
    create_hybrid_mesh as create_hybrid_mesh,
)
from partitioning.mesh import (
    create_mesh as create_mesh,
)
from partitioning.mesh import (
    default_mesh as default_mesh,
)
from partitioning.mesh import (
    default_moe_mesh as default_moe_mesh,
)
from partitioning.mesh import (
    get_cpu_mesh as get_cpu_mesh,
)
from partitioning.mesh import (
    get_gpu_mesh as get_gpu_mesh,
)
from partitioning.mesh import (
    get_mesh as get_mesh,
)
from partitioning.mesh import (
    mesh_table as mesh_table,
)
from partitioning.partitioner import (
    BasePartitioner as BasePartitioner,
)
from partitioning.partitioner import (
    BasePjitPartitioner as BasePjitPartitioner,
)
from partitioning.partitioner import (
    CompiledPartitionedCallable as CompiledPartitionedCallable,
)
from partitioning.partitioner import (
    MoePjitPartitioner as MoePjitPartitioner,
)
from partitioning.partitioner import (
    PartitionedCallable as PartitionedCallable,
)
from partitioning.partitioner import (
    PjitPartitioner as PjitPartitioner,
)
from partitioning.partitioner import (
    PjittedFnWithContext as PjittedFnWithContext,
)
from partitioning.partitioner import (
    check_compiled_once as check_compiled_once,
)
from partitioning.pictures import (
    ShardingPicture as ShardingPicture,
)
from partitioning.pictures import (
    draw_audit as draw_audit,
)
from partitioning.pictures import (
    draw_mesh as draw_mesh,
)
from partitioning.pictures import (
    visualize_sharding as visualize_sharding,
)
from partitioning.plan import (
    Audit as Audit,
)
from partitioning.plan import (
    Finding as Finding,
)
from partitioning.plan import (
    Plan as Plan,
)
from partitioning.plan import (
    PlanDiff as PlanDiff,
)
from partitioning.plan import (
    PlanRow as PlanRow,
)
from partitioning.plan import (
    diff as diff,
)
from partitioning.rules import (
    AxisNames as AxisNames,
)
from partitioning.rules import (
    AxisRules as AxisRules,
)
from partitioning.rules import (
    LogicalAxisRules as LogicalAxisRules,
)
from partitioning.rules import (
    PaddedSpec as PaddedSpec,
)
from partitioning.rules import (
    ResolvedDimension as ResolvedDimension,
)
from partitioning.rules import (
    add_axis as add_axis,
)
from partitioning.rules import (
    fsdp_logical_axis_rules as fsdp_logical_axis_rules,
)
from partitioning.rules import (
    logical_to_mesh_axes as logical_to_mesh_axes,
)
from partitioning.rules import (
    remove_axis as remove_axis,
)
from partitioning.rules import (
    resolve_axes as resolve_axes,
)
from partitioning.rules import (
    standard_logical_axis_rules as standard_logical_axis_rules,
)
from partitioning.state import (
    TrainState as TrainState,
)
from partitioning.state import (
    get_logical_axes as get_logical_axes,
)
from partitioning.state import (
    override_params_axes_names as override_params_axes_names,
)
from partitioning.state import (
    unbox as unbox,
)
from partitioning.state.conversion import (
    to_linen_boxes as to_linen_boxes,
)
from partitioning.state.conversion import (
    to_nnx_state as to_nnx_state,
)
from partitioning.state.conversion import (
    to_params_axes as to_params_axes,
)
from partitioning.state.linen import (
    LogicallyPartitioned as LogicallyPartitioned,
)
from partitioning.state.linen import (
    Partitioned as Partitioned,
)
from partitioning.state.linen import (
    with_logical_partitioning as with_logical_partitioning,
)
from partitioning.state.linen import (
    with_partitioning as with_partitioning,
)

__all__ = [
    'CHIPS',
    'Audit',
    'AxisNames',
    'AxisRules',
    'BasePartitioner',
    'Chip',
    'DataLayout',
    'LocalChunker',
    'LogicallyPartitioned',
    'MeshConfig',
    'MoePjitPartitioner',
    'Partitioned',
    'PjitPartitioner',
    'Plan',
    'PlanRow',
    'Topology',
    'TrainState',
    'check_compiled_once',
    'constrain',
    'create_mesh',
    'describe_topology',
    'diff',
    'draw_audit',
    'draw_mesh',
    'fsdp_logical_axis_rules',
    'logical_to_mesh_axes',
    'override_params_axes_names',
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
