"""Moves a traced function to another mesh with the same axes, without the function's own code.

A function that was written for one mesh names it in its constraints. Its trace is evaluated again,
equation by equation, with the other mesh in place of the first:

    sharding_constraint[sharding=NamedSharding(Mesh('data': 4), P('data'))]
    sharding_constraint[sharding=NamedSharding(Mesh('data': 16), P('data'))]

All shapes in a trace are global, so they stay, except inside `shard_map`: there, each device has a
part whose shape depends on the sizes of the axes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from meshwright import jax_private
from partitioning.products.flops import open_jaxpr


@dataclasses.dataclass(frozen=True)
class Move:
    """A mesh in place of all meshes that have the same axes.

    Attributes:
      mesh: the mesh to move to.
    """

    mesh: Mesh

    def sharding(self, x: Any) -> Any:
        """A sharding on the mesh, with the same spec; what is no NamedSharding stays."""
        if not isinstance(x, NamedSharding) or x.mesh.empty:
            return x
        mesh = self.of_mesh(x.mesh)
        return x if mesh is x.mesh else NamedSharding(mesh, x.spec, memory_kind=x.memory_kind)

    def placed(self, x: Any) -> Any:
        """A sharding of an argument or a result, on the devices of the mesh."""
        if not isinstance(x, NamedSharding) or self.of_mesh(x.mesh) is x.mesh:
            return x
        return NamedSharding(self.mesh, x.spec, memory_kind=x.memory_kind)

    def of_mesh(self, mesh: Any) -> Any:
        """The mesh in place of another one; meshes with other axes stay."""
        if mesh.empty or mesh.axis_names != self.mesh.axis_names:
            return mesh
        if isinstance(mesh, Mesh):
            return self.mesh
        return self.mesh.abstract_mesh.update(axis_types=mesh.axis_types)

    def value(self, x: Any, move_trace: Callable[[Any], Any] | None = None) -> Any:
        """A parameter of an equation on the mesh; traces in it are traced again by default."""
        if isinstance(x, NamedSharding):
            return self.sharding(x)
        if isinstance(x, Mesh | AbstractMesh):
            return self.of_mesh(x)
        if hasattr(x, 'eqns'):
            return (move_trace or self._traced_again)(x)
        if isinstance(x, tuple | list) and not hasattr(x, '_fields'):
            return type(x)(self.value(one, move_trace) for one in x)
        return x

    def _traced_again(self, jaxpr: Any) -> Any:
        moved = self.jaxpr(jaxpr)
        return moved if hasattr(jaxpr, 'jaxpr') else moved.jaxpr

    def function(self, jaxpr: Any) -> Callable[..., list[Any]]:
        """A function that does what a trace does, a Jaxpr or a ClosedJaxpr, on the mesh."""
        opened, consts = open_jaxpr(jaxpr)
        moved = opened.replace(eqns=[self._equation(e) for e in opened.eqns])
        return lambda *args: jax_private.evaluate(moved, consts, args)

    def jaxpr(self, jaxpr: Any) -> Any:
        """A trace of the same function on the mesh, a ClosedJaxpr."""
        avals = [self._struct(v.aval) for v in open_jaxpr(jaxpr)[0].invars]
        return jax.make_jaxpr(self.function(jaxpr))(*avals)

    def _equation(self, equation: Any) -> Any:
        if equation.primitive.name != 'shard_map':
            return jax_private.with_params(equation, self.value)
        check_sizes(equation, self.mesh)
        return jax_private.with_params(equation, self._value_inside)

    def _parts(self, jaxpr: Any) -> Any:
        """A trace inside `shard_map`, whose parts have the same shapes on the mesh.

        It is not traced again: its values vary over axes of the mesh, which only its
        equations know.
        """
        return jax_private.on_mesh(jaxpr, self.sharding, self._value_inside)

    def _value_inside(self, x: Any) -> Any:
        return self.value(x, self._parts)

    def _struct(self, aval: Any) -> Any:
        if not hasattr(aval, 'dtype'):
            return aval
        return jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            sharding=self.sharding(getattr(aval, 'sharding', None)),
            weak_type=getattr(aval, 'weak_type', False),
        )


def in_place_of_callers(mesh: Any) -> contextlib.AbstractContextManager[Any]:
    """Sets a mesh inside, if the caller has set another one with the same axes by `jax.set_mesh`.

    jax compiles a program only for the devices of the mesh that was set while it was traced.
    """
    callers = jax.sharding.get_mesh()
    if callers.axis_names != mesh.axis_names or callers.empty or not isinstance(mesh, Mesh):
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def check_sizes(equation: Any, mesh: Mesh) -> None:
    """Raises ValueError if a `shard_map` cannot be moved to a mesh of other sizes."""
    own = equation.params['mesh']
    if own.axis_names == mesh.axis_names and tuple(own.axis_sizes) != tuple(mesh.axis_sizes):
        before = ', '.join(f'{a}={n}' for a, n in zip(own.axis_names, own.axis_sizes, strict=True))
        after = ', '.join(f'{a}={n}' for a, n in zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        raise ValueError(
            f'shard_map was traced for a mesh of {before}, and each part has its shape from there: '
            f'make the function for the mesh of {after}, or give it these sizes by axes='
        )
