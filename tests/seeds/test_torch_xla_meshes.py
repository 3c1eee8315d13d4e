"""torch_xla's meshes of device ids, over slices and on a torus, and described machines."""

import collections
import importlib.util
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
from mock_devices import cpus, ids, tpu_slices, tpus, two_slices_of_v4, v3_4x4
from xla_meshes import IN_ORDER, mesh_of, refuses, xy_mesh

from partitioning import create_hybrid_mesh, create_mesh, describe_topology
from partitioning.compat.torch_xla import (
    HybridMesh,
    get_1d_mesh,
    get_axis_name_idx,
    get_global_mesh,
    get_logical_mesh,
    hlo_sharding,
    mark_sharding,
    mesh_from_device_ids,
    resolve_partition_spec,
    set_global_mesh,
    tile_assignment,
)

pytestmark = pytest.mark.core

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason='libtpu, which describes TPUs, is not installed',
)


def test_import_loads_nothing_heavy():
    code = (
        'import sys, partitioning; assert "partitioning.compat.torch_xla" not in sys.modules;'
        'import partitioning.compat.torch_xla;'
        'assert not {"flax", "optax", "gin"} & set(sys.modules)'
    )
    subprocess.run([sys.executable, '-c', code], check=True)


@pytest.mark.parametrize(
    'ids, shape, names, message',
    [
        (IN_ORDER, (4, 2), ('x', 'y', 'z'), 'mesh_shape.* 2 .* 3 '),
        (IN_ORDER, (4, 2), ('x', 'x'), "'x'"),
        (IN_ORDER, (4, 3), ('x', 'y'), r'\(4, 3\) .* 12.* device ids is 8'),
        ([*IN_ORDER[:7], 0], (4, 2), ('x', 'y'), 'device id 0 appears 2 times among 8'),
        ([*IN_ORDER[:7], 8], (4, 2), ('x', 'y'), r'device id 8 is not among the ids \[0, 1, 2, 3'),
        ([*IN_ORDER[:7], -1], (4, 2), ('x', 'y'), 'device id -1 is not among'),
        (IN_ORDER[:4], (2, 2), ('x', 'y'), r'4 device ids \[0, 1, 2, 3\] for 8 devices.*devices='),
        (np.arange(8.0), (4, 2), None, 'device id 0.0 must be an integer'),
        ([True, *range(1, 8)], (4, 2), None, 'device id True must be an integer'),
        (set(range(8)), (4, 2), None, 'has no order'),
        (8, (4, 2), None, 'device_ids=8 must be a sequence'),
        (IN_ORDER, 8, None, 'mesh_shape=8 must be a sequence'),
        (IN_ORDER, (), None, r'mesh_shape=\(\)'),
        (IN_ORDER, (8, 0), None, r'mesh_shape \(8, 0\).* 0 '),
        (IN_ORDER, (-1, -1), None, r'mesh_shape \(-1, -1\).* 2 .*-1'),
    ],
)
def test_D1_invalid_ids_sizes_and_names(ids, shape, names, message):
    refuses(lambda: mesh_from_device_ids(ids, shape, names), message)


def test_D1_names_and_devices_that_jax_accepts_twice():
    twice = np.array([jax.devices()[0]] * 2)
    for mesh in (Mesh(xy_mesh().devices, ('x', 'x')), Mesh(twice, ('x',))):
        for call in (
            lambda mesh=mesh: mark_sharding(np.ones(8), mesh, ('x',)),
            lambda mesh=mesh: tile_assignment(mesh, ('x',)),
            lambda mesh=mesh: set_global_mesh(mesh),
        ):
            refuses(call, "axis 'x' appears 2 times|device id 0 appears 2 times")


def test_D2_parts_of_a_mesh():
    mesh = xy_mesh()
    assert get_logical_mesh(mesh).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dict(mesh.shape) == {'x': 4, 'y': 2} and mesh.size == 8
    assert dict(mesh_of((4, 2)).shape) == {'0': 4, '1': 2}
    assert get_axis_name_idx(mesh, 'y') == 1 and get_axis_name_idx(mesh, 'z') is None
    line = get_1d_mesh('data')
    assert line.devices.shape == (8,) and line.axis_names == ('data',)
    assert get_logical_mesh(line).tolist() == IN_ORDER
    assert set(mesh_of((4, 2)).axis_types) == {AxisType.Auto}


def test_D2_global_mesh():
    mesh = xy_mesh()
    assert get_global_mesh() is None
    set_global_mesh(mesh)
    try:
        assert get_global_mesh() is mesh
        assert mark_sharding(np.ones(8), None, ('x',)).sharding == NamedSharding(mesh, P('x'))
    finally:
        set_global_mesh(None)
    assert get_global_mesh() is None
    refuses(lambda: mark_sharding(np.ones(8), None, ('x',)), 'set_global_mesh')


def test_a_part_of_the_machine():
    some = jax.devices()[4:]
    mesh = mesh_from_device_ids([7, 6, 5, 4], (2, -1), ('x', 'y'), devices=some)
    assert get_logical_mesh(mesh).tolist() == [[7, 6], [5, 4]]
    assert hlo_sharding(mesh, (0, None)) == '{devices=[2,1,2]2,3,0,1 last_tile_dim_replicate}'
    assert get_logical_mesh(get_1d_mesh(devices=some[::-1])).tolist() == [4, 5, 6, 7]
    refuses(
        lambda: mesh_from_device_ids([3, 4, 5, 6], (4,), devices=some),
        r'device id 3 is not among the ids \[4, 5, 6, 7\]',
    )


def test_a_mesh_in_place_of_a_spec():
    refuses(lambda: mark_sharding(np.ones(8), ('x',), xy_mesh()), 'before the partition spec')
    refuses(lambda: set_global_mesh({'x': 8}), r'must be a jax\.sharding\.Mesh')


# Meshes over slices.


@pytest.mark.parametrize('ici, dcn', [((2, 2), (2, 1)), ((2, 2), (1, 2)), ((1, 4), (2, 1))])
def test_D16_hybrid_meshes(ici, dcn):
    """test_hybrid_mesh.py has the orders, written down."""
    devices = two_slices_of_v4()
    for given in (devices, devices[::-1], devices[4:] + devices[:4]):
        mesh = HybridMesh(
            ici_mesh_shape=ici, dcn_mesh_shape=dcn, axis_names=('x', 'y'), devices=given
        )
        assert mesh == create_hybrid_mesh(ici, dcn, ('x', 'y'), devices=devices)


@pytest.mark.parametrize(
    'slices, ici, dcn, message',
    [
        (2, (2, 2), None, r'2 slices: provide dcn_mesh_shape.* for example \(2, 1\)'),
        (1, (2, 2), (2, 1), r'dcn.*\(2, 1\) .* 2.* slices.* 1'),
    ],
)
def test_D17_invalid_hybrid_meshes(slices, ici, dcn, message):
    """test_hybrid_mesh.py has more of them."""
    devices = two_slices_of_v4()[: 4 * slices]
    refuses(lambda: HybridMesh(ici_mesh_shape=ici, dcn_mesh_shape=dcn, devices=devices), message)


def test_D17_devices_without_a_slice_index():
    for devices in (tpus((2, 2, 1), 'TPU v4'), cpus(4, 1)):
        for dcn in (None, (1, 1)):
            mesh = HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=dcn, devices=devices)
            assert ids(mesh) == [[0, 1], [2, 3]]


V4_2X2X4 = [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11], [12, 14, 13, 15]]


@pytest.mark.parametrize(
    'kind, bounds, expected',
    [
        ('TPU v4', (2, 2, 1), [[0, 2, 1, 3]]),
        ('TPU v4', (2, 2, 1), [[0], [2], [1], [3]]),
        ('TPU v4', (2, 2, 1), [[0, 1], [2, 3]]),
        ('TPU v4', (2, 2, 2), [[0, 4, 2, 6, 1, 5, 3, 7]]),
        ('TPU v4', (2, 2, 2), V4_2X2X4[:2]),
        ('TPU v4', (2, 2, 2), [[0, 1], [4, 5], [2, 3], [6, 7]]),
        ('TPU v4', (2, 2, 2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        ('TPU v4', (2, 2, 4), V4_2X2X4),
        ('TPU v4', (2, 2, 4), [[0, 4, 8, 12, 1, 5, 9, 13], [2, 6, 10, 14, 3, 7, 11, 15]]),
        ('TPU v4', (2, 2, 4), [V4_2X2X4[:2], V4_2X2X4[2:]]),
        ('TPU v5 lite', (2, 2, 1), [[0, 1, 3, 2]]),
        ('TPU v5 lite', (2, 4, 1), [[0, 1, 2, 3], [7, 6, 5, 4]]),
        ('TPU v5 lite', (4, 2, 1), [[0, 1, 2, 3], [7, 6, 5, 4]]),
        ('TPU v5', (2, 2, 2), [[0, 1, 3, 2], [6, 7, 5, 4]]),
        ('TPU v5', (2, 2, 2), [[0, 1], [3, 2], [6, 7], [5, 4]]),
    ],
)
def test_D18_orders_on_a_torus(kind, bounds, expected):
    sizes = np.shape(expected)
    names = 'xyz'[: len(sizes)]
    assert ids(create_mesh(sizes, tuple(names), devices=tpus(bounds, kind))) == expected


def test_D18_an_axis_that_splits_a_dimension():
    """jax orders 2 x 2 x 4 chips as a mesh of 2, 2 and 4 only if axes may split; here they may."""
    devices = tpus((2, 2, 4), 'TPU v4')
    with pytest.raises(NotImplementedError, match='Failed to find assignment'):
        mesh_utils.create_device_mesh((2, 2, 4), devices)
    split = mesh_utils.create_device_mesh((2, 2, 4), devices, allow_split_physical_axes=True)
    expected = [[[0, 2, 1, 3], [4, 6, 5, 7]], [[8, 10, 9, 11], [12, 14, 13, 15]]]
    assert [[[d.id for d in row] for row in plane] for plane in split] == expected
    assert ids(create_mesh((2, 2, 4), ('x', 'y', 'z'), devices=devices)) == expected


def test_D18_orders_of_two_cores():
    small = tpus((2, 2, 1), 'TPU v3', cores=2)
    assert ids(create_mesh((8,), ('x',), devices=small)) == [0, 1, 2, 3, 6, 7, 4, 5]
    large = create_mesh((4, 8), ('x', 'y'), devices=v3_4x4())
    assert ids(large)[0] == [0, 1, 2, 3, 10, 11, 8, 9]


def test_D18_orders_over_slices():
    mesh = HybridMesh(
        ici_mesh_shape=(1, 2, 4),
        dcn_mesh_shape=(2, 1, 1),
        devices=tpu_slices(2, (2, 2, 2), 'TPU v4'),
    )
    assert ids(mesh) == [V4_2X2X4[:2], V4_2X2X4[2:]]
    mesh = HybridMesh(
        ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 2), devices=tpu_slices(4, (2, 2, 1), 'TPU v4')
    )
    assert ids(mesh) == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    # If only the first axis spans slices, create_mesh finds the same order from the total sizes.
    devices = tpu_slices(2, (2, 2, 2), 'TPU v4')
    assert ids(create_mesh((2, 2, 4), ('x', 'y', 'z'), devices=devices)) == [
        V4_2X2X4[:2],
        V4_2X2X4[2:],
    ]


@needs_libtpu
def test_D19_described_machines():
    cube = describe_topology('v5p:2x2x2')
    assert len(cube.devices) == 8
    assert {d.device_kind for d in cube.devices} == {'TPU v5'}
    of_process = collections.defaultdict(set)
    for device in cube.devices:
        of_process[device.process_index].add((device.id, device.coords[2]))
    assert of_process == {
        process: {(4 * process + i, process) for i in range(4)} for process in (0, 1)
    }
    theirs = {(d.id, d.process_index, tuple(d.coords)) for d in describe_topology('v3:4x4').devices}
    assert theirs == {(d.id, d.process_index, d.coords) for d in v3_4x4()}


@needs_libtpu
def test_D19_slices_and_programs(monkeypatch):
    monkeypatch.delenv('XLA_FLAGS', raising=False)  # the flags are for CPUs
    pods = describe_topology('v5e:4x4', num_slices=2)
    assert {d.slice_index for d in pods.devices} == {0, 1}
    mesh = create_hybrid_mesh(
        (1, 4, 4), (2, 1, 1), ('replica', 'data', 'model'), devices=pods.devices
    )
    assert dict(mesh.shape) == {'replica': 2, 'data': 4, 'model': 4}
    in_slice = get_logical_mesh(mesh) % 100_000
    assert in_slice.tolist() == np.tile(np.arange(16).reshape(4, 4), (2, 1, 1)).tolist()
    x = jax.ShapeDtypeStruct(
        (64, 64),
        jnp.float32,
        sharding=NamedSharding(mesh, resolve_partition_spec(mesh, (('replica', 'data'), 'model'))),
    )
    compiled = jax.jit(lambda t: t @ t.T).lower(x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes >= 64 * 64 * 4 // 32
