"""The described machine of a dry run, and which of its processes the script is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
from jax.sharding import Mesh, Sharding

from partitioning.hardware import JaxDevice, Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A described machine, as the script sees it.

    Attributes:
      topology: the machine.
      process: which of the machine's processes the script is; None if it is one process that has
        all devices.
    """

    topology: Topology
    process: int | None = None

    def __post_init__(self) -> None:
        count = self.topology.num_processes
        if self.process is not None and not 0 <= self.process < count:
            known = (
                '1 process, so it must be 0'
                if count == 1
                else (f'{count} processes, so it must be from 0 to {count - 1}')
            )
            raise ValueError(f'--process={self.process}: {self.topology.name} has {known}')

    @property
    def devices(self) -> tuple[JaxDevice, ...]:
        """All devices."""
        return self.topology.devices

    @functools.cached_property
    def _set(self) -> frozenset[JaxDevice]:
        return frozenset(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """All devices along one axis, for messages about the machine."""
        return Mesh(np.array(self.devices), ('devices',))

    @property
    def platform(self) -> str:
        """The platform of the devices: 'tpu' or 'gpu'."""
        return self.devices[0].platform

    @property
    def process_index(self) -> int:
        """The index of the script's process."""
        return self.process or 0

    @property
    def process_count(self) -> int:
        """How many processes the script sees."""
        return 1 if self.process is None else self.topology.num_processes

    def is_local(self, device: JaxDevice) -> bool:
        """Whether a device belongs to the script's process."""
        return self.process is None or device.process_index == self.process

    def local(self, devices: Iterable[JaxDevice]) -> list[JaxDevice]:
        """Those of some devices that belong to the script's process, in their order."""
        return [device for device in devices if self.is_local(device)]

    def has(self, device: Any) -> bool:
        """Whether something is a device of this machine."""
        return device in self._set

    def holds(self, sharding: Any) -> bool:
        """Whether a sharding lays arrays out on this machine."""
        if not isinstance(sharding, Sharding):
            return False
        devices = getattr(sharding, 'device_set', ())
        return any(device in self._set for device in devices)
