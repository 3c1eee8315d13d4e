"""The check that the arrays of a state stay where they were put."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, Sharding

from partitioning.rules import check_spec, sharding_str
from partitioning.state import path_str
from partitioning.state.same_paths import like


def check_fixed_point(state: Any, shardings: Any) -> None:
    """Checks that the arrays of a state are laid out by these shardings.

    Args:
      state: a pytree of arrays.
      shardings: Shardings, a tree of the same structure or a prefix of it. Static fields, such as
        the optimizer in Flax's TrainState, may differ.

    Raises:
      ValueError: with the path of the first array that is laid out differently; from jax, if the
        two trees have different structures.
    """

    def check(path: Any, expected: Sharding, arrays: Any) -> None:
        for below, array in jax.tree_util.tree_leaves_with_path(arrays):
            _check_array(path_str((*path, *below)), array, expected)

    adapted = like(shardings, state)
    jax.tree_util.tree_map_with_path(check, shardings if adapted is None else adapted, state)


def _check_array(path: str, array: Any, expected: Sharding) -> None:
    held = getattr(array, 'sharding', None)
    if held is None:
        raise ValueError(
            f'{path} is of type {type(array).__name__}, not an array on devices: '
            'partitioner.move_params_to_devices puts it there'
        )
    if isinstance(expected, NamedSharding):
        check_spec(expected.spec, expected.mesh, path, array.shape)
    if not held.is_equivalent_to(expected, array.ndim):
        raise ValueError(
            f'{path} of shape {array.shape} is laid out as {sharding_str(held)}, but the plan says '
            f'{sharding_str(expected)}: pass plan.specs as out_axis_resources when you partition '
            'the function that makes this state'
        )
