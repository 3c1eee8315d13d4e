"""PyTorch's ShardingPlan on a mesh, and shards that PyTorch has cut."""

from partitioning.compat.pytorch.entries import Sharder, place
from partitioning.compat.pytorch.modules import constrain_outputs, shard_module
from partitioning.compat.pytorch.shard_metadata import (
    ShardMetadata,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from partitioning.compat.pytorch.shard_reading import (
    array_from_shards,
    infer_partition_spec,
    infer_sharding_spec,
)
from partitioning.compat.pytorch.sharding_plan import ShardingPlan, ShardingPlanner
from partitioning.compat.pytorch.sharding_specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardingSpec,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
)
from partitioning.compat.pytorch.trees import parameters

__all__ = [
    'ChunkShardingSpec',
    'EnumerableShardingSpec',
    'GridShardingSpec',
    'ShardMetadata',
    'Sharder',
    'ShardingPlan',
    'ShardingPlanner',
    'ShardingSpec',
    'array_from_shards',
    'check_tensor',
    'constrain_outputs',
    'get_chunk_sharding_params',
    'get_chunked_dim_size',
    'get_split_size',
    'infer_partition_spec',
    'infer_sharding_spec',
    'parameters',
    'place',
    'shard_module',
    'validate_non_overlapping_shards_metadata',
]
