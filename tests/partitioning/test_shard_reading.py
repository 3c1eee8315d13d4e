"""Arrays made of shards that another system has cut."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from mock_devices import mesh_of_processes
from shard_cuts import CUBE, MESH, blocks_of, cuts, tensor

from partitioning.compat.pytorch import (
    ChunkShardingSpec,
    GridShardingSpec,
    ShardMetadata,
    array_from_shards,
)

pytestmark = pytest.mark.core


@st.composite
def shardings(draw, shape):
    """A NamedSharding that divides a shape, on one of two meshes."""
    mesh = draw(st.sampled_from([MESH, CUBE]))
    free, entries = draw(st.permutations(mesh.axis_names)), []
    for size in shape:
        axes = tuple(free.pop() for _ in range(draw(st.integers(0, len(free)))))
        divides = size % math.prod(mesh.shape[a] for a in axes) == 0
        entries.append(axes if axes and divides else None)
    return NamedSharding(mesh, P(*entries))


@settings(max_examples=60)
@given(cuts(), st.data())
def test_any_cut_into_any_layout(cut, data):
    shape, shards = cut
    sharding = data.draw(shardings(shape))
    expected = tensor(shape)
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


ROWS = mesh_of_processes([[0, 0], [0, 0], [1, 1], [1, 1]], ('data', 'model'))
COLUMNS = mesh_of_processes([[0, 1], [0, 1], [0, 1], [0, 1]], ('data', 'model'))


@pytest.fixture
def as_process(monkeypatch):
    """Makes jax ask for the parts of one process's mock devices only."""

    def become(process):
        def parts(shape, sharding, part, **_):
            index = sharding.devices_indices_map(shape)
            return {d: part(i) for d, i in index.items() if d.process_index == process}

        monkeypatch.setattr(jax, 'make_array_from_callback', parts)

    return become


@pytest.mark.parametrize('dtype', ['int32', None])
@pytest.mark.parametrize('process', [0, 1])
@pytest.mark.parametrize(
    ('mesh', 'spec', 'expected'),
    [
        (ROWS, P('data'), [[0, 1, 2], [2, 3]]),
        (ROWS, P('model'), [[0, 1, 2, 3]] * 2),
        (ROWS, P(), [[0, 1, 2, 3]] * 2),
        (ROWS, P(None, 'data'), [[0, 1, 2, 3]] * 2),
        (COLUMNS, P('data'), [[0, 1, 2, 3]] * 2),
        (COLUMNS, P('model'), [[0, 1, 2], [2, 3]]),
        (COLUMNS, P(('model', 'data')), [[0, 1, 2], [2, 3]]),
    ],
)
def test_a_process_reads_only_the_shards_it_holds(as_process, mesh, spec, expected, process, dtype):
    """16 rows in shards of 3, 4, 5 and 4: rows 0 to 7 are in the first three shards."""
    array, reads = tensor((16, 4)), []
    rows = [(0, 3), (3, 4), (7, 5), (12, 4)]
    shards = [ShardMetadata([start, 0], [n, 4], i) for i, (start, n) in enumerate(rows)]

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
    assert sorted(reads) == expected[process]


def test_empty_shards_are_not_read():
    def read():
        raise OSError('there is no such file')

    array = tensor((10, 8))
    blocks = [(ShardMetadata([0, 0], [0, 8]), read), (ShardMetadata([0, 0], [10, 8]), array)]
    sharding = NamedSharding(MESH, P(None, 'data'))
    for order in blocks, blocks[::-1]:
        np.testing.assert_array_equal(array_from_shards(order, (10, 8), sharding), array)


@pytest.mark.parametrize('shape', [(), (0,), (0, 3), (8, 0)])
def test_scalars_and_empty_tensors(shape):
    """PyTorch writes the chunks of an empty tensor as empty shards."""
    shards = [ShardMetadata((), ())]
    if shape:
        shards = ChunkShardingSpec(0, range(4)).build_metadata(shape)
    array = tensor(shape)
    made = array_from_shards(blocks_of(shards, array), shape, NamedSharding(MESH, P()))
    np.testing.assert_array_equal(made, array)


@pytest.mark.parametrize('dtype', ['bfloat16', 'bool', 'float8_e4m3fn', 'int8'])
def test_dtypes(dtype):
    shards = ChunkShardingSpec(0, range(3)).build_metadata((8, 2))
    array = jnp.asarray(tensor((8, 2)) % 2, dtype)
    made = array_from_shards(blocks_of(shards, array), (8, 2), NamedSharding(MESH, P('data')))
    assert made.dtype == dtype
    np.testing.assert_array_equal(np.asarray(made, 'float32'), np.asarray(array, 'float32'))


def test_a_dtype_that_jax_would_change():
    shards = ChunkShardingSpec(0, range(2)).build_metadata((8,))
    whole, over_data = tensor((8,), 'float64'), NamedSharding(MESH, P('data'))
    with pytest.raises(ValueError, match=r"float64.*float32.*dtype='float32'"):
        array_from_shards(blocks_of(shards, whole), (8,), over_data)
    cast = array_from_shards(blocks_of(shards, whole), (8,), over_data, dtype='float32')
    np.testing.assert_array_equal(cast, whole.astype('float32'))


def test_any_sharding_of_jax():
    shards = GridShardingSpec(4, range(4)).build_metadata((8, 8))
    for sharding in SingleDeviceSharding(jax.devices()[3]), NamedSharding(CUBE, P(('c', 'a'), 'b')):
        made = array_from_shards(blocks_of(shards, tensor((8, 8))), (8, 8), sharding)
        assert made.sharding == sharding
        np.testing.assert_array_equal(made, tensor((8, 8)))


def block(offsets, sizes, shape=None, dtype='float32'):
    return ShardMetadata(offsets, sizes), np.zeros(sizes if shape is None else shape, dtype)


MISUSE = {
    'no blocks': ([], (8,), 'Empty shard list'),
    'a block of another size': ([block([0], [8], [7])], (8,), r'\[0\]x\[8\].*\(7,\)'),
    'a transposed block': ([block([0, 0], [8, 2], [2, 8])], (8, 2), r'\(2, 8\)'),
    'blocks of two dtypes': (
        [block([0], [4]), block([4], [4], dtype='int32')],
        (8,),
        r'\[4\]x\[4\].*int32.*\[0\]x\[4\].*float32.*dtype=',
    ),
    'a hole': ([block([0], [3]), block([4], [4])], (8,), '7 elements.*volume 8.*missing'),
    'an overlap': ([block([0], [5]), block([4], [4])], (8,), r'\[0\]x\[5\].*\[4\]x\[4\].*overlap'),
    'more than the array': ([block([0], [9])], (8,), r'exceeds tensor dim 0.*9.*\(8,\)'),
    'another rank': ([block([0], [8])], (8, 1), 'Rank of tensor is 2, but shards rank is 1'),
    'a layout that does not divide': (
        [block([0], [9])],
        (9,),
        r"the array: .*'data'.*\(9,\).* 4\b.*8 or 12",
    ),
}


@pytest.mark.parametrize('name', MISUSE)
def test_misuse(name):
    blocks, shape, message = MISUSE[name]
    with pytest.raises(ValueError, match=message):
        array_from_shards(blocks, shape, NamedSharding(MESH, P('data')))
