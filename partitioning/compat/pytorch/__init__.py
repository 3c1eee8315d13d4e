"""Lays out modules by PyTorch's ShardingPlan, and reads shards that PyTorch has made."""

from partitioning.compat.pytorch.entries import Sharder as Sharder, place as place
from partitioning.compat.pytorch.modules import (
    ShardingPlan as ShardingPlan,
    ShardingPlanner as ShardingPlanner,
    constrain_outputs as constrain_outputs,
    shard_module as shard_module,
)
from partitioning.compat.pytorch.shard_reading import (
    array_from_shards as array_from_shards,
    infer_partition_spec as infer_partition_spec,
    infer_sharding_spec as infer_sharding_spec,
)
from partitioning.compat.pytorch.sharding_specs import (
    ChunkShardingSpec as ChunkShardingSpec,
    EnumerableShardingSpec as EnumerableShardingSpec,
    GridShardingSpec as GridShardingSpec,
    ShardingSpec as ShardingSpec,
    ShardMetadata as ShardMetadata,
    check_tensor as check_tensor,
    get_chunk_sharding_params as get_chunk_sharding_params,
    get_chunked_dim_size as get_chunked_dim_size,
    get_split_size as get_split_size,
    validate_non_overlapping_shards_metadata as validate_non_overlapping_shards_metadata,
)
from partitioning.compat.pytorch.trees import parameters as parameters
