"""linen's boxes for axis names, right under `python -O`, negative axes and Explicit meshes.

A module of its own because it imports flax. The boxes of flax itself remove a dimension inside an
`assert`, which `python -O` leaves out, take a negative index for a place before the last, and fail
where mesh axes are Explicit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import errors
from flax.core import spmd
from jax.sharding import AxisType, Mesh, NamedSharding

from partitioning.constraints import with_sharding_constraint
from partitioning.rules import (
    AxisRules,
    LogicalAxisRules,
    add_axis,
    boundary_spec,
    check_rules,
    describe_axes,
    remove_axis,
    to_spec,
    try_resolve,
)


class _Named:
    """What both boxes do in their own way."""

    names: Any
    value: Any
    mesh: Mesh | None
    replace: Callable[..., Any]
    _axes_as_names: bool

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """With the name of a new dimension at `index`; see `partitioning.rules.add_axis`."""
        return self.replace(names=tuple(add_axis(self.names, index, self._name(params))))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """Without the name at `index`; see `partitioning.rules.remove_axis`."""
        return self.replace(names=tuple(remove_axis(self.names, index, self._name(params))))

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The array, laid out by its names, over Auto or Explicit axes of the mesh around.

        Without a mesh around it is laid out over the box's own, if it has one. Names that cannot
        be resolved are left to where the state is: there the path is known.

        Raises:
          ValueError: the box is for another mesh than that around.
        """
        around = jax.sharding.get_abstract_mesh()
        mesh = around if self.mesh is None else self.mesh
        rules = getattr(self, 'rules', None) or spmd.get_logical_axis_rules()
        if not apply_constraint or mesh.empty or not (rules or self._axes_as_names):
            return self.value
        if self.mesh is not None and not around.empty and self.mesh.abstract_mesh != around:
            raise ValueError(
                f'a box with names {self.names} is for the mesh {describe_axes(mesh.shape)}, but '
                f'the mesh around is {describe_axes(around.shape)}, or its axes are of other types'
            )
        resolved, problems = try_resolve(
            self.names,
            AxisRules(rules),
            mesh=mesh,
            shape=self.value.shape,
            axes_as_names=self._axes_as_names,
        )
        if problems:
            return self.value
        if not around.empty:
            return with_sharding_constraint(self.value, to_spec(resolved))
        sharding = NamedSharding(mesh, boundary_spec(to_spec(resolved)))
        if AxisType.Explicit in mesh.axis_types:
            return jax.sharding.reshard(self.value, sharding)
        return jax.lax.with_sharding_constraint(self.value, sharding)

    def _name(self, params: dict[Any, Any]) -> str | None:
        if nn.PARTITION_NAME not in params:
            raise errors.PartitioningUnspecifiedError(self)
        return params[nn.PARTITION_NAME]


class Partitioned(_Named, nn.Partitioned):
    """`flax.linen.Partitioned`, names of mesh axes, whose `remove_axis` undoes its `add_axis`.

    Usage:
      kernel = Partitioned(jnp.zeros((8, 4)), ('data', 'model'))
      stacked = kernel.add_axis(0, {nn.PARTITION_NAME: None})  # (None, 'data', 'model')
    """

    _axes_as_names = True


class LogicallyPartitioned(_Named, nn.LogicallyPartitioned):
    """`flax.linen.LogicallyPartitioned` whose `remove_axis` undoes its `add_axis`.

    Usage:
      kernel = LogicallyPartitioned(jnp.zeros((8, 4)), ('embed', 'mlp'))
      stacked = kernel.add_axis(0, {nn.PARTITION_NAME: 'layers'})  # ('layers', 'embed', 'mlp')
    """

    _axes_as_names = False


def with_partitioning(
    init: Callable[..., jax.Array], names: Sequence[Any], mesh: Mesh | None = None
) -> Callable[..., Partitioned]:
    """An initializer whose array comes in a Partitioned with these mesh axes.

    Args:
      init: the initializer.
      names: a mesh axis, several in a tuple, or None, one a dimension.
      mesh: the only mesh that the array is for; None: any.

    Raises:
      ValueError: `names` is no tuple of them.
    """
    return _boxed(init, functools.partial(Partitioned, names=_checked(names), mesh=mesh))


def with_logical_partitioning(
    init: Callable[..., jax.Array],
    names: Sequence[str | None],
    mesh: Mesh | None = None,
    rules: LogicalAxisRules | None = None,
) -> Callable[..., LogicallyPartitioned]:
    """An initializer whose array comes in a LogicallyPartitioned with these names.

    Args:
      init: the initializer.
      names: a logical axis name or None, one a dimension.
      mesh: the only mesh that the array is for; None: any.
      rules: of this array alone, tried before all others.

    Raises:
      ValueError: `names` is no tuple of them; `rules` are none.
    """
    own = None if rules is None else check_rules(rules)
    box = functools.partial(LogicallyPartitioned, names=_checked(names), mesh=mesh, rules=own)
    return _boxed(init, box)


def _checked(names: Any) -> tuple[Any, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f'{names!r} are no names: write a tuple, such as ({names!r},)')
    return tuple(names)


def _boxed(init: Callable[..., jax.Array], box: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def boxed(*args: Any, **kwargs: Any) -> Any:
        return box(init(*args, **kwargs))

    return boxed
