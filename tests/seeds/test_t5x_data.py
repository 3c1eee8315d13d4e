"""T5X's chunks and data layouts: which process holds what."""

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from mock_devices import mesh_of_processes, tpu_slices, tpus, v3_4x4

from partitioning import (
    LocalChunker,
    MeshConfig,
    PjitPartitioner,
    default_mesh,
    standard_logical_axis_rules,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]


def partitioner(logical_axis_rules=None, **settings):
    """A partitioner of T5X's test machine."""
    mesh = MeshConfig.from_t5x(devices=v3_4x4(), **settings)
    return PjitPartitioner(mesh=mesh, logical_axis_rules=logical_axis_rules)


def test_E9_chunks_of_v3():
    mesh = default_mesh(4, devices=v3_4x4())
    for process, chunk in {0: 0, 1: 2, 2: 1, 3: 3}.items():
        chunker = LocalChunker(mesh, process)
        assert chunker.num_chunks == {'data': 4, 'model': 1}
        assert chunker.chunk_ids == {'data': chunk, 'model': 0}
        info = chunker.get_local_chunk_info((128, 16), ['data', 'model'])
        assert info.slice == (slice(32 * chunk, 32 * (chunk + 1)), slice(0, 16))
        assert info.replica_id == 0
        # T5X returns numpy's integers here.
        assert {type(s.start) for s in info.slice} == {int}
        info = chunker.get_local_chunk_info((128, 16), [None, 'model'])
        assert info.slice == (slice(None), slice(0, 16))
        assert info.replica_id == chunk


def test_E9_chunks_over_several_axes():
    """T5X raises NotImplementedError."""
    chunker = LocalChunker(default_mesh(4, devices=v3_4x4()), 1)
    assert chunker.get_local_chunk_info((128,), [('data', 'model')]).slice == (slice(64, 96),)


def test_E10_shards_are_numbered_in_the_order_of_the_axes():
    mesh = mesh_of_processes([[[0], [1]], [[2], [3]]], ('replica', 'data', 'model'))
    forth = [LocalChunker(mesh, p).get_shard_id(('replica', 'data')) for p in range(4)]
    back = [LocalChunker(mesh, p).get_shard_id(('data', 'replica')) for p in range(4)]
    assert (forth, back) == ([0, 1, 2, 3], [0, 2, 1, 3])


def test_E11_layouts_of_the_batch_on_v3():
    one = partitioner(num_partitions=1)
    layouts = [one.get_data_layout(32, host_index=p) for p in range(4)]
    assert [x.num_shards for x in layouts] == [4] * 4
    assert [x.shard_id for x in layouts] == [0, 2, 1, 3]
    assert all(x.is_first_host_in_replica_set for x in layouts)

    sixteen = partitioner(num_partitions=16)
    assert sixteen.data_mesh_size == 2
    layouts = [sixteen.get_data_layout(32, host_index=p) for p in range(4)]
    assert [x.num_shards for x in layouts] == [2] * 4
    assert [x.is_first_host_in_replica_set for x in layouts] == [True, False, True, False]


@pytest.mark.parametrize('num_partitions, size', [(1, 32), (2, 16), (4, 8), (8, 4), (16, 2)])
def test_E11_by_default_a_batch_has_one_row_per_device(num_partitions, size):
    one = partitioner(num_partitions=num_partitions)
    assert one.data_mesh_size == size
    layout = one.get_data_layout()
    assert (layout.batch_size, layout.num_shards) == (size, min(size, 4))


def test_E11_a_batch_that_does_not_divide_is_an_error():
    message = r'[Bb]atch size \(3\) must be divisible by .*\(8\)'
    with pytest.raises(ValueError, match=message):
        partitioner(num_partitions=4).get_data_layout(3)


@pytest.mark.parametrize('rules', [[('mlp', 'model')], [('batch', None), ('mlp', 'model')]])
def test_E11_rules_may_leave_the_batch_whole(rules):
    one = partitioner(num_partitions=4, logical_axis_rules=rules)
    assert one.data_partition_spec == P(None)
    assert one.data_mesh_size == 1
    for process in range(4):
        layout = one.get_data_layout(5, host_index=process)
        assert (layout.batch_size, layout.shard_id, layout.num_shards) == (5, 0, 1)
        assert layout.is_first_host_in_replica_set is (process == 0)


def test_E12_sizes_of_the_data_axes():
    rules = standard_logical_axis_rules(mesh_axes=('replica', 'data', 'model'))
    # Each process holds (1, 4, 2) devices of (replica, data, model).
    halves = np.arange(4).reshape(2, 2, 1, 1) * np.ones((1, 1, 4, 2), int)
    mesh = mesh_of_processes(halves.reshape(2, 8, 2), ('replica', 'data', 'model'))
    shards = {(a, LocalChunker(mesh, p).get_shard_id(a)) for p in range(4) for a in mesh.axis_names}
    assert LocalChunker(mesh, 0).get_num_shards(('replica', 'data')) == 4
    assert len(shards) == 2 + 2 + 1
    mesh = mesh_of_processes(np.zeros((2, 4, 2), int), ('replica', 'data', 'model'))
    assert PjitPartitioner(mesh=mesh, logical_axis_rules=rules).data_mesh_size == 8


@pytest.mark.parametrize(
    'devices, settings',
    [
        (tpus((4, 4, 1), 'TPU v5 lite'), {'num_partitions': 4}),
        (
            tpu_slices(2, (4, 4, 1), 'TPU v5 lite'),
            {'ici_mesh_shape': (1, 16, 1), 'dcn_mesh_shape': (2, 1, 1)},
        ),
    ],
)
def test_E13_hosts_whose_devices_are_not_a_sub_cube(devices, settings):
    """T5X raises, or gives two hosts the wrong rows: on v5e, rows 0-16 instead of 8-24."""
    one = PjitPartitioner(mesh=MeshConfig.from_t5x(devices=devices, **settings))
    sharding = NamedSharding(one.mesh, one.data_partition_spec)
    size = one.data_mesh_size
    expected = {d.process_index: set() for d in devices}
    for device, (rows,) in sharding.devices_indices_map((size,)).items():
        expected[device.process_index] |= set(range(*rows.indices(size)))
    assert one.data_shards == len(set(map(frozenset, expected.values())))
    for process, rows in expected.items():
        assert one.get_data_layout(size, host_index=process).row_indices == tuple(sorted(rows))
