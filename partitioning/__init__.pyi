"""The names of `partitioning`, each listed once with the module that has it.

`partitioning/__init__.py` reads this file and imports a module when one of its names is first used.
"""

from jax.sharding import (
    Mesh as Mesh,
    NamedSharding as NamedSharding,
    PartitionSpec as PartitionSpec,
)
from jax.tree_util import (
    PyTreeDef as PyTreeDef,
)

from partitioning.constraints import (
    activation_spec as activation_spec,
    constrain as constrain,
    global_mesh_defined as global_mesh_defined,
    with_sharding_constraint as with_sharding_constraint,
)
from partitioning.hardware import (
    CHIPS as CHIPS,
    Chip as Chip,
    HardwareMesh as HardwareMesh,
    JaxDevice as JaxDevice,
    OtherMesh as OtherMesh,
    Topology as Topology,
    TpuMesh as TpuMesh,
    bounds_from_last_device as bounds_from_last_device,
    describe_topology as describe_topology,
    get_coords as get_coords,
)
from partitioning.layout import (
    DataLayout as DataLayout,
    LocalChunker as LocalChunker,
    LocalChunkInfo as LocalChunkInfo,
    host_local_array_to_global_array as host_local_array_to_global_array,
)
from partitioning.mesh import (
    AxisRing as AxisRing,
    AxisTypes as AxisTypes,
    MeshConfig as MeshConfig,
    axis_rings as axis_rings,
    mesh_table as mesh_table,
)
from partitioning.mesh.aliases import (
    create_hybrid_mesh as create_hybrid_mesh,
    create_mesh as create_mesh,
    default_mesh as default_mesh,
    default_moe_mesh as default_moe_mesh,
    get_cpu_mesh as get_cpu_mesh,
    get_gpu_mesh as get_gpu_mesh,
    get_mesh as get_mesh,
)
from partitioning.partitioner.base import (
    BasePartitioner as BasePartitioner,
)
from partitioning.partitioner.base_pjit import (
    BasePjitPartitioner as BasePjitPartitioner,
)
from partitioning.partitioner.moe import (
    MoePjitPartitioner as MoePjitPartitioner,
    compute_num_model_partitions as compute_num_model_partitions,
    override_partition_specs as override_partition_specs,
)
from partitioning.partitioner.pjit import (
    PjitPartitioner as PjitPartitioner,
)
from partitioning.pictures.memory import (
    draw_audit as draw_audit,
)
from partitioning.pictures.mesh_drawing import (
    draw_mesh as draw_mesh,
)
from partitioning.pictures.shards import (
    ShardingPicture as ShardingPicture,
    visualize_sharding as visualize_sharding,
)
from partitioning.plan import (
    Audit as Audit,
    Finding as Finding,
    Plan as Plan,
    PlanDiff as PlanDiff,
    PlanRow as PlanRow,
    plan_diff as plan_diff,
)
from partitioning.programs.contexts import (
    PjittedFnWithContext as PjittedFnWithContext,
)
from partitioning.programs.partitioned_function import (
    CompiledPartitionedCallable as CompiledPartitionedCallable,
    PartitionedCallable as PartitionedCallable,
)
from partitioning.programs.trace_log import (
    check_compiled_once as check_compiled_once,
)
from partitioning.rules import (
    AxisNames as AxisNames,
    AxisRules as AxisRules,
    LogicalAxisRules as LogicalAxisRules,
    PaddedSpec as PaddedSpec,
    ResolvedDimension as ResolvedDimension,
    add_axis as add_axis,
    fsdp_logical_axis_rules as fsdp_logical_axis_rules,
    logical_to_mesh_axes as logical_to_mesh_axes,
    remove_axis as remove_axis,
    resolve_axes as resolve_axes,
    standard_logical_axis_rules as standard_logical_axis_rules,
)
from partitioning.state import (
    TrainState as TrainState,
    get_logical_axes as get_logical_axes,
    override_params_axes_names as override_params_axes_names,
    unbox as unbox,
)
from partitioning.state.conversion import (
    to_linen_boxes as to_linen_boxes,
    to_nnx_state as to_nnx_state,
    to_params_axes as to_params_axes,
)
from partitioning.state.linen import (
    LogicallyPartitioned as LogicallyPartitioned,
    Partitioned as Partitioned,
    with_logical_partitioning as with_logical_partitioning,
    with_partitioning as with_partitioning,
)
from partitioning.suggestion.rule_matches import (
    RuleMatches as RuleMatches,
    explain_rules as explain_rules,
)
from partitioning.suggestion.suggested_rules import (
    SuggestedRules as SuggestedRules,
    suggest_rules as suggest_rules,
)

__all__ = [
    'CHIPS',
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
    'draw_audit',
    'draw_mesh',
    'explain_rules',
    'fsdp_logical_axis_rules',
    'logical_to_mesh_axes',
    'override_params_axes_names',
    'plan_diff',
    'resolve_axes',
    'standard_logical_axis_rules',
    'suggest_rules',
    'to_linen_boxes',
    'to_nnx_state',
    'to_params_axes',
    'unbox',
    'visualize_sharding',
    'with_logical_partitioning',
    'with_partitioning',
    'with_sharding_constraint',
]
