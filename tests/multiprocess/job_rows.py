"""Each process feeds its rows of a batch and reads them back, on meshes of many device orders.

Each process checks its own arrays. An AssertionError here fails the test that started the process.
The expected rows follow from the positions of its devices; see layout_oracle.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from layout_oracle import check_chunks, check_rows

from partitioning import PjitPartitioner

BATCH, COLUMNS = 16, 4
KNOWN = np.arange(BATCH * COLUMNS, dtype=np.float32).reshape(BATCH, COLUMNS)


def run(count, index):
    """Reports the data layouts of each mesh, and the errors of a mesh without this process."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    local = 8 // count
    orders = {
        # The first devices of all processes, then the second ones: strided rows.
        'strided 8x1': [p * local + i for i in range(local) for p in range(count)],
        # A ring that starts inside a process: processes share some of their rows.
        'rolled 4x2': [7, 0, 1, 2, 3, 4, 5, 6],
        'mixed 2x4': [3, 0, 7, 5, 1, 6, 2, 4],
    }
    partitioners = {f'default {8 // n}x{n}': PjitPartitioner(num_partitions=n) for n in (1, 2, 4)}
    for name, order in orders.items():
        shape = tuple(map(int, name.split()[-1].split('x')))
        grid = np.array([devices[i] for i in order]).reshape(shape)
        partitioners[name] = PjitPartitioner(mesh=Mesh(grid, ('data', 'model')))
    meshes = {name: check_mesh(one, index) for name, one in partitioners.items()}
    few = Mesh(np.array([d for d in devices if d.process_index == 0]), ('data',))
    return {'meshes': meshes, 'errors': errors_of_a_mesh_without_this_process(few) if index else []}


def check_mesh(partitioner, index):
    """Checks the rows, chunks and arrays of one mesh, and reports its data layouts."""
    mesh = partitioner.mesh
    held = check_rows(mesh, 'data', BATCH)
    check_chunks(mesh, ('data', 'model'), (BATCH, 8))
    mine = list(held[index])
    feed = {'x': KNOWN[mine], 'small': KNOWN[mine, 0].astype(ml_dtypes.bfloat16)}
    batch = partitioner.to_global(feed, BATCH)
    assert batch['x'].sharding == NamedSharding(mesh, P('data'))
    assert_holds(batch['x'], KNOWN)
    back = partitioner.to_local(batch)
    for name, rows in feed.items():
        assert back[name].dtype == rows.dtype
        np.testing.assert_array_equal(back[name], rows)
    if mesh.devices.shape == (4, 2):
        assert float(jax.jit(jnp.sum)(batch['x'])) == KNOWN.sum()
    for spec in (P(('model', 'data')), P('model'), P('data', 'model'), P(None, 'model')):
        check_spec(partitioner, spec, index)
    check_numbers_of_rows(partitioner, mine, index)
    return {
        str(host): [layout.shard_id, layout.is_first_host_in_replica_set, *layout.row_indices]
        for host in sorted(held)
        for layout in [partitioner.get_data_layout(BATCH, host)]
    }


def check_spec(partitioner, spec, index):
    """Checks a batch that is sharded over other axes or by columns, too."""
    rows = list(check_rows(partitioner.mesh, spec[0] or (), BATCH)[index])
    array = partitioner.to_global(KNOWN[rows], BATCH, spec)
    assert_holds(array, KNOWN)
    elements = {
        (row, column)
        for shard in array.addressable_shards
        for row in range(BATCH)[shard.index[0]]
        for column in range(COLUMNS)[shard.index[1]]
    }
    try:
        back = partitioner.to_local(array)
    except ValueError as error:
        assert len(elements) < len(rows) * COLUMNS and 'only some columns of a row' in str(error)
    else:
        assert len(elements) == len(rows) * COLUMNS
        np.testing.assert_array_equal(back, KNOWN[rows])


def check_numbers_of_rows(partitioner, mine, index):
    """Checks that the batch size follows from the rows of a process, and wrong rows are refused."""
    for array in partitioner.to_global([KNOWN[mine], KNOWN[mine, :2]]):
        assert array.shape[0] == BATCH
    # Twice as many edges: the rows of each shard are read in the same order.
    pairs = [row for mine_too in mine for row in (2 * mine_too, 2 * mine_too + 1)]
    both = np.repeat(KNOWN, 2, 0)
    graph = {'nodes': KNOWN[mine], 'edges': both[pairs], 'temperature': np.float32(2)}
    arrays = partitioner.to_global(graph)
    assert_holds(arrays['nodes'], KNOWN)
    assert_holds(arrays['edges'], both)
    assert arrays['temperature'].is_fully_replicated and float(arrays['temperature']) == 2
    for wrong in (KNOWN[mine][1:], np.repeat(KNOWN[mine], 2, 0)):
        try:
            partitioner.to_global(wrong, BATCH)
        except ValueError as error:
            assert f'process {index} holds {len(mine)} of the {BATCH} rows' in str(error), error
        else:
            raise AssertionError('a wrong number of rows was accepted')


def errors_of_a_mesh_without_this_process(mesh):
    """The errors of a process that has no device of the mesh."""
    errors = []
    for call in (
        lambda: PjitPartitioner(mesh=mesh).get_data_layout(8),
        lambda: PjitPartitioner(mesh=mesh).to_global(KNOWN[:8]),
    ):
        try:
            call()
        except Exception as error:
            errors.append([type(error).__name__, str(error)])
    return errors


def assert_holds(array, expected):
    """Checks that every device of this process holds its part of the expected array."""
    assert array.shape == expected.shape
    assert len(array.addressable_shards) == jax.local_device_count()
    index_map = array.sharding.devices_indices_map(expected.shape)
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, expected[index_map[shard.device]])
