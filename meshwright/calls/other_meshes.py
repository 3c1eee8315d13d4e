"""A layout in the axes of another mesh over the same devices.

Arrays of one program may be on several meshes. Over devices 0 to 7, the rows of

    P('x') on Mesh(x=8)    are laid out as    P(('a', 'b')) on Mesh(a=2, b=4)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from meshwright.jax_private import TracedCall
from partitioning.rules import MeshLike, as_tuple, axis_sizes, from_tuple

AnyMesh = TypeVar('AnyMesh', bound=Mesh | AbstractMesh)


def on_one_mesh(traced: TracedCall) -> TracedCall:
    """States the layouts of arguments and results in the axes of one mesh, as far as they can be.

    A function whose layouts are all on one mesh stays as it is.
    """
    stated = [s for s in (*traced.arguments, *traced.results) if isinstance(s, NamedSharding)]
    if len({tuple(s.mesh.shape.items()) for s in stated}) < 2:
        return traced
    mesh = finest_mesh([s.mesh for s in stated])

    def restate(sharding: Any) -> Any:
        spec = spec_on(sharding, mesh) if isinstance(sharding, NamedSharding) else None
        if spec is None:
            return sharding
        return NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)

    arguments, results = (tuple(map(restate, x)) for x in (traced.arguments, traced.results))
    return dataclasses.replace(traced, arguments=arguments, results=results)


def spec_on(sharding: NamedSharding, mesh: MeshLike) -> PartitionSpec | None:
    """The layout of a sharding in the axes of a mesh.

    Args:
      sharding: the sharding.
      mesh: the mesh; on other devices, its axes stand for those with the same names.

    Returns:
      None if the axes of the mesh cannot say it.
    """
    own, sizes = sharding.mesh, axis_sizes(mesh)
    used = [axis for entry in sharding.spec for axis in _axes(entry)]
    both = [m.devices for m in (own, mesh) if isinstance(m, Mesh)]
    same_devices = len(both) == 2 and {*both[0].flat} == {*both[1].flat}
    if all(axis in sizes for axis in used) and not (
        same_devices and any(sizes[axis] != own.shape[axis] for axis in used)
    ):
        return sharding.spec
    if not same_devices:
        return None
    entries = [_entry_on(own, _axes(entry), mesh) for entry in sharding.spec]
    known = [from_tuple(entry) for entry in entries if entry is not None]
    return PartitionSpec(*known) if len(known) == len(entries) else None


def finest_mesh(meshes: Sequence[AnyMesh]) -> AnyMesh:
    """The mesh among these with the most devices and axes, and with its devices if one has them."""

    def fineness(mesh: AnyMesh) -> tuple[int, int, bool]:
        axes = sum(size > 1 for size in mesh.shape.values())
        return mesh.size, axes, isinstance(mesh, Mesh)

    finest = max(meshes, key=fineness)
    return next((m for m in meshes if m == finest and isinstance(m, Mesh)), finest)


def _axes(entry: Any) -> tuple[str, ...]:
    return as_tuple(entry) if entry is None or isinstance(entry, str | tuple) else ()


def _entry_on(own: Any, axes: tuple[str, ...], mesh: Any) -> tuple[str, ...] | None:
    """The axes of a mesh along which a dimension has the same shards as along its own axes."""
    numbers = _shard_numbers(own, axes)
    wanted = np.vectorize(lambda device: numbers[device.id], otypes=[int])(mesh.devices)
    names = mesh.axis_names
    varying = tuple(name for i, name in enumerate(names) if np.any(np.diff(wanted, axis=i)))
    found = _shard_numbers(mesh, varying)
    alike = all(found[d.id] == n for d, n in zip(mesh.devices.flat, wanted.flat, strict=True))
    return varying if alike else None


def _shard_numbers(mesh: Mesh, axes: tuple[str, ...]) -> dict[int, int]:
    """Which shard of a dimension along these axes each device has, by the number of the device."""
    shape = mesh.devices.shape
    places = np.indices(shape)
    sizes = [mesh.shape[axis] for axis in axes]
    along = [places[mesh.axis_names.index(axis)] for axis in axes]
    numbers = np.ravel_multi_index(along, sizes) if axes else np.zeros(shape, int)
    return {d.id: int(n) for d, n in zip(mesh.devices.flat, numbers.flat, strict=True)}
