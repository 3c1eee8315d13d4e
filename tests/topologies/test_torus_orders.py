"""Device orders of described TPUs: few hops along every axis, and meshes of any size."""

import dataclasses
import functools
import math

import gin
import jax
import jax.numpy as jnp
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
from jax.sharding import PartitionSpec as P

from partitioning import (
    PjitPartitioner,
    axis_rings,
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
    return create_mesh(shape, NAMES[len(shape)], devices=described(name))


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
            assert_each_device_once(mesh, devices)
            assert mesh.shape['model'] == partitions
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


def test_a_mesh_of_4096_chips():
    devices = described('v5p:16x16x16').devices
    mesh = default_mesh(64, devices=devices)
    assert mesh.devices.shape == (64, 64)
    assert mesh.size == math.prod((16, 16, 16))
    assert_each_device_once(mesh, devices)


# A MeshConfig can name the machine.


def test_a_config_with_a_topology_needs_no_devices():
    config = MeshConfig(axes={'data': -1, 'model': 4}, dcn={'data': 2}, topology='v5e:4x4')
    two = dataclasses.replace(config, num_slices=2).build()
    assert dict(two.shape) == {'data': 8, 'model': 4}
    assert [{d.slice_index for d in part.flat} for part in np.split(two.devices, 2)] == [{0}, {1}]
    with pytest.raises(ValueError, match=r"dcn {'data': 2, 'model': 1}.* slices is 1"):
        config.build()
    t5x = MeshConfig.from_t5x(4, topology='v3:4x4')
    assert t5x.build() == t5x.build()
    assert ids(t5x.build()) == ids(default_mesh(4, devices=described('v3:4x4').devices))


def test_a_config_from_gin_compiles_a_program_for_described_devices():
    gin.external_configurable(MeshConfig, 'DescribedMesh')
    gin.parse_config("""
        DescribedMesh.axes = {'data': -1, 'model': 2}
        DescribedMesh.slice_axis = 'replica'
        DescribedMesh.topology = 'v5e:2x2'
        DescribedMesh.num_slices = 2
    """)
    partitioner = PjitPartitioner(mesh=gin.get_configurable('DescribedMesh')())
    assert dict(partitioner.mesh.shape) == {'replica': 2, 'data': 2, 'model': 2}
    assert partitioner.data_partition_spec == P(('replica', 'data'))
    rows, kernel = P(('replica', 'data')), P(None, 'model')
    multiply = partitioner.partition(jnp.dot, (rows, kernel), P(('replica', 'data'), 'model'))
    x, w = jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    compiled = partitioner.compile(multiply, x, w)
    assert compiled.memory_analysis().argument_size_in_bytes >= 4 * (4 * 8 + 8 * 2)
