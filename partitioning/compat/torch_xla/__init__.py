"""torch_xla's words: tiles, groups, marks and manual sharding, over jax's own sharding.

`meshes`: meshes of device ids, the global mesh, HybridMesh; `partition_spec`: specs of mesh
dimensions or names; `tiles`: which device holds which tile, and its HLO; `mark`: laying out arrays;
`padded`: arrays whose sizes do not divide; `shards`: what this process holds, and arrays from it;
`manual`: functions of the local blocks; `gradients`: layouts and order on the way back;
`sharding_spec`: specs for the batches of an input loader.

Usage:
  from partitioning.compat import torch_xla as spmd
  mesh = spmd.mesh_from_device_ids(range(8), (4, 2), ('data', 'model'))
  x = spmd.mark_sharding(x, mesh, ('data', None))
  spmd.hlo_sharding(mesh, ('data', None))  # '{devices=[4,1,2]<=[8] last_tile_dim_replicate}'
"""

from partitioning.compat.torch_xla.gradients import (
    apply_backward_optimization_barrier,
    mark_sharding_with_gradients,
)
from partitioning.compat.torch_xla.manual import (
    ManualShards,
    disable_manual_sharding,
    enable_manual_sharding,
)
from partitioning.compat.torch_xla.mark import clear_sharding, mark_sharding
from partitioning.compat.torch_xla.meshes import (
    HybridMesh,
    get_1d_mesh,
    get_axis_name_idx,
    get_global_mesh,
    get_logical_mesh,
    mesh_from_device_ids,
    set_global_mesh,
)
from partitioning.compat.torch_xla.padded_array import PaddedArray
from partitioning.compat.torch_xla.partition_spec import SpecEntry, SpecLike, resolve_partition_spec
from partitioning.compat.torch_xla.sharding_spec import ShardingSpec, shard_batch
from partitioning.compat.torch_xla.shards import LocalShard, global_from_shards, local_shards
from partitioning.compat.torch_xla.tiles import (
    IotaTileAssignment,
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
    'IotaTileAssignment',
    'LocalShard',
    'ManualShards',
    'PaddedArray',
    'ShardingSpec',
    'ShardingType',
    'SpecEntry',
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
