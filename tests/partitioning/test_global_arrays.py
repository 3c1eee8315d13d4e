"""Global arrays from the rows of a process, and back, on the devices of this one process."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mock_devices import mesh_of_processes

from partitioning import PjitPartitioner, host_local_array_to_global_array
from partitioning.layout import global_to_local, local_to_global

pytestmark = pytest.mark.core


def real_mesh(shape, names, order=None):
    """The devices of this machine, in any order."""
    devices = np.array(jax.devices())
    return Mesh(devices[range(8) if order is None else order].reshape(shape), names)


ORDERS = {
    'in order': None,
    'backwards': [7, 6, 5, 4, 3, 2, 1, 0],
    'strided': [0, 2, 4, 6, 1, 3, 5, 7],
    'mixed': [3, 0, 7, 5, 1, 6, 2, 4],
}
MESH = real_mesh((4, 2), ('data', 'model'))


def rows(count, *shape, dtype=np.float32):
    """Different numbers in every row."""
    size = count * int(np.prod(shape, dtype=int))
    return np.arange(size).reshape(count, *shape).astype(dtype)


def assert_is(array, expected, sharding):
    """An array of these elements on each device that holds them, and of this sharding."""
    assert array.shape == expected.shape
    assert array.dtype == expected.dtype
    assert array.sharding == sharding
    index_map = sharding.devices_indices_map(expected.shape)
    assert len(array.addressable_shards) == len(index_map)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[index_map[shard.device]])


# Arrays of every kind.


@pytest.mark.parametrize('order', ORDERS)
@pytest.mark.parametrize(
    'spec',
    [
        P('data'),
        P('model'),
        P(('data', 'model')),
        P(('model', 'data')),
        P(None),
        P(),
        P('data', 'model'),
        P('data', None, 'model'),
        P(None, 'data', 'model'),
        P('model', ('data',)),
        P(None, None, ('model', 'data')),
    ],
    ids=str,
)
def test_there_and_back(order, spec):
    mesh = real_mesh((4, 2), ('data', 'model'), ORDERS[order])
    local = rows(16, 4, 8)
    array = local_to_global(local, mesh, spec)
    assert_is(array, local, NamedSharding(mesh, spec))
    back = global_to_local(array)
    assert type(back) is np.ndarray
    assert back.dtype == local.dtype
    np.testing.assert_array_equal(back, local)


@pytest.mark.parametrize('shape, names', [((8,), 'x'), ((2, 2, 2), 'xyz'), ((1, 8, 1), 'xyz')])
def test_meshes_of_any_rank(shape, names):
    mesh = real_mesh(shape, tuple(names), ORDERS['mixed'])
    local = rows(24, 3)
    spec = P(tuple(reversed(names)))
    array = local_to_global(local, mesh, spec, batch_size=24)
    assert_is(array, local, NamedSharding(mesh, spec))


FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.complex64)


@pytest.mark.parametrize('dtype', [*FLOATS, np.int32, np.int8, np.uint32, np.uint8, np.bool_])
def test_dtypes_are_kept(dtype):
    local = rows(8, 2, dtype=dtype)
    array = local_to_global(local, MESH, P('data'))
    assert array.dtype == local.dtype
    back = global_to_local(array)
    assert back.dtype == local.dtype
    assert back.tobytes() == local.tobytes()


@pytest.mark.parametrize(
    'dtype, narrowed', [(np.float64, np.float32), (np.int64, np.int32), (np.uint64, np.uint32)]
)
def test_dtypes_of_64_bits_are_what_jax_makes_of_them(dtype, narrowed):
    assert local_to_global(rows(8, dtype=dtype), MESH, P('data')).dtype == narrowed


def test_trees():
    batch = {
        'tokens': rows(8, 5, dtype=np.int32),
        'image': (rows(8, 2, 3), [rows(8)]),
        'no columns': np.zeros((8, 0), np.float32),
        'none': None,
    }
    arrays = local_to_global(batch, MESH, P('data'))
    assert jax.tree.structure(arrays) == jax.tree.structure(batch)
    for array, local in zip(jax.tree.leaves(arrays), jax.tree.leaves(batch), strict=True):
        assert_is(array, local, NamedSharding(MESH, P('data')))
    back = global_to_local(arrays)
    jax.tree.map(np.testing.assert_array_equal, back, batch)


@pytest.mark.parametrize('empty', [{}, [], (), None, {'a': {}, 'b': ()}])
def test_trees_without_arrays(empty):
    assert local_to_global(empty, MESH, P('data')) == empty
    assert local_to_global(empty, MESH, P('data'), batch_size=16) == empty
    assert global_to_local(empty) == empty


def test_rows_that_are_jax_arrays():
    local = jnp.arange(32.0).reshape(8, 4)
    array = local_to_global(local, MESH, P('data', 'model'))
    assert_is(array, np.asarray(local), NamedSharding(MESH, P('data', 'model')))


def test_rows_that_come_back_are_a_copy():
    expected = rows(8, 1024)
    array = local_to_global(expected.copy(), MESH, P('data'))
    global_to_local(array)[:] = -1
    np.testing.assert_array_equal(np.asarray(array), expected)


def test_no_device_gets_more_than_its_block(monkeypatch):
    """Rows go to the devices that hold them, not to one that shares them out."""
    moved = []
    make = jax.make_array_from_callback

    def spied(shape, sharding, rows_of_device):
        def watched(index):
            moved.append(rows_of_device(index).shape)
            return rows_of_device(index)

        return make(shape, sharding, watched)

    monkeypatch.setattr(jax, 'make_array_from_callback', spied)
    local_to_global(rows(16, 6), MESH, P('data', 'model'))
    assert set(moved) == {(4, 3)}


def test_arrays_that_were_not_made_here():
    """`global_to_local` takes any sharding."""
    local = rows(8, 4)
    for sharding in (
        NamedSharding(MESH, P(None, 'model')),
        jax.sharding.SingleDeviceSharding(jax.devices()[3]),
    ):
        back = global_to_local({'x': jax.device_put(local, sharding)})
        np.testing.assert_array_equal(back['x'], local)


def test_a_program_takes_them():
    array = local_to_global(rows(16, 4), MESH, P(('model', 'data')))
    assert float(jax.jit(jnp.sum)(array)) == 64 * 63 / 2


# From parts in every dimension.


def test_host_local_array_to_global_array():
    tree = {'x': np.arange(32.0).reshape(8, 4), 'n': np.arange(4)}
    out = host_local_array_to_global_array(tree, MESH, {'x': P('data', 'model'), 'n': None})
    for name, array in out.items():
        np.testing.assert_array_equal(array, tree[name])
    assert out['x'].sharding == NamedSharding(MESH, P('data', 'model'))
    assert out['n'].sharding.is_fully_replicated
    for shard in out['x'].addressable_shards:
        np.testing.assert_array_equal(shard.data, tree['x'][shard.index])


# The partitioner.


def test_the_partitioner_has_both():
    partitioner = PjitPartitioner(num_partitions=2)
    local = {'x': rows(8, 4), 'y': rows(8, dtype=np.int32)}
    arrays = partitioner.to_global(local)
    for name, array in arrays.items():
        assert_is(array, local[name], NamedSharding(partitioner.mesh, P('data')))
    layout = partitioner.get_data_layout(8)
    for name, back in partitioner.to_local(arrays).items():
        np.testing.assert_array_equal(back, local[name][list(layout.row_indices)])
    spec = P('data', 'model')
    array = partitioner.to_global(local['x'], batch_size=8, spec=spec)
    assert_is(array, local['x'], NamedSharding(partitioner.mesh, spec))


@pytest.mark.parametrize('size', [0, -8, 16.0, True, '16'])
def test_batch_sizes_that_no_layout_has(size):
    """Refused as `get_data_layout` refuses them."""
    partitioner = PjitPartitioner(num_partitions=8)  # one shard: no size fails to divide
    local = rows(1 if size is True else 16, 4)
    with pytest.raises(ValueError, match='batch size'):
        partitioner.get_data_layout(size)
    with pytest.raises(ValueError, match='batch'):
        partitioner.to_global(local, batch_size=size)


# Errors.


@pytest.mark.parametrize(
    'batch, spec, batch_size, message',
    [
        # Too few rows, too many, and a batch that is not theirs.
        (rows(7), P('data'), None, r'has 7 rows \(7,\).*must have 4 rows, or 8'),
        (rows(9, 2), P('data'), None, r'has 9 rows \(9, 2\).*must have 4 rows'),
        (rows(4), P('data'), 8, r'has 4 rows \(4,\): of a batch of 8 process 0 holds 8'),
        (rows(12), P('data'), 8, r'has 12 rows .* of a batch of 8 process 0 holds 8'),
        (rows(8), P('data'), 12, r'has 8 rows .* of a batch of 12 process 0 holds 12'),
        (rows(8), P('data'), 10, r'Batch size \(10\) .* \(4\): the mesh is data 4'),
        (rows(12), P(('data', 'model')), None, r'has 12 rows .* must have 8 rows, or 16'),
        # Leaves.
        (np.float32(3), P('data'), None, 'the batch is a scalar'),
        ({'x': {'y': 3}}, P('data'), None, 'x/y is a scalar'),
        ({'x': rows(8), 'y': rows(4)}, P('data'), None, r'y has 4 rows .* batch of 8 .* holds 8'),
        ({'x': rows(8), 'y': rows(16)}, P('data'), None, r'y has 16 rows'),
        ({'x': rows(8), 'y': rows(16)}, P('data'), 16, r'x has 8 rows'),
        ([rows(8), [rows(8), rows(2)]], P(), None, r'1/1 has 2 rows'),
        # Specs.
        (rows(8), P('data', 'model'), None, r'2 dimensions, but the array has 1, \(8,\)'),
        ({'a': rows(8, 2), 'b': rows(8)}, P('data', 'model'), None, 'b: .* 2 dimensions'),
        (rows(8), P('dta'), None, "'dta'.* data 4 x model 2. Did you mean 'data'"),
        (rows(8, 4), P('data', 'data'), None, "'data' twice"),
        (rows(8, 4), P(('data', 'data')), None, "'data' twice"),
        (rows(8, 3), P('data', 'model'), None, 'divi|partitioned 2 times'),
        (rows(0, 3), P('data'), None, 'has 0 rows'),
        (rows(0, 3), P('data'), 0, 'batch size 0|has 0 rows'),
    ],
)
def test_what_is_refused(batch, spec, batch_size, message):
    with pytest.raises(ValueError, match=message):
        local_to_global(batch, MESH, spec, batch_size)


def test_a_process_without_devices_of_the_mesh():
    mesh = mesh_of_processes([[3, 3], [5, 5]], ('data', 'model'))
    with pytest.raises(ValueError, match=r'process 0 holds no device .*\[3, 5\]'):
        local_to_global(rows(4), mesh, P('data'))


def test_a_column_that_does_not_divide_names_its_array():
    with pytest.raises(ValueError, match='tokens'):
        local_to_global({'tokens': rows(8, 3)}, MESH, P('data', 'model'))


@pytest.mark.parametrize('array', [jnp.float32(3), np.float32(3), np.ones(4), 3])
def test_what_has_no_rows_on_devices(array):
    with pytest.raises(ValueError, match='loss'):
        global_to_local({'loss': array})


def test_whole_numbers_that_32_bits_cannot_hold_are_refused():
    """jax makes 32 bits of 64 without a word."""
    small = local_to_global(np.arange(8, dtype=np.int64), MESH, P('data'))
    assert small.dtype == np.int32
    large = {'ids': np.full(8, 2**40 + 7)}
    with pytest.raises(ValueError, match=r'ids int64 \(8,\) has numbers beyond int32'):
        local_to_global(large, MESH, P('data'))
