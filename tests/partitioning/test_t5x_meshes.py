"""T5X's tiles, and meshes of parts of a slice. The orders of T5X are tested in tests/seeds."""

import sys

import jax
import numpy as np
import pytest
from mock_devices import gpus, ids, sorted_ids, tpu_slices, tpus, v3_4x4

from partitioning import PjitPartitioner, create_mesh, default_mesh, get_mesh

pytestmark = pytest.mark.core


def test_order_without_host_tiling():
    """Chips are in order of whole columns, with y inside x, so no host holds a block."""
    mesh = get_mesh((1, 1, 1, 1), v3_4x4(), tile_by_host_if_needed=False)
    expected = [c + 2 * (x + 4 * y) for x in range(4) for y in range(4) for c in range(2)]
    assert np.ravel(ids(mesh)).tolist() == expected


def test_devices_that_do_not_fill_their_box():
    with pytest.raises(ValueError, match=r'30 devices .*\(4, 4, 1, 2\) \(32 devices\)'):
        get_mesh((2, 1, 1, 2), v3_4x4()[2:])


# Parts of machines, and several slices.


@pytest.mark.parametrize('submesh', [(3, 1, 1, 2), (8, 1, 1, 2), (4, 1, 1, 1)])
def test_submeshes_that_do_not_fit_a_slice(submesh):
    devices = tpu_slices(2, (4, 4, 1), 'TPU v3', cores=2)
    with pytest.raises(ValueError, match=r'model_parallel_submesh .*\(4, 4, 1, 2\)') as error:
        default_mesh(None, submesh, devices=devices)
    assert str(submesh) in str(error.value)


@pytest.mark.parametrize('submesh', [(1, 1, 1, 2), (2, 1, 1, 2), (4, 1, 1, 2), (1, 4, 1, 2)])
def test_a_submesh_has_the_order_of_one_slice_in_each(submesh):
    """T5X puts all slices on the same coordinates, and loses all but one."""
    mesh = default_mesh(None, submesh, devices=tpu_slices(2, (4, 4, 1), 'TPU v3', cores=2))
    one = np.array(ids(default_mesh(None, submesh, devices=v3_4x4())))
    assert mesh.axis_names == ('replica', 'data', 'model')
    assert ids(mesh) == [one.tolist(), (one + 32).tolist()]


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


def places_in_order(mesh):
    """The coordinates of each device of a mesh, relative to the lowest ones."""
    places = np.array([d.coords for d in mesh.devices.flat])
    return (places - places.min(axis=0)).tolist()


@pytest.mark.parametrize('num_partitions', [1, 4])
@pytest.mark.parametrize(
    'kind, bounds, cores, low, high',
    [
        ('TPU v3', (8, 4, 1), 2, (4, 0, 0), (8, 4, 1)),
        ('TPU v4', (4, 4, 4), 1, (2, 2, 2), (4, 4, 4)),
        ('TPU v5 lite', (4, 4, 1), 1, (2, 0, 0), (4, 4, 1)),
        ('TPU v6 lite', (8, 8, 1), 1, (4, 2, 0), (8, 4, 1)),
        ('TPU v5 lite', (8, 8, 1), 1, (4, 2, 0), (8, 6, 1)),
        ('TPU v5', (4, 4, 4), 1, (0, 0, 2), (2, 2, 4)),
        ('TPU v5', (4, 4, 4), 1, (1, 0, 1), (3, 4, 2)),
        ('TPU7x', (4, 4, 4), 2, (0, 2, 0), (4, 4, 2)),
    ],
)
def test_box_within_a_slice(kind, bounds, cores, low, high, num_partitions):
    """The box has the order of a separate slice of its size, with each device once."""
    box = [
        d
        for d in tpus(bounds, kind, cores)
        if all(a <= c < b for a, c, b in zip(low, d.coords, high, strict=True))
    ]
    shape = (len(box) // num_partitions, num_partitions)
    mesh = default_mesh(num_partitions, devices=box)
    assert mesh.devices.shape == shape
    assert sorted_ids(mesh) == sorted(d.id for d in box)
    alone = tpus(tuple(b - a for a, b in zip(low, high, strict=True)), kind, cores)
    expected = default_mesh(num_partitions, devices=alone)
    assert places_in_order(mesh) == places_in_order(expected)


@pytest.mark.parametrize(
    'kind, bounds, cores', [('TPU v3', (4, 4, 1), 2), ('TPU v5 lite', (4, 4, 1), 1)]
)
@pytest.mark.parametrize('missing', [(3, 3, 0), (0, 0, 0), (1, 2, 0)])
def test_slice_with_a_chip_missing(kind, bounds, cores, missing):
    devices = [d for d in tpus(bounds, kind, cores) if d.coords != missing]
    for num_partitions in (1, 3, 5, 15):
        mesh = default_mesh(num_partitions, devices=devices)
        assert mesh.shape['model'] == num_partitions
        assert sorted_ids(mesh) == [d.id for d in devices]
    path = np.array([d.coords for d in default_mesh(1, devices=devices).devices.flat])
    steps = np.abs(np.diff(path, axis=0)).sum(axis=1)
    assert steps.max() <= 2 and (steps == 2).sum() <= 1  # one step can cross the gap


@pytest.mark.parametrize('bounds, missing', [((4, 4, 1), 3), ((4, 4, 1), 0), ((2, 4, 1), 1)])
def test_column_missing_from_a_slice_of_two_cores(bounds, missing):
    """An odd number of columns has no trays of 2 x 2 chips, for which jax's ring is made."""
    devices = [d for d in tpus(bounds, 'TPU v3', 2) if d.coords[0] != missing]
    mesh = create_mesh((-1, 8), ('data', 'model'), devices=devices)
    assert sorted_ids(mesh) == [d.id for d in devices]
    for ring in mesh.devices:
        path = np.array([d.coords for d in ring])
        assert np.abs(np.diff(path, axis=0)).sum(axis=1).max() == 1


@pytest.mark.parametrize('num_partitions', [1, 3, 16])
def test_programs_of_t5x_get_its_mesh_of_cpus(monkeypatch, caplog, num_partitions):
    """T5X's own is (processes, devices of each). A number that the devices allow is honoured."""
    monkeypatch.setitem(sys.modules, 't5x.partitioning', sys.modules['partitioning'])
    mesh = PjitPartitioner(num_partitions).mesh
    assert dict(mesh.shape) == {'data': 1, 'model': 8}
    assert mesh.devices.ravel().tolist() == jax.devices()
    assert f'num_partitions={num_partitions} has no effect on these CPUs' in caplog.text
    assert dict(PjitPartitioner(2).mesh.shape) == {'data': 4, 'model': 2}
    assert dict(default_mesh(4, devices=v3_4x4()).shape) == {'data': 8, 'model': 4}
