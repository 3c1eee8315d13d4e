"""torch_xla's SPMD functions, on jax's own sharding.

Usage:
  from partitioning.compat import torch_xla
  mesh = torch_xla.mesh_from_device_ids(range(8), (4, 2), ('data', 'model'))
  x = torch_xla.mark_sharding(x, mesh, ('data', None))
  torch_xla.hlo_sharding(mesh, ('data', None))  # '{devices=[4,1,2]<=[8] last_tile_dim_replicate}'
"""

from partitioning.compat.torch_xla.manual import ManualShards as ManualShards
from partitioning.compat.torch_xla.manual import disable_manual_sharding as disable_manual_sharding
from partitioning.compat.torch_xla.manual import enable_manual_sharding as enable_manual_sharding
from partitioning.compat.torch_xla.marking import PaddedArray as PaddedArray
from partitioning.compat.torch_xla.marking import (
    apply_backward_optimization_barrier as apply_backward_optimization_barrier,
)
from partitioning.compat.torch_xla.marking import clear_sharding as clear_sharding
from partitioning.compat.torch_xla.marking import mark_sharding as mark_sharding
from partitioning.compat.torch_xla.marking import (
    mark_sharding_with_gradients as mark_sharding_with_gradients,
)
from partitioning.compat.torch_xla.meshes_and_specs import HybridMesh as HybridMesh
from partitioning.compat.torch_xla.meshes_and_specs import SpecLike as SpecLike
from partitioning.compat.torch_xla.meshes_and_specs import get_1d_mesh as get_1d_mesh
from partitioning.compat.torch_xla.meshes_and_specs import get_axis_name_idx as get_axis_name_idx
from partitioning.compat.torch_xla.meshes_and_specs import get_global_mesh as get_global_mesh
from partitioning.compat.torch_xla.meshes_and_specs import get_logical_mesh as get_logical_mesh
from partitioning.compat.torch_xla.meshes_and_specs import (
    mesh_from_device_ids as mesh_from_device_ids,
)
from partitioning.compat.torch_xla.meshes_and_specs import (
    resolve_partition_spec as resolve_partition_spec,
)
from partitioning.compat.torch_xla.meshes_and_specs import set_global_mesh as set_global_mesh
from partitioning.compat.torch_xla.shards_and_batches import LocalShard as LocalShard
from partitioning.compat.torch_xla.shards_and_batches import ShardingSpec as ShardingSpec
from partitioning.compat.torch_xla.shards_and_batches import (
    global_from_shards as global_from_shards,
)
from partitioning.compat.torch_xla.shards_and_batches import local_shards as local_shards
from partitioning.compat.torch_xla.shards_and_batches import shard_batch as shard_batch
from partitioning.compat.torch_xla.tile_assignments import ShardingType as ShardingType
from partitioning.compat.torch_xla.tile_assignments import group_assignment as group_assignment
from partitioning.compat.torch_xla.tile_assignments import hlo_sharding as hlo_sharding
from partitioning.compat.torch_xla.tile_assignments import (
    iota_tile_assignment as iota_tile_assignment,
)
from partitioning.compat.torch_xla.tile_assignments import replication_groups as replication_groups
from partitioning.compat.torch_xla.tile_assignments import sharding_type as sharding_type
from partitioning.compat.torch_xla.tile_assignments import tile_assignment as tile_assignment
