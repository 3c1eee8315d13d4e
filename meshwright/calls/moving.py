"""Moves a partitioned function and its arguments to another mesh."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from meshwright.calls.partitioned import PartitionedLike, PartitionerLike
from partitioning.hardware import default_options, option_values


def move_partitioner(partitioner: PartitionerLike, mesh: Mesh) -> PartitionerLike:
    """The same partitioner on another mesh.

    Raises:
      ValueError: if the partitioner cannot be moved.
    """
    with_mesh = getattr(partitioner, 'with_mesh', None)
    if with_mesh is None:
        raise ValueError(
            f'{type(partitioner).__name__} has no method with_mesh, so it cannot be moved to '
            'another machine: make it on the mesh of that machine, and leave out topology='
        )
    return with_mesh(mesh)


def move_function(
    moved: PartitionerLike, fn: PartitionedLike, mesh: Mesh, *, with_options: bool
) -> PartitionedLike:
    """Partitions a partitioned function again, by a partitioner on another mesh.

    Its layouts are moved by their specs. If it is compiled with the default options of its devices,
    it is compiled with the default options of the new devices.

    Args:
      moved: the partitioner on the other mesh.
      fn: the function.
      mesh: the mesh that it was partitioned on.
      with_options: whether the new compiler knows the options of the function.

    Raises:
      ValueError: if the new mesh cannot have its layouts.
    """
    settings = fn.settings.on_any_mesh()
    options = settings.compiler_options
    if options is not None and options == _default_values(mesh):
        options = _default_values(moved.mesh)
    return moved.partition(
        settings.fn,
        settings.in_axis_resources,
        settings.out_axis_resources,
        static_argnums=settings.static_argnums,
        donate_argnums=settings.donate_argnums,
        on_recompile=settings.on_recompile,
        compiler_options=options if with_options else None,
    )


def move_arguments(args: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
    """Arguments as ShapeDtypeStructs, whose NamedShardings have their specs on another mesh."""
    return tuple(jax.tree.map(lambda x: _abstract(x, mesh), arg) for arg in args)


def _abstract(x: Any, mesh: Mesh) -> Any:
    if not isinstance(x, jax.Array | jax.ShapeDtypeStruct):
        return x  # a number, or a static argument
    sharding = getattr(x, 'sharding', None)
    moved = NamedSharding(mesh, sharding.spec) if isinstance(sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=moved)


def _default_values(mesh: Any) -> dict[str, Any]:
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else ()
    return option_values(default_options(devices))
