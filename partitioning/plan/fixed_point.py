"""Checks that a state stays where it was put, and that its step was compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from partitioning.partitioner.partitioned import to_shardings
from partitioning.plan.array_layouts import sharding_str
from partitioning.rules import check_spec
from partitioning.state import path_str


def check_fixed_point(state: Any, layout: Any, mesh: Mesh) -> None:
    """Checks that the arrays of a state are laid out as they should be, after a step or a restore.

    Args:
      state: a pytree of arrays.
      layout: what its layout should be: PartitionSpecs or Shardings, a tree of its structure or a
        prefix of it; or the state before.
      mesh: the mesh.

    Raises:
      ValueError: with the path of the first array that is laid out in another way; of jax, where
        the two are not of one structure.
    """
    before = jax.tree.map(lambda x: x.sharding if isinstance(x, jax.Array) else x, layout)

    def check(path: Any, expected: Sharding, arrays: Any) -> None:
        for below, array in jax.tree_util.tree_leaves_with_path(arrays):
            name, held = path_str((*path, *below)), getattr(array, 'sharding', None)
            if held is None:
                raise ValueError(
                    f'{name} is of type {type(array).__name__}, no array on devices: '
                    'move_params_to_devices puts it there'
                )
            if isinstance(expected, NamedSharding):
                check_spec(expected.spec, expected.mesh, name, array.shape)
            if not held.is_equivalent_to(expected, array.ndim):
                raise ValueError(
                    f'{name} of shape {array.shape} is laid out as '
                    f'{sharding_str(held)}, but {sharding_str(expected)} was expected: give the '
                    'function that made it out_shardings (get_mesh_axes of the state)'
                )

    jax.tree_util.tree_map_with_path(check, to_shardings(before, mesh), state)


def check_compiled_once(partitioned: Callable[..., Any]) -> None:
    """Checks that a partitioned function was traced, and so compiled, for one kind of arguments.

    Raises:
      ValueError: never, or again, for other shapes or types.
    """
    if not hasattr(partitioned, 'num_traces'):
        raise ValueError(f'{partitioned!r} is no function of PjitPartitioner.partition')
    count = partitioned.num_traces()
    if count != 1:
        name = getattr(partitioned, '__name__', 'the function')
        raise ValueError(
            f'{name} was compiled {count} times, not once: '
            + (
                'its arguments change in shape or type from call to call'
                if count
                else 'it has not been called'
            )
        )
