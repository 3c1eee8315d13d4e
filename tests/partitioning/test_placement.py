"""Where the devices of a mesh are in their machine."""

import numpy as np
from jax.sharding import Mesh
from mock_devices import gpus, tpu_slices, tpus

from partitioning.mesh import find_placement


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


def test_a_part_of_a_pod_has_no_rings():
    placement = find_placement(mesh_of(tpus((4, 4, 1), 'TPU v5 lite'), (16,)))
    assert placement.bounds == (4, 4, 1) and placement.wrap == (False, False, False)


def test_slices_and_cores_are_numbered():
    devices = tpu_slices(2, (2, 2, 1), 'TPU7x', cores=2)
    placement = find_placement(mesh_of(devices, (2, 8)))
    assert placement.places[1] == (0, 0, 0, 0, 1)
    assert placement.places[8:10] == ((1, 0, 0, 0, 0), (1, 0, 0, 0, 1))


def test_gpus_are_numbered_within_their_process():
    placement = find_placement(mesh_of(gpus(local=4, processes=2), (8,)))
    assert placement.bounds == () and placement.wrap == ()
    assert placement.places == tuple((0, process, gpu) for process in (0, 1) for gpu in range(4))
