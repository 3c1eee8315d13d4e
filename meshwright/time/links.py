"""Describes the links over which the devices of a mesh exchange data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
from jax.sharding import Mesh

from partitioning.hardware import (
    Chip,
    chip_of,
    granules_of,
    has_coords,
    places_of,
    slice_bounds,
    torus_wrap,
)


@dataclasses.dataclass(frozen=True)
class Dimension:
    """The part of one dimension of a torus that a group of chips occupies.

    Attributes:
      size: the number of chips along it.
      closed: whether links close them into a ring.
      stride: the number of links between neighbours; this many groups share each link.
    """

    size: int
    closed: bool
    stride: int = 1

    @property
    def lanes(self) -> float:
        """The number of links over which a chip receives data at the same time.

        The ends of an open line receive everything over one link.
        """
        return (2 if self.closed and self.size > 2 else 1) / self.stride

    @property
    def hops(self) -> int:
        """The number of links between the chips that are farthest from each other."""
        return (self.size // 2 if self.closed else self.size - 1) * self.stride


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The connections within one group of devices that exchange data along some mesh axes.

    Attributes:
      size: the number of devices in the group.
      granules: the number of TPU slices or NVLink domains that they are in.
      cores: the number of devices of the group on each chip.
      dimensions: the part of the torus that the group occupies, for each dimension with several of
        its chips; empty for GPUs and for the two cores of a chip.
    """

    size: int
    granules: int = 1
    cores: int = 1
    dimensions: tuple[Dimension, ...] = ()

    @property
    def lanes(self) -> float:
        """The links over which a chip receives data at the same time, summed over dimensions."""
        return sum(dimension.lanes for dimension in self.dimensions)

    @property
    def hops(self) -> int:
        """The links between the chips that are farthest apart, summed over dimensions."""
        return sum(dimension.hops for dimension in self.dimensions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What the time of an exchange depends on: the chip, and where the devices of a mesh are.

    Attributes:
      chip: the chip.
      axes: the names of the mesh axes.
      places: the position of the chip of each device in its slice, of shape `(*mesh, 3)`; on GPUs,
        all are 0.
      granules: the index of each device's TPU slice or NVLink domain, in the shape of the mesh.
      bounds: the number of chips of a slice along x, y and z.
      wrap: for each of x, y and z, whether links close a slice into a ring.
      num_processes: the number of hosts.
      network_bandwidth: a chip's share of the network between granules in bytes/s, or None if it is
        not known.
    """

    chip: Chip
    axes: tuple[str, ...]
    places: np.ndarray
    granules: np.ndarray
    bounds: tuple[int, ...]
    wrap: tuple[bool, ...]
    num_processes: int
    network_bandwidth: float | None

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.granules.size

    @property
    def num_granules(self) -> int:
        """The number of TPU slices or NVLink domains."""
        return len(np.unique(self.granules))

    def links_along(self, axes: Iterable[str], places: Sequence[int] = ()) -> Links:
        """The links of the first device's group along some mesh axes; all groups are alike.

        Args:
          axes: the names of the axes.
          places: the numbers of the devices along the axes that are in the group; () for all.
        """
        chosen = set(axes)
        index = tuple(slice(None) if name in chosen else 0 for name in self.axes)
        members = list(places) or slice(None)
        positions = self.places[index].reshape(-1, self.places.shape[-1])[members]
        numbers = np.ravel(self.granules[index])[members]
        mine = np.unique(positions[numbers == numbers[0]], axis=0)
        granules = len(np.unique(numbers))
        return Links(
            size=len(positions),
            granules=granules,
            cores=max(1, len(positions) // granules // len(mine)),
            dimensions=self._dimensions(mine),
        )

    def _dimensions(self, chips: np.ndarray) -> tuple[Dimension, ...]:
        """The parts of the torus that chips occupy; `chips` has the position of each, [n, 3]."""
        found, sizes = [], []
        for positions, bound, wraps in zip(chips.T, self.bounds, self.wrap, strict=True):
            taken = np.unique(positions)
            sizes.append(len(taken))
            if len(taken) > 1:
                stride = int(np.diff(taken).min())
                closed = bool(wraps) and len(taken) * stride == bound
                found.append(Dimension(len(taken), closed, stride))
        if math.prod(sizes) != len(chips):  # a path that winds through the torus
            return (Dimension(len(chips), closed=False),)
        return tuple(found)


def describe_machine(mesh: Mesh) -> Machine | None:
    """Describes the machine of a mesh of real or described devices; None if its chip is unknown."""
    devices = mesh.devices.ravel().tolist()
    chip = chip_of(devices[0].device_kind)
    if chip is None:
        return None
    shape = mesh.devices.shape
    granules = granules_of(devices)
    number = {d.id: i for i, granule in enumerate(granules) for d in granule}
    places = np.zeros((len(devices), 3), dtype=np.int64)
    bounds = (1, 1, 1)
    if has_coords(devices[0]):
        places = places_of(devices)[:, :3]
        first = [p for p, d in zip(places, devices, strict=True) if number[d.id] == 0]
        spans = np.max(first, axis=0) - np.min(first, axis=0) + 1
        bounds = slice_bounds(devices[0]) or tuple(spans.tolist())
    return Machine(
        chip=chip,
        axes=tuple(map(str, mesh.axis_names)),
        places=places.reshape(*shape, 3),
        granules=np.array([number[d.id] for d in devices]).reshape(shape),
        bounds=bounds,
        wrap=torus_wrap(chip.device_kind, bounds),
        num_processes=len({d.process_index for d in devices}),
        network_bandwidth=chip.dcn_bandwidth,
    )
