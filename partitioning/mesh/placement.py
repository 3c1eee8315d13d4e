"""Where the devices of a mesh are in their machine, as plain numbers."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.sharding import Mesh

from partitioning.hardware import has_coords, places_of, slice_of
from partitioning.mesh.order import torus_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the devices of a mesh are in their machine.

    Attributes:
      bounds: the chips along x, y and z of the part of a TPU slice that the mesh spans; empty for
        machines without a torus.
      wrap: for each of x, y and z, whether links close it to a ring.
      places: for each device, in the row-major order of the mesh, its slice, x, y, z and core on
        TPUs, and its NVLink domain, process and number in the process elsewhere. All count from 0.
    """

    bounds: tuple[int, ...]
    wrap: tuple[bool, ...]
    places: tuple[tuple[int, ...], ...]


def find_placement(mesh: Mesh) -> Placement:
    """Returns where the devices of a mesh are, real ones or described ones."""
    devices = mesh.devices.ravel().tolist()
    number = {s: i for i, s in enumerate(sorted({slice_of(d) for d in devices}))}
    slices = np.array([number[slice_of(d)] for d in devices])
    inside = places_of(devices)
    places = tuple(map(tuple, np.column_stack([slices, inside]).tolist()))
    if not has_coords(devices[0]):
        return Placement(bounds=(), wrap=(), places=places)
    torus = torus_of(devices[0], (inside.max(axis=0) + 1).tolist())
    return Placement(bounds=torus.bounds[:3], wrap=torus.wrap[:3], places=places)
