"""Rows of real processes: each feeds its own, whatever the order of devices, and gets them back."""

import pytest
from processes import what_they_say

# Eight devices in all. Each process checks its part by itself, from the numbers of the devices, and
# prints what it held. Errors of a process are raised there: the test shows them.
PROGRAM = """
import sys
import jax
from processes import say
import jax.numpy as jnp
import ml_dtypes
import numpy as np

port, count, index = map(int, sys.argv[1:])
local = 8 // count
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', local)
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'127.0.0.1:{port}', count, index)

from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from partitioning import LocalChunker, PjitPartitioner
from layout_oracle import check_chunks, check_rows

BATCH, COLUMNS = 16, 4
known = np.arange(BATCH * COLUMNS, dtype=np.float32).reshape(BATCH, COLUMNS)
in_order = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
assert [d.process_index for d in in_order] == [i // local for i in range(8)]
orders = {
    'of jax': None,
    # The first devices of all processes, then the second ones: rows with gaps.
    'strided': [p * local + i for i in range(local) for p in range(count)],
    # A ring that starts inside a process: processes share some of their rows.
    'rolled': [7, 0, 1, 2, 3, 4, 5, 6],
    'mixed': [3, 0, 7, 5, 1, 6, 2, 4],
}
shapes = [(4, 2), (2, 4), (8, 1)]


def owned(mesh, axes):
    # The rows of this process, place by place.
    mine = set()
    ways = int(np.prod([mesh.shape[a] for a in axes], dtype=int))
    for place in np.ndindex(mesh.devices.shape):
        if mesh.devices[place].process_index == index:
            at = dict(zip(mesh.axis_names, place))
            number = 0
            for axis in axes:
                number = number * mesh.shape[axis] + at[axis]
            mine |= set(range(number * BATCH // ways, (number + 1) * BATCH // ways))
    return sorted(mine)


total = jax.jit(jnp.sum)
said = {}
for name, order in orders.items():
    for shape in shapes:
        if order is None:
            partitioner = PjitPartitioner(num_partitions=shape[1])
            assert partitioner.mesh.devices.shape == shape
        else:
            grid = np.array([in_order[i] for i in order]).reshape(shape)
            partitioner = PjitPartitioner(mesh=Mesh(grid, ('data', 'model')))
        mesh = partitioner.mesh
        layout = partitioner.get_data_layout(BATCH)
        mine = owned(mesh, ('data',))
        assert list(layout.row_indices) == mine, (name, shape, layout.row_indices, mine)
        feed = {'x': known[mine], 'small': known[mine, 0].astype(ml_dtypes.bfloat16)}
        batch = partitioner.to_global(feed, BATCH)
        assert batch['x'].shape == known.shape
        assert batch['x'].sharding == NamedSharding(mesh, P('data'))
        assert len(batch['x'].addressable_shards) == local
        for shard in batch['x'].addressable_shards:
            at = int(np.argwhere(mesh.devices == shard.device)[0][0])
            block = BATCH // shape[0]
            expected = known[at * block:(at + 1) * block]
            np.testing.assert_array_equal(shard.data, expected)
        back = partitioner.to_local(batch)
        np.testing.assert_array_equal(back['x'], feed['x'])
        assert back['small'].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(back['small'], feed['small'])
        assert float(total(batch['x'])) == known.sum(), (name, shape)

        # The batch over other axes, backwards too, and columns that are sharded as well.
        for spec, axes in [
            (P(('model', 'data')), ('model', 'data')),
            (P('model'), ('model',)),
            (P('data', 'model'), ('data',)),
            (P(None, 'data') if shape[0] <= COLUMNS else P(), ()),
        ]:
            rows = owned(mesh, axes)
            array = partitioner.to_global(known[rows], BATCH, spec)
            index_map = array.sharding.devices_indices_map(known.shape)
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, known[index_map[shard.device]])
            columns = {(s.index[0].start, s.index[1].start) for s in array.addressable_shards}
            blocks = {s.index[0].start for s in array.addressable_shards}
            ways = array.sharding.shard_shape(known.shape)
            whole = len(columns) == len(blocks) * (COLUMNS // ways[1])
            try:
                back = partitioner.to_local(array)
            except ValueError as error:
                assert not whole and 'only some columns of a row' in str(error), str(error)
            else:
                assert whole
                np.testing.assert_array_equal(back, known[rows])
        assert len(check_rows(mesh, 'data', BATCH)) == count
        assert sum(check_chunks(mesh, ('data', 'model'), (BATCH, 8)).values()) == BATCH * 8

        # The size of a batch follows from the rows of a process; a wrong one is refused.
        for array in partitioner.to_global([known[mine], known[mine, :2]]):
            assert array.shape[0] == BATCH
        for wrong, size in [(known[mine][1:], BATCH), (np.repeat(known[mine], 2, 0), BATCH)]:
            try:
                partitioner.to_global(wrong, size)
            except ValueError as error:
                assert f'process {index} holds {len(mine)} of the {size} rows' in str(error)
            else:
                raise AssertionError('a wrong number of rows was taken')
        said[f'{name} {shape[0]}x{shape[1]}'] = {
            'rows': mine,
            'shard': [layout.shard_id, layout.num_shards, layout.is_first_host_in_replica_set],
            'even': layout.is_even,
            'all': [
                [p.shard_id, *p.row_indices, LocalChunker(mesh, host).get_shard_id('data')]
                for host in range(count)
                for p in [partitioner.get_data_layout(BATCH, host)]
            ],
        }

# A mesh of some processes: the others have no rows of it.
few = Mesh(np.array([d for d in in_order if d.process_index == 0]), ('data',))
if index:
    for call in (
        lambda: PjitPartitioner(mesh=few).get_data_layout(8),
        lambda: PjitPartitioner(mesh=few).to_global(known[:8]),
    ):
        try:
            call()
        except Exception as error:
            said.setdefault('errors', []).append([type(error).__name__, str(error)])
say(said)
"""


@pytest.fixture(scope='module', params=[2, 4, 8])
def said(request):
    """What the processes print, started once for all tests of their number."""
    return what_they_say(PROGRAM, request.param)


def test_every_row_has_readers_and_every_shard_one_first(said):
    meshes = [name for name in said[0] if name != 'errors']
    assert len(meshes) == 12
    for name in meshes:
        layouts = [one[name] for one in said]
        assert {row for layout in layouts for row in layout['rows']} == set(range(16)), name
        sets = sorted({tuple(layout['rows']) for layout in layouts})
        firsts = [tuple(x['rows']) for x in layouts if x['shard'][2]]
        assert sorted(firsts) == sets, name
        own = [[x['shard'][0], *x['rows'], x['shard'][0]] for x in layouts]
        for layout in layouts:
            assert layout['all'] == own, 'each process answers for all others as they do'
            assert layout['shard'][:2] == [sets.index(tuple(layout['rows'])), len(sets)], name


def test_the_orders_are_what_they_are_for(said):
    """Rows with gaps, shared in part, and read by several: else the checks were of nothing."""
    count = len(said)
    strided = {
        name
        for one in said
        for name, x in one.items()
        if name != 'errors' and x['rows'][-1] - x['rows'][0] >= len(x['rows'])
    }
    assert not any(name.startswith('of jax') for name in strided)
    if count < 8:  # else each process has one device
        assert 'strided 8x1' in strided
        assert not said[0]['rolled 4x2']['even']
    else:
        assert not strided
    readers = [
        sum(one['of jax 2x4']['rows'] == x['of jax 2x4']['rows'] for x in said) for one in said
    ]
    assert readers == [count // 2] * count


def test_processes_that_have_no_device_of_a_mesh(said):
    assert 'errors' not in said[0]
    for index, one in enumerate(said[1:], start=1):
        assert [kind for kind, _ in one['errors']] == ['ValueError'] * 2
        for _, message in one['errors']:
            assert f'process {index} holds no device of the mesh data {8 // len(said)}' in message
