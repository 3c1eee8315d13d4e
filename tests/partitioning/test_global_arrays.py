"""Global arrays from the rows of one process, and back, on the 8 CPU devices of the tests."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from mock_devices import mesh_of_processes

from partitioning import PjitPartitioner, host_local_array_to_global_array, resolve_axes
from partitioning.layout import global_to_local, local_to_global

pytestmark = pytest.mark.core


def real_mesh(shape, names, order=None):
    """A mesh of the 8 CPU devices in any order."""
    devices = np.array(jax.devices())
    return Mesh(devices[range(8) if order is None else order].reshape(shape), names)


MIXED = [3, 0, 7, 5, 1, 6, 2, 4]
MESH = real_mesh((4, 2), ('data', 'model'))


def rows(count, *shape, dtype=np.float32):
    """Rows of distinct numbers."""
    size = count * int(np.prod(shape, dtype=int))
    return np.arange(size).reshape(count, *shape).astype(dtype)


def assert_holds(array, expected, sharding):
    """Checks that every device holds its part of `expected`, and that the sharding is this one."""
    assert array.shape == expected.shape
    assert array.dtype == expected.dtype
    assert array.sharding == sharding
    index_map = sharding.devices_indices_map(expected.shape)
    assert len(array.addressable_shards) == len(index_map)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected[index_map[shard.device]])


# Arrays of every dtype, spec and mesh.


@pytest.mark.parametrize('order', [None, MIXED], ids=['in order', 'mixed'])
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
def test_rows_survive_the_round_trip(order, spec):
    mesh = real_mesh((4, 2), ('data', 'model'), order)
    local = rows(16, 4, 8)
    array = local_to_global(local, mesh, spec)
    assert_holds(array, local, NamedSharding(mesh, spec))
    back = global_to_local(array)
    assert type(back) is np.ndarray
    assert back.dtype == local.dtype
    np.testing.assert_array_equal(back, local)


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
def test_dtypes_of_64_bits_become_those_of_32_bits(dtype, narrowed):
    assert local_to_global(rows(8, dtype=dtype), MESH, P('data')).dtype == narrowed


def test_trees_keep_their_structure():
    batch = {
        'tokens': rows(8, 5, dtype=np.int32),
        'image': (rows(8, 2, 3), [rows(8)]),
        'no columns': np.zeros((8, 0), np.float32),
        'none': None,
    }
    arrays = local_to_global(batch, MESH, P('data'))
    assert jax.tree.structure(arrays) == jax.tree.structure(batch)
    for array, local in zip(jax.tree.leaves(arrays), jax.tree.leaves(batch), strict=True):
        assert_holds(array, local, NamedSharding(MESH, P('data')))
    back = global_to_local(arrays)
    jax.tree.map(np.testing.assert_array_equal, back, batch)


@pytest.mark.parametrize('empty', [{}, [], (), None, {'a': {}, 'b': ()}])
def test_trees_without_arrays_are_returned(empty):
    assert local_to_global(empty, MESH, P('data')) == empty
    assert local_to_global(empty, MESH, P('data'), batch_size=16) == empty
    assert global_to_local(empty) == empty


def test_local_rows_are_a_copy():
    expected = rows(8, 1024)
    array = local_to_global(expected.copy(), MESH, P('data'))
    global_to_local(array)[:] = -1
    np.testing.assert_array_equal(np.asarray(array), expected)


def test_each_device_receives_only_its_shard(monkeypatch):
    """Rows are not first copied as a whole to one device."""
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


# Chunks in every dimension.


def test_chunks_become_global_arrays():
    tree = {'x': np.arange(32.0).reshape(8, 4), 'n': np.arange(4)}
    out = host_local_array_to_global_array(tree, MESH, {'x': P('data', 'model'), 'n': None})
    for name, array in out.items():
        np.testing.assert_array_equal(array, tree[name])
    assert out['x'].sharding == NamedSharding(MESH, P('data', 'model'))
    assert out['n'].sharding.is_fully_replicated
    for shard in out['x'].addressable_shards:
        np.testing.assert_array_equal(shard.data, tree['x'][shard.index])


# The partitioner.


def test_the_partitioner_converts_both_ways():
    partitioner = PjitPartitioner(num_partitions=2)
    local = {'x': rows(8, 4), 'y': rows(8, dtype=np.int32)}
    arrays = partitioner.to_global(local)
    for name, array in arrays.items():
        assert_holds(array, local[name], NamedSharding(partitioner.mesh, P('data')))
    layout = partitioner.get_data_layout(8)
    for name, back in partitioner.to_local(arrays).items():
        np.testing.assert_array_equal(back, local[name][list(layout.row_indices)])
    spec = P('data', 'model')
    array = partitioner.to_global(local['x'], batch_size=8, spec=spec)
    assert_holds(array, local['x'], NamedSharding(partitioner.mesh, spec))


@pytest.mark.parametrize('size', [0, -8, 16.0, True, '16'])
def test_a_batch_size_must_be_a_count_everywhere(size):
    partitioner = PjitPartitioner(num_partitions=8)  # With one shard, every size divides.
    local = rows(1 if size is True else 16, 4)
    message = rf'batch size {re.escape(repr(size))} must be .*>= 1'
    with pytest.raises(ValueError, match=message):
        partitioner.get_data_layout(size)
    with pytest.raises(ValueError, match=message):
        partitioner.to_global(local, batch_size=size)


# Errors.


@pytest.mark.parametrize(
    'batch, spec, batch_size, message',
    [
        # Wrong numbers of rows.
        (rows(7), P('data'), None, r'has 7 rows, shape \(7,\).* 4 of the 4 shards.* 4 or 8 rows'),
        (rows(4), P('data'), 8, r'has 4 rows, shape \(4,\).*process 0 holds 8 of the 8 rows'),
        (rows(8), P('data'), 10, r'Batch size \(10\).*\(4\).*data 4 x model 2.* 8 or 12'),
        (rows(0, 3), P('data'), 0, 'batch size 0'),
        # The path of the array.
        (np.float32(3), P('data'), None, 'the batch is a scalar'),
        ({'x': rows(8), 'y': rows(4)}, P('data'), None, r'y has 4 rows.* 8 of the 8 rows'),
        ([rows(8), [rows(8), rows(2)]], P(), None, r'1/1 has 2 rows'),
        # Specs.
        (rows(8), P('data', 'model'), None, r'2 entries.* 1 dimension, \(8,\)'),
        ({'a': rows(8, 2), 'b': rows(8)}, P('data', 'model'), None, 'b: .* 2 entries'),
        (rows(8), P('dta'), None, "'dta'.* data 4 x model 2. Did you mean 'data'"),
        (rows(8, 4), P('data', 'data'), None, "'data' appears twice"),
        (rows(8, 4), P(('data', 'data')), None, "'data' appears twice"),
        (
            {'x': rows(8, 3)},
            P('data', 'model'),
            None,
            r"x: .*dimension 1.*\(8, 3\).* 3 .* 2, .*'model'",
        ),
        (rows(8, 4), P('data', P.UNCONSTRAINED), None, 'UNCONSTRAINED.* must be a mesh axis'),
        # jax would truncate these integers without a warning.
        ({'ids': np.full(8, 2**40 + 7)}, P('data'), None, r'ids, int64 .*\(8,\).* beyond int32'),
    ],
)
def test_wrong_batches_are_refused(batch, spec, batch_size, message):
    with pytest.raises(ValueError, match=message):
        local_to_global(batch, MESH, spec, batch_size)


def test_a_process_needs_devices_of_the_mesh():
    mesh = mesh_of_processes([[3, 3], [5, 5]], ('data', 'model'))
    with pytest.raises(ValueError, match=r'process 0 holds no device .*\[3, 5\]'):
        local_to_global(rows(4), mesh, P('data'))


@pytest.mark.parametrize('array', [jnp.float32(3), np.float32(3), np.ones(4), 3])
def test_only_jax_arrays_with_rows_have_local_rows(array):
    with pytest.raises(ValueError, match=r'loss is .*jax\.Array'):
        global_to_local({'loss': array})


@pytest.mark.parametrize(
    'batch, said',
    [
        ({'x': rows(8), 'y': [*range(8)]}, r'^y is a list of 8 numbers, .* numpy.asarray\(y\)$'),
        ({'a': {'y': rows(8, 2).tolist()}}, r'^a/y is a list of 8 lists, of shape \(8, 2\)'),
        ([1.0, 2.0], r'^the batch is a list of 2 numbers, .*asarray\(batch\)$'),
    ],
)
def test_lists_of_numbers_are_not_arrays(batch, said):
    with pytest.raises(ValueError, match=said):
        PjitPartitioner({'data': 8}).to_global(batch)
    settings = PjitPartitioner({'data': 8}).to_global((rows(8), 0.1, 2))
    assert [x.shape for x in settings] == [(8,), (), ()]


def test_arrays_in_messages_are_one_line():
    partitioner = PjitPartitioner({'data': 8})
    for call, said in (
        (lambda: partitioner.to_global(8, rows(8, 64)), r'got 8 .* write to_global\(batch, 8\)$'),
        (lambda: partitioner.to_local(rows(8, 64)), r'float32\[8, 64\].*numpy array is local'),
        (lambda: partitioner.get_data_layout(rows(8, 64)), r'size float32\[8, 64\] must be an'),
        (lambda: resolve_axes(('a',), [], mesh=partitioner), r'PjitPart.* mesh=partitioner.mesh$'),
    ):
        with pytest.raises(ValueError, match=said) as error:
            call()
        assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'specs, message',
    [
        ({'x': P('dta')}, "x: .*'dta' does not exist.*'data'"),
        ({'x': P('data', 'model')}, r'x: .*2 entries.*\(8,\)'),
    ],
)
def test_wrong_specs_of_chunks_are_refused(specs, message):
    with pytest.raises(ValueError, match=message):
        host_local_array_to_global_array({'x': rows(8)}, MESH, specs)


# Arrays of several sizes, as in a padded graph.


def test_each_array_is_laid_out_by_its_own_size():
    partitioner = PjitPartitioner(layout='fsdp')
    graph = {
        'nodes': rows(48, 4),
        'edges': rows(80, 3),
        'n_node': rows(8, dtype=np.int32),
        'temperature': np.float32(0.5),
        'key': jax.random.key(3),
    }
    arrays = partitioner.to_global(graph)
    sharding = NamedSharding(partitioner.mesh, P('data'))
    for name in ('nodes', 'edges', 'n_node'):
        assert_holds(arrays[name], graph[name], sharding)
    assert_holds(arrays['temperature'], graph['temperature'], NamedSharding(sharding.mesh, P()))
    assert arrays['key'].sharding.is_fully_replicated
    np.testing.assert_array_equal(
        jax.random.key_data(arrays['key']), jax.random.key_data(graph['key'])
    )
    _, step, _ = partitioner.setup(
        lambda key: jnp.ones((64, 64)), lambda state, graph: (state, graph['edges'].sum()), 0
    )
    assert step(jnp.ones((64, 64)), arrays)[1] == graph['edges'].sum()


def test_a_tree_of_specs():
    partitioner = PjitPartitioner(num_partitions=2)
    batch = {'x': rows(8, 4), 'globals': rows(1, 3), 'steps': rows(5, 8)}
    specs = {'x': P('data'), 'globals': None, 'steps': P(None, 'data')}
    for name, array in partitioner.to_global(batch, spec=specs).items():
        assert_holds(array, batch[name], NamedSharding(partitioner.mesh, specs[name] or P()))
    with pytest.raises(ValueError, match="spec has no 'globals', but the batch"):
        partitioner.to_global(batch, spec={'x': P('data')})


@pytest.mark.parametrize(
    'batch, batch_size, parts',
    [
        (
            {'nodes': rows(48), 'globals': rows(1, 3)},
            None,
            ['globals has 1 rows', 'nodes has 48'],
        ),
        ({'edges': rows(81), 'nodes': rows(48)}, None, ['edges has 81 rows', '8 or 16']),
        ({'edges': rows(80), 'nodes': rows(48)}, 80, ['nodes has 48 rows', '80 of the 80']),
    ],
)
def test_sizes_that_do_not_fit_name_the_array(batch, batch_size, parts):
    with pytest.raises(ValueError) as caught:
        PjitPartitioner(layout='fsdp').to_global(batch, batch_size)
    assert '\n' not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
