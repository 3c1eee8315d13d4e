"""torch_xla's SPMD functions, on jax's own sharding.

Usage:
  from partitioning.compat import torch_xla
  mesh = torch_xla.mesh_from_device_ids(range(8), (4, 2), ('data', 'model'))
  x = torch_xla.mark_sharding(x, mesh, ('data', None))
  torch_xla.hlo_sharding(mesh, ('data', None))  # '{devices=[4,1,2]<=[8] last_tile_dim_replicate}'
"""

from partitioning.compat.torch_xla.addressable_shards import (
    LocalShard,
    global_from_shards,
    local_shards,
)
from partitioning.compat.torch_xla.manual import (
    ManualShards,
    disable_manual_sharding,
    enable_manual_sharding,
)
from partitioning.compat.torch_xla.marking import (
    PaddedArray,
    apply_backward_optimization_barrier,
    clear_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
)
from partitioning.compat.torch_xla.meshes_and_specs import (
    HybridMesh,
    SpecLike,
    get_1d_mesh,
    get_axis_name_idx,
    get_global_mesh,
    get_logical_mesh,
    mesh_from_device_ids,
    resolve_partition_spec,
    set_global_mesh,
)
from partitioning.compat.torch_xla.sharding_spec import ShardingSpec, shard_batch
from partitioning.compat.torch_xla.tile_assignments import (
    ShardingType,
    group_assignment,
    hlo_sharding,
    iota_tile_assignment,
    replication_groups,
    sharding_type,
    tile_assignment,
)

__all__ = [
    'HybridMesh',
    'LocalShard',
    'ManualShards',
    'PaddedArray',
    'ShardingSpec',
    'ShardingType',
    'SpecLike',
    'apply_backward_optimization_barrier',
    'clear_sharding',
    'disable_manual_sharding',
    'enable_manual_sharding',
    'get_1d_mesh',
    'get_axis_name_idx',
    'get_global_mesh',
    'get_logical_mesh',
    'global_from_shards',
    'group_assignment',
    'hlo_sharding',
    'iota_tile_assignment',
    'local_shards',
    'mark_sharding',
    'mark_sharding_with_gradients',
    'mesh_from_device_ids',
    'replication_groups',
    'resolve_partition_spec',
    'set_global_mesh',
    'shard_batch',
    'sharding_type',
    'tile_assignment',
]
