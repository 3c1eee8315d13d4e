"""Which rows a process holds, against index maps worked out device by device."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mock_devices import mesh_of_processes, tpu_slices, tpus

from partitioning import (
    LocalChunker,
    LocalChunkInfo,
    PjitPartitioner,
    default_mesh,
    host_local_array_to_global_array,
)

pytestmark = pytest.mark.core


def held_by_hand(mesh, shape, spec):
    """Each process's elements of an array, as a mask, from the places of its devices."""
    masks = {}
    for place in itertools.product(*map(range, mesh.devices.shape)):
        at = dict(zip(mesh.axis_names, place, strict=True))
        index = []
        for size, axes in zip(shape, spec, strict=True):
            axes = () if axes is None else (axes,) if isinstance(axes, str) else axes
            number, ways = 0, 1
            for axis in axes:
                number = number * mesh.shape[axis] + at[axis]
                ways *= mesh.shape[axis]
            index.append(slice(number * size // ways, (number + 1) * size // ways))
        process = mesh.devices[place].process_index
        masks.setdefault(process, np.zeros(shape, bool))[tuple(index)] = True
    return masks


def held_by_index_map(mesh, shape, spec):
    masks = {}
    for device, index in NamedSharding(mesh, P(*spec)).devices_indices_map(shape).items():
        masks.setdefault(device.process_index, np.zeros(shape, bool))[index] = True
    return masks


def v3(num_partitions):
    return default_mesh(num_partitions, devices=tpus((4, 4, 1), 'TPU v3', cores=2))


def hybrid(kind, bounds, ici):
    return default_mesh(
        None, ici_mesh_shape=ici, dcn_mesh_shape=(2, 1, 1), devices=tpu_slices(2, bounds, kind)
    )


def torus(kind, bounds, num_partitions):
    return default_mesh(num_partitions, devices=tpus(bounds, kind))


STRIDED = mesh_of_processes([[0], [1], [2], [3]] * 4, ('data', 'model'))
DIAGONAL = mesh_of_processes([[0, 1], [1, 0], [2, 3], [3, 2]], ('data', 'model'))
MODEL_OVER_PROCESSES = mesh_of_processes([[0, 1], [0, 1], [2, 3], [2, 3]], ('data', 'model'))

MESHES = {
    'v3 4x4, 1': lambda: v3(1),
    'v3 4x4, 4': lambda: v3(4),
    'v3 4x4, 16': lambda: v3(16),
    'v4 4x4x4, 4': lambda: torus('TPU v4', (4, 4, 4), 4),
    'v4 2x2x2, 8': lambda: torus('TPU v4', (2, 2, 2), 8),
    'v5e 4x4, 1': lambda: torus('TPU v5 lite', (4, 4, 1), 1),
    'v5e 4x4, 4': lambda: torus('TPU v5 lite', (4, 4, 1), 4),
    'v5e 2 slices': lambda: hybrid('TPU v5 lite', (4, 4, 1), (1, 16, 1)),
    'v5p 2 slices': lambda: hybrid('TPU v5', (4, 4, 4), (1, 16, 4)),
    'strided': lambda: STRIDED,
    'diagonal': lambda: DIAGONAL,
    'model over processes': lambda: MODEL_OVER_PROCESSES,
}
ARRAYS = [
    ((256, 16), ('data', None)),
    ((256, 16), ('data', 'model')),
    ((256, 16), (None, 'model')),
    ((256,), (('data', 'model'),)),
    ((16, 256), (None, ('model', 'data'))),
    ((16, 8), (None, None)),
]


@pytest.mark.parametrize('name', MESHES)
def test_chunks_are_what_the_devices_hold(name):
    """Right for each process and array, or an error where no slice can say it: never wrong."""
    mesh = MESHES[name]()
    described = 0
    arrays = ARRAYS
    if 'replica' in mesh.axis_names:
        arrays = [*ARRAYS, ((256, 16), (('replica', 'data'), 'model')), ((256,), ('replica',))]
    for shape, spec in arrays:
        by_hand = held_by_hand(mesh, shape, spec)
        by_map = held_by_index_map(mesh, shape, spec)
        first = Counter()
        for process, mask in by_hand.items():
            np.testing.assert_array_equal(mask, by_map[process])
            try:
                info = LocalChunker(mesh, process).get_local_chunk_info(shape, spec)
            except ValueError as error:
                assert 'get_local_chunks' in str(error)
                assert not is_sliceable(mask)
                continue
            described += 1
            ours = np.zeros(shape, bool)
            ours[info.slice] = True
            np.testing.assert_array_equal(ours, mask)
            first[mask.tobytes()] += info.replica_id == 0
        assert all(count == 1 for count in first.values())
    assert described


def is_sliceable(mask):
    """Whether one slice a dimension selects exactly the mask."""
    sliced = np.ones(mask.shape, bool)
    for dim, size in enumerate(mask.shape):
        along = mask.any(axis=tuple(d for d in range(mask.ndim) if d != dim))
        positions = np.flatnonzero(along)
        if len(set(np.diff(positions).tolist())) > 1:
            return False
        sliced &= along.reshape([size if d == dim else 1 for d in range(mask.ndim)])
    return np.array_equal(sliced, mask)


@pytest.mark.parametrize('name', MESHES)
def test_replicas_of_a_chunk_are_numbered(name):
    mesh = MESHES[name]()
    processes = sorted({d.process_index for d in mesh.devices.flat})
    for axes in [(), ('data',), ('model',), ('data', 'model')]:
        groups = {}
        for process in processes:
            chunker = LocalChunker(mesh, process)
            groups.setdefault(chunker.get_shard_id(axes), []).append(chunker.get_replica_id(axes))
        num_shards = LocalChunker(mesh, processes[0]).get_num_shards(axes)
        assert sorted(groups) == list(range(num_shards))
        for replica_ids in groups.values():
            assert sorted(replica_ids) == list(range(len(replica_ids)))


@pytest.mark.parametrize('num_partitions', [1, 2, 4, 8])
@pytest.mark.parametrize('spec', [('data', 'model'), (('data', 'model'), None), (None, 'data')])
def test_one_process_holds_all(num_partitions, spec):
    """On the real devices of this machine, which are all of one process."""
    mesh = PjitPartitioner(num_partitions=num_partitions).mesh
    info = LocalChunker(mesh).get_local_chunk_info((16, 8), spec)
    ours = np.zeros((16, 8), bool)
    ours[info.slice] = True
    for index in NamedSharding(mesh, P(*spec)).addressable_devices_indices_map((16, 8)).values():
        assert ours[index].all()
    assert ours.all() and info.replica_id == 0


# T5X's tables.


def test_v3_chunks():
    chunkers = {p: LocalChunker(v3(4), p) for p in range(4)}
    assert {p: c.chunk_ids['data'] for p, c in chunkers.items()} == {0: 0, 1: 2, 2: 1, 3: 3}
    for chunker in chunkers.values():
        chunk = chunker.chunk_ids['data']
        assert chunker.num_chunks == {'data': 4, 'model': 1}
        assert chunker.chunk_ids['model'] == 0
        assert chunker.get_local_chunk_info((128, 16), ['data', 'model']) == LocalChunkInfo(
            (slice(32 * chunk, 32 * chunk + 32), slice(0, 16)), 0
        )
        assert chunker.get_local_chunk_info((128, 16), [None, 'model']) == LocalChunkInfo(
            (slice(None), slice(0, 16)), chunk
        )


def test_chunks_are_python_integers():
    info = LocalChunker(v3(4), 1).get_local_chunk_info((128, 16), ['data', 'model'])
    numbers = [info.replica_id, *(n for s in info.slice for n in (s.start, s.stop))]
    assert [type(n) for n in numbers] == [int] * 5


@pytest.mark.parametrize(
    'axes, shards',
    [
        (('replica', 'data'), {(0, 0): 0, (0, 1): 1, (1, 0): 2, (1, 1): 3}),
        (('data', 'replica'), {(0, 0): 0, (1, 0): 1, (0, 1): 2, (1, 1): 3}),
        ('data', {(0, 0): 0, (0, 1): 1, (1, 0): 0, (1, 1): 1}),
    ],
)
def test_shard_ids_are_row_major_over_the_axes_as_given(axes, shards):
    mesh = mesh_of_processes([[[0, 0], [1, 1]], [[2, 2], [3, 3]]], ('replica', 'data', 'model'))
    for (replica, data), shard in shards.items():
        assert LocalChunker(mesh, 2 * replica + data).get_shard_id(axes) == shard


def test_strided_rows():
    for process in range(4):
        info = LocalChunker(STRIDED, process).get_local_chunk_info((16, 2), ['data', None])
        assert list(range(16))[info.slice[0]] == [process + 4 * i for i in range(4)]
        assert info.replica_id == 0


@pytest.mark.parametrize('name, shards', [('v5e 2 slices', 8), ('v5p 2 slices', None)])
def test_shards_on_two_slices(name, shards):
    """T5X gives some of these processes the rows of others, and refuses the rest."""
    partitioner = PjitPartitioner(
        mesh=MESHES[name](), logical_axis_rules=[('batch', ('replica', 'data'))]
    )
    batch = partitioner.data_mesh_size
    layouts, rows = {}, {}
    for process, mask in held_by_hand(partitioner.mesh, (batch,), (('replica', 'data'),)).items():
        layouts[process] = partitioner.get_data_layout(batch, host_index=process)
        rows.setdefault(mask.tobytes(), []).append(process)
    assert partitioner.data_shards == len(rows) == (shards or len(rows))
    for processes in rows.values():
        assert len({layouts[p].shard_id for p in processes}) == 1
        assert sum(layouts[p].is_first_host_in_replica_set for p in processes) == 1
    assert {layout.shard_id for layout in layouts.values()} == set(range(len(rows)))


# Data layouts.


@pytest.mark.parametrize(
    'num_partitions, mesh_size, num_shards, shard_ids, first',
    [
        (1, 32, 4, [0, 2, 1, 3], [True] * 4),
        (4, 8, 4, [0, 2, 1, 3], [True] * 4),
        (16, 2, 2, [0, 0, 1, 1], [True, False, True, False]),
    ],
)
def test_v3_data_layouts(num_partitions, mesh_size, num_shards, shard_ids, first):
    partitioner = PjitPartitioner(num_partitions, devices=tpus((4, 4, 1), 'TPU v3', cores=2))
    assert partitioner.data_mesh_size == mesh_size
    assert partitioner.data_shards == num_shards
    assert partitioner.data_shard_id == 0
    layouts = [partitioner.get_data_layout(32, host_index=p) for p in range(4)]
    assert {layout.batch_size for layout in layouts} == {32}
    assert {layout.num_shards for layout in layouts} == {num_shards}
    held = {p: held_by_hand(partitioner.mesh, (32,), ('data',))[p] for p in range(4)}
    blocks = sorted({m.tobytes() for m in held.values()}, reverse=True)
    assert [blocks.index(held[p].tobytes()) for p in range(4)] == shard_ids
    assert [layout.shard_id for layout in layouts] == shard_ids
    assert [layout.is_first_host_in_replica_set for layout in layouts] == first
    assert partitioner.get_data_layout().batch_size == mesh_size


def test_data_layout_over_replica_and_data():
    def partitioner(processes):
        mesh = mesh_of_processes(processes, ('replica', 'data', 'model'))
        rules = [('batch', ('replica', 'data'))]
        return PjitPartitioner(mesh=mesh, logical_axis_rules=rules)

    assert partitioner(np.zeros((2, 4, 2))).data_mesh_size == 8
    four_hosts = np.repeat(np.arange(4), 8).reshape(2, 8, 2)  # each holds (1, 4, 2)
    assert partitioner(four_hosts).data_shards == 4


@pytest.mark.parametrize('rules', [[('embed', None)], [('batch', None)]])
def test_data_layout_without_a_batch_axis(rules):
    partitioner = PjitPartitioner(
        4, logical_axis_rules=rules, devices=tpus((4, 4, 1), 'TPU v3', cores=2)
    )
    assert partitioner.data_partition_spec == P(None)
    assert partitioner.data_mesh_size == 1 and partitioner.data_shards == 1
    for process in range(4):
        layout = partitioner.get_data_layout(3, host_index=process)
        assert (layout.batch_size, layout.shard_id, layout.num_shards) == (3, 0, 1)
        assert layout.is_first_host_in_replica_set == (process == 0)


def test_batch_size_that_does_not_divide():
    partitioner = PjitPartitioner(4, devices=tpus((4, 4, 1), 'TPU v3', cores=2))
    message = r'Batch size \(3\) must be divisible by corresponding data mesh size \(8\).*Use 8\.'
    with pytest.raises(ValueError, match=message):
        partitioner.get_data_layout(3)
    with pytest.raises(ValueError, match='8 or 16'):
        partitioner.get_data_layout(12)


@pytest.mark.parametrize('size', [-8, 0, 16.0, 15.5, True, '16'])
def test_batch_size_that_is_no_count(size):
    with pytest.raises(ValueError, match='batch size'):
        PjitPartitioner(8).get_data_layout(size)


def test_process_without_devices():
    with pytest.raises(ValueError, match='process 9'):
        PjitPartitioner(8).get_data_layout(8, host_index=9)
    with pytest.raises(ValueError, match=r'process 4 .*\[0, 1, 2, 3\]'):
        LocalChunker(STRIDED, 4)


# Errors of the chunker.


@pytest.mark.parametrize(
    'shape, axes, message',
    [
        ((128, 16), ['dta', None], r"'dta'.*'data'"),
        ((128, 16), ['expert', None], r"'expert'.*data 8 x model 4"),
        ((128, 16), ['data', 'data'], "'data' is used twice"),
        ((128, 16), [('data', 'model'), 'model'], "'model' is used twice"),
        ((128, 16), ['data'], '1 mesh axes .* 2 dimensions'),
        ((128,), ['data', None], '2 mesh axes .* 1 dimensions'),
        ((130, 16), ['data', None], '130 does not divide by 8'),
        ((3, 16), ['data', None], '3 does not divide by 8'),
        ((128, 16), [('data', 'model'), None], None),
    ],
)
def test_errors_of_chunks(shape, axes, message):
    chunker = LocalChunker(v3(4), 0)
    if message is None:
        assert chunker.get_local_chunk_info(shape, axes).slice == (slice(0, 32), slice(None))
        return
    with pytest.raises(ValueError, match=message):
        chunker.get_local_chunk_info(shape, axes)


@pytest.mark.parametrize('axes', ['expert', ('data', 'data')])
def test_errors_of_shards(axes):
    chunker = LocalChunker(v3(4), 0)
    for method in (chunker.get_shard_id, chunker.get_num_shards, chunker.get_replica_id):
        with pytest.raises(ValueError, match='mesh axis'):
            method(axes)


def test_sets_of_parts_that_overlap_have_numbers_too():
    mesh = mesh_of_processes([[0, 0], [0, 1], [1, 1]], ('data', 'model'))  # rows 0 and 1, 1 and 2
    chunkers = [LocalChunker(mesh, process) for process in (0, 1)]
    assert [c.get_shard_id('data') for c in chunkers] == [0, 1]
    assert [c.get_num_shards('data') for c in chunkers] == [2, 2]
    with pytest.raises(ValueError, match='shared in part'):
        chunkers[0].get_local_chunk_info((3,), ['data'])
    assert [c.get_local_chunks((3,), ['data']) for c in chunkers] == [
        (LocalChunkInfo((slice(0, 1),), 0), LocalChunkInfo((slice(1, 2),), 0)),
        (LocalChunkInfo((slice(1, 2),), 1), LocalChunkInfo((slice(2, 3),), 0)),
    ]


# Arrays from parts.


def test_host_local_array_to_global_array():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('data', 'model'))
    tree = {'x': np.arange(32.0).reshape(8, 4), 'n': np.arange(4)}
    out = host_local_array_to_global_array(tree, mesh, {'x': P('data', 'model'), 'n': None})
    for name, array in out.items():
        np.testing.assert_array_equal(array, tree[name])
    assert out['x'].sharding == NamedSharding(mesh, P('data', 'model'))
    assert out['n'].sharding.is_fully_replicated
    for shard in out['x'].addressable_shards:
        np.testing.assert_array_equal(shard.data, tree['x'][shard.index])
