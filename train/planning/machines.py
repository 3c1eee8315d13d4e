"""Described machines by name, and runs that are moved to them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from meshwright.calls.target import target_of_topology
from partitioning import MeshConfig
from partitioning.hardware import (
    Chip,
    JaxDevice,
    Topology,
    check_flags,
    describe_topology,
    parse_topology,
    stand_in_devices,
)
from partitioning.hardware.topology import split_slices
from train.config import TrainConfig
from train.errors import ConfigError


class NotInstalledError(ConfigError):
    """The compiler that describes a machine is not installed."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine, described by its name.

    Attributes:
      topology: one slice: a chip and its arrangement, 'v5p:4x4x4' or 'h100:2x8'.
      num_slices: the number of slices, which the data centre network joins.
      on_cpu: whether virtual CPU devices stand for its devices, so that its compiler need not be
        installed.
    """

    topology: str
    num_slices: int = 1
    on_cpu: bool = False

    def __str__(self) -> str:
        """The name as `parse_machine` reads it."""
        return f'{self.num_slices}x{self.topology}' if self.num_slices > 1 else self.topology

    @property
    def chip(self) -> Chip:
        """The kind of its chips."""
        return parse_topology(self.topology)[0]

    @property
    def num_devices(self) -> int:
        """The number of its devices, in all slices."""
        chip, shape = parse_topology(self.topology)
        return math.prod(shape) * chip.devices * self.num_slices

    def describe(self) -> Topology:
        """Returns its devices.

        Raises a NotInstalledError if the compiler that describes them is not installed, and a
        ValueError if no machine has this shape.
        """
        try:
            return describe_topology(self.topology, num_slices=self.num_slices)
        except RuntimeError as error:
            raise NotInstalledError(f'{self}: {error}') from error

    def devices(self) -> Sequence[JaxDevice]:
        """Returns its devices, or the virtual CPU devices that stand for them."""
        if self.on_cpu:
            return self.make_mesh(MeshConfig(axes={'data': -1})).devices.ravel().tolist()
        return self.describe().devices

    def make_mesh(self, source: MeshConfig) -> Mesh:
        """Makes a mesh of virtual CPU devices as `source` says, for a machine that is `on_cpu`."""
        return target_of_topology(self.topology, source, on_cpu=True).mesh


def parse_machine(text: str, *, on_cpu: bool = False) -> Machine:
    """Returns the machine of a name such as 'v5p:4x4x4', or '2xv5e:16x16' for two slices.

      on_cpu: whether virtual CPU devices stand for its devices.

    Raises:
      ValueError: if the chip is unknown, or its machines are written in another way.
    """
    topology, slices = split_slices(text)
    if slices < 1:
        raise ConfigError(f'topology {text!r} has 0 slices: write {topology!r} for one slice')
    parse_topology(topology)
    if on_cpu and slices > 1:
        raise ConfigError(
            f'--on_cpu compiles for one slice, because CPU devices show no data centre network: '
            f'write {topology!r} in place of {text!r}, or remove --on_cpu'
        )
    return Machine(topology, slices, on_cpu)


def check_compilers(machines: Iterable[Machine]) -> None:
    """Checks that the compilers of machines accept the flags of the environment.

    Raises a ValueError if one of them does not, and would end this process.
    """
    for platform in sorted({machine.chip.platform for machine in machines if not machine.on_cpu}):
        check_flags(platform)


@contextlib.contextmanager
def stand_in(machine: Machine) -> Iterator[None]:
    """Lets settings that are made in the body find the devices of the machine, as if jax had them.

    Their sizes are then checked against the machine, not against this computer.
    """
    with stand_in_devices(machine.devices()):
        yield


def move_to(config: TrainConfig, machine: Machine, **changes: Any) -> TrainConfig:
    """Returns the settings of a run on another machine, without its evaluations.

    An axis of size -1 takes the devices that the other axes leave. The settings are checked once,
    with all changes. Raises a NotInstalledError if the compiler that describes the machine is not
    installed, and a ConfigError or ValueError if the mesh, the state or the batch cannot be divided
    there, or if the partitioner does not say how its mesh was made.

    Args:
      machine: the machine, which replaces the machine of the mesh.
      **changes: other settings to change, such as `num_microbatches`.
    """
    partitioner = changes.pop('partitioner', config.partitioner)
    source, with_mesh = partitioner.mesh_source, getattr(partitioner, 'with_mesh', None)
    if isinstance(source, Mesh):
        source = MeshConfig(axes=dict(source.shape))
    if not isinstance(source, MeshConfig) or with_mesh is None:
        raise ConfigError(
            f'the mesh of {type(partitioner).__name__} cannot be moved to {machine}: describe it '
            'with mesh=MeshConfig(...) of a PjitPartitioner'
        )
    of_here: dict[str, Any] = {'devices': None, 'backend': None, 'process_is_granule': None}
    described = dataclasses.replace(
        source, topology=machine.topology, num_slices=machine.num_slices, **of_here
    )
    if not machine.on_cpu:
        machine.describe()  # says which compiler is not installed
    there = machine.make_mesh(described) if machine.on_cpu else described
    return dataclasses.replace(config, partitioner=with_mesh(there), evaluators={}, **changes)
