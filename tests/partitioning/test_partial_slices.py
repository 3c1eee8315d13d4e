"""Meshes of a part of a TPU slice: a box within it, or a slice with missing chips."""

import numpy as np
import pytest
from mock_devices import sorted_ids, tpus

from partitioning import create_mesh, default_mesh

pytestmark = pytest.mark.core


def places_in_order(mesh):
    """The coordinates of each device of a mesh, relative to the lowest ones."""
    places = np.array([d.coords for d in mesh.devices.flat])
    return (places - places.min(axis=0)).tolist()


@pytest.mark.parametrize('num_partitions', [1, 2, 4, 8])
@pytest.mark.parametrize(
    'kind, bounds, cores, low, high',
    [
        ('TPU v3', (8, 4, 1), 2, (4, 0, 0), (8, 4, 1)),
        ('TPU v4', (4, 4, 4), 1, (2, 2, 2), (4, 4, 4)),
        ('TPU v5 lite', (4, 4, 1), 1, (2, 0, 0), (4, 4, 1)),
        ('TPU v6 lite', (8, 8, 1), 1, (4, 2, 0), (8, 4, 1)),
        ('TPU v5 lite', (8, 8, 1), 1, (4, 2, 0), (8, 6, 1)),
        ('TPU v5', (4, 4, 4), 1, (0, 0, 2), (2, 2, 4)),
        ('TPU v5', (4, 4, 4), 1, (1, 0, 1), (3, 4, 2)),
        ('TPU7x', (4, 4, 4), 2, (0, 2, 0), (4, 4, 2)),
    ],
)
def test_box_within_a_slice(kind, bounds, cores, low, high, num_partitions):
    """The box has the order of a separate slice of its size, with each device once."""
    box = [
        d
        for d in tpus(bounds, kind, cores)
        if all(a <= c < b for a, c, b in zip(low, d.coords, high, strict=True))
    ]
    shape = (len(box) // num_partitions, num_partitions)
    mesh = default_mesh(num_partitions, devices=box)
    assert mesh.devices.shape == shape
    assert sorted_ids(mesh) == sorted(d.id for d in box)
    alone = tpus(tuple(b - a for a, b in zip(low, high, strict=True)), kind, cores)
    expected = default_mesh(num_partitions, devices=alone)
    assert places_in_order(mesh) == places_in_order(expected)


@pytest.mark.parametrize(
    'kind, bounds, cores', [('TPU v3', (4, 4, 1), 2), ('TPU v5 lite', (4, 4, 1), 1)]
)
@pytest.mark.parametrize('missing', [(3, 3, 0), (0, 0, 0), (1, 2, 0)])
def test_slice_with_a_chip_missing(kind, bounds, cores, missing):
    devices = [d for d in tpus(bounds, kind, cores) if d.coords != missing]
    for num_partitions in (1, 3, 5, 15):
        mesh = default_mesh(num_partitions, devices=devices)
        assert mesh.shape['model'] == num_partitions
        assert sorted_ids(mesh) == [d.id for d in devices]
    path = np.array([d.coords for d in default_mesh(1, devices=devices).devices.flat])
    steps = np.abs(np.diff(path, axis=0)).sum(axis=1)
    assert steps.max() <= 2 and (steps == 2).sum() <= 1  # one step can cross the gap


@pytest.mark.parametrize('bounds, missing', [((4, 4, 1), 3), ((4, 4, 1), 0), ((2, 4, 1), 1)])
def test_column_missing_from_a_slice_of_two_cores(bounds, missing):
    """An odd number of columns has no trays of 2 x 2 chips, for which jax's ring is made."""
    devices = [d for d in tpus(bounds, 'TPU v3', 2) if d.coords[0] != missing]
    mesh = create_mesh((-1, 8), ('data', 'model'), devices=devices)
    assert sorted_ids(mesh) == [d.id for d in devices]
    for ring in mesh.devices:
        path = np.array([d.coords for d in ring])
        assert np.abs(np.diff(path, axis=0)).sum(axis=1).max() == 1


def test_plane_missing_from_a_slice():
    """The seven remaining rows of eight are not a box, because there is a gap between them."""
    devices = [d for d in tpus((8, 8, 1), 'TPU v6 lite') if d.coords[1] != 3]
    mesh = default_mesh(8, devices=devices)
    assert dict(mesh.shape) == {'data': 7, 'model': 8}
    assert sorted_ids(mesh) == [d.id for d in devices]
