"""Any train state -> the logical axes of its leaves.

Parameters carry their names in linen boxes (`Partitioned`, `LogicallyPartitioned`). Every other
leaf gets its axes from the parameter whose path ends its own path: optimizers keep one tree a
statistic, of the parameters' structure, whatever else surrounds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from partitioning.rules import AxisNames

Path = tuple[str, ...]


def path_str(path: Sequence[Any]) -> str:
    """A pytree path as a readable name: `params/decoder/wq`."""
    return '/'.join(key_names(path))


def key_names(path: Sequence[Any]) -> Path:
    """The keys of a pytree path as plain strings."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def is_box(x: Any) -> bool:
    """True for a linen box that carries axis names."""
    return hasattr(x, 'names') and hasattr(x, 'unbox')


def unbox(tree: Any) -> Any:
    """`tree` with each linen box replaced by the array in it."""
    return jax.tree.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)


def get_logical_axes(state: Any) -> Any:
    """The logical axes of a train state.

    Args:
      state: a pytree, abstract or not, whose parameters are linen boxes with names; or an object
        with T5X's `as_logical_axes()`.

    Returns:
      The same tree with AxisNames in place of every array (and of every box).

    Raises:
      ValueError: no leaf carries names, or a leaf that follows a parameter has a shape that its
        parameter's names do not explain.
    """
    if hasattr(state, 'as_logical_axes'):
        return state.as_logical_axes()
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_box)
    boxes = [(key_names(path), leaf) for path, leaf in leaves if is_box(leaf)]
    if not boxes:
        raise ValueError(
            'Missing axis names: no parameter of the state carries any. Create parameters with '
            'flax.linen.with_logical_partitioning(init, names), or give the state as_logical_axes()'
        )
    parameters = {path: (box.names, box.value.shape) for path, box in boxes}
    by_suffix = _by_suffix(parameters)
    axes = []
    for path, leaf in leaves:
        if is_box(leaf):
            if len(leaf.names) != len(leaf.value.shape):
                raise ValueError(
                    f'{path_str(path)}: {len(leaf.names)} logical axes {leaf.names} for shape '
                    f'{tuple(leaf.value.shape)}'
                )
            axes.append(AxisNames(*leaf.names))
        else:
            axes.append(_follow(key_names(path), leaf, by_suffix))
    return jax.tree_util.tree_unflatten(treedef, axes)


def _by_suffix(parameters: dict[Path, Any]) -> dict[Path, Any]:
    """Parameters by their path below the keys that all of them share."""
    paths = list(parameters)
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    return {path[shared:]: parameter for path, parameter in parameters.items()}


def _follow(path: Path, leaf: Any, by_suffix: dict[Path, Any]) -> AxisNames:
    """The axes of a leaf that is no parameter: those of the parameter it belongs to, or none."""
    shape = tuple(np.shape(leaf))
    match = next((by_suffix[path[i:]] for i in range(len(path)) if path[i:] in by_suffix), None)
    if match is None or not shape:
        return AxisNames(*(None,) * len(shape))
    names, parameter_shape = match
    if shape == tuple(parameter_shape):
        return AxisNames(*names)
    if shape == (1,):  # what factored optimizers keep for a statistic that they do not use
        return AxisNames(None)
    if shape[1:] == tuple(parameter_shape):  # a history of the parameter, as in L-BFGS
        return AxisNames(None, *names)
    kept = _kept_dimensions(path, shape, tuple(parameter_shape))
    if kept is None:
        raise ValueError(
            f'{"/".join(path)}: shape {shape} does not follow from its parameter of shape '
            f'{tuple(parameter_shape)}, so its layout is unknown; give the state as_logical_axes()'
        )
    return AxisNames(*(names[d] for d in kept))


def _kept_dimensions(path: Path, shape: Path | tuple, parameter_shape: tuple) -> list[int] | None:
    """The parameter's dimensions that a factored statistic keeps: all but one.

    optax's Adafactor drops the largest dimension for rows and the second largest for columns, and
    takes the later of two equal ones for the larger (numpy.argsort).
    """
    rank = len(parameter_shape)
    if len(shape) != rank - 1:
        return None
    order = np.argsort(parameter_shape)
    first = order[-2] if 'v_col' in path else order[-1]
    for dropped in [int(first), *range(rank)]:
        kept = [d for d in range(rank) if d != dropped]
        if tuple(parameter_shape[d] for d in kept) == shape:
            return kept
    return None
