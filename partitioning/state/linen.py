"""linen boxes that work under `python -O`, with negative axes and with Explicit mesh axes.

The boxes of flax remove a dimension inside an `assert`, which `python -O` skips; they insert at a
negative index as lists do, not as arrays do; and they fail under Explicit mesh axes. This module
imports flax, so `import partitioning` loads it on first use only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
from flax import errors
from flax.core import spmd
from jax.sharding import Mesh

from partitioning.constraints import lay_out
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


class _Box:
    """The methods in which both boxes differ from flax's."""

    names: Any
    value: Any
    mesh: Mesh | None
    replace: Callable[..., Any]
    _axes_as_names: bool

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """A box with one more name at `index`; see `partitioning.add_axis`."""
        return self.replace(names=tuple(add_axis(self.names, index, self._name(params))))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """A box without the name at `index`; see `partitioning.remove_axis`."""
        return self.replace(names=tuple(remove_axis(self.names, index, self._name(params))))

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The array, laid out by its names over the current mesh.

        Without a current mesh, it is laid out over the mesh of the box, if there is one. An array
        whose names cannot be resolved is returned unchanged: the error is raised where the whole
        state is resolved, with the path of the array.

        Args:
          apply_constraint: False returns the array unchanged.

        Raises:
          ValueError: if the mesh of the box is not the current mesh.
        """
        current = jax.sharding.get_abstract_mesh()
        mesh = current if self.mesh is None else self.mesh
        rules = getattr(self, 'rules', None) or spmd.get_logical_axis_rules()
        if not apply_constraint or mesh.empty or not (rules or self._axes_as_names):
            return self.value
        if self.mesh is not None and not current.empty and self.mesh.abstract_mesh != current:
            raise ValueError(
                f'the box with names {self.names} is for the mesh {describe_axes(mesh.shape)}, but '
                f'the current mesh is {describe_axes(current.shape)} or has other axis types; '
                'create the box without mesh='
            )
        options = {'shape': self.value.shape, 'axes_as_names': self._axes_as_names}
        resolved, problems = try_resolve(self.names, AxisRules(rules), mesh=mesh, **options)
        if problems:
            return self.value
        over = None if self.mesh is None or not current.empty else self.mesh
        return lay_out(self.value, boundary_spec(to_spec(resolved)), over)

    def _name(self, params: dict[Any, Any]) -> str | None:
        if nn.PARTITION_NAME not in params:
            raise errors.PartitioningUnspecifiedError(self)
        return params[nn.PARTITION_NAME]


class Partitioned(_Box, nn.Partitioned):
    """A `flax.linen.Partitioned`, whose names are mesh axes, with corrected methods.

    Usage:
      kernel = Partitioned(jnp.zeros((8, 4)), ('data', 'model'))
      stacked = kernel.add_axis(0, {nn.PARTITION_NAME: None})  # (None, 'data', 'model')
    """

    _axes_as_names = True


class LogicallyPartitioned(_Box, nn.LogicallyPartitioned):
    """A `flax.linen.LogicallyPartitioned`, whose names are logical axes, with corrected methods.

    Usage:
      kernel = LogicallyPartitioned(jnp.zeros((8, 4)), ('embed', 'mlp'))
      stacked = kernel.add_axis(0, {nn.PARTITION_NAME: 'layers'})  # ('layers', 'embed', 'mlp')
    """

    _axes_as_names = False


def with_partitioning(
    init: Callable[..., jax.Array], names: Sequence[Any], mesh: Mesh | None = None
) -> Callable[..., Partitioned]:
    """Wraps an initializer so that it returns its array in a Partitioned.

    Args:
      init: the initializer.
      names: one entry per dimension: a mesh axis, a tuple of mesh axes, or None.
      mesh: the mesh that the array is for; by default any mesh.

    Raises:
      ValueError: if `names` is not a tuple or a list.
    """
    return _box_result(init, Partitioned, names, mesh=mesh)


def with_logical_partitioning(
    init: Callable[..., jax.Array],
    names: Sequence[str | None],
    mesh: Mesh | None = None,
    rules: LogicalAxisRules | None = None,
) -> Callable[..., LogicallyPartitioned]:
    """Wraps an initializer so that it returns its array in a LogicallyPartitioned.

    Args:
      init: the initializer.
      names: one logical axis name or None per dimension.
      mesh: the mesh that the array is for; by default any mesh.
      rules: rules for this array only, tried before all others.

    Raises:
      ValueError: if `names` is not a tuple or a list, or if `rules` are invalid.
    """
    checked = None if rules is None else check_rules(rules)
    return _box_result(init, LogicallyPartitioned, names, mesh=mesh, rules=checked)


def _box_result(init: Callable[..., Any], box: Any, names: Any, **settings: Any) -> Any:
    """`init` with its result in a box."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f'names must be a tuple, such as ({names!r},), not {names!r}')

    @functools.wraps(init)
    def boxed(*args: Any, **kwargs: Any) -> Any:
        return box(init(*args, **kwargs), tuple(names), **settings)

    return boxed
