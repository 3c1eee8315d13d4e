"""Any train state -> the logical axes of its leaves.

Parameters carry their names in linen boxes (`Partitioned`, `LogicallyPartitioned`). Every other
leaf gets its axes from the parameter whose path ends its own path: optimizers keep one tree a
statistic, of the parameters' structure, whatever else surrounds it.
"""

from __future__ import annotations

import dataclasses
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


@dataclasses.dataclass(frozen=True)
class LeafAxes:
    """Where one leaf of a state has its axes from.

    Attributes:
      path: the leaf's place, `opt_state/0/mu/decoder/wq`.
      names: logical axes of the parameter it is, or follows.
      shape: shape of that parameter.
      dims: for each dimension of the leaf, the dimension of the parameter that it is; None: none.
    """

    path: str
    names: tuple[str | None, ...]
    shape: tuple[int, ...]
    dims: tuple[int | None, ...]

    def pick(self, of_parameter: Sequence[Any]) -> tuple[Any, ...]:
        """Entries of something of the parameter, one a dimension, for the leaf's dimensions."""
        return tuple(None if d is None else of_parameter[d] for d in self.dims)


def get_logical_axes(state: Any) -> Any:
    """The logical axes of a train state.

    Args:
      state: a pytree, abstract or not, whose parameters are linen boxes with names; or an object
        with T5X's `as_logical_axes()`.

    Returns:
      The same tree with AxisNames in place of every array (and of every box).

    Raises:
      ValueError: a parameter carries no names or too few, or a leaf that follows a parameter has a
        shape that its parameter's does not explain.
    """
    if hasattr(state, 'as_logical_axes'):
        return state.as_logical_axes()
    leaves, treedef = leaf_axes(state)
    return jax.tree_util.tree_unflatten(treedef, [AxisNames(*x.pick(x.names)) for x in leaves])


def leaf_axes(state: Any) -> tuple[list[LeafAxes], Any]:
    """Where every leaf of a state has its axes from, and the tree they make.

    Arguments and errors are those of `get_logical_axes`.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_box)
    boxes = {key_names(path): _box(path, leaf) for path, leaf in leaves if is_box(leaf)}
    if not boxes:
        raise ValueError(
            'Missing axis names: no parameter of the state carries any. Create parameters with '
            'flax.linen.with_logical_partitioning(init, names), or give the state as_logical_axes()'
        )
    shared = _shared_keys(list(boxes))
    by_suffix = {path[len(shared) :]: box for path, box in boxes.items()}

    def axes(path: Path, leaf: Any) -> LeafAxes:
        if path in boxes:
            return boxes[path]
        shape = tuple(np.shape(leaf))
        if shape and path[: len(shared)] == shared:
            raise ValueError(
                f'Missing axis names for parameters: {"/".join(path)} of shape {shape} has none, '
                'but others beside it do. To replicate it, create it with '
                f'flax.linen.with_logical_partitioning(init, {(None,) * len(shape)})'
            )
        return _follow(path, shape, by_suffix)

    return [axes(key_names(path), leaf) for path, leaf in leaves], treedef


def _box(path: Sequence[Any], box: Any) -> LeafAxes:
    names, shape = tuple(box.names), tuple(box.value.shape)
    if len(names) != len(shape):
        raise ValueError(
            f'{path_str(path)}: {len(names)} logical axes {names} for shape {shape}. If it is '
            'optimizer state, make it of unboxed parameters: tx.init(partitioning.unbox(params))'
        )
    return LeafAxes(path_str(path), names, shape, tuple(range(len(shape))))


def _shared_keys(paths: list[Path]) -> Path:
    """The keys that all paths begin with."""
    shared = 0
    while all(len(p) > shared + 1 and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    return paths[0][:shared]


def _follow(path: Path, shape: tuple[int, ...], by_suffix: dict[Path, LeafAxes]) -> LeafAxes:
    """The axes of a leaf that is no parameter: those of the parameter it belongs to, or none."""
    name, rank = '/'.join(path), len(shape)
    match = next((by_suffix[path[i:]] for i in range(len(path)) if path[i:] in by_suffix), None)
    if match is None or not shape:
        return LeafAxes(name, (), (), (None,) * rank)
    dims: list[int | None] | None
    if shape == match.shape:
        dims = list(match.dims)
    elif shape == (1,):  # what factored optimizers keep for a statistic that they do not use
        dims = [None]
    elif shape[1:] == match.shape:  # a history of the parameter, as in L-BFGS
        dims = [None, *match.dims]
    else:
        dims = _kept_dimensions(path, shape, match.shape)
    if dims is None:
        raise ValueError(
            f'{name}: shape {shape} does not follow from its parameter of shape {match.shape}, so '
            'its layout is unknown; give the state as_logical_axes()'
        )
    return LeafAxes(name, match.names, match.shape, tuple(dims))


def _kept_dimensions(
    path: Path, shape: tuple[int, ...], parameter_shape: tuple[int, ...]
) -> list[int | None] | None:
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
        kept: list[int | None] = [d for d in range(rank) if d != dropped]
        if tuple(np.delete(parameter_shape, dropped)) == shape:
            return kept
    return None
