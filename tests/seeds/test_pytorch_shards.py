"""How PyTorch cuts tensors into shards: behaviours C9 to C16 of the seeds."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import create_mesh
from partitioning.compat.pytorch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardMetadata,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    infer_partition_spec,
    infer_sharding_spec,
    validate_non_overlapping_shards_metadata,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]


def test_C9_sizes_of_chunks():
    given = {(11, 4): 3, (12, 4): 3, (13, 4): 4, (5, 4): 2, (11, 1): 11, (11, 11): 1}
    assert {args: get_split_size(*args) for args in given} == given
    given = {(11, 3, 0): 3, (11, 3, 3): 2, (13, 4, 0): 4, (13, 4, 3): 1, (5, 2, 3): 0}
    assert {args: get_chunked_dim_size(*args) for args in given} == given


@pytest.mark.parametrize(
    ('size', 'chunks', 'expected'),
    [(10, 3, [4, 4, 2]), (13, 4, [4, 4, 4, 1]), (5, 4, [2, 2, 1, 0])],
)
def test_C9_chunks_of_a_dimension(size, chunks, expected):
    shards = ChunkShardingSpec(0, range(chunks)).build_metadata((size, 3))
    assert [s.shard_sizes for s in shards] == [(n, 3) for n in expected]
    starts = [min(sum(expected[:i]), size) for i in range(chunks)]
    assert [s.shard_offsets for s in shards] == [(n, 0) for n in starts]
    assert [s.placement for s in shards] == [*range(chunks)]


@pytest.mark.parametrize('text', ['{}', 'rank:{}/cuda:{}'])
def test_C10_the_place_of_a_rank_decides(text):
    def of(order):
        placements = [i if text == '{}' else text.format(i, i) for i in order]
        spec = ChunkShardingSpec(0, placements)
        return [get_chunk_sharding_params(21, 4, spec, rank) for rank in range(4)]

    assert of([0, 1, 2, 3]) == [(0, 6), (6, 6), (12, 6), (18, 3)]
    assert of([3, 2, 1, 0]) == [(18, 3), (12, 6), (6, 6), (0, 6)]


def test_C11_the_dimension_of_chunks():
    with pytest.raises(NotImplementedError, match="not support named dimension 'N'"):
        ChunkShardingSpec('N', [0, 1])
    for dim in None, {}, 1.0, True:
        with pytest.raises(ValueError, match='needs to be an integer'):
            ChunkShardingSpec(dim, [0, 1])
    for dim in 2, -3:
        spec = ChunkShardingSpec(dim, [0, 1])
        with pytest.raises(ValueError, match=f'Invalid sharding dim: {dim}'):
            spec.build_metadata((4, 6))
    last, second = (ChunkShardingSpec(dim, [0, 1]).build_metadata((4, 6)) for dim in (-1, 1))
    assert last == second and [s.shard_sizes for s in last] == [(4, 3), (4, 3)]


def shards(*pairs):
    return [ShardMetadata(offsets, sizes, i) for i, (offsets, sizes) in enumerate(pairs)]


ROWS = shards(([0, 0], [5, 5]), ([5, 0], [5, 5]))


@pytest.mark.parametrize(
    ('shape', 'blocks'),
    [
        ((10, 5), ROWS),
        ((6, 6), shards(*(([r, c], [3, 3]) for r in (0, 3) for c in (0, 3)))),
        (
            (6, 6),
            shards(([0, 0], [2, 4]), ([0, 4], [4, 2]), ([2, 0], [4, 4]), ([4, 4], [2, 2])),
        ),
    ],
)
def test_C12_shards_that_make_a_tensor(shape, blocks):
    assert EnumerableShardingSpec(blocks).build_metadata(shape) == tuple(blocks)
    held = np.zeros(shape, int)
    for shard in blocks:
        held[shard.index] += 1
    assert (held == 1).all()


def test_C13_offsets_and_sizes_that_are_refused():
    for offsets, sizes, message in (
        ([0], [1, 1], 'same number of elements'),
        ([-1, 0], [1, 1], 'shard_offsets should be >=0'),
        ([0, 0], [-1, 1], 'shard_sizes should be >= 0'),
    ):
        with pytest.raises(ValueError, match=message):
            ShardMetadata(offsets, sizes)


@pytest.mark.parametrize(
    ('blocks', 'message'),
    [
        ([], 'Empty shard list provided'),
        (shards(([0, 0], [1, 1]), ([0, 0, 0], [1, 1, 1])), 'Found inconsistent ranks for shards'),
        (shards(([0, 0], [3, 3]), ([2, 0], [3, 3])), 'Shards.*overlap'),
    ],
)
def test_C13_shards_that_do_not_make_a_tensor(blocks, message):
    for check in EnumerableShardingSpec, validate_non_overlapping_shards_metadata:
        with pytest.raises(ValueError, match=message):
            check(blocks)


@pytest.mark.parametrize(
    ('blocks', 'shape', 'message'),
    [
        (ROWS, (10, 5, 5), 'Rank of tensor is 3, but shards rank is 2'),
        (ROWS, (10, 3), 'exceeds tensor dim 1'),
        (shards(([0, 0], [5, 5]), ([5, 5], [5, 5])), (10, 10), '50.*not match tensor volume 100'),
    ],
)
def test_C13_shards_of_another_tensor(blocks, shape, message):
    with pytest.raises(ValueError, match=message):
        EnumerableShardingSpec(blocks).build_metadata(shape)


def test_C14_shards_side_by_side():
    validate_non_overlapping_shards_metadata(shards(([5, 0, 5], [5] * 3), ([5, 5, 5], [5] * 3)))


@pytest.mark.parametrize(
    'blocks',
    [
        shards(([5, 0, 5], [5] * 3), ([5, 4, 5], [5] * 3)),
        shards(([5, 0, 5], [5] * 3), ([5, 4, 9], [5] * 3)),
        shards(([5, 0, 5], [5] * 3), ([5, 0, 5], [5] * 3)),
        shards(([0], [1]), ([4], [2]), ([1], [4])),
    ],
)
def test_C14_shards_that_overlap(blocks):
    for given in blocks, blocks[::-1]:
        with pytest.raises(ValueError, match=r'Shards.*overlap'):
            validate_non_overlapping_shards_metadata(given)


def test_C14_empty_shards_do_not_overlap():
    validate_non_overlapping_shards_metadata(shards(([0, 0], [0, 0]), ([0, 0], [0, 0])))
    validate_non_overlapping_shards_metadata(shards(([0, 0], [0, 5]), ([0, 0], [5, 5])))


def test_C15_chunks_from_shards():
    """The placements are in the order of the offsets, whatever the order of the shards."""
    blocks = ChunkShardingSpec(1, [2, 0, 1]).build_metadata((3, 10))
    for given in blocks, blocks[::-1]:
        assert infer_sharding_spec(given) == ChunkShardingSpec(1, [2, 0, 1])


def test_C15_shards_that_are_not_chunks():
    uneven = shards(([0, 0], [5, 5]), ([5, 0], [10, 5]))
    grid = GridShardingSpec(4, range(4)).build_metadata((8, 8))
    for blocks in uneven, grid:
        assert infer_sharding_spec(blocks) == EnumerableShardingSpec(blocks)


def test_C16_blocks_of_a_grid():
    mesh = create_mesh((2, 2), ('x', 'y'), devices=jax.devices()[:4])
    spec = GridShardingSpec(4, range(4))
    blocks = spec.build_metadata((8, 8))
    assert [s.shard_offsets for s in blocks] == [(0, 0), (0, 4), (4, 0), (4, 4)]
    assert {s.shard_sizes for s in blocks} == {(4, 4)}
    assert spec.to_partition_spec(mesh, (8, 8)) == P('x', 'y')
    assert infer_partition_spec(blocks, mesh) == P('x', 'y')
    index = NamedSharding(mesh, P('x', 'y')).devices_indices_map((8, 8))
    of_jax = [tuple(s.start for s in index[device]) for device in mesh.devices.flat]
    assert of_jax == [s.shard_offsets for s in blocks]
