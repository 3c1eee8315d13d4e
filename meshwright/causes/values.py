"""The values of a traced function: what each is, its dimensions, and the line that makes it."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from meshwright.causes.linked_dimensions import LinkedDimensions
from meshwright.causes.moved_dimensions import Dims

# Operations that change neither what an array is nor, apart from the dtype, its elements.
MOVES = frozenset(
    [
        'convert_element_type',
        'copy',
        'copy_p',
        'slice',
        'dynamic_slice',
        'squeeze',
        'reshape',
        'transpose',
        'device_put',
        'sharding_constraint',
        'reduce_precision',
        'stop_gradient',
        'optimization_barrier',
        'expand_dims',
        'reshard',
        'mesh_cast',
        'pvary',
        'pbroadcast',
        'name',
    ]
)


@dataclasses.dataclass(eq=False)
class Value:
    """A value of a traced function.

    Attributes:
      shape: its global shape.
      dtype: its dtype.
      dims: for each dimension its name and mesh axes, or None if nothing is known.
      primitive: the operation that makes it; '' for arguments.
      stack: the 'file:line' of the code that makes it, and of its callers.
      scope: the words of the path of the operation.
      backward: whether it is part of a backward pass.
      operands: the values that the operation takes.
      contracted: the dimensions that the operation sums over.
      argument: the path of the argument that it is, cast, sliced or moved; '' for others.
      gradient_of: the path of the parameter that it is a gradient of; '' for others.
      update_of: the path of the array of the state that it updates; '' for others.
      layout: the mesh axes of each dimension, if a constraint fixes them.
      local: whether its shape is that of one shard, inside of a shard_map.
      loop: for what a loop stacks, the 'file:line' of the loop and of its callers.
      copied_from: the values that it is inside of a loop or of a function: the carry of a loop is
        what is given and what an iteration results in.
    """

    shape: tuple[int, ...]
    dtype: str
    dims: Dims
    primitive: str = ''
    stack: tuple[str, ...] = ()
    scope: frozenset[str] = frozenset()
    backward: bool = False
    operands: tuple[Value, ...] = ()
    contracted: Dims = ()
    argument: str = ''
    gradient_of: str = ''
    update_of: str = ''
    layout: tuple[tuple[str, ...], ...] | None = None
    local: bool = False
    loop: tuple[str, ...] = ()
    copied_from: tuple[Value, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str | None, ...]:
        """The logical axes of its dimensions."""
        return tuple(d.name if d else None for d in self.dims)


class TracedValues(NamedTuple):
    """All values of a function.

    Attributes:
      arguments: its arguments.
      values: what its operations make, in their order.
      results: what it returns.
      links: which dimensions of arguments belong together.
    """

    arguments: tuple[Value, ...]
    values: tuple[Value, ...]
    results: tuple[Value, ...]
    links: LinkedDimensions
