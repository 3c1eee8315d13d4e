"""The machine of a forecast: its mesh, its name, and the compiler that is used for it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from importlib import metadata
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh

from meshwright.jax_private import make_cpu_devices
from partitioning.hardware import (
    Chip,
    JaxDevice,
    chip_of,
    describe_topology,
    has_coords,
    num_slices as count_slices,
    parse_topology,
    slice_bounds,
    slice_of,
)
from partitioning.mesh import MeshConfig
from partitioning.rules import describe_axes

# The compiler that the figures come from. 'cpu' compiles for virtual CPU devices in place of the
# machine. 'none' compiles nothing: the figures are derived from the traced function.
BackEnd = Literal['tpu', 'gpu', 'cpu', 'none']

_PACKAGES = {
    'tpu': ('libtpu', 'libtpu-nightly'),
    'gpu': ('jax-cuda13-plugin', 'jax-cuda12-plugin'),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A machine, with the mesh that a function runs on.

    Attributes:
      topology: its name, 'v5p:4x4x4'.
      num_slices: its number of slices.
      chip: its chip, or None for chips without data.
      mesh: the mesh, of devices that can be compiled for.
      back_end: the compiler for these devices.
      version: its name and version.
      slices: the number of slices along axes that span several, which CPU devices do not show.
    """

    topology: str
    num_slices: int
    chip: Chip | None
    mesh: Mesh
    back_end: BackEnd
    version: str
    slices: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_stand_in(self) -> bool:
        """Whether virtual CPU devices stand for the devices of another machine."""
        return self.back_end == 'cpu' and self.chip is not None


def target_of_mesh(mesh: Mesh | AbstractMesh) -> Target:
    """The machine of a mesh of present or described devices.

    Raises:
      ValueError: if the mesh has no devices.
    """
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            f'the mesh {describe_axes(mesh)} has no devices to compile for: name a machine, such '
            "as topology='v5p:4x4x4'"
        )
    devices = mesh.devices.ravel().tolist()
    platform = devices[0].platform
    back_end: BackEnd = platform if platform in ('tpu', 'gpu') else 'cpu'
    return Target(
        topology=_name_of(devices),
        num_slices=count_slices(devices) if has_coords(devices[0]) else 1,
        chip=chip_of(devices[0].device_kind),
        mesh=mesh,
        back_end=back_end,
        version=version_of(back_end),
    )


def target_of_topology(
    name: str,
    source: Mesh | AbstractMesh | MeshConfig,
    *,
    num_slices: int = 1,
    axes: Mapping[str, int] | None = None,
    on_cpu: bool = False,
) -> Target:
    """The machine of a name, with a mesh that has the axes of another mesh.

    Args:
      name: the name, as for `describe_topology`.
      source: the mesh or description of a mesh that has the axes.
      num_slices: the number of slices.
      axes: the sizes of the axes in place of those in `source`; one may be -1.
      on_cpu: whether virtual CPU devices stand for the machine in any case. They also do if the
        compiler of the machine is not installed.

    Raises:
      ValueError: if the name is of no known machine, or if the axes do not fit the machine.
    """
    chip, shape = parse_topology(name)
    try:
        described = None if on_cpu else describe_topology(name, num_slices=num_slices)
    except RuntimeError:  # the compiler of the machine is not installed
        described = None
    config = _config(source, name, num_slices, axes)
    back_end: BackEnd = 'cpu'
    try:
        if described is None:
            topology = f'{chip.name}:{"x".join(map(str, shape))}'
            count = math.prod(shape) * chip.devices * num_slices
            mesh, slices = _stand_in(config, count, num_slices)
        else:
            back_end = 'tpu' if chip.platform == 'tpu' else 'gpu'
            topology, mesh, slices = described.name, config.build(), {}
    except ValueError as error:
        if axes is not None:
            raise
        raise ValueError(f'{name}: {error}; give its mesh as axes={{...}}') from None
    return Target(
        topology=topology,
        num_slices=num_slices,
        chip=chip,
        mesh=mesh,
        back_end=back_end,
        version=version_of(back_end),
        slices=slices,
    )


def version_of(back_end: BackEnd) -> str:
    """The name and version of a compiler: 'libtpu 0.0.52'."""
    for package in _PACKAGES.get(back_end, ()):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f'{package} {metadata.version(package)}'
    jaxlib = f'jaxlib {metadata.version("jaxlib")}'
    return f'jax {jax.__version__}, not compiled' if back_end == 'none' else f'{jaxlib} for CPUs'


def _config(source: Any, name: str, num_slices: int, axes: Mapping[str, int] | None) -> MeshConfig:
    """The description of a mesh on a machine, with the axes of another one."""
    changes: dict[str, Any] = {'topology': name, 'num_slices': num_slices}
    if axes is not None:
        changes['axes'] = axes
    if isinstance(source, MeshConfig):
        changes |= {'devices': None, 'backend': None, 'granule_size': None}
        return dataclasses.replace(source, **changes)
    return MeshConfig(**{'axes': dict(source.shape), 'axis_types': source.axis_types, **changes})


def _stand_in(config: MeshConfig, count: int, num_slices: int) -> tuple[Mesh, dict[str, int]]:
    """A mesh of virtual CPU devices, and the number of slices along its axes.

    Raises:
      ValueError: if the axes do not fit the number of devices.
    """
    devices = _cpu_devices(count)
    slice_axis = config.slice_axis
    plain = dataclasses.replace(config, topology=None, num_slices=None, devices=devices, dcn=None)
    over = {} if config.dcn is None else dict(config.dcn)
    if over or (num_slices > 1 and slice_axis is not None):
        over = {k: n for k, n in over.items() if n != 1} or {str(slice_axis): num_slices}
        over = {k: num_slices if n == -1 else n for k, n in over.items()}
        inner = dict(config.axes)
        known = math.prod(n for n in inner.values() if n != -1)
        inner = {k: count // num_slices // known if n == -1 else n for k, n in inner.items()}
        front = {k: 1 for k in over if k not in inner}
        whole = {k: n * over.get(k, 1) for k, n in {**front, **inner}.items()}
        plain = dataclasses.replace(plain, axes=whole, slice_axis=None)
    plain = dataclasses.replace(plain, order='best', model_parallel_submesh=None)
    mesh = plain.build()
    if num_slices > 1 and not over:  # the first axes span the slices
        over, left = {}, num_slices
        for axis, size in mesh.shape.items():
            over[axis] = math.gcd(size, left)
            left //= over[axis]
    return mesh, {axis: n for axis, n in over.items() if n > 1 and num_slices > 1}


# jax keeps what it compiles by device, so equal ones are made once.
_CLIENTS: dict[int, list[JaxDevice]] = {}


def _cpu_devices(count: int) -> list[JaxDevice]:
    """Virtual CPU devices, in a client of their own if JAX has fewer."""
    here = jax.devices('cpu')
    if len(here) >= count:
        return list(here[:count])
    if count not in _CLIENTS:
        _CLIENTS[count] = make_cpu_devices(count)
    return list(_CLIENTS[count])


def _name_of(devices: list[JaxDevice]) -> str:
    chip = chip_of(devices[0].device_kind)
    kind = chip.name if chip else devices[0].device_kind.lower().replace(' ', '-')
    if has_coords(devices[0]) and (bounds := slice_bounds(devices[0])) is not None:
        shown = bounds[:2] if chip is not None and chip.dimensions == 2 else bounds
        return f'{kind}:{"x".join(map(str, shown))}'
    processes = len({(slice_of(d), d.process_index) for d in devices})
    if chip is not None and len(devices) % processes == 0:
        return f'{kind}:{processes}x{len(devices) // processes}'
    return f'{kind}:{len(devices)}'
