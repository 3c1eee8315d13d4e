"""T5X's device orders on one and on several slices of TPU v2, v3 and v4."""

import dataclasses

import numpy as np
import pytest
from mock_devices import gpus, ids, tpu_slices, tpus, v3_4x4

from partitioning import default_mesh, get_mesh

pytestmark = pytest.mark.core

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
V4_ORDERS = [
    ((2, 2, 2), 1, [[0], [2], [1], [3], [4], [6], [5], [7]]),
    ((2, 2, 2), 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ((2, 2, 2), 4, [[0, 2, 1, 3], [4, 6, 5, 7]]),
    ((2, 2, 1), 2, [[0, 2], [1, 3]]),
    ((2, 2, 1), 4, [[0, 2, 1, 3]]),
]


def in_rows(order, width):
    return np.reshape(order, (-1, width)).tolist()


V3_ORDERS = [
    (1, in_rows(V3_ORDER_1, 1)),
    (2, in_rows(V3_ORDER_1, 2)),
    (4, V3_ORDER_4),
]
V3_SUBMESHES = [
    ((1, 1, 1, 2), in_rows(V3_ORDER_1, 2)),
    ((2, 1, 1, 2), V3_ORDER_4),
    ((4, 1, 1, 2), in_rows(range(32), 8)),
    ((1, 4, 1, 2), V3_Z_MAJOR_Y),
]


@pytest.mark.parametrize('num_partitions, expected', V3_ORDERS)
def test_v3_default_orders(num_partitions, expected):
    mesh = default_mesh(num_partitions, devices=v3_4x4())
    assert mesh.axis_names == ('data', 'model')
    assert ids(mesh) == expected


@pytest.mark.parametrize('submesh, expected', V3_SUBMESHES)
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
    """Chips are in order of whole columns, with y inside x, so no host holds a block."""
    mesh = get_mesh((1, 1, 1, 1), v3_4x4(), tile_by_host_if_needed=False)
    expected = [c + 2 * (x + 4 * y) for x in range(4) for y in range(4) for c in range(2)]
    assert ids(mesh) == in_rows(expected, 1)


@pytest.mark.parametrize('bounds, num_partitions, expected', V4_ORDERS)
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
@pytest.mark.parametrize('slices', [1, 2])
def test_default_tiles(kind, bounds, cores, num_partitions, tile, slices):
    """A model replica covers exactly one aligned box of the size in T5X's table."""
    devices = tpu_slices(slices, bounds, kind, cores) if slices > 1 else tpus(bounds, kind, cores)
    mesh = default_mesh(num_partitions, devices=devices)
    for row in mesh.devices.reshape(-1, num_partitions):
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


@pytest.mark.parametrize(
    'submesh', [(3, 1, 1, 1), (4, 1, 1, 1), (0, 1, 1, 1), (1, 2), (8, 1, 1, 2)]
)
def test_submeshes_that_do_not_fit(submesh):
    with pytest.raises(ValueError, match='model_parallel_submesh'):
        get_mesh(submesh, v3_4x4())


def test_devices_that_do_not_fill_their_box():
    with pytest.raises(ValueError, match=r'30 devices .*\(4, 4, 1, 2\) \(32 devices\)'):
        get_mesh((2, 1, 1, 2), v3_4x4()[2:])


# Several slices, each in T5X's order.


def after_each_other(order, slices):
    """The order of each slice, whose ids follow the ids of the slice before it."""
    one = np.array(order)
    return [(one + s * one.size).tolist() for s in range(slices)]


@pytest.mark.parametrize('slices', [2, 4])
@pytest.mark.parametrize('num_partitions, expected', V3_ORDERS)
def test_v3_orders_in_each_slice(slices, num_partitions, expected):
    devices = tpu_slices(slices, (4, 4, 1), 'TPU v3', cores=2)
    mesh = default_mesh(num_partitions, devices=devices)
    assert mesh.axis_names == ('replica', 'data', 'model')
    assert ids(mesh) == after_each_other(expected, slices)


@pytest.mark.parametrize('slices', [2, 4])
@pytest.mark.parametrize('bounds, num_partitions, expected', V4_ORDERS)
def test_v4_orders_in_each_slice(slices, bounds, num_partitions, expected):
    devices = tpu_slices(slices, bounds, 'TPU v4')
    mesh = default_mesh(num_partitions, devices=devices[::-1])
    assert ids(mesh) == after_each_other(expected, slices)


@pytest.mark.parametrize('submesh, expected', V3_SUBMESHES)
def test_submesh_in_each_slice(submesh, expected):
    devices = tpu_slices(2, (4, 4, 1), 'TPU v3', cores=2)
    mesh = default_mesh(None, submesh, devices=devices)
    assert mesh.axis_names == ('replica', 'data', 'model')
    assert ids(mesh) == after_each_other(expected, 2)


@pytest.mark.parametrize('submesh', [(3, 1, 1, 2), (8, 1, 1, 2), (4, 1, 1, 1)])
def test_submeshes_that_do_not_fit_a_slice(submesh):
    devices = tpu_slices(2, (4, 4, 1), 'TPU v3', cores=2)
    with pytest.raises(ValueError, match=r'model_parallel_submesh .*\(4, 4, 1, 2\)') as error:
        default_mesh(None, submesh, devices=devices)
    assert str(submesh) in str(error.value)


def test_the_numbers_of_processes_do_not_matter():
    """Each process holds one block of the mesh, also if process 0 is in the far corner."""
    devices = [dataclasses.replace(d, process_index=3 - d.process_index) for d in v3_4x4()]
    assert ids(default_mesh(1, devices=devices)) == ids(default_mesh(1, devices=v3_4x4()))


def test_devices_that_leave_gaps_in_a_box_with_room_for_more():
    devices = [
        d
        for d in tpus((2, 2, 4), 'TPU v4')
        if d.coords in {(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1)}
    ]
    assert sorted(np.ravel(ids(default_mesh(1, devices=devices))).tolist()) == [0, 1, 2, 5]
    with pytest.raises(ValueError, match=r'4 devices do not fill a machine of \(2, 2, 2, 1\)'):
        default_mesh(None, (1, 1, 1, 1), devices=devices)


def test_get_mesh_takes_one_slice():
    with pytest.raises(ValueError, match='one slice, not of 2 slices'):
        get_mesh((2, 2, 1, 1), tpu_slices(2, (2, 2, 2), 'TPU v4'))


@pytest.mark.parametrize('tile', [None, '12', 4, (1, 2.0, 1, 1)])
def test_malformed_tiles(tile):
    with pytest.raises(ValueError, match='model_parallel_submesh'):
        get_mesh(tile, tpus((2, 2, 2), 'TPU v4'))


@pytest.mark.parametrize('tile, first', [((1, 4), [0, 1, 2, 3]), ((2, 2), [0, 1, 8, 9])])
def test_hosts_elsewhere(tile, first):
    """The number and size of hosts come from the given devices, not from this process."""
    mesh = get_mesh(tile, gpus(8, 2), tile_by_host_if_needed=False)
    assert ids(mesh)[0] == first
    assert mesh.devices.shape == (4, 4)
