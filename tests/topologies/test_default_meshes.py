"""`default_mesh` and `MeshConfig` on every described TPU, for every number of partitions."""

import dataclasses
import math
import random

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from described_machines import (
    MACHINES,
    PARTITIONS,
    Machine,
    assert_each_device_once,
    described,
    ids,
    needs_libtpu,
)
from jax.sharding import PartitionSpec as P

from partitioning import PjitPartitioner, create_mesh, default_mesh, default_moe_mesh
from partitioning.mesh import MeshConfig

pytestmark = needs_libtpu

CASES = [(machine, partitions) for machine in MACHINES for partitions in PARTITIONS]
TOO_SMALL = {('v4:2x2x4', 1, 32), ('v5e:4x4', 1, 32), ('v5e:4x4', 2, 32)}


def refused(case: tuple[Machine, int]) -> bool:
    machine, partitions = case
    return (machine.name, machine.slices, partitions) in TOO_SMALL


MESHES = [case for case in CASES if not refused(case)]
REFUSED = [case for case in CASES if refused(case)]


def test_the_cases_are_75_meshes_and_3_errors():
    assert (len(MESHES), len(REFUSED)) == (75, 3)


@pytest.mark.parametrize('machine, partitions', MESHES, ids=str)
def test_every_machine_has_a_mesh(machine, partitions):
    devices = machine.describe().devices
    mesh = default_mesh(partitions, devices=devices)
    assert_each_device_once(mesh, devices)
    data = machine.devices // machine.slices // partitions
    if machine.slices == 1:
        assert mesh.axis_names == ('data', 'model')
        assert mesh.devices.shape == (data, partitions)
    else:
        assert mesh.axis_names == ('replica', 'data', 'model')
        assert mesh.devices.shape == (machine.slices, data, partitions)
        for replica in range(machine.slices):
            assert {d.slice_index for d in mesh.devices[replica].flat} == {replica}


@pytest.mark.parametrize('machine, partitions', REFUSED, ids=str)
def test_more_partitions_than_a_slice_has_devices(machine, partitions):
    with pytest.raises(ValueError, match=f'num_partitions={partitions} ') as error:
        default_mesh(partitions, devices=machine.describe().devices)
    message = str(error.value)
    assert '16 devices' in message
    assert 'one of 1, 2, 4, 8, 16' in message
    assert ('2 slices' in message) == ('ici_mesh_shape' in message) == (machine.slices == 2)


@pytest.mark.parametrize(
    'name, slices, partitions',
    [('v3:4x4', 1, 4), ('v4:4x4x4', 1, 8), ('v5e:16x16', 1, 8), ('v5p:4x4x4', 2, 16)],
)
def test_the_order_of_the_list_of_devices_does_not_matter(name, slices, partitions):
    devices = list(described(name, slices).devices)
    expected = default_mesh(partitions, devices=devices)
    random.Random(0).shuffle(devices)
    assert default_mesh(partitions, devices=devices) == expected


# The partitioner.


@pytest.mark.parametrize(
    'name, partitions', [('v3:4x4', 4), ('v4:2x2x4', 8), ('v5e:16x16', 8), ('v5p:8x8x8', 32)]
)
def test_the_partitioner_on_one_slice(name, partitions):
    devices = described(name).devices
    partitioner = PjitPartitioner(mesh=MeshConfig.from_t5x(partitions, devices=devices))
    assert partitioner.mesh == default_mesh(partitions, devices=devices)
    assert partitioner.data_partition_spec == P('data')
    assert dict(partitioner.logical_axis_rules)['batch'] == 'data'
    assert partitioner.data_mesh_size == len(devices) // partitions


@pytest.mark.parametrize('rules', [None, (('batch', 'data'), ('mlp', 'model'))])
@pytest.mark.parametrize(
    'name, partitions', [('v5e:4x4', 4), ('v5p:4x4x4', 16), ('v6e:16x16', 32), ('v3:4x4', 4)]
)
def test_the_partitioner_on_two_slices(name, partitions, rules):
    devices = described(name, 2).devices
    config = MeshConfig.from_t5x(partitions, devices=devices)
    partitioner = PjitPartitioner(mesh=config, logical_axis_rules=rules)
    assert partitioner.mesh == default_mesh(partitions, devices=devices)
    assert partitioner.data_partition_spec == P(('replica', 'data'))
    assert dict(partitioner.logical_axis_rules)['batch'] == ('replica', 'data')
    assert partitioner.data_mesh_size == len(devices) // partitions


# Meshes that T5X refuses or gets wrong.


@pytest.mark.parametrize(
    'choice', [{'num_partitions': 4}, {'model_parallel_submesh': (2, 1, 1, 2)}]
)
def test_two_slices_of_v3_keep_both(choice):
    # T5X puts both slices on the same coordinates, and loses one.
    one = MeshConfig.from_t5x(**choice, devices=described('v3:4x4').devices).build()
    two = MeshConfig.from_t5x(**choice, devices=described('v3:4x4', 2).devices).build()
    assert ids(two) == [ids(one), ids(one)]
    assert [{d.slice_index for d in two.devices[s].flat} for s in (0, 1)] == [{0}, {1}]


@pytest.mark.parametrize(
    'name, ici',
    [
        ('v5e:4x4', (1, 8, 2)),
        ('v5e:4x4', (1, 16, 1)),
        ('v5p:4x4x4', (1, 32, 2)),
        ('v5p:4x4x4', (2, 16, 2)),
        ('v6e:16x16', (1, 128, 2)),
        ('v6e:16x16', (1, 64, 4)),
    ],
)
def test_shapes_within_and_over_slices(name, ici):
    devices = described(name, 2).devices
    mesh = default_mesh(None, ici_mesh_shape=ici, dcn_mesh_shape=(2, 1, 1), devices=devices)
    assert mesh.axis_names == ('replica', 'data', 'model')
    assert mesh.devices.shape == (2 * ici[0], *ici[1:])
    assert_each_device_once(mesh, devices)
    for s in (0, 1):
        part = mesh.devices[s * ici[0] : (s + 1) * ici[0]]
        assert {d.slice_index for d in part.flat} == {s}


def test_a_model_axis_over_slices_works_as_the_error_message_suggests():
    devices = described('v5e:4x4', 2).devices
    mesh = default_mesh(32, ici_mesh_shape=(1, 1, 16), dcn_mesh_shape=(1, 1, 2), devices=devices)
    assert mesh.devices.shape == (1, 1, 32)
    assert [d.slice_index for d in mesh.devices[0, 0]] == [0] * 16 + [1] * 16


def test_a_mesh_of_any_axes_over_slices():
    devices = described('v5p:4x4x4', 2).devices
    mesh = create_mesh((2, -1, 2, 4), ('replica', 'fsdp', 'expert', 'model'), devices=devices)
    assert dict(mesh.shape) == {'replica': 2, 'fsdp': 8, 'expert': 2, 'model': 4}
    assert_each_device_once(mesh, devices)
    assert [{d.slice_index for d in mesh.devices[s].flat} for s in (0, 1)] == [{0}, {1}]


@pytest.mark.parametrize(
    'experts, choice, shape',
    [
        (16, {'num_partitions': 1}, (1, 8, 1)),
        (8, {'num_partitions': 1}, (1, 8, 1)),
        (4, {'num_partitions': 1}, (2, 4, 1)),
        (8, {'num_partitions': 4}, (1, 2, 4)),
        (8, {'model_parallel_submesh': (1, 1, 1, 2)}, (1, 4, 2)),
    ],
)
def test_experts_on_v3_2x2(experts, choice, shape):
    devices = described('v3:2x2').devices
    mesh = default_moe_mesh(experts, **choice, devices=devices)
    assert mesh.axis_names == ('data', 'expert', 'model')
    assert mesh.devices.shape == shape
    # Experts that share a group are neighbours along the data axis of the default mesh.
    plain = default_mesh(**{'num_partitions': None, **choice}, devices=devices)
    assert np.reshape(ids(mesh), (-1, shape[-1])).tolist() == ids(plain)


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
