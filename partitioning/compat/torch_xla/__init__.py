"""Offers torch_xla's SPMD functions for jax arrays.

Usage:
  from partitioning.compat import torch_xla
  mesh = torch_xla.mesh_from_device_ids(range(8), (4, 2), ('data', 'model'))
  x = torch_xla.mark_sharding(x, mesh, ('data', None))
  torch_xla.hlo_sharding(mesh, ('data', None))  # '{devices=[4,1,2]<=[8] last_tile_dim_replicate}'
"""

from partitioning.compat.torch_xla.marking import (
    ManualShards as ManualShards,
    PaddedArray as PaddedArray,
    apply_backward_optimization_barrier as apply_backward_optimization_barrier,
    clear_sharding as clear_sharding,
    disable_manual_sharding as disable_manual_sharding,
    enable_manual_sharding as enable_manual_sharding,
    mark_sharding as mark_sharding,
    mark_sharding_with_gradients as mark_sharding_with_gradients,
)
from partitioning.compat.torch_xla.meshes_and_specs import (
    HybridMesh as HybridMesh,
    SpecLike as SpecLike,
    get_1d_mesh as get_1d_mesh,
    get_axis_name_idx as get_axis_name_idx,
    get_global_mesh as get_global_mesh,
    get_logical_mesh as get_logical_mesh,
    mesh_from_device_ids as mesh_from_device_ids,
    resolve_partition_spec as resolve_partition_spec,
    set_global_mesh as set_global_mesh,
)
from partitioning.compat.torch_xla.shards_and_batches import (
    LocalShard as LocalShard,
    ShardingSpec as ShardingSpec,
    global_from_shards as global_from_shards,
    local_shards as local_shards,
    shard_batch as shard_batch,
)
from partitioning.compat.torch_xla.tile_assignments import (
    ShardingType as ShardingType,
    group_assignment as group_assignment,
    hlo_sharding as hlo_sharding,
    iota_tile_assignment as iota_tile_assignment,
    replication_groups as replication_groups,
    sharding_type as sharding_type,
    tile_assignment as tile_assignment,
)
