"""linen boxes that work under `python -O`, with negative axes and with Explicit mesh axes.

The boxes of flax remove a dimension inside an `assert`, which `python -O` skips; they insert at a
negative index as lists do, not as arrays do; and they fail under Explicit mesh axes. This module
imports flax, so `import partitioning` loads it on first use only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
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
from partitioning.state.boxes import pad_names


class NoPartitionNameError(errors.PartitioningUnspecifiedError, ValueError):
    """A transformation such as nn.scan adds a dimension to a box and gives it no name."""

    def __init__(self, box: Any):
        Exception.__init__(
            self,
            'a transformation (nn.scan, nn.vmap, ...) adds a dimension to, or removes one from, a '
            f'parameter with the names {tuple(box.names)}, but does not name the dimension. Write '
            'metadata_params={nn.PARTITION_NAME: None} in the transformation, or a name that a '
            "rule maps, such as 'layers' with the rule ('layers', None)",
        )


class _Box:
    """The methods in which both boxes differ from flax's.

    They need only what flax's own boxes have, because `boxes_like_ours` calls them with those too.
    """

    names: Any
    value: Any
    mesh: Mesh | None
    replace: Callable[..., Any]

    def add_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """A box with one more name at `index`; see `partitioning.add_axis`."""
        names = tuple(self.names)
        if index < 0:  # it counts from the last dimension, which may have no name
            rank = len(getattr(self.value, 'shape', ()))
            names = (*names, *[None] * (rank - 1 - len(names)))
        return self.replace(names=tuple(add_axis(names, index, _partition_name(self, params))))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Any:
        """A box without the name at `index`; see `partitioning.remove_axis`."""
        names = remove_axis(self.names, index, _partition_name(self, params))
        return self.replace(names=tuple(names))

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The array, laid out by its names over the current mesh.

        Without a current mesh, it is laid out over the mesh of the box, if there is one. Names that
        are fewer than the dimensions belong to the first dimensions. An array whose names cannot be
        resolved is returned unchanged: the error is raised where the whole state is resolved, with
        the path of the array.

        Raises:
          ValueError: if the mesh of the box is not the current mesh.
        """
        current = jax.sharding.get_abstract_mesh()
        mesh = self.mesh if current.empty and self.mesh is not None else current
        rules = getattr(self, 'rules', None) or spmd.get_logical_axis_rules()
        axes_as_names = not hasattr(self, 'rules')
        if not apply_constraint or mesh.empty or not (rules or axes_as_names):
            return self.value
        if self.mesh is not None and dict(self.mesh.shape) != dict(mesh.shape):
            raise ValueError(
                f'the box with names {self.names} is for the mesh {describe_axes(self.mesh.shape)},'
                f' but the current mesh is {describe_axes(mesh.shape)}; create the box without '
                'mesh='
            )
        shape = self.value.shape
        resolved, problems = try_resolve(
            pad_names(self.names, len(shape)),
            AxisRules(rules),
            mesh=mesh,
            shape=shape,
            axes_as_names=axes_as_names,
        )
        if problems:
            return self.value
        over = self.mesh if current.empty else None
        return lay_out(self.value, boundary_spec(to_spec(resolved)), over)


def _partition_name(box: Any, params: dict[Any, Any]) -> str | None:
    """The name that a transformation gives to the dimension that it adds or removes."""
    if nn.PARTITION_NAME not in params:
        raise NoPartitionNameError(box)
    return params[nn.PARTITION_NAME]


class Partitioned(_Box, nn.Partitioned):
    """A `flax.linen.Partitioned`, whose names are mesh axes, with corrected methods.

    Usage:
      kernel = Partitioned(jnp.zeros((8, 4)), ('data', 'model'))
      stacked = kernel.add_axis(0, {nn.PARTITION_NAME: None})  # (None, 'data', 'model')
    """


class LogicallyPartitioned(_Box, nn.LogicallyPartitioned):
    """A `flax.linen.LogicallyPartitioned`, whose names are logical axes, with corrected methods."""


def with_partitioning(
    init: Callable[..., jax.Array], names: Sequence[Any], mesh: Mesh | None = None
) -> Callable[..., Partitioned]:
    """Wraps an initializer so that it returns its array in a Partitioned.

    The names are a mesh axis, a tuple of mesh axes, or None for each dimension. By default the
    array is for any mesh. Names that are no tuple or list are a ValueError.
    """
    return _box_result(init, Partitioned, names, mesh=mesh)


def with_logical_partitioning(
    init: Callable[..., jax.Array],
    names: Sequence[str | None],
    mesh: Mesh | None = None,
    rules: LogicalAxisRules | None = None,
) -> Callable[..., LogicallyPartitioned]:
    """Wraps an initializer so that it returns its array in a LogicallyPartitioned.

    The names are a logical axis or None for each dimension. By default the array is for any mesh.
    `rules` are for this array only, and are tried before all others. Names that are no tuple or
    list, and invalid rules, are a ValueError.
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


_TRACING: ContextVar[bool] = ContextVar('a partitioner is tracing', default=False)


@contextlib.contextmanager
def boxes_like_ours() -> Iterator[None]:
    """Inside this context, in this thread, flax's boxes behave like the boxes of this module."""
    token = _TRACING.set(True)
    try:
        yield
    finally:
        _TRACING.reset(token)


def _switch(flax_method: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is `ours` while a partitioner traces, and flax's otherwise."""

    @functools.wraps(flax_method)
    def method(*args: Any, **kwargs: Any) -> Any:
        return (ours if _TRACING.get() else flax_method)(*args, **kwargs)

    return method


# linen creates and reads boxes while a partitioner traces a function over a mesh, where the methods
# of flax fail for correct programs. DenseGeneral, for example, reads a box around a flat kernel,
# which has fewer dimensions than names. flax has no hook for this. Therefore the three methods of
# its two boxes that depend on a mesh or on names are replaced here. At any other time, the new
# methods call flax's methods.
for _name in ('unbox', 'add_axis', 'remove_axis'):
    for _box in (nn.Partitioned, nn.LogicallyPartitioned):
        if _name in vars(_box):  # LogicallyPartitioned inherits two of them
            setattr(_box, _name, _switch(vars(_box)[_name], getattr(Partitioned, _name)))
