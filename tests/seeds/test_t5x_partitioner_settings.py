"""T5X's meshes of CPUs, GPUs and experts, and the settings of its partitioners."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mock_devices import cpus, gpus, ids, tpu_slices, tpus, v3_4x4

from partitioning import (
    MeshConfig,
    MoePjitPartitioner,
    PjitPartitioner,
    default_mesh,
    get_cpu_mesh,
    get_gpu_mesh,
)

pytestmark = pytest.mark.core


def in_rows(order, width):
    return np.reshape(order, (-1, width)).tolist()


@pytest.mark.parametrize('num_partitions, shape', [(None, (1, 8)), (1, (8, 1)), (2, (4, 2))])
def test_E6_cpus_honour_num_partitions(num_partitions, shape):
    mesh = get_cpu_mesh() if num_partitions is None else get_cpu_mesh(num_partitions)
    assert mesh.axis_names == ('data', 'model')
    assert mesh.devices.shape == shape
    assert ids(mesh) == in_rows(range(8), shape[1])
    if num_partitions is not None:
        partitioner = PjitPartitioner(num_partitions=num_partitions)
        backend = default_mesh(num_partitions, backend='cpu')
        for other in (partitioner.mesh, default_mesh(num_partitions), backend):
            assert other == mesh


def test_E6_the_model_axis_of_cpus_stays_in_a_process():
    mesh = default_mesh(4, devices=cpus(4, 2))
    assert [{d.process_index for d in row} for row in mesh.devices] == [{0}, {1}]
    assert ids(mesh) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert ids(default_mesh(2, devices=cpus(4, 2)[::-1])) == in_rows(range(8), 2)


GPUS = [
    *[(8, 1, n, shape) for n, shape in ((1, (8, 1)), (2, (4, 2)), (8, (1, 8)))],
    *[(8, 2, n, shape) for n, shape in ((1, (16, 1)), (4, (4, 4)), (8, (2, 8)), (16, (1, 16)))],
    (4, 4, 8, (2, 8)),
]


@pytest.mark.parametrize('local, processes, num_partitions, shape', GPUS)
def test_E7_meshes_of_gpus(monkeypatch, local, processes, num_partitions, shape):
    devices = gpus(local, processes)
    monkeypatch.setattr(jax, 'devices', lambda *_: devices)
    mesh = get_gpu_mesh(num_partitions)
    assert mesh.axis_names == ('data', 'model')
    assert ids(mesh) == in_rows(range(len(devices)), shape[1])
    assert mesh.devices.shape == shape
    assert ids(default_mesh(num_partitions)) == ids(mesh)


@pytest.mark.parametrize(
    'num_partitions, problem', [(3, ''), (12, ''), (32, ': it is larger than the machine')]
)
def test_E7_gpus_that_do_not_divide(num_partitions, problem):
    message = f'num_partitions={num_partitions} does not divide the 16 devices of the machine'
    with pytest.raises(ValueError, match=f'^{message}{problem}; use one of 1, 2, 4, 8, 16$'):
        default_mesh(num_partitions, devices=gpus(8, 2))


def partitioner(logical_axis_rules=None, **settings):
    """A partitioner of T5X's test machine."""
    mesh = MeshConfig.from_t5x(devices=v3_4x4(), **settings)
    return PjitPartitioner(mesh=mesh, logical_axis_rules=logical_axis_rules)


SHAPES = {'ici_mesh_shape': (1, 4, 2), 'dcn_mesh_shape': (1, 1, 1)}


@pytest.mark.parametrize('make', [MeshConfig.from_t5x, PjitPartitioner])
@pytest.mark.parametrize(
    'settings, said',
    [
        ({}, 'At least one of num_partitions'),
        ({'num_partitions': 4, 'model_parallel_submesh': (2, 1, 1, 2)}, 'model_parallel_submesh'),
        ({'num_partitions': 4, **SHAPES}, 'num_partitions'),
        ({'model_parallel_submesh': (1, 1, 1, 2), **SHAPES}, 'model_parallel_submesh.*ici_mesh'),
        ({'model_parallel_submesh': (2, 1, 1)}, r'4-tuple.*\(2, 1, 1\)'),
        ({'model_parallel_submesh': ()}, '4-tuple'),
        ({'model_parallel_submesh': (2.0, 2, 1, 2)}, r'4-tuple .* of integers.* not \(2.0, 2, 1'),
        ({'ici_mesh_shape': (1, 4, 2)}, 'dcn_mesh_shape'),
        ({'dcn_mesh_shape': (1, 4, 2)}, 'ici_mesh_shape'),
    ],
)
def test_E8_settings_that_do_not_determine_a_mesh_are_errors(make, settings, said):
    with pytest.raises(ValueError, match=said):
        make(**settings)


def test_E8_meshes_of_slices_also_shard_the_batch_over_replicas():
    devices = tpu_slices(2, (2, 2, 1), 'TPU v4')
    rules = [('batch', 'data'), ('mlp', 'model')]
    mesh = MeshConfig.from_t5x(ici_mesh_shape=(1, 2, 2), dcn_mesh_shape=(2, 1, 1), devices=devices)
    hybrid = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    assert hybrid.mesh.axis_names == ('replica', 'data', 'model')
    assert hybrid.data_partition_spec == P(('replica', 'data'))
    assert tuple(hybrid.logical_axis_rules) == (('batch', ('replica', 'data')), rules[1])
    one = partitioner(num_partitions=4, logical_axis_rules=rules)
    assert one.data_partition_spec == P('data')
    assert tuple(one.logical_axis_rules) == tuple(rules)


# T5X's order on 2 x 2 chips of two cores: chip by chip, down one column and then the next.
V3_2X2 = [0, 1, 4, 5, 2, 3, 6, 7]


@pytest.mark.parametrize(
    'experts, num_partitions, submesh, shape, order',
    [
        (16, 1, None, (1, 8, 1), V3_2X2),
        (8, 1, None, (1, 8, 1), V3_2X2),
        (4, 1, None, (2, 4, 1), V3_2X2),
        (8, 4, None, (1, 2, 4), list(range(8))),
        (8, None, (1, 1, 1, 2), (1, 4, 2), V3_2X2),
        (1, 1, None, (8, 1, 1), V3_2X2),
        (1, 4, None, (2, 1, 4), list(range(8))),
        (12, 2, None, (1, 4, 2), V3_2X2),
        (2, None, (2, 1, 1, 2), (1, 2, 4), list(range(8))),
    ],
)
def test_E16_meshes_of_experts(monkeypatch, experts, num_partitions, submesh, shape, order):
    """The 'expert' axis is split off the 'data' axis, and every device keeps its place."""
    devices = tpus((2, 2, 1), 'TPU v3', cores=2)
    monkeypatch.setattr(jax, 'devices', lambda *_: devices)
    mesh = MoePjitPartitioner(experts, num_partitions, submesh).mesh
    assert mesh.axis_names == ('data', 'expert', 'model')
    assert ids(mesh) == np.reshape(order, shape).tolist()
    without = default_mesh(num_partitions, submesh, devices=devices)
    assert np.ravel(ids(without)).tolist() == order
