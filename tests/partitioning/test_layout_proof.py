"""The proof of a layout: it passes for every assignment of devices, and fails where one errs."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from mock_devices import mesh_of_processes

from partitioning import LocalChunker, LocalChunkInfo, PjitPartitioner
from partitioning.layout import data_layout, proof, verify, verify_chunks

pytestmark = pytest.mark.core

NAMES = ('x', 'y', 'z')


def parts_by_hand(mesh, axes):
    """For each process the parts of a dimension over `axes`, counted place by place."""
    held = {}
    for place in itertools.product(*map(range, mesh.devices.shape)):
        number = 0
        for axis in axes:
            number = number * mesh.shape[axis] + place[mesh.axis_names.index(axis)]
        held.setdefault(mesh.devices[place].process_index, set()).add(number)
    return held


# Any assignment of devices to processes.


@st.composite
def meshes(draw):
    """Meshes of one to three axes, of processes whose numbers have gaps."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    numbers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True))
    size = math.prod(shape)
    owners = draw(st.lists(st.sampled_from(numbers), min_size=size, max_size=size))
    return mesh_of_processes(np.reshape(owners, shape), NAMES[: len(shape)])


def some_axes(draw, mesh):
    """Any of the axes, in any order."""
    axes = draw(st.permutations(mesh.axis_names))
    return tuple(axes[: draw(st.integers(0, len(axes)))])


@settings(max_examples=150, deadline=None)
@given(data=st.data(), mesh=meshes(), block=st.integers(1, 5))
def test_rows_of_any_assignment(data, mesh, block):
    axes = some_axes(data.draw, mesh)
    ways = math.prod(mesh.shape[a] for a in axes)
    batch = block * ways
    parts = parts_by_hand(mesh, axes)
    layouts = {process: data_layout(mesh, axes, batch, process) for process in parts}
    for process, layout in layouts.items():
        assert layout.row_indices == tuple(
            row for row in range(batch) if row // block in parts[process]
        )
    sets = sorted({tuple(sorted(p)) for p in parts.values()})
    firsts = [layouts[p].shard_id for p in layouts if layouts[p].is_first_host_in_replica_set]
    assert sorted(firsts) == list(range(len(sets)))
    for process, layout in layouts.items():
        assert sets[layout.shard_id] == tuple(sorted(parts[process]))
        assert (layout.batch_size, layout.num_shards) == (batch, len(sets))
        # What a reader of T5X assumes: as many rows in each shard, and each row in one.
        assert layout.is_even == all(len(s) * len(sets) == ways for s in sets)
    assert {row for layout in layouts.values() for row in layout.row_indices} == set(range(batch))

    proven = verify(mesh, P(axes), batch)
    readers = [sum(row // block in p for p in parts.values()) for row in range(batch)]
    assert (proven.batch_size, proven.num_processes) == (batch, len(parts))
    assert proven.num_shards == len(sets)
    assert proven.readers_per_row == (min(readers), max(readers))
    sizes = [block * len(p) for p in parts.values()]
    assert proven.rows_per_process == (min(sizes), max(sizes))
    assert proven.num_strided == sum(max(p) - min(p) >= len(p) for p in parts.values())


@settings(max_examples=150, deadline=None)
@given(data=st.data(), mesh=meshes())
def test_blocks_of_any_assignment(data, mesh):
    """Axes dealt to two dimensions; sizes that they divide, or any size as padded."""
    axes = some_axes(data.draw, mesh)
    cut = data.draw(st.integers(0, len(axes)))
    spec = (axes[:cut], axes[cut:])
    ways = [math.prod(mesh.shape[a] for a in dimension) for dimension in spec]
    pad = data.draw(st.booleans())
    shape = tuple(data.draw(st.integers(0, 9)) if pad else 2 * n for n in ways)
    parts = [parts_by_hand(mesh, dimension) for dimension in spec]
    written = np.zeros(shape, int)
    for process in parts[0]:
        held = np.zeros(shape, bool)
        policy = 'pad' if pad else 'error'
        for block in LocalChunker(mesh, process).get_local_chunks(shape, spec, policy):
            assert not held[block.slice].any(), 'blocks of a process have nothing in common'
            held[block.slice] = True
            written[block.slice] += block.replica_id == 0
        np.testing.assert_array_equal(held, held_by_hand(mesh, process, spec, shape))
    assert (written == 1).all()
    assert sum(verify_chunks(mesh, P(*spec), shape).values()) == math.prod(shape)


def held_by_hand(mesh, process, spec, shape):
    """The elements that a process holds, as a mask."""
    held = np.zeros(shape, bool)
    for place in itertools.product(*map(range, mesh.devices.shape)):
        if mesh.devices[place].process_index != process:
            continue
        index = []
        for size, axes in zip(shape, spec, strict=True):
            number, ways = 0, 1
            for axis in axes:
                number = number * mesh.shape[axis] + place[mesh.axis_names.index(axis)]
                ways *= mesh.shape[axis]
            block = math.ceil(size / ways)
            index.append(slice(number * block, (number + 1) * block))
        held[tuple(index)] = True
    return held


# What a proof says.

STRIDED = mesh_of_processes([[0, 0], [1, 1], [0, 0], [1, 1]], ('data', 'model'))
SHARED = mesh_of_processes([[0, 1], [0, 1], [2, 3], [2, 3]], ('data', 'model'))
OVERLAPPING = mesh_of_processes([[0, 0], [0, 1], [1, 1], [1, 1]], ('data', 'model'))
IN_A_RING = mesh_of_processes([[0, 1], [1, 2], [2, 3], [3, 0]], ('data', 'model'))


@pytest.mark.parametrize(
    'mesh, words',
    [
        (
            STRIDED,
            '8 rows in 2 shards: 2 processes read 4 rows each, 2 of them strided; a row is read '
            'by 1 of them',
        ),
        (
            SHARED,
            '8 rows in 2 shards: 4 processes read 4 rows each, 0 of them strided; a row is read '
            'by 2 of them',
        ),
        (
            OVERLAPPING,
            '8 rows in 2 shards that share rows or differ in size: 2 processes read 4 to 6 rows '
            'each, 0 of them strided; a row is read by 1 to 2 of them',
        ),
        (
            IN_A_RING,
            '8 rows in 4 shards that share rows or differ in size: 4 processes read 4 rows each, '
            '1 of them strided; a row is read by 2 of them',
        ),
    ],
)
def test_the_words_of_a_proof(mesh, words):
    assert str(verify(mesh, P('data'), 8)) == words


@pytest.mark.parametrize('spec', [P('data'), P('data', 'model'), ('data', None), [('data',)]])
def test_specs_however_they_are_written(spec):
    assert verify(STRIDED, spec, 8) == verify(STRIDED, P('data'), 8)


def test_writers_of_a_replicated_array():
    assert verify_chunks(SHARED, P('data'), (4, 3)) == {0: 6, 1: 0, 2: 6, 3: 0}
    assert verify_chunks(SHARED, P(), (4, 3)) == {0: 12, 1: 0, 2: 0, 3: 0}
    assert verify_chunks(SHARED, P(), ()) == {0: 1, 1: 0, 2: 0, 3: 0}


@pytest.mark.parametrize(
    'spec, batch, message',
    [
        (P('data'), 6, r'Batch size \(6\) must be divisible .*\(4\)'),
        (P('dta'), 8, "'dta' does not exist.*'data'"),
        (P(('data', 'data')), 8, "'data' is used twice"),
        *((P('data'), size, 'batch.*positive whole number') for size in (0, -8, 16.0, '8')),
        (P(None), True, 'batch.*positive whole number'),
    ],
)
def test_batches_that_cannot_be_verified(spec, batch, message):
    with pytest.raises(ValueError, match=message):
        verify(STRIDED, spec, batch)


def test_a_spec_longer_than_the_array():
    with pytest.raises(ValueError, match=r'2 mesh axes .* 1 dimensions'):
        verify_chunks(STRIDED, P('data', 'model'), (8,))


# A proof of something wrong must fail.


def replaced(**changes):
    """A wrong layout: that of process 1 with something changed."""

    def wrong(mesh, axes, batch_size, process_index=None):
        layout = data_layout(mesh, axes, batch_size, process_index)
        if process_index != 1:
            return layout
        made = {name: change(layout) for name, change in changes.items()}
        return dataclasses.replace(layout, **made)

    return wrong


def swapped(mesh, axes, batch_size, process_index=None):
    """Processes 0 and 1 get each other's rows."""
    other = {0: 1, 1: 0}.get(process_index, process_index)
    return data_layout(mesh, axes, batch_size, other)


WRONG_LAYOUTS = {
    'the last row dropped': (
        replaced(row_indices=lambda x: x.row_indices[:-1]),
        r'process 1 of data 4 x model 2 is given rows \[2, 3, 6\], but its devices hold '
        r'\[2, 3, 6, 7\]',
    ),
    'a row of another process': (
        replaced(row_indices=lambda x: (0, *x.row_indices)),
        r'process 1 .* rows \[0, 2, 3, 6, 7\], but',
    ),
    'a row twice': (
        replaced(row_indices=lambda x: (*x.row_indices, 7)),
        r'process 1 .* rows \[2, 3, 6, 7, 7\], but',
    ),
    'rows in another order': (
        replaced(row_indices=lambda x: x.row_indices[::-1]),
        r'process 1 .* rows \[7, 6, 3, 2\], but',
    ),
    'no rows': (replaced(row_indices=lambda x: ()), r'process 1 .* rows \[\], but'),
    'contiguous rows, as T5X would have them': (
        replaced(row_indices=lambda x: (4, 5, 6, 7)),
        r'process 1 .* rows \[4, 5, 6, 7\], but',
    ),
    'rows swapped': (swapped, r'process 0 .* rows \[2, 3, 6, 7\], but'),
    'no first process': (
        replaced(is_first_host_in_replica_set=lambda x: False),
        r'0 of the processes that hold rows \[2, 3, 6, 7\] say',
    ),
    'shard id of another': (
        replaced(shard_id=lambda x: 0),
        r'given batch size, shard id.* \(8, 0, 2, True\), not \(8, 1, 2, True\)',
    ),
    'shard id too large': (
        replaced(shard_id=lambda x: 2),
        r'given batch size, shard id.* \(8, 2, 2, True\), not \(8, 1, 2, True\)',
    ),
    'number of shards': (replaced(num_shards=lambda x: 4), 'shards'),
    'uneven, it says': (replaced(is_even=lambda x: False), 'even'),
    'another batch': (replaced(batch_size=lambda x: 16), 'batch'),
}


@pytest.mark.parametrize('name', WRONG_LAYOUTS)
def test_a_wrong_layout_is_caught(name, monkeypatch):
    wrong, message = WRONG_LAYOUTS[name]
    verify(STRIDED, P('data'), 8)
    monkeypatch.setattr(proof, 'data_layout', wrong)
    with pytest.raises(ValueError, match=message):
        verify(STRIDED, P('data'), 8)


@pytest.mark.parametrize(
    'changes, message',
    [
        (
            {'is_first_host_in_replica_set': lambda x: True},
            r'2 of the processes that hold rows \[0, 1, 2, 3\]',
        ),
        ({'shard_id': lambda x: 1}, r'rows \[0, 1, 2, 3\], is given .*\(8, 1, 2, True\), not'),
    ],
)
def test_replicas_that_contradict_each_other_are_caught(changes, message, monkeypatch):
    monkeypatch.setattr(proof, 'data_layout', replaced(**changes))
    with pytest.raises(ValueError, match=message):
        verify(SHARED, P('data'), 8)


@pytest.mark.parametrize('mesh', [OVERLAPPING, IN_A_RING], ids=['overlapping', 'in a ring'])
def test_shards_said_to_be_even_that_are_not_are_caught(mesh, monkeypatch):
    def wrong(*args):
        return dataclasses.replace(data_layout(*args), is_even=True)

    assert not verify(mesh, P('data'), 8).is_even
    monkeypatch.setattr(proof, 'data_layout', wrong)
    with pytest.raises(ValueError, match='even'):
        verify(mesh, P('data'), 8)


def chunker_with(change):
    """A chunker whose blocks are changed; `change` knows the process, too."""

    class Wrong(LocalChunker):
        def get_local_chunks(self, *args):
            return change(self.process_index, super().get_local_chunks(*args))

    return Wrong


def all_written(process, blocks):
    return tuple(LocalChunkInfo(b.slice, 0) for b in blocks)


def of_nobody(process, blocks):
    return tuple(LocalChunkInfo(b.slice, b.replica_id + 1) for b in blocks)


def shifted(process, blocks):
    """Process 1 writes what process 0 does."""
    return tuple(
        LocalChunkInfo((slice(b.slice[0].start - process, b.slice[0].stop - process),), 0)
        for b in blocks
    )


WRONG_CHUNKS = {
    'a block less': (
        STRIDED,
        lambda p, b: b[p:],
        r'process 1 is given blocks .* of \(4,\), but its devices',
    ),
    'no block': (
        STRIDED,
        lambda p, b: (),
        r'process 0 is given blocks \[\] of \(4,\), but its devices',
    ),
    'nobody writes': (SHARED, of_nobody, r'element \(0,\) of \(4,\) is written 0 times'),
    'all write': (SHARED, all_written, r'element \(0,\) of \(4,\) is written 2 times'),
    'blocks of another': (STRIDED, shifted, r'process 1 is given blocks .* but its devices hold'),
    # As many writers as make a count of 8 bits begin again at 1.
    '257 write': (
        mesh_of_processes(np.repeat(np.arange(257)[None], 4, axis=0), ('data', 'model')),
        all_written,
        'is written 257 times',
    ),
}


@pytest.mark.parametrize('name', WRONG_CHUNKS)
def test_wrong_chunks_are_caught(name, monkeypatch):
    mesh, change, message = WRONG_CHUNKS[name]
    verify_chunks(mesh, P('data'), (4,))
    monkeypatch.setattr(proof, 'LocalChunker', chunker_with(change))
    with pytest.raises(ValueError, match=message):
        verify_chunks(mesh, P('data'), (4,))


def test_chunks_of_a_process_that_does_not_hold_them_are_caught(monkeypatch):
    """Two processes that write each other's blocks write all once, but not what they hold."""

    class Wrong(LocalChunker):
        def __init__(self, mesh, process_index):
            super().__init__(mesh, {0: 1, 1: 0}[process_index])

    monkeypatch.setattr(proof, 'LocalChunker', Wrong)
    with pytest.raises(ValueError, match='process 0'):
        verify_chunks(STRIDED, P('data'), (4,))


def test_a_mesh_of_another_order_than_jax_has_is_caught(monkeypatch):
    """The places of devices are compared with jax's map, not believed."""
    from jax.sharding import NamedSharding

    right = NamedSharding.devices_indices_map

    def wrong(self, shape):
        index_map = right(self, shape)
        return dict(zip(index_map, [*index_map.values()][::-1], strict=True))

    monkeypatch.setattr(NamedSharding, 'devices_indices_map', wrong)
    with pytest.raises(ValueError, match='stands at part 0 of 4, but jax gives it rows 6 to 8'):
        verify(STRIDED, P('data'), 8)


def test_the_real_devices_of_this_process():
    partitioner = PjitPartitioner(num_partitions=2)
    proven = verify(partitioner.mesh, partitioner.data_partition_spec, 16)
    assert (proven.num_processes, proven.rows_per_process, proven.is_even) == (1, (16, 16), True)
    assert verify_chunks(partitioner.mesh, P('data', 'model'), (7, 5)) == {0: 35}
