"""linen's box for axis names, right under `python -O`, negative axes and Explicit meshes.

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

from partitioning.constrain import with_sharding_constraint
from partitioning.rules import AxisRules, add_axis, remove_axis, to_spec, try_resolve


class LogicallyPartitioned(nn.LogicallyPartitioned):
    """`flax.linen.LogicallyPartitioned` whose `remove_axis` undoes its `add_axis`.

    Usage:
      kernel = LogicallyPartitioned(jnp.zeros((8, 4)), ('embed', 'mlp'))
      stacked = kernel.add_axis(0, {nn.PARTITION_NAME: 'layers'})  # ('layers', 'embed', 'mlp')
    """

    def add_axis(self, index: int, params: dict[Any, Any]) -> LogicallyPartitioned:
        """With the name of a new dimension at `index`; see `partitioning.rules.add_axis`."""
        return self._renamed(add_axis(self.names, index, self._name(params)))

    def remove_axis(self, index: int, params: dict[Any, Any]) -> LogicallyPartitioned:
        """Without the name at `index`; see `partitioning.rules.remove_axis`."""
        return self._renamed(remove_axis(self.names, index, self._name(params)))

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The array, laid out by its names inside a mesh, of Auto or of Explicit axes.

        Names that cannot be resolved are left to where the state is: there the path is known.
        """
        rules = self.rules or spmd.get_logical_axis_rules()
        mesh = jax.sharding.get_abstract_mesh()
        if not apply_constraint or not rules or mesh.empty:
            return self.value
        shape = self.value.shape
        resolved, problems = try_resolve(self.names, AxisRules(rules), mesh=mesh, shape=shape)
        return self.value if problems else with_sharding_constraint(self.value, to_spec(resolved))

    def _renamed(self, names: Sequence[str | None]) -> LogicallyPartitioned:
        return self.replace(names=tuple(names))

    def _name(self, params: dict[Any, Any]) -> str | None:
        if nn.PARTITION_NAME not in params:
            raise errors.PartitioningUnspecifiedError(self)
        return params[nn.PARTITION_NAME]


def with_logical_partitioning(
    init: Callable[..., jax.Array], names: Sequence[str | None]
) -> Callable[..., LogicallyPartitioned]:
    """An initializer whose array comes in a LogicallyPartitioned with these names.

    Raises:
      ValueError: `names` is no tuple of them.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f'{names!r} are no names: write a tuple, such as ({names!r},)')

    @functools.wraps(init)
    def boxed(*args: Any, **kwargs: Any) -> LogicallyPartitioned:
        return LogicallyPartitioned(init(*args, **kwargs), tuple(names))

    return boxed
