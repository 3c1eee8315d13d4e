"""Devices, chips and their rates, the rings of slices, and the names of clouds."""

import types

import jax
import pytest
from mock_devices import cpus, gpus, tpus

from partitioning import CHIPS
from partitioning.hardware import chip_of, has_coords, parse_topology, torus_wrap
from partitioning.hardware.topology import from_cloud_name

pytestmark = [pytest.mark.core, pytest.mark.smoke]


# Coordinates.


def test_only_tpus_have_coordinates():
    assert has_coords(tpus((2, 2, 1), 'TPU v5 lite')[0])
    assert not has_coords(gpus(8, 1)[0])
    assert not has_coords(cpus(8, 1)[0])
    assert not has_coords(jax.devices()[0])
    # Described GPUs have places in their racks, which do not form a torus.
    assert not has_coords(types.SimpleNamespace(id=0, coords=(0, 1, 3), platform='gpu'))


# Chips.

DEVICE_KINDS = {
    'v2': 'TPU v2',
    'v3': 'TPU v3',
    'v4': 'TPU v4',
    'v5e': 'TPU v5 lite',
    'v5p': 'TPU v5',
    'v6e': 'TPU v6 lite',
    'tpu7x': 'TPU7x',
}


def test_chips_by_their_device_kind():
    """The names are those in the device descriptions of libtpu."""
    for name, kind in DEVICE_KINDS.items():
        chip = chip_of(kind)
        assert chip is CHIPS[name]
        assert (chip.name, chip.platform) == (name, 'tpu')
    assert chip_of('NVIDIA H200').name == 'h200'
    assert {c.name for c in CHIPS.values() if c.platform == 'gpu'} == {
        'a100',
        'h100',
        'h200',
        'b200',
    }


@pytest.mark.parametrize('kind', ['cpu', 'TPU', 'TPU v5e', 'tpu v4', 'NVIDIA', ''])
def test_unknown_device_kinds(kind):
    """A prefix does not match, because 'TPU v5' and 'TPU v5 lite' are different chips."""
    assert chip_of(kind) is None


@pytest.mark.parametrize(
    'name, gib',
    [
        ('v2', 7.48),
        ('v3', 15.48),
        ('v4', 30.75),
        ('v5e', 15.75),
        ('v5p', 95.73),
        ('v6e', 31.24),
        ('tpu7x', 94.74),
    ],
)
def test_memory_of_one_device(name, gib):
    """The figures are from the compiler's out-of-memory errors."""
    assert CHIPS[name].hbm_bytes_per_device == pytest.approx(gib * 2**30, abs=2)


@pytest.mark.parametrize(
    'name, gigabytes',
    # Bidirectional bandwidth of a chip over all its links, in GB/s, as the documents give it.
    [('v5e', 400), ('v5p', 1200), ('v6e', 800), ('tpu7x', 1200), ('h100', 900), ('b200', 1800)],
)
def test_link_bandwidth_adds_up(name, gigabytes):
    chip = CHIPS[name]
    assert chip.ici_links * chip.ici_link_bandwidth * 2 == pytest.approx(gigabytes * 1e9)


def test_links_of_a_torus_are_two_per_dimension():
    for chip in CHIPS.values():
        if chip.platform == 'tpu':
            assert chip.ici_links == 2 * chip.dimensions


# Rings.


@pytest.mark.parametrize(
    'kind, bounds, wrap',
    [
        # Cubes of 4 x 4 x 4 chips close in all three dimensions, or in none.
        ('TPU v4', (4, 4, 4), (True, True, True)),
        ('TPU v4', (2, 2, 4), (False, False, False)),
        ('TPU v4', (4, 4, 2), (False, False, False)),
        ('TPU v5', (8, 8, 8), (True, True, True)),
        ('TPU v5', (4, 8, 12), (True, True, True)),
        ('TPU7x', (2, 4, 4), (False, False, False)),
        # Planes close in the dimensions in which they are as long as the pod.
        ('TPU v5 lite', (16, 16, 1), (True, True, False)),
        ('TPU v5 lite', (8, 16, 1), (False, True, False)),
        ('TPU v5 lite', (4, 4, 1), (False, False, False)),
        ('TPU v6 lite', (16, 16, 1), (True, True, False)),
        ('TPU v2', (16, 16, 1), (True, True, False)),
        ('TPU v3', (32, 32, 1), (True, True, False)),
        ('TPU v3', (16, 32, 1), (False, True, False)),
        ('TPU v9', (16, 16, 16), (False, False, False)),
    ],
)
def test_dimensions_that_close_to_rings(kind, bounds, wrap):
    assert torus_wrap(kind, bounds) == wrap


# Names of clouds, with the shapes of the tables of Cloud TPU and Compute Engine.


@pytest.mark.parametrize(
    'name, topology',
    [
        ('v2-8', 'v2:2x2'),
        ('v3-32', 'v3:4x4'),
        ('v4-8', 'v4:2x2x1'),
        ('v4-32', 'v4:2x2x4'),
        ('v5litepod-1', 'v5e:1x1'),
        ('v5litepod-256', 'v5e:16x16'),
        ('v5p-8', 'v5p:2x2x1'),
        ('v5p-128', 'v5p:4x4x4'),
        ('v5p-1024', 'v5p:8x8x8'),
        ('v5p-12288', 'v5p:16x16x24'),
        ('v6e-8', 'v6e:2x4'),
        ('tpu7x-128', 'tpu7x:4x4x4'),
        ('v5p-4x4x4', 'v5p:4x4x4'),
        ('a3-highgpu-8g', 'h100:1x8'),
        ('a3-ultragpu-8g', 'h200:1x8'),
        ('a4-highgpu-8g', 'b200:1x8'),
    ],
)
def test_names_of_clouds(name, topology):
    assert from_cloud_name(name) == topology
    chip, shape = parse_topology(name)
    assert f'{chip.name}:{"x".join(map(str, shape))}' == topology


@pytest.mark.parametrize('name', ['v5p:4x4x4', 'h100:1x8', 'v5p', 'v9-8', '', 'v5p-', 'v5p-0'])
def test_other_names_are_not_translated(name):
    assert from_cloud_name(name) is None


@pytest.mark.parametrize(
    'name, suggestion',
    [
        ('v5p-9', "counts 2 TensorCores per chip: write, for example, 'v5p-8'"),
        ('v5p-100', "'v5p-128'"),
        ('v5litepod-12', "counts chips: write, for example, 'v5litepod-16'"),
        ('v6e-512', "'v6e-256'"),
    ],
)
def test_sizes_that_no_cloud_offers(name, suggestion):
    with pytest.raises(ValueError, match=f'no machine {name!r} is offered') as caught:
        parse_topology(name)
    assert suggestion in str(caught.value) and '\n' not in str(caught.value)
