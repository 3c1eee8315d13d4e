"""Named array axes on any mesh of TPUs, GPUs or CPUs.

Usage:
  from partitioning import PjitPartitioner
  partitioner = PjitPartitioner(num_partitions=2)

`__all__` holds what programs need. Further names of `t5x.partitioning` can be imported from here
too, as can the type names in the signatures.
"""

import importlib
from typing import Any

from partitioning.constraints import constrain, with_sharding_constraint
from partitioning.hardware import CHIPS, Chip, Topology, describe_topology
from partitioning.layout import DataLayout, LocalChunker
from partitioning.mesh import MeshConfig, create_mesh
from partitioning.partitioner import (
    BasePartitioner,
    MoePjitPartitioner,
    PjitPartitioner,
    check_compiled_once,
)
from partitioning.plan import Audit, Plan, PlanRow, diff
from partitioning.rules import (
    AxisNames,
    AxisRules,
    fsdp_logical_axis_rules,
    logical_to_mesh_axes,
    resolve_axes,
    standard_logical_axis_rules,
)
from partitioning.state import TrainState, override_params_axes_names, unbox

# Names whose modules are imported at their first use, because they import flax or are rarely used.
_LAZY = {
    'partitioning.state.linen': (
        'LogicallyPartitioned',
        'Partitioned',
        'with_logical_partitioning',
        'with_partitioning',
    ),
    'partitioning.state.conversion': ('to_linen_boxes', 'to_nnx_state', 'to_params_axes'),
    'partitioning.pictures': ('ShardingPicture', 'draw_audit', 'draw_mesh', 'visualize_sharding'),
    'partitioning.mesh': (
        'AxisRing',
        'AxisTypes',
        'axis_rings',
        'create_hybrid_mesh',
        'default_mesh',
        'default_moe_mesh',
        'get_cpu_mesh',
        'get_gpu_mesh',
        'get_mesh',
        'mesh_table',
    ),
    'partitioning.hardware': (
        'HardwareMesh',
        'JaxDevice',
        'OtherMesh',
        'TpuMesh',
        'bounds_from_last_device',
        'get_coords',
    ),
    'partitioning.layout': ('LocalChunkInfo', 'host_local_array_to_global_array'),
    'partitioning.partitioner': (
        'BasePjitPartitioner',
        'CompiledPartitionedCallable',
        'PartitionedCallable',
        'PjittedFnWithContext',
    ),
    'partitioning.plan': ('Finding', 'PlanDiff'),
    'partitioning.constraints': ('global_mesh_defined',),
    'partitioning.rules': (
        'LogicalAxisRules',
        'PaddedSpec',
        'ResolvedDimension',
        'add_axis',
        'remove_axis',
    ),
    'partitioning.state': ('get_logical_axes',),
    # T5X's module has these names of jax, which its users import from there.
    'jax.sharding': ('Mesh', 'NamedSharding', 'PartitionSpec'),
    'jax.tree_util': ('PyTreeDef',),
}
_MODULE_OF_NAME = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a name of `_LAZY` at its first use."""
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module(_MODULE_OF_NAME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF_NAME})


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
