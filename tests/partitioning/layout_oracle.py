"""What each process must hold of an array, found without the code under test.

There are two independent sources, which are compared before they are used: the places of the
devices in the mesh, and jax's index map. `check_rows` and `check_chunks` then compare them with
every answer that `partitioning.layout` gives, for every process of a mesh.
"""

from collections import Counter

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from partitioning.layout import LocalChunker, data_layout


def as_axes(entry):
    """The mesh axes of one dimension as a tuple."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def count_shards(mesh, entry):
    """The number of shards of a dimension."""
    return int(np.prod([mesh.shape[axis] for axis in as_axes(entry)], dtype=int))


def shards_by_place(mesh, spec, shape):
    """For each process the bounds of its shards, from the places of its devices in the mesh.

    The bounds of a shard are its start and stop in each dimension. A size that does not divide is
    padded, and the padding is left out.
    """
    held = {}
    for place in np.ndindex(mesh.devices.shape):
        bounds = []
        for size, entry in zip(shape, spec, strict=True):
            number = 0
            for axis in as_axes(entry):
                number = number * mesh.shape[axis] + place[mesh.axis_names.index(axis)]
            per_shard = -(-size // count_shards(mesh, entry))
            bounds.append((min(number * per_shard, size), min((number + 1) * per_shard, size)))
        held.setdefault(mesh.devices[place].process_index, set()).add(tuple(bounds))
    return held


def shards_by_index_map(mesh, spec, shape):
    """The same from jax's index map of an array whose sizes divide."""
    held = {}
    index_map = NamedSharding(mesh, PartitionSpec(*spec)).devices_indices_map(tuple(shape))
    for device, index in index_map.items():
        held.setdefault(device.process_index, set()).add(_bounds(index, shape))
    return held


def held_rows(mesh, axes, batch_size):
    """For each process the rows of the batch that its devices hold, in rising order."""
    by_place = shards_by_place(mesh, [axes], [batch_size])
    assert by_place == shards_by_index_map(mesh, [axes], [batch_size]), 'the two sources differ'
    return {
        process: tuple(row for [(start, stop)] in sorted(bounds) for row in range(start, stop))
        for process, bounds in by_place.items()
    }


def is_even(held, batch_size):
    """Whether the distinct sets of rows are equal in size and disjoint."""
    distinct = set(held.values())
    return len(set(map(len, distinct))) == 1 and sum(map(len, distinct)) == batch_size


def check_rows(mesh, axes, batch_size):
    """Checks the data layout of every process, and returns the rows that each holds."""
    held = held_rows(mesh, axes, batch_size)
    distinct = sorted(set(held.values()))
    replica_ids = {rows: [] for rows in distinct}
    for process, rows in held.items():
        layout = data_layout(mesh, axes, batch_size, process)
        chunker = LocalChunker(mesh, process)
        where = f'process {process} of {mesh.devices.shape} over {axes}'
        assert layout.row_indices == rows, f'{where}: rows {layout.row_indices}, not {rows}'
        given = (layout.batch_size, layout.shard_id, layout.num_shards, layout.is_even)
        expected = (batch_size, distinct.index(rows), len(distinct), is_even(held, batch_size))
        assert given == expected, f'{where}: size, id, count and evenness {given}, not {expected}'
        numbers = (chunker.get_shard_id(axes), chunker.get_num_shards(axes))
        assert numbers == expected[1:3], f'{where}: the chunker answers {numbers}'
        replica_id = chunker.get_replica_id(axes)
        replica_ids[rows].append(replica_id)
        assert layout.is_first_host_in_replica_set == (replica_id == 0), f'{where}: replica'
    for rows, ids in replica_ids.items():
        assert sorted(ids) == list(range(len(ids))), f'replicas of rows {rows}: {ids}'
    return held


def check_chunks(mesh, spec, shape, on_indivisible='error'):
    """Checks the chunks of every process, and returns the number of elements that each writes."""
    held = shards_by_place(mesh, spec, shape)
    if on_indivisible == 'error':
        assert held == shards_by_index_map(mesh, spec, shape), 'the two sources differ'
    distinct = set(map(frozenset, held.values()))
    overlap = sum(map(len, distinct)) > len(frozenset().union(*distinct))
    times_written = np.zeros(shape, int)
    writes, writers = {}, Counter()
    for process, shards in held.items():
        chunker = LocalChunker(mesh, process)
        chunks = chunker.get_local_chunks(shape, spec, on_indivisible)
        given = {_bounds(chunk.slice, shape) for chunk in chunks}
        where = f'process {process} of {mesh.devices.shape} over {spec}'
        assert given == shards, f'{where}: chunks {sorted(given)}, not {sorted(shards)}'
        writes[process] = 0
        mask = np.zeros(shape, bool)
        for chunk in chunks:
            mask[chunk.slice] = True
            if chunk.replica_id == 0:
                times_written[chunk.slice] += 1
                writes[process] += times_written[chunk.slice].size
        try:
            info = chunker.get_local_chunk_info(shape, spec, on_indivisible)
        except ValueError as error:
            assert 'get_local_chunks' in str(error), f'{where}: {error}'
            may_raise = overlap or on_indivisible == 'pad' or not _is_sliceable(mask)
            assert may_raise, f'{where}: {error}'
        else:
            described = np.zeros(shape, bool)
            described[info.slice] = True
            assert (described == mask).all(), f'{where}: {info} is not what the devices hold'
            if mask.any():  # Shards of padding alone have equal bounds.
                writers[frozenset(shards)] += info.replica_id == 0
    assert (times_written == 1).all(), f'elements are written {np.unique(times_written)} times'
    assert set(writers.values()) <= {1}, f'chunks have {sorted(writers.values())} first replicas'
    return writes


def _bounds(index, shape):
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))


def _is_sliceable(mask):
    """Whether one slice per dimension selects exactly this mask."""
    slices = []
    for dim in range(mask.ndim):
        along = np.flatnonzero(mask.any(axis=tuple(d for d in range(mask.ndim) if d != dim)))
        steps = set(np.diff(along).tolist()) or {1}
        if len(steps) > 1:
            return False
        slices.append(slice(along[0], along[-1] + 1, steps.pop()))
    return bool(mask[tuple(slices)].all())
