"""Described GPU machines, and their meshes: model groups stay inside a host if they fit."""

import collections
import os
import subprocess
import sys

import numpy as np
import pytest
from described_machines import assert_each_device_once, described, needs_cuda_plugin

from partitioning import CHIPS, axis_rings, default_mesh

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
