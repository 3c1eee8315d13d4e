"""Which rows and chunks each process holds, for any assignment of devices; and what is refused."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P
from layout_oracle import check_chunks, check_rows, count_shards
from mock_devices import mesh_of_processes, tpu_slices, tpus

from partitioning import LocalChunker, LocalChunkInfo, PjitPartitioner, default_mesh
from partitioning.layout import data_layout

pytestmark = [pytest.mark.core, pytest.mark.smoke]


def v3(num_partitions):
    return default_mesh(num_partitions, devices=tpus((4, 4, 1), 'TPU v3', cores=2))


def hybrid(kind, bounds, ici):
    return default_mesh(
        None, ici_mesh_shape=ici, dcn_mesh_shape=(2, 1, 1), devices=tpu_slices(2, bounds, kind)
    )


def torus(kind, bounds, num_partitions):
    return default_mesh(num_partitions, devices=tpus(bounds, kind))


FOUR = mesh_of_processes([[0, 0], [1, 1], [2, 2], [3, 3]], ('data', 'model'))
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
    'these 8 CPUs': lambda: PjitPartitioner(num_partitions=2).mesh,
    'strided': lambda: STRIDED,
    'diagonal': lambda: DIAGONAL,
    'model over processes': lambda: MODEL_OVER_PROCESSES,
}


@pytest.mark.parametrize('name', MESHES)
def test_every_process_gets_the_rows_and_chunks_of_its_devices(name):
    mesh = MESHES[name]()
    *most, model = mesh.axis_names
    data = most[-1]
    for axes in [(), (data,), (model,), tuple(most), (model, *most), tuple(mesh.axis_names)]:
        check_rows(mesh, axes, 2 * count_shards(mesh, axes))
    for spec in [
        (data, None),
        (tuple(most), model),
        (None, model),
        (None, (model, data)),
        (None, None),
    ]:
        check_chunks(mesh, spec, tuple(2 * count_shards(mesh, entry) for entry in spec))


def test_one_slice_with_a_stride_describes_strided_rows():
    for process in range(4):
        info = LocalChunker(STRIDED, process).get_local_chunk_info((16, 2), ['data', None])
        assert info == LocalChunkInfo((slice(process, process + 13, 4), slice(None)), 0)


def test_overlapping_chunks_are_numbered_and_listed_by_shard():
    mesh = mesh_of_processes([[0, 0], [0, 1], [1, 1]], ('data', 'model'))  # rows 0 and 1, 1 and 2
    chunkers = [LocalChunker(mesh, process) for process in (0, 1)]
    assert [c.get_shard_id('data') for c in chunkers] == [0, 1]
    assert [c.get_num_shards('data') for c in chunkers] == [2, 2]
    with pytest.raises(
        ValueError, match=r'process 0 holds 2 shards.*other chunks.*get_local_chunks'
    ):
        chunkers[0].get_local_chunk_info((3,), ['data'])
    assert [c.get_local_chunks((3,), ['data']) for c in chunkers] == [
        (LocalChunkInfo((slice(0, 1),), 0), LocalChunkInfo((slice(1, 2),), 0)),
        (LocalChunkInfo((slice(1, 2),), 1), LocalChunkInfo((slice(2, 3),), 0)),
    ]


def test_scalars_have_one_replica_per_process():
    """A train state has scalars, such as its step."""
    for process in range(4):
        info = LocalChunkInfo((), process)
        assert LocalChunker(FOUR, process).get_local_chunks((), ()) == (info,)
        assert LocalChunker(FOUR, process).get_local_chunk_info((), ()) == info


# The partitioner.


@pytest.mark.parametrize('axes', [('data', None), (('model', 'data'), None), (None, 'model')])
def test_the_partitioner_forwards_to_its_chunker(axes):
    partitioner, chunker = PjitPartitioner(mesh=FOUR), LocalChunker(FOUR)
    chunks = chunker.get_local_chunks((16, 4), axes)
    assert partitioner.get_local_chunks((16, 4), P(*axes)) == chunks
    assert len(chunks) == {('data', None): 1}.get(axes, 2)


# Sizes that do not divide.


@pytest.mark.parametrize(
    'rows, chunks',
    [
        (130, [(0, 33), (33, 66), (66, 99), (99, 130)]),  # T5X assigns rows 128 and 129 to nobody.
        (3, [(0, 1), (1, 2), (2, 3), (3, 3)]),  # T5X assigns no row to anybody.
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
                with pytest.raises(ValueError, match=rf"\b{rows}\b.*\b4\b.*'data'.*'pad'"):
                    method((rows, 2), ('data', None))
    assert [row for start, stop in chunks for row in range(start, stop)] == list(range(rows))


@pytest.mark.parametrize('size, fits', [(3, '8'), (12, '8 or 16')])
def test_a_batch_size_that_does_not_divide_comes_with_sizes_that_fit(size, fits):
    with pytest.raises(ValueError, match=rf'\({size}\).*\(8\).*data 8 x model 4.*Use {fits}\.'):
        data_layout(v3(4), 'data', size, 0)


# Errors.


@pytest.mark.parametrize('host', [9, -1, '0', 0.5, True])
def test_a_process_without_devices_is_named(host):
    with pytest.raises(ValueError, match=rf'process {host!r} holds no device .*processes \[0\]'):
        PjitPartitioner(8).get_data_layout(8, host_index=host)
    with pytest.raises(ValueError, match=rf'process {host!r} .*\[0, 1, 2, 3\]'):
        LocalChunker(v3(4), host)


@pytest.mark.parametrize(
    'shape, axes, message',
    [
        ((128, 16), ['dta', None], r"'dta' does not exist.*Did you mean 'data'"),
        ((128, 16), [('data', 'expert'), None], "'expert' does not exist"),
        ((128, 16), ['data', 'data'], "'data' appears twice"),
        ((128, 16), [('data', 'model'), 'model'], "'model' appears twice"),
        ((128, 16), ['data'], r'1 entry.* 2 dimensions, \(128, 16\)'),
        ((128,), ['data', None], r'2 entries.* 1 dimension, \(128,\)'),
        ((128, 16), 'data', "'data' must have one entry per dimension"),
        ((128, 16), [{'data'}, None], "{'data'} in .* must be a mesh axis"),
        ((130, 16), ['data', None], '130.* 8.* 128 or 136'),
        ((16, 3), [None, 'model'], "3.* 4.* 'model'"),
        ((-128, 16), ['data', None], '-128.*>= 0'),
    ],
)
def test_errors_of_chunks(shape, axes, message):
    chunker = LocalChunker(v3(4), 0)
    for method in (chunker.get_local_chunk_info, chunker.get_local_chunks):
        with pytest.raises(ValueError, match=message):
            method(shape, axes)


@pytest.mark.parametrize(
    'owners, message',
    [
        ([[0, 1, 1, 0], [1, 1, 0, 0]], '4 shards .* do not form a rectangle'),
        ([[0, 1, 1, 0], [0, 1, 1, 0]], r'shards \[0, 3\] of 4 along dimension 1'),
    ],
)
def test_why_one_slice_per_dimension_cannot_describe_a_chunk(owners, message):
    chunker = LocalChunker(mesh_of_processes(owners, ('data', 'model')), 0)
    with pytest.raises(ValueError, match=rf'process 0 holds {message}.*get_local_chunks'):
        chunker.get_local_chunk_info((2, 8), ('data', 'model'))


def test_chunks_have_two_policies():
    with pytest.raises(ValueError, match="'error' or 'pad', not 'replicate'"):
        LocalChunker(v3(4), 0).get_local_chunks((128,), ('data',), 'replicate')


@pytest.mark.parametrize(
    'axes, message',
    [
        ('expert', "'expert' does not exist"),
        (('data', 'data'), "'data' appears twice"),
        ({'data', 'model'}, 'no order.*tuple'),
        (frozenset(['data']), 'no order.*tuple'),
    ],
)
def test_errors_of_shard_numbers(axes, message):
    chunker = LocalChunker(v3(4), 0)
    for method in (chunker.get_shard_id, chunker.get_num_shards, chunker.get_replica_id):
        with pytest.raises(ValueError, match=message):
            method(axes)


# Properties.


@st.composite
def meshes(draw):
    """Meshes of one to three axes; the numbers of the processes have gaps."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    numbers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True))
    size = math.prod(shape)
    owners = draw(st.lists(st.sampled_from(numbers), min_size=size, max_size=size))
    return mesh_of_processes(np.reshape(owners, shape), ('x', 'y', 'z')[: len(shape)])


def some_axes(draw, mesh):
    """Any of the axes, in any order."""
    axes = draw(st.permutations(mesh.axis_names))
    return tuple(axes[: draw(st.integers(0, len(axes)))])


@settings(max_examples=100)
@given(data=st.data(), mesh=meshes(), rows_per_shard=st.integers(1, 3))
def test_rows_of_any_assignment(data, mesh, rows_per_shard):
    axes = some_axes(data.draw, mesh)
    batch_size = rows_per_shard * math.prod(mesh.shape[a] for a in axes)
    held = check_rows(mesh, axes, batch_size)
    assert set().union(*held.values()) == set(range(batch_size))


@settings(max_examples=100)
@given(data=st.data(), mesh=meshes())
def test_chunks_of_any_assignment(data, mesh):
    """The axes shard two dimensions, of sizes that divide or of any size under 'pad'."""
    axes = some_axes(data.draw, mesh)
    cut = data.draw(st.integers(0, len(axes)))
    spec = (axes[:cut], axes[cut:])
    num_shards = [math.prod(mesh.shape[a] for a in dimension) for dimension in spec]
    if data.draw(st.booleans()):
        shape = tuple(data.draw(st.integers(0, 9)) for _ in spec)
        writes = check_chunks(mesh, spec, shape, 'pad')
    else:
        shape = tuple(data.draw(st.integers(1, 2)) * n for n in num_shards)
        writes = check_chunks(mesh, spec, shape)
    assert sum(writes.values()) == math.prod(shape)


# Known meshes.

SHARED = mesh_of_processes([[0, 1], [0, 1], [2, 3], [2, 3]], ('data', 'model'))


def test_one_replica_writes_a_replicated_array():
    assert check_chunks(SHARED, ('data', None), (4, 3)) == {0: 6, 1: 0, 2: 6, 3: 0}
    assert check_chunks(SHARED, (None, None), (4, 3)) == {0: 12, 1: 0, 2: 0, 3: 0}
    assert check_chunks(SHARED, (), ()) == {0: 1, 1: 0, 2: 0, 3: 0}
