"""PyTorch's sharding specs, the shards they cut, and the PartitionSpecs that cut the same ones."""

import collections
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from shard_cuts import CUBE, MESH, cuts

from partitioning import PaddedSpec
from partitioning.compat.pytorch import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardingPlan,
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


def places(shards):
    return {(s.shard_offsets, s.shard_sizes) for s in shards}


# Ways to cut.


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_are_those_of_torch(size, chunks):
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


@settings(max_examples=80, deadline=None)
@given(cuts(), st.data())
def test_any_cut_makes_a_tensor_until_a_shard_changes(cut, data):
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


def test_overlaps_of_every_pair_of_small_boxes():
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
            with pytest.raises(ValueError, match='overlap'):
                validate_non_overlapping_shards_metadata([first, second])
        else:
            validate_non_overlapping_shards_metadata([first, second])


def test_the_overlap_among_many_shards():
    shards = GridShardingSpec((8, 8), range(32 * 32)).build_metadata((256, 256))
    check_tensor(shards, (256, 256))
    doubled = [*shards, ShardMetadata([255, 255], [1, 1])]
    with pytest.raises(ValueError, match=r'\[248, 248\]x\[8, 8\] of 1023.*\[255, 255\].*overlap'):
        validate_non_overlapping_shards_metadata(doubled)


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


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3), st.data())
def test_chunks_are_inferred_from_shards_in_any_order(rank, data):
    shape = tuple(data.draw(st.integers(2, 12)) for _ in range(rank))
    dim, number = data.draw(st.integers(0, rank - 1)), data.draw(st.integers(2, 6))
    spec = ChunkShardingSpec(dim, data.draw(st.permutations(range(number))))
    shards = spec.build_metadata(shape)
    inferred = infer_sharding_spec(data.draw(st.permutations(shards)))
    assert isinstance(inferred, ChunkShardingSpec)
    again = inferred.build_metadata(shape)
    assert {s for s in again if s.num_elements} == {s for s in shards if s.num_elements}


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


ODD = {'a': 2, 'b': 2, 'c': 4}


@pytest.mark.parametrize(
    ('parts', 'sizes'),
    [
        ((4, 2, 2), ODD),
        ((2, 4, 2), ODD),
        ((2, 2, 4), ODD),
        ((8, 2), ODD),
        ((2, 8), ODD),
        ((4, 4), ODD),
        ((16, 1), ODD),
        ((3, 4), {'x': 3, 'one': 1, 'y': 2, 'z': 2}),
    ],
)
def test_every_grid_that_axes_can_make(parts, sizes):
    """If any choice of axes cuts these blocks, one is found, even if it is not the first tried."""
    shape = tuple(4 * number for number in parts)
    grid = GridShardingSpec((4,) * len(parts), range(math.prod(parts)))
    spec = grid.to_partition_spec(sizes, shape)
    entries = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
    found = [math.prod(sizes[a] for a in axes) for axes in entries]
    assert [*found, *[1] * (len(parts) - len(found))] == [*parts]
    names = [axis for axes in entries for axis in axes]
    assert len(set(names)) == len(names)


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
