"""Arrays out of shards that others have cut, and the specs that make the same shards."""

import collections
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from mock_devices import mesh_of_processes

from partitioning import create_mesh
from partitioning.compat.pytorch import ShardingPlan
from partitioning.compat.pytorch.shards import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ShardMetadata,
    array_from_shards,
    check_tensor,
    get_chunk_sharding_params,
    get_chunked_dim_size,
    get_split_size,
    infer_partition_spec,
    infer_sharding_spec,
    validate_non_overlapping_shards_metadata,
)

pytestmark = pytest.mark.core

MESH = create_mesh((4, 2), ('data', 'model'))
CUBE = create_mesh((2, 2, 2), ('a', 'b', 'c'))


def whole(shape, dtype='int32'):
    return np.arange(math.prod(shape), dtype=dtype).reshape(shape)


def blocks_of(shards, array):
    return [(shard, array[shard.index]) for shard in shards]


def assert_one_tensor(shards, shape):
    """Each element is in one shard, by marking them."""
    held = np.zeros(shape, int)
    for shard in shards:
        assert held[shard.index].shape == shard.shard_sizes
        held[shard.index] += 1
    assert (held == 1).all()


# Ways to cut.


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 40), st.integers(1, 12))
def test_chunks_are_those_of_torch(size, chunks):
    """By element: element i of a dimension is in chunk i // ceil(size / chunks)."""
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
    if size:
        assert_one_tensor(shards, (3, size))


@st.composite
def guillotine(draw, start, stop, depth=4):
    """A box cut in two along any dimension, and its parts again."""
    dims = [d for d in range(len(start)) if stop[d] - start[d] > 1]
    if not depth or not dims or not draw(st.booleans()):
        return [ShardMetadata(start, [b - a for a, b in zip(start, stop, strict=True)])]
    dim = draw(st.sampled_from(dims))
    cut = draw(st.integers(start[dim] + 1, stop[dim] - 1))
    low, high = [*stop], [*start]
    low[dim] = high[dim] = cut
    first = draw(guillotine(start, low, depth - 1))
    return first + draw(guillotine(high, stop, depth - 1))


@st.composite
def cuts(draw):
    """A shape and shards that make it: chunks, a grid, or cuts anywhere, with empty ones, mixed."""
    rank = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 5, 8, 16]), min_size=rank, max_size=rank)))
    kind = draw(st.sampled_from(['chunks', 'grid', 'anywhere']))
    if kind == 'chunks':
        spec = ChunkShardingSpec(draw(st.integers(-rank, rank - 1)), range(draw(st.integers(1, 6))))
        shards = [*spec.build_metadata(shape)]
    elif kind == 'grid':
        block = tuple(
            draw(st.sampled_from([d for d in range(1, n + 1) if n % d == 0])) for n in shape
        )
        number = math.prod(n // b for n, b in zip(shape, block, strict=True))
        shards = [*GridShardingSpec(block, range(number)).build_metadata(shape)]
    else:
        shards = draw(guillotine([0] * rank, [*shape]))
        if draw(st.booleans()):
            first = draw(st.integers(0, shape[0]))
            shards.append(ShardMetadata([first] + [0] * (rank - 1), [0, *shape[1:]]))
    return shape, draw(st.permutations(shards))


@settings(max_examples=150, deadline=None)
@given(cuts())
def test_cuts_make_a_tensor(cut):
    shape, shards = cut
    assert_one_tensor(shards, shape)
    check_tensor(shards, shape)
    assert EnumerableShardingSpec(shards).build_metadata(shape) == tuple(shards)


@settings(max_examples=150, deadline=None)
@given(cuts(), st.data())
def test_a_cut_that_is_moved_makes_none(cut, data):
    """Any shard that is left out, there twice, or grown is found."""
    shape, shards = cut
    full = [s for s in shards if s.num_elements]
    victim = data.draw(st.sampled_from(full))
    rest = [s for s in shards if s is not victim]
    dim = data.draw(st.integers(0, len(shape) - 1))
    grown = [n + (d == dim) for d, n in enumerate(victim.shard_sizes)]
    for wrong in (
        rest,
        [*shards, victim],
        [*rest, ShardMetadata(victim.shard_offsets, grown)],
    ):
        with pytest.raises(ValueError, match=r'overlap|exceeds tensor dim|does not match|Empty'):
            check_tensor(wrong, shape)


# Into arrays.


@st.composite
def shardings(draw, shape):
    """A NamedSharding that divides a shape, on one of two meshes."""
    mesh = draw(st.sampled_from([MESH, CUBE]))
    free, entries = draw(st.permutations(mesh.axis_names)), []
    for size in shape:
        axes = tuple(free.pop() for _ in range(draw(st.integers(0, len(free)))))
        entries.append(
            axes if axes and size % math.prod(mesh.shape[a] for a in axes) == 0 else None
        )
    return NamedSharding(mesh, P(*entries))


@settings(max_examples=120, deadline=None)
@given(cuts(), st.data())
def test_any_cut_into_any_layout(cut, data):
    shape, shards = cut
    sharding = data.draw(shardings(shape))
    expected = whole(shape)
    reads = collections.Counter()

    def read(shard):
        reads[shard] += 1
        return expected[shard.index]

    as_functions = [(shard, lambda shard=shard: read(shard)) for shard in shards]
    for blocks in blocks_of(shards, expected), as_functions:
        array = array_from_shards(blocks, shape, sharding)
        assert array.sharding == sharding and array.dtype == 'int32'
        np.testing.assert_array_equal(array, expected)
    assert set(reads.values()) == {1}, 'each shard once'
    assert {s for s in shards if s.num_elements} <= {*reads}


PROCESSES = mesh_of_processes([[0, 0], [0, 0], [1, 1], [1, 1]], ('data', 'model'))
COLUMNS = mesh_of_processes([[0, 1], [0, 1], [0, 1], [0, 1]], ('data', 'model'))


@pytest.fixture
def as_process(monkeypatch):
    """jax asks for the parts of one process's devices only: here for those of mock devices."""

    def become(process):
        def parts(shape, sharding, part, **_):
            index = sharding.devices_indices_map(shape)
            return {d: part(i) for d, i in index.items() if d.process_index == process}

        monkeypatch.setattr(jax, 'make_array_from_callback', parts)

    return become


@pytest.mark.parametrize('dtype', ['int32', None])
@pytest.mark.parametrize('process', [0, 1])
@pytest.mark.parametrize(
    ('mesh', 'spec', 'wanted'),
    [
        (PROCESSES, P('data'), [[0, 1, 2], [2, 3]]),
        (PROCESSES, P('model'), [[0, 1, 2, 3]] * 2),
        (PROCESSES, P(), [[0, 1, 2, 3]] * 2),
        (PROCESSES, P(None, 'data'), [[0, 1, 2, 3]] * 2),
        (COLUMNS, P('data'), [[0, 1, 2, 3]] * 2),
        (COLUMNS, P('model'), [[0, 1, 2], [2, 3]]),
        (COLUMNS, P(('model', 'data')), [[0, 1, 2], [2, 3]]),
    ],
)
def test_a_process_reads_what_it_holds(as_process, mesh, spec, wanted, process, dtype):
    """Of 16 rows in shards of 3, 4, 5 and 4: rows 0 to 7 are in the first three, 8 on in two."""
    array, reads = whole((16, 4)), []
    sizes, starts = [3, 4, 5, 4], [0, 3, 7, 12]
    shards = [
        ShardMetadata([r, 0], [n, 4], i) for i, (r, n) in enumerate(zip(starts, sizes, strict=True))
    ]

    def read(shard):
        reads.append(shard.placement)
        return array[shard.index]

    blocks = [(shard, lambda shard=shard: read(shard)) for shard in shards]
    as_process(process)
    sharding = NamedSharding(mesh, spec)
    parts = array_from_shards(blocks, (16, 4), sharding, dtype=dtype)
    for device, index in sharding.devices_indices_map((16, 4)).items():
        if device.process_index == process:
            np.testing.assert_array_equal(parts[device], array[index])
    assert sorted(reads) == wanted[process]


def test_shards_without_elements_are_not_read():
    def read():
        raise OSError('there is no such file')

    array = whole((10, 8))
    blocks = [(ShardMetadata([0, 0], [0, 8]), read), (ShardMetadata([0, 0], [10, 8]), array)]
    sharding = NamedSharding(MESH, P(None, 'data'))
    for order in blocks, blocks[::-1]:
        np.testing.assert_array_equal(array_from_shards(order, (10, 8), sharding), array)


@pytest.mark.parametrize('shape', [(), (0,), (0, 3), (8, 0)])
def test_arrays_of_one_element_and_of_none(shape):
    """As PyTorch writes them: chunks of an empty tensor are empty shards."""
    shards = [ShardMetadata((), ())]
    if shape:
        shards = ChunkShardingSpec(0, range(4)).build_metadata(shape)
    array = whole(shape)
    made = array_from_shards(blocks_of(shards, array), shape, NamedSharding(MESH, P()))
    np.testing.assert_array_equal(made, array)


@pytest.mark.parametrize('dtype', ['bfloat16', 'bool', 'float8_e4m3fn', 'int8'])
def test_types(dtype):
    shards = ChunkShardingSpec(0, range(3)).build_metadata((8, 2))
    array = jnp.asarray(whole((8, 2)) % 2, dtype)
    made = array_from_shards(blocks_of(shards, array), (8, 2), NamedSharding(MESH, P('data')))
    assert made.dtype == dtype
    np.testing.assert_array_equal(np.asarray(made, 'float32'), np.asarray(array, 'float32'))


def test_any_sharding_of_jax():
    shards = GridShardingSpec(4, range(4)).build_metadata((8, 8))
    for sharding in SingleDeviceSharding(jax.devices()[3]), NamedSharding(CUBE, P(('c', 'a'), 'b')):
        made = array_from_shards(blocks_of(shards, whole((8, 8))), (8, 8), sharding)
        assert made.sharding == sharding
        np.testing.assert_array_equal(made, whole((8, 8)))


def one(offsets, sizes, shape=None, dtype='float32'):
    return ShardMetadata(offsets, sizes), np.zeros(sizes if shape is None else shape, dtype)


SHARDED = NamedSharding(MESH, P('data'))
BAD_BLOCKS = {
    'none': ([], (8,), 'Empty shard list'),
    'a block of another size': ([one([0], [8], [7])], (8,), r'\[0\]x\[8\].*shape \(7,\)'),
    'a block turned': ([one([0, 0], [8, 2], [2, 8])], (8, 2), r'\(2, 8\)'),
    'blocks of two types': (
        [one([0], [4]), one([4], [4], dtype='int32')],
        (8,),
        r'\[4\]x\[4\] is int32, \[0\]x\[4\] float32',
    ),
    'a hole': ([one([0], [3]), one([4], [4])], (8,), '7 elements.*volume 8.*missing'),
    'an overlap': ([one([0], [5]), one([4], [4])], (8,), r'\[0\]x\[5\] and \[4\]x\[4\] overlap'),
    'more than the array': ([one([0], [9])], (8,), r'exceeds tensor dim 0.*9.*\(8,\)'),
    'another rank': ([one([0], [8])], (8, 1), 'Rank of tensor is 2, but shards rank is 1'),
    'a layout that does not divide': ([one([0], [6])], (6,), '6'),
}


@pytest.mark.parametrize('name', BAD_BLOCKS)
def test_blocks_held_wrong(name):
    blocks, shape, message = BAD_BLOCKS[name]
    with pytest.raises(ValueError, match=message):
        array_from_shards(blocks, shape, SHARDED)


# Back to specs.


def cut_by(sharding, shape):
    """The blocks that jax cuts an array in, each once, by its index map."""
    found = {}
    for device, index in sharding.devices_indices_map(shape).items():
        bounds = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
        found.setdefault(tuple(bounds), device.id)
    return [
        ShardMetadata([a for a, _ in bounds], [b - a for a, b in bounds], device)
        for bounds, device in found.items()
    ]


def places(shards):
    return {(s.shard_offsets, s.shard_sizes) for s in shards}


SPECS_OF_ONE_MESH = [
    P(),
    P('data'),
    P('model'),
    P('data', 'model'),
    P('model', 'data'),
    P(None, 'data'),
    P(('data', 'model')),
    P(('model', 'data')),
    P(None, ('data', 'model')),
]


@pytest.mark.parametrize('spec', SPECS_OF_ONE_MESH)
def test_specs_from_blocks(spec):
    """The inferred one cuts the same blocks, whatever axes it takes."""
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
    """Several axes would do: it is an error that says so, or one that cuts the same blocks."""
    shards = cut_by(NamedSharding(CUBE, spec), (16, 16))
    try:
        inferred = infer_partition_spec(shards, CUBE)
    except ValueError as error:
        assert 'parts could be over a or b or c of the mesh' in str(error)
    else:
        assert places(cut_by(NamedSharding(CUBE, inferred), (16, 16))) == places(shards)


ODD = {'a': 2, 'b': 2, 'c': 4}


@pytest.mark.parametrize(
    ('ways', 'sizes'),
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
def test_every_grid_that_axes_make(ways, sizes):
    """Where some choice of axes cuts these blocks, one is found, not the first one tried."""
    shape = tuple(4 * way for way in ways)
    spec = GridShardingSpec((4,) * len(ways), range(math.prod(ways))).to_partition_spec(
        sizes, shape
    )
    found = [
        math.prod(sizes[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))
        for axes in spec
    ]
    assert [*found, *[1] * (len(ways) - len(found))] == [*ways]
    names = [a for axes in spec for a in ((axes,) if isinstance(axes, str) else axes or ())]
    assert len(set(names)) == len(names)


def test_uneven_chunks_are_for_a_policy():
    """29 over 4 have a spec, and a plan says what becomes of it."""
    shards = ChunkShardingSpec(0, range(4)).build_metadata((29, 4))
    spec = infer_partition_spec(shards, MESH)
    assert spec == P('data')
    plan, tree = ShardingPlan({'w': spec}), {'w': np.zeros((29, 4))}
    assert plan.resolve(tree, MESH, on_indivisible='pad')['w'].padded_spec == P('data', None)
    with pytest.raises(ValueError, match='29 does not divide by 4'):
        plan.resolve(tree, MESH)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 3), st.data())
def test_chunks_are_inferred_from_any_order(rank, data):
    shape = tuple(data.draw(st.integers(2, 12)) for _ in range(rank))
    dim, number = data.draw(st.integers(0, rank - 1)), data.draw(st.integers(2, 6))
    spec = ChunkShardingSpec(dim, data.draw(st.permutations(range(number))))
    shards = spec.build_metadata(shape)
    shuffled = data.draw(st.permutations(shards))
    inferred = infer_sharding_spec(shuffled)
    cut = {(s.shard_offsets, s.shard_sizes, s.placement) for s in shards if s.num_elements}
    again = inferred.build_metadata(shape)
    assert {(s.shard_offsets, s.shard_sizes, s.placement) for s in again if s.num_elements} == cut
    assert isinstance(inferred, ChunkShardingSpec)


@settings(max_examples=100, deadline=None)
@given(cuts())
def test_any_cut_is_inferred(cut):
    """A spec that makes the same shards."""
    shape, shards = cut
    again = infer_sharding_spec(shards).build_metadata(shape)
    assert sorted(places(again)) == sorted(places(shards))


def test_specs_of_entries():
    """On the mesh axis of as many devices, which there must be one of."""
    assert ChunkShardingSpec(0, range(4)).to_partition_spec(MESH, (8, 8)) == P('data')
    assert ChunkShardingSpec(-1, range(2)).to_partition_spec(MESH, (8, 8)) == P(None, 'model')
    assert ChunkShardingSpec(1, ['rank:5/cpu']).to_partition_spec(MESH, (8, 8)) == P()
    assert GridShardingSpec((2, 4), range(8)).to_partition_spec(MESH, (8, 8)) == P('data', 'model')
    ranks = [f'rank:{i}/cuda:{i % 8}' for i in range(12)]  # as text, 10 comes before 2
    assert ChunkShardingSpec(0, ranks).to_partition_spec({'data': 12}, (24,)) == P('data')


TWICE = {'a': 2, 'b': 2}
BAD_SPECS = {
    'no axis of that size': (
        ChunkShardingSpec(0, range(3)),
        MESH,
        r'parts \(3, 1\).*data 4 x model 2',
    ),
    'two axes of that size': (
        ChunkShardingSpec(0, range(2)),
        TWICE,
        '2 parts could be over a or b of',
    ),
    'another order': (ChunkShardingSpec(0, [3, 2, 1, 0]), MESH, 'order of their ranks'),
    'another order of blocks': (GridShardingSpec((2, 4), [7, 6, 5, 4, 3, 2, 1, 0]), MESH, 'order'),
    'no such dimension': (
        ChunkShardingSpec(2, range(4)),
        MESH,
        r'Invalid sharding dim: 2.*\(8, 8\)',
    ),
    'blocks that do not divide': (GridShardingSpec(3, range(8)), MESH, r'\(8, 8\).*divide by 3'),
    'blocks of another number': (GridShardingSpec(4, range(8)), MESH, 'make 4 .* 8 placements'),
    'blocks of another rank': (GridShardingSpec((4,), range(4)), MESH, r'grid_size \(4,\)'),
    'blocks of nothing': (GridShardingSpec(0, range(4)), MESH, 'grid_size 0'),
    'blocks that no axes make': (
        GridShardingSpec(2, range(16)),
        {'x': 16},
        r'parts \(4, 4\).*the axes of the mesh x 16 do not make them',
    ),
    'shards of two sizes': (
        EnumerableShardingSpec([ShardMetadata([0, 0], [5, 8]), ShardMetadata([5, 0], [3, 8])]),
        MESH,
        r'\(3, 8\) and \(5, 8\)',
    ),
    'shards of another tensor': (
        EnumerableShardingSpec([ShardMetadata([0, 0], [4, 8])]),
        MESH,
        'volume 64',
    ),
}


@pytest.mark.parametrize('name', BAD_SPECS)
def test_specs_held_wrong(name):
    spec, mesh, message = BAD_SPECS[name]
    with pytest.raises(ValueError, match=message):
        spec.to_partition_spec(mesh, (8, 8))


def two(*shards):
    return [ShardMetadata(offsets, sizes) for offsets, sizes in shards]


@pytest.mark.parametrize(
    ('shards', 'message'),
    [
        ([], 'Empty shard list'),
        (two(([0], [4]), ([3], [4])), 'overlap'),
        (two(([0], [4]), ([5], [4])), 'missing'),
        (two(([1], [4])), 'missing'),
        (two(([0], [4]), ([0, 0], [4, 4])), 'inconsistent ranks'),
        (two(([0, 0], [2, 2]), ([2, 2], [2, 2])), 'missing'),
    ],
)
def test_shards_of_no_spec(shards, message):
    for infer in infer_sharding_spec, lambda shards: infer_partition_spec(shards, MESH):
        with pytest.raises(ValueError, match=message):
            infer(shards)


FOUR = ChunkShardingSpec(0, range(4))
WRONG_WORDS = {
    'half an element': lambda: ShardMetadata([0.5], [1]),
    'a size of truth': lambda: ShardMetadata([0], [True]),
    'an offset as text': lambda: ShardMetadata(['0'], [1]),
    'an offset, not a tuple': lambda: ShardMetadata(0, 1),
    'chunks for nobody': lambda: ChunkShardingSpec(0, []),
    'two chunks for one': lambda: ChunkShardingSpec(0, [1, 1]),
    'two blocks for one': lambda: GridShardingSpec(4, [0, 0, 1, 2]).build_metadata((8, 8)),
    'placements as text': lambda: ChunkShardingSpec(0, '01'),
    'a number of chunks': lambda: ChunkShardingSpec(0, 4),
    'ranks of two kinds': lambda: ChunkShardingSpec(0, [0, 'one', 2, 3]).to_partition_spec(
        MESH, (8,)
    ),
    'shards as tuples': lambda: EnumerableShardingSpec([([0], [4])]),
    'no chunks': lambda: get_split_size(4, 0),
    'a rank of no chunk': lambda: get_chunk_sharding_params(8, 4, FOUR, 4),
    'more ranks than the world': lambda: get_chunk_sharding_params(8, 2, FOUR, 3),
}


@pytest.mark.parametrize('name', WRONG_WORDS)
def test_words_held_wrong(name):
    """An error of ours, not one of Python that comes from somewhere within."""
    with pytest.raises((ValueError, TypeError)) as error:
        WRONG_WORDS[name]()
    theirs = ('is not iterable', 'unhashable', 'has no attribute', 'not supported between')
    assert not any(words in str(error.value) for words in theirs), str(error.value)


def test_thousands_of_shards():
    """As checkpoints have them, checked in a moment."""
    shards = GridShardingSpec((8, 8), range(64 * 64)).build_metadata((512, 512))
    check_tensor(shards, (512, 512))
    doubled = [*shards, ShardMetadata([511, 511], [1, 1])]
    with pytest.raises(
        ValueError, match=r'\[504, 504\]x\[8, 8\] of 4095 and \[511, 511\].*overlap'
    ):
        validate_non_overlapping_shards_metadata(doubled)


def test_shards_are_values():
    """Equal where they lie and whose they are; numpy's numbers and lists are Python's tuples."""
    shard = ShardMetadata(np.array([0, 4]), [np.int64(2), 3], 'rank:0/cpu')
    assert shard == ShardMetadata((0, 4), (2, 3), 'rank:0/cpu') != ShardMetadata((0, 4), (2, 3))
    assert len({shard, ShardMetadata([0, 4], [2, 3], 'rank:0/cpu')}) == 1
    assert shard.index == (slice(0, 2), slice(4, 7)) and shard.stops == (2, 7)
    assert shard.num_elements == 6 and str(shard) == '[0, 4]x[2, 3] of rank:0/cpu'
    specs = [ChunkShardingSpec(0, [0, 1]), ChunkShardingSpec(0, (0, 1))]
    grids = [GridShardingSpec((4, 4), [0, 1]), GridShardingSpec([4, 4], (0, 1))]
    for first, second in specs, grids:
        assert first == second and hash(first) == hash(second)


def test_overlaps_against_every_pair():
    """All pairs of some boxes, by their elements."""
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
