"""Device orders of described TPUs: few hops along every axis, and the orders of jax and T5X."""

import functools

import numpy as np
import pytest
from described_machines import (
    MACHINES,
    PARTITIONS,
    assert_each_device_once,
    described,
    ids,
    needs_libtpu,
)
from hop_counter import fewest_weighted, hops_of_axis, mean_hops, networks, weighted
from jax.experimental import mesh_utils
from jax_orders import JAX_HYBRID_ORDERS, JAX_ORDERS

from partitioning import (
    axis_rings,
    create_hybrid_mesh,
    create_mesh,
    default_mesh,
)
from partitioning.mesh import MeshConfig

pytestmark = needs_libtpu

ONE_SLICE = {machine.name: machine for machine in MACHINES if machine.slices == 1}
SHAPES = [
    (name, (machine.devices // partitions, partitions))
    for name, machine in ONE_SLICE.items()
    for partitions in PARTITIONS
    if machine.devices % partitions == 0
]
THREE_AXES = [
    *[('v5p:4x4x4', shape) for shape in ((2, 8, 4), (4, 4, 4), (8, 2, 4))],
    *[('v5e:16x16', shape) for shape in ((4, 16, 4), (8, 8, 4))],
]
NAMES = {2: ('data', 'model'), 3: ('data', 'fsdp', 'model')}


@functools.cache
def create(name, shape):
    return create_mesh(shape, NAMES[len(shape)], devices=described(name).devices)


def hops(name, grid):
    return mean_hops(grid, ONE_SLICE[name].bounds, ONE_SLICE[name].wrap)


@functools.cache
def jax_hops(name, shape):
    """Returns the mean hops of jax's order, or None if jax would have to split dimensions."""
    try:
        grid = mesh_utils.create_device_mesh(shape, list(described(name).devices))
    except NotImplementedError:
        return None
    return hops(name, grid)


def fewest(name, shape):
    machine = ONE_SLICE[name]
    return fewest_weighted(shape, machine.bounds, machine.wrap, machine.cores)[0]


# Hops.


def test_the_counter_on_rings_counted_by_hand():
    # Along a row of four and back there are 1 + 1 + 1 + 3 hops, or 4 if the row is a ring.
    row = np.array([d for d in described('v5e:4x4').devices if d.coords[1] == 0])
    row = np.array(sorted(row, key=lambda d: d.coords[0]))
    assert mean_hops(row, (4, 4, 1), (False, False, False)) == [1.5]
    assert mean_hops(row, (4, 4, 1), (True, False, False)) == [1.0]
    assert mean_hops(row[[0, 2, 1, 3]], (4, 4, 1), (False, False, False)) == [2.0]
    two_cores = create('v3:4x4', (16, 2))
    assert hops('v3:4x4', two_cores.devices)[1] == 0.0


@pytest.mark.parametrize('name, shape', SHAPES + THREE_AXES, ids=str)
def test_few_hops_along_every_axis(name, shape):
    ours, theirs = hops(name, create(name, shape).devices), jax_hops(name, shape)
    cost = weighted(ours, shape)
    if theirs is None:
        assert cost <= fewest(name, shape) + 1e-9, ours
        assert ours[-1] <= 1.5
        if len(shape) == 2:
            assert max(ours) <= 2.5
    else:
        assert all(o <= t + 1e-9 for o, t in zip(ours, theirs, strict=True)), (ours, theirs)
    assert_rings_are_as_counted(create(name, shape), ONE_SLICE[name])


def test_jax_refuses_some_of_the_shapes_and_orders_others():
    # Both branches of the test above must run.
    refused = sum(jax_hops(name, shape) is None for name, shape in SHAPES)
    assert 15 <= refused <= len(SHAPES) - 15


@pytest.mark.parametrize(
    'name, shape, expected',
    [
        ('v5p:4x4x4', (4, 4, 4), [1.0, 1.0, 1.0]),
        ('v5p:4x4x4', (8, 2, 4), [1.25, 1.0, 1.0]),
        ('v5p:4x4x4', (2, 8, 4), [2.0, 1.0, 1.0]),
        ('v5e:16x16', (8, 8, 4), [2.0, 2.0, 1.0]),
        ('v5e:16x16', (4, 16, 4), [4.0, 2.0, 1.0]),
    ],
)
def test_the_hops_of_three_axes(name, shape, expected):
    assert all(
        ours <= most + 1e-9
        for ours, most in zip(hops(name, create(name, shape).devices), expected, strict=True)
    )


# Parts of a slice.


@pytest.mark.parametrize(
    'name, part, alike, shapes',
    [
        ('v5e:4x4', lambda x, y, z: x >= 2, 'v5e:2x4', [(2, 4), (8, 1), (1, 8)]),
        ('v5p:4x4x4', lambda x, y, z: min(x, y, z) >= 2, 'v5p:2x2x2', [(2, 4), (4, 2), (1, 8)]),
        ('v6e:16x16', lambda x, y, z: x < 8 and y >= 8, 'v6e:8x8', [(8, 8), (16, 4), (32, 2)]),
    ],
)
def test_a_box_within_a_slice_is_ordered_like_a_separate_slice(name, part, alike, shapes):
    devices = [d for d in described(name).devices if part(*d.coords)]
    whole = described(alike)
    for shape in shapes:
        mesh = create_mesh(shape, ('data', 'model'), devices=devices)
        assert_each_device_once(mesh, devices)
        like = create_mesh(shape, ('data', 'model'), devices=whole.devices)
        assert mean_hops(mesh.devices, whole.bounds, whole.wrap) == mean_hops(
            like.devices, whole.bounds, whole.wrap
        )
        default = default_mesh(shape[1], devices=devices)
        assert_each_device_once(default, devices)


@pytest.mark.parametrize('shape', [(64, 4), (32, 8), (8, 32)])
def test_a_part_with_half_of_a_ring_has_no_ring_there(shape):
    """The part contains half of x, so only y and z are rings inside it."""
    devices = [d for d in described('v5p:8x8x8').devices if d.coords[0] < 4]
    mesh = create_mesh(shape, ('data', 'model'), devices=devices)
    means = mean_hops(mesh.devices, (4, 8, 8), (False, True, True))
    assert [ring.mean_hops for ring in axis_rings(mesh)] == pytest.approx(means)


def test_devices_that_do_not_fill_a_box_form_a_path_of_neighbours():
    # 15 chips of 4 x 4: nearly all steps are between neighbours, but the last one is long.
    devices = [d for d in described('v5e:4x4').devices if tuple(d.coords) != (3, 3, 0)]
    mesh = create_mesh((15,), ('data',), devices=devices)
    assert_each_device_once(mesh, devices)
    counted = hops_of_axis(mesh.devices, 0, (4, 4, 1), (False, False, False))
    assert counted[:-1].count(1) >= 13
    assert max(counted) <= 6
    ring = axis_rings(mesh)[0]
    assert (ring.mean_hops, ring.worst_hops) == (pytest.approx(sum(counted) / 15), max(counted))


# axis_rings agrees with the independent count.


def assert_rings_are_as_counted(mesh, machine):
    rings = axis_rings(mesh)
    assert [ring.axis for ring in rings] == list(mesh.axis_names)
    for axis, ring in enumerate(rings):
        counted = hops_of_axis(mesh.devices, axis, machine.bounds, machine.wrap)
        assert ring.size == mesh.devices.shape[axis]
        assert ring.network == networks(mesh, axis)
        if counted:
            assert ring.mean_hops == pytest.approx(sum(counted) / len(counted))
            assert ring.worst_hops == max(counted)
        else:
            assert (ring.mean_hops, ring.worst_hops) == (None, None)


@pytest.mark.parametrize('machine', MACHINES, ids=str)
def test_rings_of_every_default_mesh(machine):
    devices = machine.describe().devices
    for partitions in PARTITIONS:
        if machine.devices // machine.slices % partitions == 0:
            mesh = default_mesh(partitions, devices=devices)
            assert_rings_are_as_counted(mesh, machine)
            named = {ring.axis: ring.network for ring in axis_rings(mesh)}
            assert named['model'] == ('ICI' if partitions > 1 else '-')
            assert named.get('replica') == ('DCN' if machine.slices > 1 else None)


@pytest.mark.parametrize('shape', [(32,), (16, 2), (1, 32), (4, 8)], ids=str)
def test_rings_that_lead_through_both_slices(shape):
    machine = next(m for m in MACHINES if (m.name, m.slices) == ('v5e:4x4', 2))
    mesh = create_mesh(shape, ('data', 'model')[-len(shape) :], devices=machine.describe().devices)
    assert_rings_are_as_counted(mesh, machine)
    assert [r.network for r in axis_rings(mesh)].count('ICI + DCN') == 1


def test_the_argument_wrap_changes_the_counted_hops():
    mesh = create('v5p:4x4x4', (16, 4))
    for wrap in ((False, False, False), (False, False, True)):
        expected = mean_hops(mesh.devices, (4, 4, 4), wrap)
        assert [r.mean_hops for r in axis_rings(mesh, wrap=wrap)] == pytest.approx(expected)


# Known orders of jax.


@pytest.mark.parametrize('name, shape, expected', JAX_ORDERS, ids=str)
def test_known_orders_of_jax(name, shape, expected):
    mesh = create_mesh(shape, tuple('abc'[: len(shape)]), devices=described(name).devices)
    assert ids(mesh) == expected


@pytest.mark.parametrize('name, slices, ici, dcn, expected', JAX_HYBRID_ORDERS, ids=str)
def test_known_orders_of_jax_over_slices(name, slices, ici, dcn, expected):
    devices = described(name, slices).devices
    number = {d.id: i for i, d in enumerate(sorted(devices, key=lambda d: d.id))}
    mesh = create_hybrid_mesh(ici, dcn, tuple('abc'[: len(ici)]), devices=devices)
    assert np.vectorize(lambda d: number[d.id])(mesh.devices).tolist() == expected


def test_the_first_row_of_v3_4x4_equals_that_of_jax():
    assert ids(create('v3:4x4', (4, 8)))[0] == [0, 1, 2, 3, 10, 11, 8, 9]


# T5X's orders.

V3_ORDER_1 = [
    *([0, 1, 8, 9, 2, 3, 10, 11], [16, 17, 24, 25, 18, 19, 26, 27]),
    *([4, 5, 12, 13, 6, 7, 14, 15], [20, 21, 28, 29, 22, 23, 30, 31]),
]
V3_ORDER_4 = [
    *([0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19], [24, 25, 26, 27]),
    *([4, 5, 6, 7], [12, 13, 14, 15], [20, 21, 22, 23], [28, 29, 30, 31]),
]
V3_Z_MAJOR = [
    *([0, 1, 8, 9, 16, 17, 24, 25], [2, 3, 10, 11, 18, 19, 26, 27]),
    *([4, 5, 12, 13, 20, 21, 28, 29], [6, 7, 14, 15, 22, 23, 30, 31]),
]
T5X_ORDERS = [
    ('v3:4x4', 1, np.reshape(V3_ORDER_1, (32, 1)).tolist()),
    ('v3:4x4', 2, np.reshape(V3_ORDER_1, (16, 2)).tolist()),
    ('v3:4x4', 4, V3_ORDER_4),
    ('v4:2x2x2', 1, [[0], [2], [1], [3], [4], [6], [5], [7]]),
    ('v4:2x2x2', 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ('v4:2x2x2', 4, [[0, 2, 1, 3], [4, 6, 5, 7]]),
    ('v4:2x2x1', 2, [[0, 2], [1, 3]]),
    ('v4:2x2x1', 4, [[0, 2, 1, 3]]),
]
T5X_SUBMESHES = [
    ('v3:4x4', (1, 1, 1, 2), np.reshape(V3_ORDER_1, (16, 2)).tolist()),
    ('v3:4x4', (2, 1, 1, 2), V3_ORDER_4),
    ('v3:4x4', (4, 1, 1, 2), np.arange(32).reshape(4, 8).tolist()),
    ('v3:4x4', (1, 4, 1, 2), V3_Z_MAJOR),
    ('v4:2x2x2', (1, 2, 1, 1), [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ('v4:2x2x2', (2, 2, 1, 1), [[0, 2, 1, 3], [4, 6, 5, 7]]),
    # In the order of tiles that span a plane of hosts, z varies slowest.
    ('v4:4x4x4', (4, 1, 1, 1), np.arange(64).reshape(16, 4).tolist()),
    (
        *('v4:4x4x4', (1, 4, 1, 1)),
        [[x + 4 * y + 16 * z for y in range(4)] for z in range(4) for x in range(4)],
    ),
    (
        *('v4:4x4x4', (4, 1, 4, 1)),
        [[x + 4 * y + 16 * z for z in range(4) for x in range(4)] for y in range(4)],
    ),
]


@pytest.mark.parametrize('name, partitions, expected', T5X_ORDERS, ids=str)
def test_default_orders_of_t5x(name, partitions, expected):
    devices = described(name).devices
    assert ids(default_mesh(partitions, devices=devices)) == expected


@pytest.mark.parametrize('name, submesh, expected', T5X_SUBMESHES, ids=str)
def test_submesh_orders_of_t5x(name, submesh, expected):
    devices = described(name).devices
    config = MeshConfig.from_t5x(model_parallel_submesh=submesh, devices=devices)
    assert ids(config.build()) == expected


def test_each_process_of_v3_holds_a_block():
    mesh = default_mesh(4, devices=described('v3:4x4').devices)
    for process in range(4):
        rows = [i for i, row in enumerate(mesh.devices) if row[0].process_index == process]
        assert len(rows) == 2 and rows[1] == rows[0] + 1
        assert {d.process_index for d in mesh.devices[rows].flat} == {process}
    assert ids(mesh)[:2] == [[0, 1, 2, 3], [8, 9, 10, 11]]  # the rows of process 0


@pytest.mark.parametrize('submesh', [(3, 1, 1, 1), (4, 1, 1, 1), (8, 1, 1, 2), (1, 1, 2, 2)])
def test_submeshes_that_do_not_tile_v3(submesh):
    config = MeshConfig.from_t5x(
        model_parallel_submesh=submesh, devices=described('v3:4x4').devices
    )
    with pytest.raises(ValueError, match='model_parallel_submesh') as error:
        config.build()
    assert '(4, 4, 1, 2)' in str(error.value)


def test_partitions_that_do_not_divide_v3():
    with pytest.raises(ValueError, match=r'num_partitions=3 does not divide the 32 devices'):
        default_mesh(3, devices=described('v3:4x4').devices)


@pytest.mark.parametrize(
    'name, shape, expected',
    [
        ('v5e:2x4', (8, 1), [1.0, 0.0]),
        ('v5e:2x4', (4, 2), [1.5, 1.0]),
        ('v6e:2x4', (1, 8), [0.0, 1.0]),
        ('tpu7x:2x2x1', (2, 4), [1.0, 0.5]),
    ],
)
def test_small_machines_have_no_more_hops_than_with_the_fixed_order_of_jax(name, shape, expected):
    """jax uses one fixed order for these devices, which needs more hops for some shapes."""
    topology = described(name)
    mesh = create_mesh(shape, ('data', 'model'), devices=topology)
    assert_each_device_once(mesh, topology.devices)
    means = [ring.mean_hops for ring in axis_rings(mesh)]
    theirs = mesh_utils.create_device_mesh(shape, list(topology.devices))
    assert means == mean_hops(mesh.devices, topology.bounds, topology.wrap)
    jax_means = mean_hops(theirs, topology.bounds, topology.wrap)
    assert all(a <= b for a, b in zip(means, jax_means, strict=True))
    assert means == expected
