"""T5X's meshes of TPUs: the tables of its code for its own test machines, and newer kinds."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils
from mock_devices import MockDevice, ids, tpus, v3_4x4

from partitioning import (
    bounds_from_last_device,
    default_mesh,
    get_coords,
    get_mesh,
)

pytestmark = pytest.mark.core


def in_rows(order, width):
    return np.reshape(order, (-1, width)).tolist()


def test_E1_bounds_and_coordinates():
    chip = MockDevice(id=0, process_index=0, coords=(3, 3, 3), core_on_chip=1)
    assert bounds_from_last_device(chip) == (4, 4, 4, 2)
    assert get_coords(dataclasses.replace(chip, coords=(1, 0, 1))) == (1, 0, 1, 1)


def test_E1_bounds_and_coordinates_without_a_torus(monkeypatch):
    monkeypatch.setattr(jax, 'process_count', lambda: 1)
    monkeypatch.setattr(jax, 'local_device_count', lambda: 4)
    device = MockDevice(id=9, process_index=1, device_kind='cpu', platform='cpu')
    assert bounds_from_last_device(device) == (1, 4)
    monkeypatch.setattr(jax, 'local_device_count', lambda: 8)
    assert get_coords(device) == (1, 1)


V3_1 = [
    *(0, 1, 8, 9, 2, 3, 10, 11),
    *(16, 17, 24, 25, 18, 19, 26, 27),
    *(4, 5, 12, 13, 6, 7, 14, 15),
    *(20, 21, 28, 29, 22, 23, 30, 31),
]

V3_4 = [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24, 25, 26, 27]]
V3_4 += [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23], [28, 29, 30, 31]]


def test_E2_each_process_of_v3_holds_a_block_of_the_mesh():
    mesh = default_mesh(4, devices=v3_4x4())
    assert mesh.axis_names == ('data', 'model')
    assert (mesh.devices.shape, mesh.size) == ((8, 4), 32)
    for process in range(4):
        mine = [row for row in mesh.devices if row[0].process_index == process]
        assert np.shape(mine) == (2, 4)
        assert {d.process_index for row in mine for d in row} == {process}
    assert [[d.id for d in row] for row in mesh.devices if row[0].process_index == 0] == [
        [0, 1, 2, 3],
        [8, 9, 10, 11],
    ]


@pytest.mark.parametrize(
    'num_partitions, expected', [(1, in_rows(V3_1, 1)), (2, in_rows(V3_1, 2)), (4, V3_4)]
)
def test_E3_default_orders_of_v3(num_partitions, expected):
    assert ids(default_mesh(num_partitions, devices=v3_4x4())) == expected


@pytest.mark.parametrize(
    'submesh, expected',
    [
        ((1, 1, 1, 2), in_rows(V3_1, 2)),
        ((2, 1, 1, 2), V3_4),
        ((4, 1, 1, 2), in_rows(range(32), 8)),
        (
            (1, 4, 1, 2),
            [
                [0, 1, 8, 9, 16, 17, 24, 25],
                [2, 3, 10, 11, 18, 19, 26, 27],
                [4, 5, 12, 13, 20, 21, 28, 29],
                [6, 7, 14, 15, 22, 23, 30, 31],
            ],
        ),
    ],
)
def test_E3_submeshes_of_v3(submesh, expected):
    assert ids(get_mesh(submesh, v3_4x4())) == expected
    assert ids(default_mesh(None, submesh, devices=v3_4x4())) == expected


def test_E3_sizes_that_do_not_fit_v3_are_errors():
    message = 'num_partitions=3 does not divide the 32 devices .* use one of 1, 2, 4, 8, 16, 32'
    with pytest.raises(ValueError, match=message):
        default_mesh(3, devices=v3_4x4())
    message = r'submesh \(3, 1, 1, 1\) .* machine \(4, 4, 1, 2\): each .* must divide'
    with pytest.raises(ValueError, match=message):
        get_mesh((3, 1, 1, 1), v3_4x4())
    message = r'\(4, 1, 1, 1\) .* \(4, 4, 1, 2\), .* all 2 cores of each chip: use \(4, 1, 1, 2\)'
    with pytest.raises(ValueError, match=message):
        get_mesh((4, 1, 1, 1), v3_4x4())


def test_E3_one_model_replica_may_fill_v3():
    """T5X's table has no entry for the whole machine."""
    mesh = default_mesh(32, devices=v3_4x4())
    assert dict(mesh.shape) == {'data': 1, 'model': 32}
    assert sorted(ids(mesh)[0]) == list(range(32))


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
def test_E5_orders_of_v4(bounds, num_partitions, expected):
    assert ids(default_mesh(num_partitions, devices=tpus(bounds, 'TPU v4'))) == expected


@pytest.mark.parametrize(
    'submesh, expected',
    [
        # In the order of tiles that span a plane of hosts, z varies slowest.
        ((4, 1, 1, 1), np.arange(64).reshape(16, 4).tolist()),
        (
            (1, 4, 1, 1),
            [[x + 4 * y + 16 * z for y in range(4)] for z in range(4) for x in range(4)],
        ),
        (
            (4, 1, 4, 1),
            [[x + 4 * y + 16 * z for z in range(4) for x in range(4)] for y in range(4)],
        ),
    ],
)
def test_E5_submeshes_of_v4(submesh, expected):
    assert ids(default_mesh(None, submesh, devices=tpus((4, 4, 4), 'TPU v4'))) == expected


# (kind, chips, devices per chip, num_partitions, tile)
TILES = [
    *(
        (kind, (4, 4, 1), 2, num_partitions, tile)
        for kind in ('TPU v2', 'TPU v3')
        for num_partitions, tile in (
            *((1, (1, 1, 1, 1)), (2, (1, 1, 1, 2)), (4, (2, 1, 1, 2))),
            *((8, (2, 2, 1, 2)), (16, (4, 2, 1, 2))),
        )
    ),
    ('TPU v4', (4, 4, 4), 1, 1, (1, 1, 1, 1)),
    ('TPU v4', (4, 4, 4), 1, 2, (1, 2, 1, 1)),
    ('TPU v4', (4, 4, 4), 1, 4, (4, 1, 1, 1)),
    ('TPU v4', (2, 2, 4), 1, 4, (2, 2, 1, 1)),
    ('TPU v4', (4, 4, 4), 1, 8, (4, 2, 1, 1)),
    ('TPU v4', (2, 2, 8), 1, 8, (1, 1, 8, 1)),
    ('TPU v4', (4, 4, 8), 1, 8, (1, 1, 8, 1)),
    ('TPU v4', (2, 2, 16), 1, 16, (1, 1, 16, 1)),
    ('TPU v4', (8, 4, 16), 1, 16, (1, 1, 16, 1)),
    ('TPU v4', (8, 4, 4), 1, 16, (8, 2, 1, 1)),
    ('TPU v4', (4, 4, 4), 1, 16, (4, 4, 1, 1)),
    ('TPU v4', (2, 2, 4), 1, 16, (2, 2, 4, 1)),
]


@pytest.mark.parametrize('kind, bounds, cores, num_partitions, tile', TILES)
def test_E5_a_model_replica_is_one_tile_of_the_table(kind, bounds, cores, num_partitions, tile):
    mesh = default_mesh(num_partitions, devices=tpus(bounds, kind, cores))
    for row in mesh.devices:
        places = np.array([(*d.coords, d.core_on_chip) for d in row])
        low, high = places.min(axis=0), places.max(axis=0)
        assert tuple((high - low + 1).tolist()) == tile
        assert not (low % tile).any()
        assert len(np.unique(places, axis=0)) == num_partitions
    assert sorted(np.ravel(ids(mesh)).tolist()) == list(range(mesh.size))


def order_of_jax(devices, shape):
    """The ids by `create_device_mesh`, or None if it has no order."""
    try:
        grid = mesh_utils.create_device_mesh(shape, devices)
    except NotImplementedError:
        return None
    return [[d.id for d in row] for row in grid]


@pytest.mark.parametrize(
    'kind, bounds, num_partitions, known',
    [
        *(('TPU v5 lite', (4, 4, 1), n, n in (1, 4, 16)) for n in (1, 2, 4, 8, 16)),
        *(('TPU v6 lite', (4, 4, 1), n, n in (1, 4, 16)) for n in (1, 2, 4, 8, 16)),
        *(('TPU v5', (2, 2, 4), n, True) for n in (1, 2, 4, 8, 16)),
        *((kind, (2, 4, 1), 4, True) for kind in ('TPU v5 lite', 'TPU v6 lite')),
    ],
)
def test_E5_newer_kinds_use_the_order_of_jax(kind, bounds, num_partitions, known):
    """T5X has no default mesh for these. If jax has no order either, there still is a mesh."""
    devices = tpus(bounds, kind)
    shape = (len(devices) // num_partitions, num_partitions)
    mesh, theirs = default_mesh(num_partitions, devices=devices[::-1]), order_of_jax(devices, shape)
    assert dict(mesh.shape) == {'data': shape[0], 'model': shape[1]}
    assert sorted(np.ravel(ids(mesh)).tolist()) == list(range(len(devices)))
    assert (theirs is not None) == known
    assert theirs in (None, ids(mesh))


def hops(order, bounds):
    """For each axis of a mesh, the sum of the distances between neighbours along the links."""
    places = np.stack(np.unravel_index(order, bounds[::-1]), axis=-1)
    return [int(abs(places - np.roll(places, 1, axis)).sum()) for axis in (0, 1)]


@pytest.mark.parametrize('kind', ['TPU v5 lite', 'TPU v6 lite'])
@pytest.mark.parametrize(
    'bounds, num_partitions', [((2, 4, 1), 1), ((2, 4, 1), 2), ((2, 4, 1), 8), ((2, 2, 1), 2)]
)
def test_E5_one_tray_of_a_newer_kind_has_shorter_rings(kind, bounds, num_partitions):
    """jax numbers the rings of 2 x 4 like the rings of 4 x 2, and 2 x 2 along one axis."""
    devices = tpus(bounds, kind)
    ours = ids(default_mesh(num_partitions, devices=devices))
    theirs = order_of_jax(devices, np.shape(ours))
    assert np.shape(ours) == (len(devices) // num_partitions, num_partitions)
    assert sorted(np.ravel(ours).tolist()) == list(range(len(devices)))
    saved = np.subtract(hops(theirs, bounds), hops(ours, bounds))
    assert (saved >= 0).all() and saved.any()


def test_E5_eight_partitions_of_a_small_v4():
    """T5X raises an AssertionError: its table has the tile (4, 2, 1, 1), which does not fit."""
    mesh = default_mesh(8, devices=tpus((2, 2, 2), 'TPU v4'))
    assert ids(mesh) == [[0, 4, 2, 6, 1, 5, 3, 7]], 'the order of jax'
