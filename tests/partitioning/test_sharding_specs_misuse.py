"""Sharding specs and shards that are refused."""

import pytest
from shard_cuts import MESH

from partitioning.compat.pytorch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardMetadata,
    get_chunk_sharding_params,
    get_split_size,
    infer_partition_spec,
    infer_sharding_spec,
)

pytestmark = pytest.mark.core

CHUNKS = ChunkShardingSpec(0, range(4))
NO_PARTITION_SPEC = {
    'no axis of that size': (
        ChunkShardingSpec(0, range(3)),
        MESH,
        r'data 4 x model 2.*\(3, 1\) parts.*PartitionSpec',
    ),
    'two axes of that size': (
        ChunkShardingSpec(0, range(2)),
        {'a': 2, 'b': 2},
        '2 parts.*a or b.*a 2 x b 2.*PartitionSpec',
    ),
    'chunks in another order': (
        ChunkShardingSpec(0, [3, 2, 1, 0]),
        MESH,
        r'\[3, 2, 1, 0\].*order of their ranks',
    ),
    'blocks in another order': (
        GridShardingSpec((2, 4), [7, 6, 5, 4, 3, 2, 1, 0]),
        MESH,
        'order of their ranks',
    ),
    'no such dimension': (
        ChunkShardingSpec(2, range(4)),
        MESH,
        r'Invalid sharding dim: 2.*\(8, 8\)',
    ),
    'blocks that do not divide': (
        GridShardingSpec(3, range(8)),
        MESH,
        r'blocks of \(3, 3\).*\(8, 8\)',
    ),
    'too few blocks': (GridShardingSpec(4, range(8)), MESH, r'\(8, 8\).* 4 blocks.* 8 placements'),
    'blocks of another rank': (GridShardingSpec((4,), range(4)), MESH, r'grid_size=\(4,\).*\(8, 8'),
    'blocks of size 0': (GridShardingSpec(0, range(4)), MESH, 'grid_size=0.*>= 1'),
    'blocks that no axes make': (GridShardingSpec(2, range(16)), {'x': 16}, r'x 16.*\(4, 4\)'),
    'shards of two sizes': (
        EnumerableShardingSpec([ShardMetadata([0, 0], [5, 8]), ShardMetadata([5, 0], [3, 8])]),
        MESH,
        r'\(3, 8\) and \(5, 8\).*array_from_shards',
    ),
    'shards of another tensor': (
        EnumerableShardingSpec([ShardMetadata([0, 0], [4, 8])]),
        MESH,
        'volume 64',
    ),
}


@pytest.mark.parametrize('name', NO_PARTITION_SPEC)
def test_no_partition_spec(name):
    spec, mesh, message = NO_PARTITION_SPEC[name]
    with pytest.raises(ValueError, match=message):
        spec.to_partition_spec(mesh, (8, 8))


@pytest.mark.parametrize(
    ('pairs', 'message'),
    [
        ([], 'Empty shard list'),
        ([([0], [4]), ([3], [4])], 'overlap'),
        ([([1], [4])], 'missing'),
        ([([0], [4]), ([0, 0], [4, 4])], 'inconsistent ranks'),
        ([([0, 0], [2, 2]), ([2, 2], [2, 2])], 'missing'),
    ],
)
@pytest.mark.parametrize('infer', [infer_sharding_spec, lambda s: infer_partition_spec(s, MESH)])
def test_shards_that_do_not_make_a_tensor(infer, pairs, message):
    with pytest.raises(ValueError, match=message):
        infer([ShardMetadata(offsets, sizes) for offsets, sizes in pairs])


MISUSE = {
    'half an element': (lambda: ShardMetadata([0.5], [1]), r'shard_offsets.*0\.5'),
    'a boolean as size': (lambda: ShardMetadata([0], [True]), 'shard_sizes.*True'),
    'an offset as text': (lambda: ShardMetadata(['0'], [1]), "shard_offsets.*'0'"),
    'an offset, not a tuple': (lambda: ShardMetadata(0, 1), 'shard_offsets=0'),
    'no placements': (lambda: ChunkShardingSpec(0, []), r'placements \[\]'),
    'two chunks in one place': (lambda: ChunkShardingSpec(0, [1, 1]), r'placements \[1, 1\]'),
    'two blocks in one place': (lambda: GridShardingSpec(4, [0, 0, 1]), r'placements \[0, 0, 1\]'),
    'placements as text': (lambda: ChunkShardingSpec(0, '01'), "placements='01'"),
    'a number of chunks': (lambda: ChunkShardingSpec(0, 4), 'placements=4'),
    'ranks of two kinds': (
        lambda: ChunkShardingSpec(0, [0, 'one', 2, 3]).to_partition_spec(MESH, (8,)),
        "placements.*'one'.*kind",
    ),
    'shards as tuples': (lambda: EnumerableShardingSpec([([0], [4])]), 'ShardMetadata'),
    'zero chunks': (lambda: get_split_size(4, 0), 'chunks=0.*>= 1'),
    'a rank without a chunk': (lambda: get_chunk_sharding_params(8, 4, CHUNKS, 4), 'rank 4'),
    'too few chunks': (lambda: get_chunk_sharding_params(8, 2, CHUNKS, 3), '2 chunks.*4 placement'),
}


@pytest.mark.parametrize('name', MISUSE)
def test_misuse(name):
    call, message = MISUSE[name]
    with pytest.raises(ValueError, match=message):
        call()
