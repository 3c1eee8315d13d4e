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
from partitioning.rules import MeshLike, axis_sizes, from_tuple, sharding_axes

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
    used = [sharding_axes(entry) for entry in sharding.spec]
    names = [axis for axes in used for axis in axes]
    if all(sizes.get(axis) == own.shape[axis] for axis in names):
        return sharding.spec
    if not (isinstance(own, Mesh) and isinstance(mesh, Mesh) and _in_same_order(own, mesh)):
        return sharding.spec if all(axis in sizes for axis in names) else None
    found = [_axes_on(own, axes, mesh) for axes in used]
    known = [from_tuple(axes) for axes in found if axes is not None]
    return PartitionSpec(*known) if len(known) == len(found) else None


def finest_mesh(meshes: Sequence[AnyMesh]) -> AnyMesh:
    """The mesh among these with the most devices and axes, and with its devices if one has them."""

    def fineness(mesh: AnyMesh) -> tuple[int, int, bool]:
        axes = sum(size > 1 for size in mesh.shape.values())
        return mesh.size, axes, isinstance(mesh, Mesh)

    finest = max(meshes, key=fineness)
    return next((m for m in meshes if m == finest and isinstance(m, Mesh)), finest)


def _in_same_order(own: Mesh, mesh: Mesh) -> bool:
    """Whether meshes have the same devices in one order, which jax asks of a function's arrays."""
    return np.array_equal(own.devices.ravel(), mesh.devices.ravel())


def _axes_on(own: Mesh, axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...] | None:
    """The axes of a mesh along which a dimension has the same shards as along its own axes."""
    numbers = _shard_numbers(own, axes)
    placed = numbers.reshape(mesh.devices.shape)
    names = enumerate(mesh.axis_names)
    varying = tuple(name for i, name in names if np.any(np.diff(placed, axis=i)))
    return varying if np.array_equal(numbers, _shard_numbers(mesh, varying)) else None


def _shard_numbers(mesh: Mesh, axes: tuple[str, ...]) -> np.ndarray:
    """Which shard of a dimension along these axes each device has, in the order of the devices."""
    places = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1)
    along = tuple(places[mesh.axis_names.index(axis)] for axis in axes)
    sizes = tuple(mesh.shape[axis] for axis in axes)
    return np.ravel_multi_index(along, sizes) if axes else np.zeros(mesh.size, int)
