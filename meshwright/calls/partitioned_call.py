"""A call of a partitioned function, and the same call on another mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshwright.calls.held import HeldArray, find_held
from meshwright.calls.partitioned import PartitionedLike, PartitionerLike
from meshwright.jax_private import TracedCall, read_trace
from partitioning.hardware import default_options, option_values
from partitioning.mesh import MeshConfig
from partitioning.rules import LogicalAxisRules, as_tuple


@dataclasses.dataclass(frozen=True)
class PartitionedCall:
    """A call of a partitioned function: a `Call` that knows names and rules.

    Attributes:
      fn: the function.
      args: its arguments, abstract or not.
    """

    fn: PartitionedLike
    args: tuple[Any, ...]

    @property
    def partitioner(self) -> PartitionerLike:
        """The partitioner of the function."""
        return self.fn.partitioner

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.fn.boundary.arguments.function

    @property
    def mesh(self) -> Mesh:
        """The mesh of the function."""
        return self.partitioner.mesh

    @property
    def mesh_source(self) -> Mesh | AbstractMesh | MeshConfig:
        """The mesh, or its description, which may need more devices than there are."""
        return self.partitioner.mesh_source

    @property
    def rules(self) -> LogicalAxisRules:
        """The logical axis rules under which the function is traced."""
        return self.partitioner.logical_axis_rules

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The mesh axes of the batch; empty if the partitioner has none."""
        try:
            spec = self.partitioner.data_partition_spec
        except ValueError:
            return ()
        return as_tuple(spec[0]) if len(spec) else ()

    def argument_name(self, index: int) -> str:
        """The name of an argument."""
        return self.fn.boundary.arguments.name(index)

    def trace(self) -> TracedCall:
        """Traces the function."""
        args = move_arguments(self.args, self.fn.boundary.mesh)
        return read_trace(self.fn.trace(*args))

    def held(self, traced: TracedCall) -> tuple[HeldArray, ...]:
        """The arrays of the arguments."""
        return find_held(self.fn.boundary, self.args, self.partitioner, self.batch_axes)

    def with_args(self, args: tuple[Any, ...]) -> Self:
        """The call with other arguments."""
        return dataclasses.replace(self, args=args)

    def on(self, mesh: Mesh, *, with_options: bool = True) -> Self:
        """The call on another mesh, by a partitioner on that mesh.

        Layouts are moved by their specs. A function that is compiled with the default options of
        its devices is then compiled with options for the new devices.

        Args:
          mesh: the mesh.
          with_options: whether the new compiler knows the options of the function.

        Raises:
          ValueError: if the partitioner cannot be moved, or the mesh cannot have the layouts.
        """
        settings = self.fn.settings.on_any_mesh()
        options = settings.compiler_options
        if options is not None and options == _default_values(self.mesh_source):
            options = _default_values(mesh)
        moved = move_partitioner(self.partitioner, mesh).partition(
            settings.fn,
            settings.in_shardings,
            settings.out_shardings,
            static_argnums=settings.static_argnums,
            donate_argnums=settings.donate_argnums,
            on_recompile=settings.on_recompile,
            compiler_options=options if with_options else None,
        )
        return dataclasses.replace(self, fn=moved, args=move_arguments(self.args, mesh))


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
