"""Hops of rings against hops counted one by one, networks, and the places of devices."""

import numpy as np
import pytest
from hop_counter import hops_of_axis
from jax.sharding import Mesh
from mock_devices import cpus, gpus, tpu_slices, tpus, v3_4x4

from partitioning import axis_rings, create_hybrid_mesh, create_mesh, default_mesh, mesh_table
from partitioning.mesh import find_placement

pytestmark = pytest.mark.core


def counted(mesh, axis, bounds, wrap):
    """(mean, worst) hops of the steps along an axis that stay within a slice."""
    hops = hops_of_axis(mesh.devices, axis, bounds, wrap)
    return (sum(hops) / len(hops), max(hops)) if hops else (None, None)


NONE, PLANE, CUBE = (False,) * 3, (True, True, False), (True,) * 3


@pytest.mark.parametrize(
    'devices, bounds, wrap, sizes',
    [
        (tpus((4, 4, 1), 'TPU v5 lite'), (4, 4, 1), NONE, (4, 4)),
        (tpus((4, 4, 1), 'TPU v5 lite'), (4, 4, 1), NONE, (2, 4, 2)),
        (tpus((16, 16, 1), 'TPU v5 lite'), (16, 16, 1), PLANE, (64, 4)),
        (tpus((16, 8, 1), 'TPU v6 lite'), (16, 8, 1), (True, False, False), (8, 16)),
        (tpus((4, 4, 4), 'TPU v4'), (4, 4, 4), CUBE, (8, 8)),
        (tpus((2, 2, 4), 'TPU v5'), (2, 2, 4), NONE, (8, 2)),
        (tpus((2, 2, 2), 'TPU7x', 2), (2, 2, 2), NONE, (4, 4)),
        (v3_4x4(), (4, 4, 1), NONE, (4, 8)),
        (tpu_slices(2, (4, 4, 4), 'TPU v5'), (4, 4, 4), CUBE, (2, 16, 4)),
        (tpu_slices(4, (2, 4, 1), 'TPU v6 lite'), (2, 4, 1), NONE, (8, 4)),
    ],
)
def test_hops(devices, bounds, wrap, sizes):
    names = [f'axis{i}' for i in range(len(sizes))]
    in_links = create_mesh(sizes, names, devices=devices)
    in_numbers = Mesh(np.reshape(np.array(devices, object), sizes), names)
    for mesh in (in_links, in_numbers):
        rings = axis_rings(mesh)
        assert [(r.axis, r.size) for r in rings] == list(zip(names, sizes, strict=True))
        for axis, ring in enumerate(rings):
            assert (ring.mean_hops, ring.worst_hops) == counted(mesh, axis, bounds, wrap)


def test_hops_by_hand():
    """A row of four takes three steps and three hops back; a ring of sixteen closes directly."""
    row = axis_rings(create_mesh((4, 4), ('a', 'b'), devices=tpus((4, 4, 1), 'TPU v5 lite')))
    assert [(r.mean_hops, r.worst_hops) for r in row] == [(1.5, 3), (1.5, 3)]
    pod = axis_rings(create_mesh((16, 16), ('a', 'b'), devices=tpus((16, 16, 1), 'TPU v6 lite')))
    assert [(r.mean_hops, r.worst_hops) for r in pod] == [(1.0, 1), (1.0, 1)]
    cores = axis_rings(default_mesh(2, devices=v3_4x4()))[1]
    assert (cores.mean_hops, cores.worst_hops) == (0.0, 0)


def test_a_reshape_is_five_times_as_far():
    """512 chips of v5p in the order of their numbers are 5.1 hops apart, and 1.1 in ours."""
    devices = sorted(tpus((8, 8, 8), 'TPU v5'), key=lambda d: (d.process_index, d.id))
    numbered = Mesh(np.reshape(np.array(devices, object), (64, 8)), ('data', 'model'))
    linked = create_mesh((64, 8), ('data', 'model'), devices=devices)
    assert round(axis_rings(numbered)[0].mean_hops, 1) == 5.1
    assert round(axis_rings(linked)[0].mean_hops, 1) == 1.1


# Networks.


def networks(mesh, **options):
    return {ring.axis: ring.network for ring in axis_rings(mesh, **options)}


def test_networks_of_tpus():
    slices = tpu_slices(2, (4, 4, 1), 'TPU v5 lite')
    replicas = default_mesh(4, devices=slices)
    assert networks(replicas) == {'replica': 'DCN', 'data': 'ICI', 'model': 'ICI'}
    assert axis_rings(replicas)[0].mean_hops is None
    assert axis_rings(replicas)[0].worst_hops is None
    mixed = create_hybrid_mesh((2, 8), (2, 1), ('data', 'model'), devices=slices)
    assert networks(mixed) == {'data': 'ICI + DCN', 'model': 'ICI'}
    # Only steps within a slice are hops, not those from the end of a row to another slice.
    columns = create_hybrid_mesh((4, 4), (2, 1), ('data', 'model'), devices=slices)
    assert (axis_rings(columns)[0].mean_hops, axis_rings(columns)[0].worst_hops) == (1.0, 1)
    one = default_mesh(1, devices=tpus((4, 4, 1), 'TPU v5 lite'))
    assert networks(one) == {'data': 'ICI', 'model': '-'}


@pytest.mark.parametrize(
    'devices, num_partitions, granule_size, expected',
    [
        (gpus(8, 2), 8, None, ('network', 'NVLink')),
        (gpus(8, 2), 4, None, ('NVLink + network', 'NVLink')),
        (gpus(8, 2), 16, None, ('-', 'NVLink + network')),
        (gpus(8, 1), 2, None, ('NVLink', 'NVLink')),
        (gpus(4, 4), 4, None, ('network', 'NVLink')),
        (gpus(4, 4), 4, 16, ('NVLink', 'NVLink')),
        (gpus(4, 4), 4, 8, ('NVLink + network', 'NVLink')),
        (gpus(4, 2, domains=2), 4, None, ('NVLink + network', 'NVLink')),
        (gpus(4, 2, domains=2), 8, None, ('network', 'NVLink')),
        (cpus(8, 1), 2, None, ('memory', 'memory')),
        (cpus(4, 2), 4, None, ('network', 'memory')),
        (cpus(4, 2), 8, None, ('-', 'memory + network')),
    ],
)
def test_networks_of_hosts(devices, num_partitions, granule_size, expected):
    options = {'granule_size': granule_size}
    mesh = default_mesh(num_partitions, devices=devices, **options)
    assert networks(mesh, **options) == dict(zip(('data', 'model'), expected, strict=True))
    for ring in axis_rings(mesh, **options):
        assert ring.mean_hops is None and ring.worst_hops is None


# Tables.


def test_table_of_two_slices():
    mesh = default_mesh(4, devices=tpu_slices(2, (2, 2, 2), 'TPU v4'))
    assert mesh_table(mesh).splitlines() == [
        '16 TPU v4 devices, 4 processes of 4',
        'axis     size  network  mean hops  worst hops',
        'replica     2  DCN              -           -',
        'data        2  ICI           1.00           1',
        'model       4  ICI           1.50           2',
    ]


def test_table_of_unequal_hosts():
    """There are no hops without a torus, and the first line lists the sizes of the processes."""
    mesh = create_mesh((13, 1), ('data', 'x'), devices=gpus(8, 2)[3:])
    assert mesh_table(mesh).splitlines() == [
        '13 NVIDIA H100 devices, 2 processes of 5 or 8',
        'axis  size  network           mean hops  worst hops',
        'data    13  NVLink + network          -           -',
        'x        1  -                         -           -',
    ]


def test_table_takes_wrap_and_granules():
    rows = create_mesh((4, 4), ('a', 'b'), devices=tpus((4, 4, 1), 'TPU v5 lite'))
    assert '1.50           3' in mesh_table(rows)
    assert '1.00           1' in mesh_table(rows, wrap=PLANE)
    hosts = default_mesh(4, devices=gpus(4, 4))
    assert 'network' in mesh_table(hosts).split('data')[1]
    assert 'network' not in mesh_table(hosts, granule_size=16).split('data')[1]


@pytest.mark.parametrize('wrap', [(True,), 'yes', (True,) * 4])
def test_wrap_needs_three_entries(wrap):
    mesh = create_mesh((8,), ('x',), devices=tpus((2, 2, 2), 'TPU v5'))
    with pytest.raises(ValueError, match='wrap='):
        axis_rings(mesh, wrap=wrap)


def test_wrap_needs_tpus():
    with pytest.raises(ValueError, match=r'wrap=.* TPUs'):
        axis_rings(create_mesh((8,), ('x',)), wrap=(True, True, True))


# Where the devices of a mesh are in their machine.


def mesh_of(devices, sizes):
    held = np.empty(len(devices), dtype=object)
    held[:] = devices
    return Mesh(held.reshape(sizes), tuple(f'axis{i}' for i in range(len(sizes))))


def test_a_cube_closes_its_rings_and_its_places_are_in_the_order_of_the_mesh():
    devices = tpus((4, 4, 4), 'TPU v5')
    placement = find_placement(mesh_of(devices[::-1], (8, 8)))
    assert placement.bounds == (4, 4, 4) and placement.wrap == (True, True, True)
    assert placement.places[0] == (0, 3, 3, 3, 0) and placement.places[-1] == (0, 0, 0, 0, 0)
    assert placement.places[1] == (0, 2, 3, 3, 0)  # x counts fastest


def test_gpus_are_numbered_within_their_process():
    placement = find_placement(mesh_of(gpus(local=4, processes=2), (8,)))
    assert placement.bounds == () and placement.wrap == ()
    assert placement.places == tuple((0, process, gpu) for process in (0, 1) for gpu in range(4))
