"""Devices -> Mesh: T5X's tables for TPUs and GPUs, and the machines that T5X has no table for."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from mock_devices import MockDevice, gpus, ids, tpu_slices, tpus

from partitioning import (
    PjitPartitioner,
    bounds_from_last_device,
    default_mesh,
    get_coords,
    get_cpu_mesh,
    get_gpu_mesh,
    get_mesh,
)

pytestmark = pytest.mark.core


def v3_4x4():
    return tpus((4, 4, 1), 'TPU v3', cores=2)


V3_ORDER_1 = [
    *(0, 1, 8, 9, 2, 3, 10, 11),
    *(16, 17, 24, 25, 18, 19, 26, 27),
    *(4, 5, 12, 13, 6, 7, 14, 15),
    *(20, 21, 28, 29, 22, 23, 30, 31),
]
V3_ORDER_4 = [
    *([0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24, 25, 26, 27]),
    *([4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23], [28, 29, 30, 31]),
]
V3_Z_MAJOR_Y = [
    *([0, 1, 8, 9, 16, 17, 24, 25], [2, 3, 10, 11, 18, 19, 26, 27]),
    *([4, 5, 12, 13, 20, 21, 28, 29], [6, 7, 14, 15, 22, 23, 30, 31]),
]


def in_rows(order, width):
    return np.reshape(order, (-1, width)).tolist()


# Coordinates.


def test_coordinates_of_tpus():
    assert get_coords(MockDevice(0, 0, (1, 0, 1), core_on_chip=1)) == (1, 0, 1, 1)
    assert bounds_from_last_device(MockDevice(0, 0, (3, 3, 3), core_on_chip=1)) == (4, 4, 4, 2)


def test_coordinates_without_torus(monkeypatch):
    monkeypatch.setattr(jax, 'local_device_count', lambda: 8)
    assert get_coords(MockDevice(9, 1)) == (1, 1)
    monkeypatch.setattr(jax, 'local_device_count', lambda: 4)
    assert bounds_from_last_device(MockDevice(3, 0)) == (1, 4)


# T5X's device orders.


@pytest.mark.parametrize(
    'num_partitions, expected',
    [
        (1, in_rows(V3_ORDER_1, 1)),
        (2, in_rows(V3_ORDER_1, 2)),
        (4, V3_ORDER_4),
    ],
)
def test_v3_default_orders(num_partitions, expected):
    mesh = default_mesh(num_partitions, devices=v3_4x4())
    assert mesh.axis_names == ('data', 'model')
    assert ids(mesh) == expected


@pytest.mark.parametrize(
    'submesh, expected',
    [
        ((1, 1, 1, 2), in_rows(V3_ORDER_1, 2)),
        ((2, 1, 1, 2), V3_ORDER_4),
        ((4, 1, 1, 2), in_rows(range(32), 8)),
        ((1, 4, 1, 2), V3_Z_MAJOR_Y),
    ],
)
def test_v3_submesh_orders(submesh, expected):
    assert ids(get_mesh(submesh, v3_4x4())) == expected
    assert ids(default_mesh(None, submesh, devices=v3_4x4())) == expected


def test_v3_each_process_holds_a_block():
    mesh = default_mesh(4, devices=v3_4x4())
    assert mesh.devices.shape == (8, 4) and mesh.size == 32
    for process in range(4):
        rows = [row for row in mesh.devices.tolist() if row[0].process_index == process]
        assert len(rows) == 2
        assert {d.process_index for row in rows for d in row} == {process}
        if process == 0:
            assert [[d.id for d in row] for row in rows] == [[0, 1, 2, 3], [8, 9, 10, 11]]


def test_order_without_host_tiling():
    """Chips column by column, whole columns: y is inside x, and no host keeps a block."""
    mesh = get_mesh((1, 1, 1, 1), v3_4x4(), tile_by_host_if_needed=False)
    expected = [c + 2 * (x + 4 * y) for x in range(4) for y in range(4) for c in range(2)]
    assert ids(mesh) == in_rows(expected, 1)


@pytest.mark.parametrize(
    'bounds, num_partitions, expected',
    [
        ((2, 2, 2), 1, [[0], [2], [1], [3], [4], [6], [5], [7]]),
        ((2, 2, 2), 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ((2, 2, 2), 4, [[0, 2, 1, 3], [4, 6, 5, 7]]),
        ((2, 2, 1), 2, [[0, 2], [1, 3]]),
        ((2, 2, 1), 4, [[0, 2, 1, 3]]),
    ],
)
def test_v4_default_orders(bounds, num_partitions, expected):
    assert ids(default_mesh(num_partitions, devices=tpus(bounds, 'TPU v4'))) == expected


@pytest.mark.parametrize(
    'kind, bounds, cores, num_partitions, tile',
    [
        ('TPU v2', (4, 4, 1), 2, 8, (2, 2, 1, 2)),
        ('TPU v3', (4, 4, 1), 2, 16, (4, 2, 1, 2)),
        ('TPU v4', (4, 4, 4), 1, 4, (4, 1, 1, 1)),
        ('TPU v4', (4, 4, 4), 1, 8, (4, 2, 1, 1)),
        ('TPU v4', (4, 4, 4), 1, 16, (4, 4, 1, 1)),
        ('TPU v4', (2, 2, 8), 1, 8, (1, 1, 8, 1)),
        ('TPU v4', (2, 2, 4), 1, 16, (2, 2, 4, 1)),
        ('TPU v4', (2, 2, 16), 1, 16, (1, 1, 16, 1)),
        ('TPU v4', (8, 4, 4), 1, 16, (8, 2, 1, 1)),
    ],
)
def test_default_tiles(kind, bounds, cores, num_partitions, tile):
    """A model replica covers exactly one box of T5X's table, aligned to it."""
    mesh = default_mesh(num_partitions, devices=tpus(bounds, kind, cores))
    for row in mesh.devices:
        places = np.array([(*d.coords, d.core_on_chip) for d in row])
        low, high = places.min(axis=0), places.max(axis=0)
        assert tuple((high - low + 1).tolist()) == tile
        assert not (low % tile).any()
        assert len(np.unique(places, axis=0)) == num_partitions


def test_the_order_of_the_device_list_does_not_matter():
    devices = v3_4x4()
    for num_partitions in (1, 2, 4):
        assert ids(default_mesh(num_partitions, devices=devices[::-1])) == ids(
            default_mesh(num_partitions, devices=devices)
        )


# Machines without a table entry: any order, each device once.


@pytest.mark.parametrize(
    'kind, bounds, cores, num_partitions',
    [
        ('TPU v3', (4, 4, 1), 2, 32),
        ('TPU v4', (2, 2, 2), 1, 8),
        ('TPU v4', (2, 2, 4), 1, 8),
        ('TPU v5 lite', (4, 4, 1), 1, 1),
        ('TPU v5 lite', (4, 4, 1), 1, 4),
        ('TPU v5 lite', (2, 4, 1), 1, 8),
        ('TPU v5', (2, 2, 2), 1, 2),
        ('TPU v5', (4, 4, 4), 1, 16),
        ('TPU v6 lite', (8, 8, 1), 1, 32),
        ('TPU v6 lite', (4, 4, 1), 1, 2),
    ],
)
def test_meshes_beyond_the_tables(kind, bounds, cores, num_partitions):
    devices = tpus(bounds, kind, cores)
    mesh = default_mesh(num_partitions, devices=devices)
    assert dict(mesh.shape) == {'data': len(devices) // num_partitions, 'model': num_partitions}
    assert sorted(np.ravel(ids(mesh)).tolist()) == list(range(len(devices)))


@pytest.mark.parametrize('num_partitions', [3, 5, 0, -1, 64])
def test_partitions_that_do_not_divide_tpus(num_partitions):
    with pytest.raises(ValueError, match=rf'{num_partitions}.* 32'):
        default_mesh(num_partitions, devices=v3_4x4())


@pytest.mark.parametrize(
    'submesh', [(3, 1, 1, 1), (4, 1, 1, 1), (0, 1, 1, 1), (1, 2), (8, 1, 1, 2)]
)
def test_submeshes_that_do_not_fit(submesh):
    with pytest.raises(ValueError, match='model_parallel_submesh'):
        get_mesh(submesh, v3_4x4())


# CPU and GPU.


@pytest.mark.parametrize('num_partitions, data', [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_cpu_honours_num_partitions(num_partitions, data):
    assert len(jax.devices()) == 8
    for mesh in (
        PjitPartitioner(num_partitions=num_partitions).mesh,
        default_mesh(num_partitions),
        get_cpu_mesh(num_partitions),
    ):
        assert dict(mesh.shape) == {'data': data, 'model': num_partitions}
        assert sorted(np.ravel(ids(mesh)).tolist()) == sorted(d.id for d in jax.devices())


def test_cpu_default_is_one_process_a_row():
    assert dict(get_cpu_mesh().shape) == {'data': 1, 'model': 8}


@pytest.mark.parametrize('make', [default_mesh, get_cpu_mesh])
@pytest.mark.parametrize('num_partitions', [3, 16, 0, -1])
def test_cpu_partitions_that_do_not_divide(make, num_partitions):
    with pytest.raises(ValueError, match=f'num_partitions={num_partitions} does not divide .*8'):
        make(num_partitions)


@pytest.mark.parametrize(
    'local, processes, num_partitions, shape',
    [
        (8, 1, 1, (8, 1)),
        (8, 1, 2, (4, 2)),
        (8, 1, 8, (1, 8)),
        (8, 2, 1, (16, 1)),
        (8, 2, 4, (4, 4)),
        (8, 2, 8, (2, 8)),
        (8, 2, 16, (1, 16)),
        (4, 4, 8, (2, 8)),
    ],
)
def test_gpu_meshes(monkeypatch, local, processes, num_partitions, shape):
    devices = gpus(local, processes)
    monkeypatch.setattr(jax, 'devices', lambda *_: devices)
    monkeypatch.setattr(jax, 'device_count', lambda *_: len(devices))
    monkeypatch.setattr(jax, 'local_device_count', lambda *_: local)
    monkeypatch.setattr(jax, 'process_count', lambda *_: processes)
    for mesh in (get_gpu_mesh(num_partitions), default_mesh(num_partitions)):
        assert mesh.axis_names == ('data', 'model')
        assert ids(mesh) == np.arange(len(devices)).reshape(shape).tolist()


@pytest.mark.parametrize(
    'local, processes, num_partitions',
    [(8, 2, 3), (8, 2, 12), (8, 2, 32), (6, 2, 4), (8, 2, 0)],
)
def test_gpu_partitions_that_do_not_fit(local, processes, num_partitions):
    with pytest.raises(ValueError, match=f'num_partitions={num_partitions}'):
        default_mesh(num_partitions, devices=gpus(local, processes))


# Several slices.


def test_two_slices_need_shapes():
    devices = tpu_slices(2, (2, 2, 2), 'TPU v4')
    for choice in ({'num_partitions': 4}, {'model_parallel_submesh': (2, 2, 1, 1)}):
        with pytest.raises(ValueError, match=r'2 slices of 8 devices.*\(2, 1, 1\)') as error:
            PjitPartitioner(**choice, devices=devices).mesh  # noqa: B018
        assert 'ici_mesh_shape=(1, 2, 4)' in str(error.value)


def test_the_mesh_that_the_two_slices_error_suggests():
    mesh = default_mesh(
        None,
        ici_mesh_shape=(1, 2, 4),
        dcn_mesh_shape=(2, 1, 1),
        devices=tpu_slices(2, (2, 2, 2), 'TPU v4'),
    )
    assert ids(mesh) == [[[0, 2, 1, 3], [4, 6, 5, 7]], [[8, 10, 9, 11], [12, 14, 13, 15]]]


@pytest.mark.parametrize(
    'kind, bounds, ici',
    [
        ('TPU v5 lite', (4, 4, 1), (1, 8, 2)),
        ('TPU v5 lite', (4, 4, 1), (1, 16, 1)),
        ('TPU v5', (4, 4, 4), (1, 32, 2)),
        ('TPU v6 lite', (16, 16, 1), (1, 128, 2)),
        ('TPU v6 lite', (16, 16, 1), (1, 64, 4)),
    ],
)
def test_hybrid_meshes(kind, bounds, ici):
    devices = tpu_slices(2, bounds, kind)
    mesh = default_mesh(None, ici_mesh_shape=ici, dcn_mesh_shape=(2, 1, 1), devices=devices)
    assert mesh.axis_names == ('replica', 'data', 'model')
    assert mesh.devices.shape == (2 * ici[0], ici[1], ici[2])
    assert sorted(np.ravel(ids(mesh)).tolist()) == list(range(2 * math.prod(bounds)))
    for replica in (0, 1):
        assert {d.slice_index for d in mesh.devices[replica].ravel()} == {replica}


@pytest.mark.parametrize(
    'ici, dcn',
    [
        ((1, 2, 8), (2, 1, 1)),  # 32 devices of 16
        ((1, 8, 2), (1, 1, 1)),  # 16 devices, but of one slice
        ((1, 2, 2), (4, 1, 1)),  # four slices of two
        ((2, 4), (2, 1)),
        ((1, 2, 4), (2, 1)),
    ],
)
def test_hybrid_shapes_that_do_not_fit(ici, dcn):
    devices = tpu_slices(2, (2, 2, 2), 'TPU v4')
    with pytest.raises(ValueError, match='ici_mesh_shape') as error:
        default_mesh(None, ici_mesh_shape=ici, dcn_mesh_shape=dcn, devices=devices)
    assert str(ici) in str(error.value) and str(dcn) in str(error.value)


def test_one_slice_with_shapes_on_this_machine():
    partitioner = PjitPartitioner(ici_mesh_shape=(1, 4, 2), dcn_mesh_shape=(1, 1, 1))
    assert dict(partitioner.mesh.shape) == {'replica': 1, 'data': 4, 'model': 2}
    assert partitioner.data_partition_spec == P(('replica', 'data'))
    assert ('batch', ('replica', 'data')) in partitioner.logical_axis_rules
    assert ('batch', 'data') not in partitioner.logical_axis_rules


# Settings that contradict each other, or decide nothing.


@pytest.mark.parametrize('make', [PjitPartitioner, default_mesh])
@pytest.mark.parametrize(
    'settings, message',
    [
        ({'ici_mesh_shape': (1, 16, 2)}, 'dcn_mesh_shape'),
        ({'num_partitions': 2, 'dcn_mesh_shape': (1, 1, 1)}, 'ici_mesh_shape'),
        (
            {'num_partitions': 4, 'model_parallel_submesh': (1, 1, 1, 2)},
            'num_partitions.*model_parallel_submesh',
        ),
        (
            {'num_partitions': 4, 'ici_mesh_shape': (1, 16, 2), 'dcn_mesh_shape': (1, 1, 1)},
            'num_partitions',
        ),
        ({'num_partitions': None}, 'num_partitions'),
    ],
)
def test_contradicting_settings(make, settings, message):
    with pytest.raises(ValueError, match=message):
        make(**{'num_partitions': None, 'devices': v3_4x4()} | settings)


def test_no_setting_at_all():
    with pytest.raises(ValueError, match='At least one of'):
        PjitPartitioner()


@pytest.mark.parametrize('submesh', [(1, 2), (1, 1, 1, 1, 2), (2,), ()])
def test_submesh_of_other_than_four(submesh):
    with pytest.raises(ValueError, match='4-tuple'):
        PjitPartitioner(model_parallel_submesh=submesh)


def test_num_partitions_beside_shapes_that_agree():
    """T5X's configurations set all three."""
    partitioner = PjitPartitioner(
        num_partitions=2, ici_mesh_shape=(1, 4, 2), dcn_mesh_shape=(1, 1, 1)
    )
    assert partitioner.mesh.shape['model'] == 2
