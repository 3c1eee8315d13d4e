"""How PyTorch cuts tensors into shards: behaviours C9 to C16 of the seeds."""

import collections
import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from shard_cuts import cuts, places

from partitioning import create_mesh
from partitioning.compat.pytorch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardMetadata,
    check_tensor,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    infer_partition_spec,
    infer_sharding_spec,
    validate_non_overlapping_shards_metadata,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]


def assert_one_tensor(shards, shape):
    """Each element is in exactly one shard."""
    held = np.zeros(shape, int)
    for shard in shards:
        assert held[shard.index].shape == shard.shard_sizes
        held[shard.index] += 1
    assert (held == 1).all()


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(1, 12))
def test_C9_C10_chunks_are_those_of_torch(size, chunks):
    """Element i of a dimension is in chunk i // ceil(size / chunks)."""
    split = math.ceil(size / chunks)
    owners = collections.Counter(i // split for i in range(size)) if size else {}
    sizes = [owners.get(chunk, 0) for chunk in range(chunks)]
    assert get_split_size(size, chunks) == split
    assert [get_chunked_dim_size(size, split, i) for i in range(chunks)] == sizes
    spec = ChunkShardingSpec(-1, range(chunks))
    shards = spec.build_metadata((3, size))
    assert [s.shard_sizes for s in shards] == [(3, n) for n in sizes]
    parts = [get_chunk_sharding_params(size, chunks, spec, rank) for rank in range(chunks)]
    assert parts == [(s.shard_offsets[1], s.shard_sizes[1]) for s in shards]
    assert_one_tensor(shards, (3, size))


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


@settings(max_examples=80)
@given(cuts(), st.data())
def test_C12_C13_any_cut_makes_a_tensor_until_a_shard_changes(cut, data):
    """A shard that is left out, repeated or grown is found."""
    shape, shards = cut
    assert_one_tensor(shards, shape)
    check_tensor(shards, shape)
    assert EnumerableShardingSpec(shards).build_metadata(shape) == tuple(shards)
    again = infer_sharding_spec(shards).build_metadata(shape)
    assert sorted(places(again)) == sorted(places(shards))

    victim = data.draw(st.sampled_from([s for s in shards if s.num_elements]))
    rest = [s for s in shards if s is not victim]
    dim = data.draw(st.integers(0, len(shape) - 1))
    sizes = [n + (d == dim) for d, n in enumerate(victim.shard_sizes)]
    grown = ShardMetadata(victim.shard_offsets, sizes)
    for wrong in rest, [*shards, victim], [*rest, grown]:
        with pytest.raises(ValueError, match=r'overlap|exceeds tensor dim|does not match|Empty'):
            check_tensor(wrong, shape)


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


def test_C14_overlaps_of_every_pair_of_small_boxes():
    boxes = [
        ShardMetadata(offsets, sizes)
        for offsets in itertools.product((0, 1, 2), repeat=2)
        for sizes in itertools.product((0, 1, 2), repeat=2)
    ]
    for first, second in itertools.combinations_with_replacement(boxes, 2):
        held = np.zeros((4, 4), int)
        held[first.index] += 1
        held[second.index] += 1
        if held.max() > 1:
            for given in [first, second], [second, first]:
                with pytest.raises(ValueError, match=r'Shards.*overlap'):
                    validate_non_overlapping_shards_metadata(given)
        else:
            validate_non_overlapping_shards_metadata([first, second])


@settings(max_examples=80)
@given(st.integers(1, 3), st.data())
def test_C15_chunks_are_inferred_from_shards_in_any_order(rank, data):
    shape = tuple(data.draw(st.integers(2, 12)) for _ in range(rank))
    dim, number = data.draw(st.integers(0, rank - 1)), data.draw(st.integers(2, 6))
    spec = ChunkShardingSpec(dim, data.draw(st.permutations(range(number))))
    shards = spec.build_metadata(shape)
    inferred = infer_sharding_spec(data.draw(st.permutations(shards)))
    assert isinstance(inferred, ChunkShardingSpec)
    again = inferred.build_metadata(shape)
    assert {s for s in again if s.num_elements} == {s for s in shards if s.num_elements}


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
