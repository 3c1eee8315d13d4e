"""Which rows a process holds, against index maps worked out device by device."""

import itertools
from collections import Counter

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mock_devices import mesh_of_processes, tpu_slices, tpus

from partitioning import (
    LocalChunker,
    LocalChunkInfo,
    PjitPartitioner,
    default_mesh,
)
from partitioning.layout import data_layout

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
        first = Counter()
        for process, mask in by_hand.items():
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


@pytest.mark.parametrize('mesh, spec', [('v3 4x4, 4', P('data', 'model')), ('strided', P('data'))])
def test_numbers_are_python_integers(mesh, spec):
    """Also where those that are given are numpy's: JSON and gin take no others."""
    chunker = LocalChunker(MESHES[mesh](), np.int64(1))
    shape = np.array([16, 16][: len(spec)])
    infos = [
        chunker.get_local_chunk_info(shape, spec),
        *chunker.get_local_chunks(shape, spec),
        *chunker.get_local_chunks(shape, spec, 'pad'),
    ]
    numbers = [chunker.get_shard_id('data'), chunker.get_replica_id('data')]
    numbers += [chunker.get_num_shards('data'), *chunker.num_chunks.values()]
    for info in infos:
        numbers += [info.replica_id, *(n for s in info.slice for n in (s.start, s.stop, s.step))]
    layout = PjitPartitioner(mesh=MESHES[mesh]()).get_data_layout(np.int64(16), np.int64(1))
    numbers += [layout.batch_size, layout.shard_id, layout.num_shards, *layout.row_indices]
    assert {type(n) for n in numbers} <= {int, type(None)}
    assert type(layout.is_first_host_in_replica_set) is type(layout.is_even) is bool


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


@pytest.mark.parametrize('name, shards', [('v5e 2 slices', 8), ('v5p 2 slices', 16)])
def test_shards_on_two_slices(name, shards):
    """T5X gives some of these processes the rows of others, and refuses the rest."""
    partitioner = PjitPartitioner(mesh=MESHES[name]())
    batch = 2 * partitioner.data_mesh_size
    rows = {}
    for process, mask in held_by_hand(partitioner.mesh, (batch,), (('replica', 'data'),)).items():
        layout = partitioner.get_data_layout(batch, host_index=process)
        assert layout.row_indices == tuple(np.flatnonzero(mask).tolist())
        rows.setdefault(layout.row_indices, []).append(layout)
    assert partitioner.data_shards == len(rows) == shards
    for shard_id, same in enumerate(rows[key] for key in sorted(rows)):
        assert {layout.shard_id for layout in same} == {shard_id}
        assert sum(layout.is_first_host_in_replica_set for layout in same) == 1
    assert sorted({row for key in rows for row in key}) == list(range(batch))


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


@pytest.mark.parametrize('host', [9, -1, '0', 0.5])
def test_process_without_devices(host):
    with pytest.raises(
        ValueError, match=rf'process {host!r} holds no device .*has processes \[0\]'
    ):
        PjitPartitioner(8).get_data_layout(8, host_index=host)
    with pytest.raises(ValueError, match=rf'process {host!r} .*\[0, 1, 2, 3\]'):
        LocalChunker(v3(4), host)


def test_the_layout_of_any_process():
    partitioner = PjitPartitioner(mesh=STRIDED)
    for host in range(4):
        layout = partitioner.get_data_layout(32, host)
        expected = [row for row in range(32) if row // 2 % 4 == host]
        assert list(layout.row_indices) == expected
        assert (layout.shard_id, layout.num_shards, layout.is_even) == (host, 4, True)
    assert partitioner.get_data_layout(32) == partitioner.get_data_layout(32, 0)


@pytest.mark.parametrize('size', [-8, 0, 16.0, True, '16'])
def test_layouts_without_a_partitioner_take_no_other_sizes(size):
    with pytest.raises(ValueError, match=r'[Bb]atch size'):
        data_layout(STRIDED, (), size, 0)


# Sizes that do not divide, which T5X cuts off.

FOUR = mesh_of_processes([[0, 0], [1, 1], [2, 2], [3, 3]], ('data', 'model'))


@pytest.mark.parametrize(
    'rows, chunks',
    [
        (130, [(0, 33), (33, 66), (66, 99), (99, 130)]),  # T5X: rows 128 and 129 are of nobody
        (3, [(0, 1), (1, 2), (2, 3), (3, 3)]),  # T5X: all rows are of nobody
        (5, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (0, [(0, 0)] * 4),
    ],
)
def test_rows_that_do_not_divide(rows, chunks):
    for process, (start, stop) in enumerate(chunks):
        chunker = LocalChunker(FOUR, process)
        padded = LocalChunkInfo((slice(start, stop), slice(None)), 0)
        assert chunker.get_local_chunk_info((rows, 2), ('data', None), 'pad') == padded
        assert chunker.get_local_chunks((rows, 2), ('data', None), 'pad') == (padded,)
        for method in (chunker.get_local_chunk_info, chunker.get_local_chunks):
            if rows:
                with pytest.raises(ValueError, match=f'{rows} does not divide by 4.*pad'):
                    method((rows, 2), ('data', None))
    assert [row for start, stop in chunks for row in range(start, stop)] == list(range(rows))


def test_arrays_without_dimensions():
    """Those of a train state: its step."""
    for process in range(4):
        info = LocalChunkInfo((), process)
        assert LocalChunker(FOUR, process).get_local_chunks((), ()) == (info,)
        assert LocalChunker(FOUR, process).get_local_chunk_info((), ()) == info


@pytest.mark.parametrize('axes', [('data', None), (('model', 'data'), None), (None, 'model')])
def test_the_partitioner_asks_its_chunker(axes):
    partitioner, chunker = PjitPartitioner(mesh=FOUR), LocalChunker(FOUR)
    chunks = chunker.get_local_chunks((16, 4), axes)
    assert partitioner.get_local_chunks((16, 4), P(*axes)) == chunks
    assert len(chunks) == {('data', None): 1}.get(axes, 2)


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
        ((128, 16), [('data', 'expert'), None], "'expert' does not exist"),
        ((-128, 16), ['data', None], '-128'),
        ((128.5, 16), ['data', None], r'128\.5'),
    ],
)
def test_errors_of_chunks(shape, axes, message):
    chunker = LocalChunker(v3(4), 0)
    for method in (chunker.get_local_chunk_info, chunker.get_local_chunks):
        with pytest.raises(ValueError, match=message):
            method(shape, axes)


def test_a_policy_that_chunks_do_not_have():
    with pytest.raises(ValueError, match="'error' or 'pad', not 'replicate'"):
        LocalChunker(v3(4), 0).get_local_chunks((128,), ('data',), 'replicate')


@pytest.mark.parametrize('axes', [{'data', 'model'}, frozenset(['data'])])
def test_axes_without_an_order(axes):
    with pytest.raises(ValueError, match='has no order'):
        LocalChunker(v3(4), 0).get_shard_id(axes)


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
