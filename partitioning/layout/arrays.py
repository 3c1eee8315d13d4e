"""Global arrays from the rows or chunks of each process, and back."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.layout.ownership import (
    axes_per_dimension,
    check_batch_size,
    index_bounds,
    shard_ownership,
)
from partitioning.rules import boundary_spec, check_layout, check_spec, describe_axes
from partitioning.values import value_str


def local_to_global(
    local_batch: Any,
    mesh: Mesh,
    spec: Any,
    batch_size: int | None = None,
    *,
    own_sizes: bool = False,
) -> Any:
    """Sharded global arrays from the rows that each process has read.

    It is `BasePartitioner.to_global` for a mesh and a spec, or a tree of specs. If arrays may have
    their `own_sizes`, each is laid out by its own first dimension, and scalars are replicated.
    Otherwise all arrays must have the same number of rows.

    Raises:
      ValueError: if an array does not have the rows of this process, if arrays differ in their
        number of rows, if integers do not fit 32 bits, or if the spec does not fit an array.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(local_batch)
    check_no_lists(local_batch)
    of_each = _spec_of_each(spec, local_batch, len(leaves))
    if batch_size is not None:
        for one in dict.fromkeys(of_each):
            check_batch_size(batch_size, _batch_shards(mesh, one).num_shards, mesh)
    sizes = {_name(path): np.shape(leaf)[0] for path, leaf in leaves if np.ndim(leaf)}
    placed = []
    for (path, leaf), one in zip(leaves, of_each, strict=True):
        name, shape = _name(path), np.shape(leaf)
        if own_sizes and not shape:
            placed.append((leaf, _batch_shards(mesh, PartitionSpec())))
            continue
        batch = _batch_shards(mesh, one)
        _check_rows(name, shape, batch_size, batch, sizes)
        rows = shape[0] // len(batch.chunk) * batch.num_shards
        if batch_size is None and not own_sizes:
            batch_size = rows
        _check_layout(one, mesh, name, (rows, *shape[1:]))
        _check_integers_fit(name, leaf)
        placed.append((leaf, batch))
    return jax.tree.unflatten(structure, [_global_array(*one) for one in placed])


def _spec_of_each(spec: Any, batch: Any, count: int) -> list[PartitionSpec]:
    """The spec of each array of a batch, from one spec or a tree of specs; None replicates."""

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    if is_spec(spec):
        return [PartitionSpec() if spec is None else spec] * count
    try:
        whole = jax.tree.broadcast(spec, batch, is_leaf=is_spec)
    except ValueError as error:
        said = ' '.join(str(error).split())
        raise ValueError(f'the tree of specs does not fit the batch: {said}') from None
    found = jax.tree.leaves(whole, is_leaf=is_spec)
    return [PartitionSpec() if one is None else boundary_spec(one) for one in found]


class _BatchShards(NamedTuple):
    """The shards of a batch: its sharding, the shards of this process, and how many there are."""

    sharding: NamedSharding
    chunk: tuple[int, ...]
    num_shards: int


# A run lays out batches of the same shapes again and again, and they are checked once.


@functools.lru_cache(maxsize=64)
def _batch_shards(mesh: Mesh, spec: PartitionSpec) -> _BatchShards:
    check_spec(spec, mesh, 'the batch')
    ownership = shard_ownership(mesh, axes_per_dimension(spec)[:1] or ((),))
    ownership.check_process(jax.process_index(), mesh)
    [num_shards] = ownership.num_shards
    chunk = ownership.chunks[jax.process_index()]
    return _BatchShards(NamedSharding(mesh, spec), chunk, num_shards)


_check_layout = functools.lru_cache(maxsize=256)(check_layout)


def global_to_local(global_batch: Any) -> Any:
    """The rows of global arrays that this process holds; the inverse of `local_to_global`.

    The argument is a pytree of jax.Arrays [batch, ...] with any sharding. The result has numpy
    arrays [local rows, ...], in the order of the global rows.

    Raises:
      ValueError: if this process holds only some columns of a row.
    """
    return jax.tree_util.tree_map_with_path(_local_rows, global_batch)


def host_local_array_to_global_array(arr_tree: Any, mesh: Mesh, pspecs: Any) -> Any:
    """Global arrays from each process's chunk of every array.

    `arr_tree` is a pytree of arrays, each of which is the chunk of this process in every dimension,
    and `pspecs` a prefix of it, of PartitionSpecs for the global `mesh`; None replicates. A spec
    that an array cannot have is a ValueError.
    """
    from jax.experimental import multihost_utils

    specs = jax.tree.map(
        lambda spec: PartitionSpec() if spec is None else boundary_spec(spec),
        pspecs,
        is_leaf=lambda spec: spec is None or isinstance(spec, PartitionSpec),
    )

    def check(path: Any, spec: PartitionSpec, subtree: Any) -> None:
        for deeper, array in jax.tree_util.tree_leaves_with_path(subtree):
            where = jax.tree_util.keystr((*path, *deeper), simple=True, separator='/')
            check_spec(spec, mesh, where or 'the array', np.shape(array))

    jax.tree_util.tree_map_with_path(
        check, specs, arr_tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, specs)


def _check_rows(
    name: str,
    shape: tuple[int, ...],
    batch_size: int | None,
    batch: _BatchShards,
    sizes: Mapping[str, int],
) -> None:
    """Raises ValueError unless an array has the rows of this process.

    `sizes` has the number of rows of each array of the batch, by name.
    """
    if not shape:
        raise ValueError(f'{name} is a scalar, but the first dimension of a batch must be its rows')
    rows, held, num_shards = shape[0], len(batch.chunk), batch.num_shards
    if batch_size is None:
        fits, holds = bool(rows) and rows % held == 0, f'{held} of the {num_shards} shards'
        wrong = f', which is not a positive multiple of {held}'
        hint = f'{held} or {2 * held} rows, for example'
        if other := next((other for other, size in sizes.items() if size != rows), None):
            hint += (
                f', or give it its own spec: {other} has {sizes[other]} rows, and spec= takes a '
                'tree with a PartitionSpec for each array; P() replicates one'
            )
    else:
        expected = batch_size // num_shards * held
        fits, holds = rows == expected, f'{expected} of the {batch_size} rows'
        wrong, hint = '', 'the rows of DataLayout.row_indices'
    if not fits:
        raise ValueError(
            f'{name} has {rows} rows, shape {shape}{wrong}: process {jax.process_index()} holds '
            f'{holds} of the batch on the mesh {describe_axes(batch.sharding.mesh.shape)}. '
            f'Pass {hint}'
        )


def check_no_lists(batch: Any, argument: str | None = None) -> None:
    """Raises ValueError if a list of numbers stands for an array: jax sees one scalar per number.

    A tuple of numbers may be some settings of the step, so only lists are refused. `argument` is
    the name of the batch in a step, if it is one's argument.
    """
    found = jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_nested_numbers)
    for path, x in found:
        if _is_nested_numbers(x):
            name = _name(path)
            if argument is not None:
                name = f'{argument}{jax.tree_util.keystr(path)}'
            shape = np.shape(np.asarray(x, dtype=object))
            inner = f', of shape {shape}' if len(shape) > 1 else ''
            count = f'{len(x)} {"lists" if isinstance(x[0], list) else "numbers"}'
            array = name if argument else 'batch' if not path else name.rpartition('/')[2]
            raise ValueError(
                f'{name} is a list of {count}{inner}, not an array: write numpy.asarray({array})'
            )


def _is_nested_numbers(x: Any) -> bool:
    if not isinstance(x, list) or not x:
        return False
    return all(isinstance(e, int | float | complex) or _is_nested_numbers(e) for e in x)


def _check_integers_fit(name: str, leaf: Any) -> None:
    """Raises ValueError if jax would truncate integers of 64 bits to 32 bits."""
    array = np.asarray(leaf)
    kept = jax.dtypes.canonicalize_dtype(array.dtype) if array.dtype.kind in 'iu' else array.dtype
    if kept != array.dtype and array.size and (array.astype(kept) != array).any():
        raise ValueError(
            f'{name}, {array.dtype} of shape {array.shape}, has integers beyond {kept}, which jax '
            "would truncate. Use smaller ones, or jax.config.update('jax_enable_x64', True)"
        )


def _global_array(leaf: Any, batch: _BatchShards) -> jax.Array:
    if not np.shape(leaf):
        return _replicated_scalar(leaf, batch.sharding)
    local = np.asarray(leaf)
    rows_per_shard = local.shape[0] // len(batch.chunk)
    local_start = {shard: i * rows_per_shard for i, shard in enumerate(batch.chunk)}

    def rows_of_device(index: Any) -> np.ndarray:
        start = local_start[(index[0].start or 0) // rows_per_shard]
        return local[(slice(start, start + rows_per_shard), *index[1:])]

    shape = (rows_per_shard * batch.num_shards, *local.shape[1:])
    return jax.make_array_from_callback(shape, batch.sharding, rows_of_device)


def _replicated_scalar(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return jax.device_put(x, sharding)  # a random key has no numpy array
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(x))


def _local_rows(path: Any, array: Any) -> np.ndarray:
    if not isinstance(array, jax.Array) or not array.ndim:
        hint = ''
        if isinstance(array, np.ndarray | np.generic):
            hint = ': a numpy array is local already; to_global makes a global array of it'
        raise ValueError(
            f'{_name(path)} is {value_str(array)}, but must be a jax.Array [batch, ...]{hint}'
        )
    shards = {index_bounds(s.index, array.shape): s for s in array.addressable_shards}
    local_start, num_rows = {}, 0
    for start, stop in sorted({bounds[0] for bounds in shards}):
        local_start[start, stop] = num_rows
        num_rows += stop - start
    local = np.empty((num_rows, *array.shape[1:]), array.dtype)
    if sum(math.prod(stop - start for start, stop in bounds) for bounds in shards) != local.size:
        raise ValueError(
            f'{_name(path)}, shape {array.shape}: process {jax.process_index()} holds only some '
            f'columns of a row under {array.sharding}; gather the columns first'
        )
    for bounds, shard in shards.items():
        first = local_start[bounds[0]]
        rows = slice(first, first + bounds[0][1] - bounds[0][0])
        local[(rows, *(slice(*columns) for columns in bounds[1:]))] = shard.data
    return local


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/') or 'the batch'
