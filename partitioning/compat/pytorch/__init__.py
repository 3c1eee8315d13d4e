"""PyTorch's ShardingPlan on a mesh, and shards that PyTorch has cut."""

from partitioning.compat.pytorch.entries import Sharder as Sharder
from partitioning.compat.pytorch.entries import place as place
from partitioning.compat.pytorch.modules import constrain_outputs as constrain_outputs
from partitioning.compat.pytorch.modules import shard_module as shard_module
from partitioning.compat.pytorch.shard_metadata import ShardMetadata as ShardMetadata
from partitioning.compat.pytorch.shard_metadata import check_tensor as check_tensor
from partitioning.compat.pytorch.shard_metadata import (
    validate_non_overlapping_shards_metadata as validate_non_overlapping_shards_metadata,
)
from partitioning.compat.pytorch.shard_reading import array_from_shards as array_from_shards
from partitioning.compat.pytorch.shard_reading import infer_partition_spec as infer_partition_spec
from partitioning.compat.pytorch.shard_reading import infer_sharding_spec as infer_sharding_spec
from partitioning.compat.pytorch.sharding_plan import ShardingPlan as ShardingPlan
from partitioning.compat.pytorch.sharding_plan import ShardingPlanner as ShardingPlanner
from partitioning.compat.pytorch.sharding_specs import ChunkShardingSpec as ChunkShardingSpec
from partitioning.compat.pytorch.sharding_specs import (
    EnumerableShardingSpec as EnumerableShardingSpec,
)
from partitioning.compat.pytorch.sharding_specs import GridShardingSpec as GridShardingSpec
from partitioning.compat.pytorch.sharding_specs import ShardingSpec as ShardingSpec
from partitioning.compat.pytorch.sharding_specs import (
    get_chunk_sharding_params as get_chunk_sharding_params,
)
from partitioning.compat.pytorch.sharding_specs import get_chunked_dim_size as get_chunked_dim_size
from partitioning.compat.pytorch.sharding_specs import get_split_size as get_split_size
from partitioning.compat.pytorch.trees import parameters as parameters
