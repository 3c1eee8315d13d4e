"""default_mesh on machines with and without a T5X table entry, for each number of partitions."""

import math
import random

import numpy as np
import pytest
from jax.sharding import AxisType
from mock_devices import gpus, ids, sorted_ids, tpu_slices, tpus

from partitioning import default_mesh, get_cpu_mesh

pytestmark = pytest.mark.core

# Machines without a T5X table entry: each device appears once, in any order.


@pytest.mark.parametrize(
    'kind, bounds, cores, num_partitions',
    [
        ('TPU v3', (4, 4, 1), 2, 32),
        ('TPU v4', (2, 2, 2), 2, 2),  # without megacore
        ('TPU7x', (2, 2, 2), 2, 4),
    ],
)
def test_meshes_beyond_the_tables(kind, bounds, cores, num_partitions):
    devices = tpus(bounds, kind, cores)
    mesh = default_mesh(num_partitions, devices=devices)
    assert dict(mesh.shape) == {'data': len(devices) // num_partitions, 'model': num_partitions}
    assert sorted(np.ravel(ids(mesh)).tolist()) == list(range(len(devices)))


MACHINES = [
    ('TPU v3', (4, 4, 1), 2),
    ('TPU v4', (4, 4, 4), 1),
    ('TPU v5 lite', (4, 8, 1), 1),
    ('TPU v5', (2, 2, 4), 1),
    ('TPU v6 lite', (4, 4, 1), 1),
    ('TPU7x', (2, 2, 4), 2),
]


# Several slices.


@pytest.mark.parametrize('slices', [4])
@pytest.mark.parametrize('kind, bounds, cores', MACHINES)
def test_replicas_are_slices(kind, bounds, cores, slices):
    devices = tpu_slices(slices, bounds, kind, cores)
    shuffled = random.Random(slices).sample(devices, len(devices))
    mesh = default_mesh(4, devices=shuffled)
    each = math.prod(bounds) * cores
    assert mesh.axis_names == ('replica', 'data', 'model')
    assert mesh.devices.shape == (slices, each // 4, 4)
    assert sorted_ids(mesh) == list(range(slices * each))
    for replica in range(slices):
        assert {d.slice_index for d in mesh.devices[replica].flat} == {replica}
        assert ids(mesh)[replica] == (np.array(ids(mesh)[0]) + replica * each).tolist()
    assert ids(mesh)[0] == ids(default_mesh(4, devices=tpus(bounds, kind, cores)))


# CPU and GPU.


@pytest.mark.parametrize(
    'local, processes, num_partitions, expected',
    [
        # Four does not divide six, so rows take two GPUs from each of two hosts.
        (6, 2, 4, [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
        (6, 4, 3, np.arange(24).reshape(8, 3).tolist()),
        (6, 4, 12, np.arange(24).reshape(2, 12).tolist()),
        (4, 3, 2, np.arange(12).reshape(6, 2).tolist()),
        (4, 3, 3, [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]),
        (4, 3, 6, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
        (1, 6, 2, [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_gpu_hosts_of_any_shape(local, processes, num_partitions, expected):
    assert ids(default_mesh(num_partitions, devices=gpus(local, processes))) == expected


def test_racks_decide_the_order():
    """Without granule_size, nine partitions take one GPU from each of nine hosts."""
    devices = gpus(4, 36)
    alone = default_mesh(9, devices=devices)
    assert {len({d.process_index for d in row}) for row in alone.devices} == {9}
    racked = default_mesh(9, devices=devices, granule_size=72)
    assert ids(racked) == np.arange(144).reshape(16, 9).tolist()
    domains = gpus(4, 18, domains=2)  # the GPUs report their rack
    assert ids(default_mesh(9, devices=domains)) == ids(racked)


# Errors.


@pytest.mark.parametrize('make', [default_mesh, get_cpu_mesh])
@pytest.mark.parametrize('num_partitions', [0, -1, True, 2.0, '2'])
def test_partitions_that_are_not_positive_integers(make, num_partitions):
    with pytest.raises(ValueError, match=f'num_partitions={num_partitions!r} must be an integer'):
        make(num_partitions)


@pytest.mark.parametrize('make', [default_mesh, get_cpu_mesh])
@pytest.mark.parametrize('num_partitions', [3, 16])
def test_cpu_partitions_that_do_not_divide(make, num_partitions):
    with pytest.raises(
        ValueError, match=f'num_partitions={num_partitions!r} does not divide .*8'
    ) as error:
        make(num_partitions)
    assert str(error.value).endswith('use one of 1, 2, 4, 8')


@pytest.mark.parametrize('num_partitions, hint', [(8, True), (16, True), (32, False)])
def test_more_partitions_than_a_slice(num_partitions, hint):
    """The message suggests spreading 'model' over slices only if the machine is large enough."""
    devices = tpu_slices(4, (2, 2, 1), 'TPU v5 lite')
    expected = rf'num_partitions={num_partitions} .* 4 devices of each of the 4 slices.*larger'
    with pytest.raises(ValueError, match=expected) as error:
        default_mesh(num_partitions, devices=devices)
    assert ('ici_mesh_shape' in str(error.value)) == hint


# Axis types.


def test_axis_types():
    auto, explicit = AxisType.Auto, AxisType.Explicit
    assert default_mesh(2).axis_types == (auto, auto)
    assert default_mesh(2, axis_types=explicit).axis_types == (explicit, explicit)
    assert default_mesh(2, axis_types=(explicit, auto)).axis_types == (explicit, auto)
    slices = tpu_slices(2, (2, 2, 2), 'TPU v4')
    assert default_mesh(2, devices=slices, axis_types=explicit).axis_types == (explicit,) * 3
    with pytest.raises(ValueError, match=r"axis_types.*\('replica', 'data', 'model'\)"):
        default_mesh(2, devices=slices, axis_types=(auto, auto))
