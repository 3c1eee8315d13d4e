"""Described GPU machines, and their meshes: model groups stay inside a host if they fit."""

import collections
import os
import subprocess
import sys

import numpy as np
import pytest
from described_machines import assert_each_device_once, described, needs_cuda_plugin

from partitioning import CHIPS, PjitPartitioner, axis_rings, create_mesh, default_mesh
from partitioning.mesh import MeshConfig

pytestmark = needs_cuda_plugin

# (name, number of NVLink domains, total number of hosts, GPUs per host)
GPU_MACHINES = [
    ('h100:1x8', 1, 1, 8),
    ('h100:2x8', 1, 2, 8),
    ('h100:16x8', 1, 16, 8),
    ('h200:2x4', 1, 2, 4),
    ('b200:18x4', 2, 36, 4),
]
all_machines = pytest.mark.parametrize('name, domains, hosts, local', GPU_MACHINES)
CASES = [
    (*machine, n)
    for machine in GPU_MACHINES
    for n in range(1, machine[2] * machine[3] + 1)
    if machine[2] * machine[3] % n == 0
]


def gpu_ids(mesh):
    return [[d.id for d in row] for row in mesh.devices]


def granule_of(device, domains):
    """Returns the NVLink domain of a device if the machine has several, otherwise its host."""
    return device.coords[0] if domains > 1 else device.process_index


@all_machines
def test_devices_of_a_description(name, domains, hosts, local):
    topology = described(name, domains)
    chip = CHIPS[name.split(':')[0]]
    assert [d.id for d in topology.devices] == list(range(hosts * local))
    assert [d.process_index for d in topology.devices] == np.repeat(range(hosts), local).tolist()
    assert {d.platform for d in topology.devices} == {'gpu'}
    assert {d.device_kind for d in topology.devices} == {chip.device_kind}
    assert topology.chip is chip
    assert topology.num_processes == hosts
    assert topology.bounds == (hosts // domains, local)
    assert topology.num_slices == domains
    assert topology.wrap == (False, False)


@pytest.mark.parametrize('name, domains, hosts, local, partitions', CASES)
def test_model_groups_span_as_few_granules_as_possible_and_report_their_networks(
    name, domains, hosts, local, partitions
):
    devices = described(name, domains).devices
    mesh = default_mesh(partitions, devices=devices)
    assert mesh.axis_names == ('data', 'model')
    assert mesh.devices.shape == (len(devices) // partitions, partitions)
    assert_each_device_once(mesh, devices)
    counted = [collections.Counter(granule_of(d, domains) for d in group) for group in mesh.devices]
    granule = len(devices) // domains if domains > 1 else local
    if granule % partitions == 0:
        assert all(len(group) == 1 for group in counted)
    elif partitions % granule == 0:
        assert all(set(group.values()) == {granule} for group in counted)
    if granule % partitions == 0 or partitions % granule == 0:
        assert np.ravel(gpu_ids(mesh)).tolist() == list(range(len(devices)))

    for axis, ring in enumerate(axis_rings(mesh)):
        rolled = np.roll(mesh.devices, -1, axis=axis)
        crosses = {
            granule_of(a, domains) != granule_of(b, domains)
            for a, b in zip(mesh.devices.flat, rolled.flat, strict=True)
        }
        names = [{False: 'NVLink', True: 'network'}[c] for c in sorted(crosses)]
        assert ring.network == (' + '.join(names) if ring.size > 1 else '-')
        assert (ring.mean_hops, ring.worst_hops) == (None, None)


@pytest.mark.parametrize(
    'name, partitions, shape',
    [
        *[('h100:1x8', n, (8 // n, n)) for n in (1, 2, 8)],
        *[('h100:2x8', n, (16 // n, n)) for n in (1, 4, 8, 16)],
        ('h200:2x4', 8, (1, 8)),
    ],
)
def test_the_partitioner_on_gpus(name, partitions, shape):
    config = MeshConfig.from_t5x(partitions, devices=described(name).devices)
    partitioner = PjitPartitioner(mesh=config)
    assert partitioner.mesh.devices.shape == shape
    assert np.ravel(gpu_ids(partitioner.mesh)).tolist() == list(range(partitioner.mesh.size))
    assert dict(partitioner.logical_axis_rules)['batch'] == 'data'


@pytest.mark.parametrize('partitions', [3, 12, 32])
def test_partitions_that_do_not_divide(partitions):
    with pytest.raises(ValueError, match=f'num_partitions={partitions} does not divide the 16 d'):
        default_mesh(partitions, devices=described('h100:2x8').devices)


def test_a_submesh_needs_tpus():
    with pytest.raises(ValueError, match=r'tile of a TPU torus.*num_partitions=4'):
        default_mesh(None, (2, 2, 1, 1), devices=described('h100:2x8').devices)


# Racks of 72 GPUs on one NVLink network, in hosts of 4.


@pytest.mark.parametrize('name, domains', [('b200:36x4', 1), ('b200:18x4', 2)])
@pytest.mark.parametrize('partitions', [1, 2, 4, 8, 9, 12, 24, 36, 72])
def test_model_groups_stay_inside_a_rack(name, domains, partitions):
    devices = described(name, domains).devices
    mesh = default_mesh(partitions, devices=devices, granule_size=72)
    assert_each_device_once(mesh, devices)
    racks = [{d.id // 72 for d in group} for group in mesh.devices]
    assert all(len(rack) == 1 for rack in racks)
    model = axis_rings(mesh, granule_size=72)[1]
    assert model.network == ('NVLink' if partitions > 1 else '-')


def test_without_granule_size_model_groups_span_hosts():
    mesh = default_mesh(8, devices=described('b200:36x4').devices)
    assert axis_rings(mesh)[1].network == 'NVLink + network'


def test_described_racks_do_not_need_granule_size():
    devices = described('b200:18x4', 2).devices
    for partitions in (8, 9, 24, 72):
        mesh = default_mesh(partitions, devices=devices)
        assert all(len({d.id // 72 for d in group}) == 1 for group in mesh.devices)
        assert axis_rings(mesh)[1].network == 'NVLink'
    across = default_mesh(144, devices=devices)
    assert axis_rings(across)[1].network == 'NVLink + network'


def test_an_axis_over_racks_uses_the_network():
    devices = described('b200:36x4').devices
    mesh = create_mesh((2, 18, 4), ('replica', 'data', 'model'), devices=devices, granule_size=72)
    assert np.vectorize(lambda d: d.id)(mesh.devices).tolist() == (
        np.arange(144).reshape(2, 18, 4).tolist()
    )
    networks = [ring.network for ring in axis_rings(mesh, granule_size=72)]
    assert networks == ['network', 'NVLink', 'NVLink']


@pytest.mark.parametrize('size', [7, 6, 100, 145])
def test_a_granule_size_that_does_not_consist_of_whole_hosts(size):
    with pytest.raises(ValueError, match=f'granule_size={size}.*144 devices'):
        default_mesh(4, devices=described('b200:36x4').devices, granule_size=size)


def test_a_machine_is_described_after_jax_has_looked_for_devices():
    """jax looks for plugins once, and leaves out the one for CUDA on machines without cuDNN."""
    program = (
        'import jax\n'
        'jax.devices()\n'
        'from partitioning import describe_topology\n'
        "print(len(describe_topology('h100:1x8').devices), jax.default_backend())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != 'JAX_PLATFORMS'}
    found = subprocess.run(
        [sys.executable, '-c', program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.stdout == '8 cpu\n', found.stderr
