"""The order of devices in a mesh, by their links, and how far apart neighbours on its axes are."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import math
import types
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from partitioning.hardware import (
    JaxDevice,
    granules_of,
    has_coords,
    places_of,
    slice_bounds,
    slice_of,
    torus_wrap,
)
from partitioning.mesh.torus import Torus, hops_to_next, mean_hops, ring_order, snake

_LOGGER = logging.getLogger(__name__)
TWO_CORES = ('TPU v2', 'TPU v3')  # each core is a device
_TRAYS = ('TPU v5 lite', 'TPU v5e', 'TPU v6 lite', 'TPU7x')  # jax has special rings for them
_LARGEST_TRAY = 32  # devices; for more, jax assigns whole dimensions only and has no rings
# The ring of 2 x 2 x 2 chips, numbered with x fastest and z slowest; jax before 0.11 lacks it.
_V5P_CUBE_RING = (0, 1, 3, 2, 6, 7, 5, 4)


def order_devices(devices: Sequence[JaxDevice], axis_sizes: Sequence[int]) -> np.ndarray:
    """Returns the devices of one TPU slice, or one group of GPUs or CPUs, of shape `axis_sizes`.

    GPUs and CPUs are ordered by process and id. TPUs are in the order of
    `jax.experimental.mesh_utils.create_device_mesh` if it has one, and otherwise form the shortest
    rings of the torus; later axes have more traffic. If chips are missing from the box that the
    TPUs span, their order follows a path that winds through the box.
    """
    shape = tuple(axis_sizes)
    if not has_coords(devices[0]):
        by_process = sorted(devices, key=lambda d: (d.process_index, d.id))
        return as_array(by_process).reshape(shape)
    places = places_of(devices)
    bounds = tuple((places.max(axis=0) + 1).tolist())
    if math.prod(bounds) != len(devices):
        _LOGGER.warning(
            '%d TPU devices do not fill the %s box that they span: their mesh winds through it, '
            'and its rings have detours',
            len(devices),
            'x'.join(map(str, bounds)),
        )
        rank = np.empty(bounds, dtype=np.int64)
        rank[tuple(snake(bounds).T)] = np.arange(rank.size)
        winding = np.argsort(rank[tuple(places.T)], kind='stable')
        return as_array(devices)[winding].reshape(shape)
    grid = np.empty(bounds, dtype=object)
    grid[tuple(places.T)] = as_array(devices)
    return grid.reshape(-1)[_order_on_torus(grid, shape)]


def check_same_size(granules: Sequence[Sequence[JaxDevice]]) -> None:
    """Raises ValueError if the groups differ in size, so that a mesh cannot hold them."""
    sizes = [len(granule) for granule in granules]
    if len(set(sizes)) > 1:
        raise ValueError(
            f'the slices (or processes) have unequal sizes, {sizes} devices: choose equal ones '
            'with devices='
        )


def best_grid(
    devices: Sequence[JaxDevice], sizes: Sequence[int], granule_size: int | None = None
) -> np.ndarray:
    """Returns devices, of shape `sizes`, whose last axes stay in a granule as far as it reaches."""
    granules = granules_of(devices, granule_size=granule_size)
    if has_coords(devices[0]):
        check_same_size(granules)
    if len(granules) == 1 or len({len(granule) for granule in granules}) > 1:
        return order_devices(devices, sizes)
    within: list[int] = []
    left = len(granules[0])
    for size in reversed(sizes):
        within.insert(0, math.gcd(size, left))
        left //= within[0]
    over = [size // inner for size, inner in zip(sizes, within, strict=True)]
    return join_blocks([order_devices(granule, within) for granule in granules], over)


def join_blocks(blocks: Sequence[np.ndarray], over: Sequence[int]) -> np.ndarray:
    """Joins the devices of each granule, all of one shape, with `over` blocks along each axis."""
    shape = blocks[0].shape
    n = len(shape)
    interleaved = [axis for pair in zip(range(n), range(n, 2 * n), strict=True) for axis in pair]
    sizes = [outer * inner for outer, inner in zip(over, shape, strict=True)]
    return np.stack(blocks).reshape(*over, *shape).transpose(interleaved).reshape(sizes)


def as_array(devices: Sequence[JaxDevice]) -> np.ndarray:
    """Returns a one-dimensional array of devices."""
    array = np.empty(len(devices), dtype=object)
    array[:] = devices
    return array


def torus_of(device: JaxDevice, bounds: Sequence[int]) -> Torus:
    """Returns the torus of a box of (x, y, z, cores) with this device in it.

    A dimension closes to a ring if it does so in the whole slice and the box spans all of it.
    """
    x, y, z, cores = bounds
    whole = slice_bounds(device) or (x, y, z)
    closed = torus_wrap(device.device_kind, whole)
    wrap = [c and b == w for c, b, w in zip(closed, (x, y, z), whole, strict=True)]
    return Torus(bounds=(x, y, z, cores), wrap=(*wrap, False), hops=(1, 1, 1, 0))


def _order_on_torus(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns indices into a flattened grid (x, y, z, core) of devices, as an array of `shape`."""
    torus, kind = torus_of(grid.flat[0], grid.shape), grid.flat[0].device_kind
    theirs = _jax_order(grid, shape)
    if theirs is None:
        return ring_order(torus, shape, whole_row_major=kind not in TWO_CORES)
    trays = kind in TWO_CORES or (kind in _TRAYS and grid.size <= _LARGEST_TRAY)
    # Users of jax know the order of these shapes, even if it is not the shortest ring.
    known = kind != 'TPU7x' and grid.size == 8 and shape == (2, 4)
    if not trays or (8 in (grid.size, shape[-1]) if kind in TWO_CORES else known):
        return theirs
    # jax's order of a tray suits one mesh shape only, so ours may have shorter rings.
    ours = ring_order(torus, shape, whole_row_major=False)
    pairs = list(zip(mean_hops(torus, ours), mean_hops(torus, theirs), strict=True))
    better = all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)
    return ours if better else theirs


def _jax_order(grid: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    """Returns the order of `create_device_mesh`, or None if it has none for this box."""
    kind, (x, y, _, cores) = grid.flat[0].device_kind, grid.shape
    by_rows = np.arange(grid.size).reshape(grid.shape).transpose(2, 1, 0, 3).ravel()
    if kind in ('TPU v5', 'TPU v5p') and grid.shape == (2, 2, 2, 1):
        return by_rows[list(_V5P_CUBE_RING)].reshape(shape)
    if cores == 2 and kind not in (*TWO_CORES, 'TPU7x'):
        return None  # jax expects one device per chip
    if kind in TWO_CORES and (x % 2 or y % 2):
        return None  # jax would mistake these eight devices for a tray of 2 x 2 chips
    if grid.size == max(grid.shape) == 8:
        return None  # jax would mistake these eight chips for a tray of 2 x 4
    if grid.size > _LARGEST_TRAY and kind not in TWO_CORES:
        # jax has an order only for axes that take whole dimensions.
        numbers = range(len(grid.shape) + 1)
        some = itertools.chain.from_iterable(itertools.combinations(grid.shape, n) for n in numbers)
        if not {*map(math.prod, some)}.issuperset(shape):
            return None
    from jax.experimental import mesh_utils

    # Some of jax's rings rely on the order of jax.devices() on a pod, and on coordinates from 0.
    processes = np.array([d.process_index for d in grid.flat])
    pod = by_rows[np.argsort(processes[by_rows], kind='stable')]
    places = np.stack(np.unravel_index(pod, grid.shape), axis=-1).tolist()
    chips = [  # the attributes of devices that jax reads, and our index
        types.SimpleNamespace(
            platform='tpu', device_kind=kind, coords=(x, y, z), core_on_chip=core, index=index
        )
        for index, (x, y, z, core) in zip(pod.tolist(), places, strict=True)
    ]
    try:
        ordered = mesh_utils.create_device_mesh(shape, chips)
    except NotImplementedError:  # an axis would have to split a dimension
        return None
    return np.array([chip.index for chip in ordered.flat]).reshape(shape)


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
    torus, places = _on_torus(mesh)
    if wrap is not None:
        if torus is None or isinstance(wrap, str) or len(tuple(wrap)) != 3:
            raise ValueError(
                f'wrap={wrap!r} must be three booleans, for x, y and z, and needs TPUs'
            )
        torus = dataclasses.replace(torus, wrap=(*map(bool, wrap), False))
    fast, slow = 'NVLink' if devices[0].platform == 'gpu' else 'memory', 'network'
    if torus is not None:
        fast, slow = 'ICI', 'DCN'
    rings = []
    for axis, (name, size) in enumerate(mesh.shape.items()):
        crosses = granule != np.roll(granule, -1, axis=axis)
        networks = [n for n, there in ((fast, ~crosses), (slow, crosses)) if there.any()]
        mean = worst = None
        if torus is not None and not crosses.all():
            hops = hops_to_next(torus, places.reshape(*crosses.shape, 4), axis)[~crosses]
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
    torus, inside = _on_torus(mesh)
    places = tuple(map(tuple, np.column_stack([slices, inside]).tolist()))
    if torus is None:
        return Placement(bounds=(), wrap=(), places=places)
    return Placement(bounds=torus.bounds[:3], wrap=torus.wrap[:3], places=places)


def _on_torus(mesh: Mesh) -> tuple[Torus | None, np.ndarray]:
    """Returns the torus of each slice, or None if there is none, and the places of all devices."""
    devices = mesh.devices.ravel().tolist()
    places = places_of(devices)
    if not has_coords(devices[0]):
        return None, places
    return torus_of(devices[0], (places.max(axis=0) + 1).tolist()), places
