"""The layout of a batch whose arrays differ in their dimensions."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.layout.arrays import check_no_lists
from partitioning.programs.boundary import is_numeric, to_shardings
from partitioning.programs.inner_layouts import is_resource
from partitioning.rules import (
    LogicalAxisRules,
    as_tuple,
    axis_sizes,
    either,
    num_shards,
    sizes_that_fit,
    spec_str,
)
from partitioning.state.structures import KeyPath, TreeMismatchError, pair_leaves

_OLD_KEYS = ((2,), (4,))  # of 'threefry2x32', and of 'rbg' and 'unsafe_rbg'


def has_rows(argument: Any) -> bool:
    """Whether an argument of a step has an array that is neither a scalar nor a random key."""
    return any(np.ndim(x) and not _is_old_key(x) for x in jax.tree.leaves(argument))


def _is_old_key(x: Any) -> bool:
    """Whether an array is one key of `jax.random.PRNGKey`: some words in uint32."""
    return getattr(x, 'dtype', None) == np.uint32 and np.shape(x) in _OLD_KEYS


def batch_specs(batch: Any, spec: Any, mesh: Mesh, name: str, *, is_default: bool = False) -> Any:
    """The specs of the arrays of a batch.

    `spec` is for each array that is not a scalar, or it is a tree of specs. It is returned if it
    fits every array, and otherwise a tree of specs, in which scalars are replicated. A size that
    does not divide is a ValueError if the user has not chosen the spec (`is_default`), and a list
    of numbers in place of an array always is.
    """
    if not is_resource(spec):
        _check_structure(batch, spec, name)
        return spec
    check_no_lists(batch, name)
    if is_default:
        _check_sizes(batch, spec, mesh, name)
    if all(np.ndim(x) for x in jax.tree.leaves(batch)):
        return spec
    return jax.tree.map(lambda x: spec if np.ndim(x) else PartitionSpec(), batch)


def check_data_spec(
    spec: Any, mesh: Mesh, rules: LogicalAxisRules = (), setting: str = 'data_spec'
) -> None:
    """Raises ValueError if the layout of a batch is not specs that the mesh can have."""

    def name(path: KeyPath) -> str:
        return f'{setting}{jax.tree_util.keystr(path[1:])}'

    to_shardings((spec,), mesh, allow_unconstrained=True, rules=rules, name=name)


def check_batch(batch: Any, spec: Any) -> None:
    """Raises ValueError if a batch of `to_global` has no arrays, or another tree than its spec."""
    from partitioning.programs.explaining.misfits import value_problems

    for problem in value_problems('batch', None, batch, abstract=False):
        raise ValueError(problem) from None
    if not is_resource(spec):
        _check_structure(batch, spec, 'the batch', 'spec')


def _check_structure(batch: Any, spec: Any, name: str, setting: str = 'data_spec') -> None:
    """Raises ValueError unless a tree of specs is the batch's tree, or the upper part of it."""
    try:
        specs = jax.tree.map(lambda x: x or PartitionSpec(), spec, is_leaf=is_resource)
        for _ in pair_leaves(specs, batch, prefix=True, static_fields=False):
            pass
    except TreeMismatchError as error:
        raise ValueError(
            f'{setting}{jax.tree_util.keystr(error.path)} has {error.first}, but {name} has '
            f'{error.second}: give {setting} the structure of {name}, or one PartitionSpec for all '
            'of its arrays'
        ) from None


def _check_sizes(batch: Any, spec: PartitionSpec, mesh: Mesh, name: str) -> None:
    """Raises ValueError if the data axes do not divide the first dimension of an array."""
    axes = as_tuple(spec[0]) if len(spec) else ()
    shards, sizes = num_shards(axes, mesh), axis_sizes(mesh)
    arrays = jax.tree.leaves(batch)
    if any(not is_numeric(x) for x in arrays):
        return  # which the call says
    for path, x in jax.tree_util.tree_leaves_with_path(batch):
        if not np.ndim(x) or np.shape(x)[0] % shards == 0:
            continue
        over = ' x '.join(f'{axis} {sizes[axis]}' for axis in axes)
        rows = np.shape(x)[0]
        text = (
            f'{name}{jax.tree_util.keystr(path)} has shape {np.shape(x)}, but {shards} data shards '
            f'({over}) do not divide its first dimension, of size {rows}: pass '
            f'{either(sizes_that_fit(rows, shards))} rows, or give setup '
            'data_spec=partitioner.padded_data_partition_spec, which pads them'
        )
        if write := _other_dimensions(batch, spec, shards):
            text += f'; if that dimension does not count rows, give setup data_spec={write}'
        raise ValueError(text)


def _other_dimensions(batch: Any, spec: PartitionSpec, shards: int) -> str | None:
    """The data_spec of a batch whose first dimensions may count something else than rows.

    None if they all seem to count rows: the batch has one number of them, and no second dimension
    that may count rows is followed by a third.
    """
    shapes = [np.shape(x) for x in jax.tree.leaves(batch) if np.ndim(x)]
    stacked = {s[:2] for s in shapes if s[0] % shards and len(s) > 2 and s[1] % shards == 0}
    if not stacked and len({s[0] for s in shapes}) == 1:
        return None

    def fitting(x: Any) -> str:
        shape = np.shape(x)
        if shape and shape[0] % shards == 0:
            return spec_str(PartitionSpec(spec[0]))
        return spec_str(PartitionSpec(None, spec[0]) if shape[:2] in stacked else PartitionSpec())

    if jax.tree_util.all_leaves([batch]):
        return fitting(batch)
    if isinstance(batch, dict) and jax.tree_util.all_leaves(batch.values()):
        return f'{{{", ".join(f"{key!r}: {fitting(x)}" for key, x in batch.items())}}}'
    each = dict.fromkeys(fitting(x) for x in jax.tree.leaves(batch))
    return f'a tree with a spec for each array, here {" or ".join(each)}'
