"""Meshes of the eight virtual devices, as the tests of torch_xla's functions use them."""

import pytest
from jax.sharding import AxisType, Mesh

from partitioning.compat.torch_xla import mesh_from_device_ids

IN_ORDER = list(range(8))
SHUFFLED = [3, 1, 4, 0, 5, 2, 6, 7]
TYPES = {
    'auto': (AxisType.Auto, AxisType.Auto),
    'explicit': (AxisType.Explicit, AxisType.Explicit),
    'mixed': (AxisType.Explicit, AxisType.Auto),
}


def mesh_of(shape, names=None, ids=IN_ORDER):
    return mesh_from_device_ids(ids, shape, names)


def xy_mesh(types='auto', ids=IN_ORDER):
    """Four devices along x and two along y, with axes of these types."""
    mesh = mesh_of((4, 2), ('x', 'y'), ids)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=TYPES[types])


def explicit(mesh):
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)


def bounds_by_device(shards):
    """For each device the bounds of its tile, and the number of its replica."""
    return {s.device_id: ([(i.start, i.stop) for i in s.index], s.replica_id) for s in shards}


def refuses(call, message):
    """Checks that a call raises a ValueError whose message contains this pattern."""
    with pytest.raises(ValueError, match=message):
        call()
