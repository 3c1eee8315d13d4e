"""Where the devices of a mesh are, and how far apart neighbours along its axes are."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from partitioning.hardware import granules_of, has_coords, places_of, slice_of
from partitioning.mesh.order import torus_of
from partitioning.mesh.torus import Torus, hops_to_next


@dataclasses.dataclass(frozen=True)
class AxisRing:
    """The rings along one axis of a mesh, from each device to the next and back to the first.

    Attributes:
      axis: the name of the axis.
      size: the number of devices in one ring.
      network: the network of its steps: 'ICI', 'DCN' or 'ICI + DCN' between TPUs; 'NVLink',
        'network' or both between GPUs; 'memory', 'network' or both between CPUs; '-' for an axis of
        one device.
      mean_hops: the number of links between neighbours, averaged over all steps within a TPU slice;
        the two cores of a chip are 0 links apart. None if there are no such steps.
      worst_hops: the largest number of links between two neighbours, or None.
    """

    axis: str
    size: int
    network: str
    mean_hops: float | None
    worst_hops: int | None


def axis_rings(
    mesh: Mesh, *, wrap: Sequence[bool] | None = None, granule_size: int | None = None
) -> list[AxisRing]:
    """Measures the rings of each axis of a mesh.

    Args:
      mesh: the mesh, of real or described devices.
      wrap: for each of x, y and z, whether links close the mesh's part of a TPU slice to a ring; by
        default as slices of these TPUs do.
      granule_size: the number of GPUs that share one NVLink network, by default the GPUs of a host.

    Returns:
      One entry per axis, in the order of the mesh.

    Raises:
      ValueError: if `wrap` is malformed or the devices are not TPUs.
    """
    devices = mesh.devices.ravel().tolist()
    granules = granules_of(devices, granule_size=granule_size)
    number = {d.id: i for i, granule in enumerate(granules) for d in granule}
    granule = np.array([number[d.id] for d in devices]).reshape(mesh.devices.shape)
    torus, places = _on_torus(mesh, wrap)
    fast, slow = 'NVLink' if devices[0].platform == 'gpu' else 'memory', 'network'
    if torus is not None:
        fast, slow = 'ICI', 'DCN'
    rings = []
    for axis, (name, size) in enumerate(mesh.shape.items()):
        crosses = granule != np.roll(granule, -1, axis=axis)
        networks = [n for n, there in ((fast, ~crosses), (slow, crosses)) if there.any()]
        mean = worst = None
        if torus is not None and not crosses.all():
            hops = hops_to_next(torus, places, axis)[~crosses]
            mean, worst = float(hops.mean()), int(hops.max())
        rings.append(AxisRing(name, size, ' + '.join(networks) if size > 1 else '-', mean, worst))
    return rings


def mesh_table(
    mesh: Mesh, *, wrap: Sequence[bool] | None = None, granule_size: int | None = None
) -> str:
    """Returns a table of a mesh: its devices and processes, and each axis with network and hops.

    Args as in `axis_rings`.
    """
    rows = [('axis', 'size', 'network', 'mean hops', 'worst hops')]
    for ring in axis_rings(mesh, wrap=wrap, granule_size=granule_size):
        moves = ring.size > 1 and ring.mean_hops is not None
        mean, worst = (f'{ring.mean_hops:.2f}', f'{ring.worst_hops}') if moves else ('-', '-')
        rows.append((ring.axis, str(ring.size), ring.network, mean, worst))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [describe_devices(mesh)]
    for row in rows:
        cells = map(str.format, ('{:<{}}', '{:>{}}', '{:<{}}', '{:>{}}', '{:>{}}'), row, widths)
        lines.append('  '.join(cells).rstrip())
    return '\n'.join(lines)


def describe_devices(mesh: Mesh) -> str:
    """The devices of a mesh in words: `16 TPU v4 devices, 4 processes of 4`."""
    processes = collections.Counter(d.process_index for d in mesh.devices.flat)
    kind = mesh.devices.flat[0].device_kind
    each = ' or '.join(map(str, sorted(set(processes.values()))))
    devices = f'{mesh.size} {"CPU" if kind == "cpu" else kind} device{"s" * (mesh.size > 1)}'
    several = f'{len(processes)} processes of {each}'
    return f'{devices}, {several if len(processes) > 1 else "1 process"}'


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


def _on_torus(mesh: Mesh, wrap: Sequence[bool] | None) -> tuple[Torus | None, np.ndarray]:
    """Returns the torus of each slice, or None if there is none, and places, of `(*mesh, 4)`."""
    devices = mesh.devices.ravel().tolist()
    on_torus = all(has_coords(d) for d in devices)
    if wrap is not None and (not on_torus or isinstance(wrap, str) or len(tuple(wrap)) != 3):
        raise ValueError(f'wrap={wrap!r} must be three booleans, for x, y and z, and needs TPUs')
    if not on_torus:
        return None, np.empty((*mesh.devices.shape, 0))
    places = np.array([(*d.coords, 0) for d in devices], dtype=np.int64)
    torus = torus_of(devices[0], (places.max(axis=0) - places.min(axis=0) + 1).tolist())
    if wrap is not None:
        torus = dataclasses.replace(torus, wrap=(*map(bool, wrap), False))
    return torus, places.reshape(*mesh.devices.shape, 4)
