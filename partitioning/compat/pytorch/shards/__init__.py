"""Shards that others have cut: what they are, whether they make a tensor, and how to read them.

`metadata`: where a shard is, and checks of several; `specs`: PyTorch's ways to cut; `infer`: the
way back, from shards to a spec; `gather`: shards to a sharded array.
"""

from partitioning.compat.pytorch.shards.gather import array_from_shards
from partitioning.compat.pytorch.shards.infer import infer_partition_spec, infer_sharding_spec
from partitioning.compat.pytorch.shards.metadata import (
    ShardMetadata,
    check_tensor,
    validate_non_overlapping_shards_metadata,
)
from partitioning.compat.pytorch.shards.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
)

__all__ = [
    'ChunkShardingSpec',
    'EnumerableShardingSpec',
    'GridShardingSpec',
    'ShardMetadata',
    'array_from_shards',
    'check_tensor',
    'get_chunk_sharding_params',
    'get_chunked_dim_size',
    'get_split_size',
    'infer_partition_spec',
    'infer_sharding_spec',
    'validate_non_overlapping_shards_metadata',
]
