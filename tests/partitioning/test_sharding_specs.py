"""PyTorch's sharding specs: the PartitionSpecs that cut the same shards, and what is refused."""

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from shard_cuts import CUBE, MESH, places

from partitioning import PaddedSpec
from partitioning.compat.pytorch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardingPlan,
    ShardMetadata,
    get_chunk_sharding_params,
    get_split_size,
    infer_partition_spec,
    infer_sharding_spec,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]


# Ways to cut.


def test_shards_are_values():
    """Shards and specs compare by value; numbers of numpy and lists become tuples."""
    shard = ShardMetadata(np.array([0, 4]), [np.int64(2), 3], 'rank:0/cpu')
    assert shard == ShardMetadata((0, 4), (2, 3), 'rank:0/cpu') != ShardMetadata((0, 4), (2, 3))
    assert len({shard, ShardMetadata([0, 4], [2, 3], 'rank:0/cpu')}) == 1
    assert shard.index == (slice(0, 2), slice(4, 7)) and shard.stops == (2, 7)
    assert shard.num_elements == 6 and str(shard) == '[0, 4]x[2, 3] of rank:0/cpu'
    specs = [ChunkShardingSpec(0, [0, 1]), ChunkShardingSpec(0, (0, 1))]
    grids = [GridShardingSpec((4, 4), [0, 1]), GridShardingSpec([4, 4], (0, 1))]
    for first, second in specs, grids:
        assert first == second and hash(first) == hash(second)


def test_empty_chunks_are_inferred():
    """Empty chunks come last; each begins at the end of the dimension."""
    shards = ChunkShardingSpec(0, range(4)).build_metadata((2, 3))
    assert [(s.shard_offsets[0], s.shard_sizes[0]) for s in shards] == [
        (0, 1), (1, 1), (2, 0), (2, 0)
    ]  # fmt: skip
    assert infer_sharding_spec(shards) == ChunkShardingSpec(0, range(4))
    assert infer_sharding_spec(shards[::-1]) == ChunkShardingSpec(0, (0, 1, 3, 2))
    elsewhere = [*shards[:3], ShardMetadata((1, 0), (0, 3), 3)]
    assert infer_sharding_spec(elsewhere) == EnumerableShardingSpec(elsewhere)


# PartitionSpecs.


def cut_by(sharding, shape):
    """The blocks into which jax cuts an array, each once, by its index map."""
    found = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
        found.setdefault(tuple(bounds), device.id)
    return [
        ShardMetadata([a for a, _ in bounds], [b - a for a, b in bounds], device)
        for bounds, device in found.items()
    ]


@pytest.mark.parametrize(
    'spec',
    [
        P(),
        P('data'),
        P('model'),
        P('data', 'model'),
        P('model', 'data'),
        P(None, 'data'),
        P(('data', 'model')),
        P(('model', 'data')),
        P(None, ('data', 'model')),
    ],
)
def test_specs_from_blocks(spec):
    """The inferred spec cuts the same blocks, whichever axes it takes."""
    shards = cut_by(NamedSharding(MESH, spec), (16, 16))
    inferred = infer_partition_spec(shards[::-1], MESH)
    assert places(cut_by(NamedSharding(MESH, inferred), (16, 16))) == places(shards)
    if ('data', 'model') not in spec and ('model', 'data') not in spec:
        assert inferred == spec


@pytest.mark.parametrize(
    'spec',
    [
        P('a'),
        P('b', 'c'),
        P(('a', 'b')),
        P(('a', 'b'), 'c'),
        P('c', ('a', 'b')),
        P(('a', 'b', 'c')),
    ],
)
def test_specs_on_a_mesh_of_equal_axes(spec):
    """Several choices of axes cut the same blocks; a choice between single axes is refused."""
    shards = cut_by(NamedSharding(CUBE, spec), (16, 16))
    if spec == P('a'):
        with pytest.raises(ValueError, match=r'2 parts.*a or b or c.*a 2 x b 2 x c 2'):
            infer_partition_spec(shards, CUBE)
        return
    inferred = infer_partition_spec(shards, CUBE)
    assert places(cut_by(NamedSharding(CUBE, inferred), (16, 16))) == places(shards)


def test_a_policy_decides_about_uneven_chunks():
    shards = ChunkShardingSpec(0, range(4)).build_metadata((29, 4))
    spec = infer_partition_spec(shards, MESH)
    assert spec == P('data')
    plan, tree = ShardingPlan({'w': spec}), {'w': np.zeros((29, 4))}
    padded = plan.resolve(tree, MESH, on_indivisible='pad')['w']
    assert padded.spec == PaddedSpec(P(None, None), P('data', None))
    with pytest.raises(ValueError, match=r'w: .*29.* 4\b.*28 or 32'):
        plan.resolve(tree, MESH)


def test_specs_take_the_mesh_axis_with_as_many_devices_as_chunks():
    assert ChunkShardingSpec(0, range(4)).to_partition_spec(MESH, (8, 8)) == P('data')
    assert ChunkShardingSpec(-1, range(2)).to_partition_spec(MESH, (8, 8)) == P(None, 'model')
    assert ChunkShardingSpec(1, ['rank:5/cpu']).to_partition_spec(MESH, (8, 8)) == P()
    assert GridShardingSpec((2, 4), range(8)).to_partition_spec(MESH, (8, 8)) == P('data', 'model')
    ranks = [f'rank:{i}/cuda:{i % 8}' for i in range(12)]  # as text, 10 comes before 2
    assert ChunkShardingSpec(0, ranks).to_partition_spec({'data': 12}, (24,)) == P('data')


# What is refused.

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
