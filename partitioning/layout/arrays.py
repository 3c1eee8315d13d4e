"""Global arrays from what each process holds of them, and back."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.layout.held import Axes, axes_of, bounds_of, check_rows_divide, held_parts
from partitioning.rules import boundary_spec, check_spec, describe_axes


def local_to_global(
    local_batch: Any, mesh: Mesh, spec: PartitionSpec, batch_size: int | None = None
) -> Any:
    """Puts the rows that each process has read together to sharded global arrays.

    Args:
      local_batch: pytree of arrays [local rows, ...], the rows of `DataLayout.row_indices` in
        their order; dimensions but the first are whole, even where `spec` shards them.
      mesh: the mesh.
      spec: the mesh axes of the first dimension, and of more.
      batch_size: rows of the global batch; by default what this process's rows make. Give it where
        there are several processes: none can see what the others have read.

    Returns:
      A pytree of jax.Arrays [batch_size, ...]. On CPU they may share the memory of numpy arrays, so
      do not write to those again.

    Raises:
      ValueError: a number of rows that is not that of this process, or that differs from leaf to
        leaf; a spec that the mesh or an array cannot have.
    """
    check_spec(spec, mesh, 'the batch')
    axes = axes_of(spec)
    held = held_parts(mesh, axes[:1] or ((),))
    held.check_holds(jax.process_index(), mesh)
    mine, [ways] = held.parts[jax.process_index()], held.ways
    if batch_size is not None:
        check_rows_divide(batch_size, ways, mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(local_batch):
        name, shape = _name(path), np.shape(leaf)
        _check_rows(name, shape, batch_size, len(mine), ways, mesh)
        if batch_size is None:
            batch_size = shape[0] // len(mine) * ways
        check_spec(spec, mesh, name, shape)
        _check_columns(name, shape, axes, mesh)
        _check_kept(name, leaf)
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda leaf: _global_array(leaf, sharding, mine, ways), local_batch)


def global_to_local(global_batch: Any) -> Any:
    """The rows of global arrays that this process holds: `local_to_global` undone.

    Args:
      global_batch: pytree of jax.Arrays [batch, ...], of any sharding.

    Returns:
      A pytree of numpy arrays [local rows, ...], the rows rising.

    Raises:
      ValueError: of some row this process holds only a part.
    """
    return jax.tree_util.tree_map_with_path(_local_rows, global_batch)


def host_local_array_to_global_array(arr_tree: Any, mesh: Mesh, pspecs: Any) -> Any:
    """Puts each process's part of every array together to global arrays.

    Args:
      arr_tree: pytree of arrays, each this process's part in every dimension.
      mesh: the global mesh.
      pspecs: PartitionSpecs, a pytree that is a prefix of `arr_tree`; None: replicated.

    Returns:
      A pytree of global jax.Arrays.

    Raises:
      ValueError: a spec that the mesh or its array cannot have.
    """
    from jax.experimental import multihost_utils

    specs = jax.tree.map(
        lambda spec: PartitionSpec() if spec is None else boundary_spec(spec),
        pspecs,
        is_leaf=lambda spec: spec is None or isinstance(spec, PartitionSpec),
    )

    def check(path: Any, spec: PartitionSpec, below: Any) -> None:
        for deeper, array in jax.tree_util.tree_leaves_with_path(below):
            where = jax.tree_util.keystr((*path, *deeper), simple=True, separator='/')
            check_spec(spec, mesh, where or 'the array', np.shape(array))

    jax.tree_util.tree_map_with_path(
        check, specs, arr_tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, specs)


def _check_rows(
    name: str, shape: tuple[int, ...], batch_size: int | None, held: int, ways: int, mesh: Mesh
) -> None:
    on = f'on the mesh {describe_axes(mesh.shape)}'
    if not shape:
        raise ValueError(f'{name} is a scalar: the first dimension of a batch is its rows')
    expected = None if batch_size is None else batch_size // ways * held
    if expected is None and (not shape[0] or shape[0] % held):
        raise ValueError(
            f'{name} has {shape[0]} rows {shape}: process {jax.process_index()} holds {held} of '
            f'the {ways} parts of the batch {on}, so it must have {held} rows, or {2 * held}, ...'
        )
    if expected is not None and shape[0] != expected:
        raise ValueError(
            f'{name} has {shape[0]} rows {shape}: of a batch of {batch_size} process '
            f'{jax.process_index()} holds {expected}, {on} (DataLayout.row_indices says which)'
        )


def _check_columns(name: str, shape: tuple[int, ...], axes: Axes, mesh: Mesh) -> None:
    for dim, (size, dim_axes) in enumerate(zip(shape[1:], axes[1:], strict=False), 1):
        ways = math.prod(mesh.shape[axis] for axis in dim_axes)
        if size % ways:
            raise ValueError(
                f'{name} {shape}: dimension {dim} does not divide by {ways}, the size of mesh axes '
                f'{dim_axes}'
            )


def _check_kept(name: str, leaf: Any) -> None:
    """jax makes 32 bits of 64 where these are not enabled: whole numbers must fit."""
    array = np.asarray(leaf)
    kept = jax.dtypes.canonicalize_dtype(array.dtype) if array.dtype.kind in 'iu' else array.dtype
    if kept != array.dtype and array.size and (array.astype(kept) != array).any():
        raise ValueError(
            f'{name} {array.dtype} {array.shape} has numbers beyond {kept}, which jax would cut: '
            "use smaller ones, or jax.config.update('jax_enable_x64', True)"
        )


def _global_array(
    leaf: Any, sharding: NamedSharding, parts: tuple[int, ...], ways: int
) -> jax.Array:
    local = np.asarray(leaf)
    block = local.shape[0] // len(parts)
    place = {part: i * block for i, part in enumerate(parts)}

    def rows_of_device(index: Any) -> np.ndarray:
        # A device holds one part, and parts that follow each other do so locally, too.
        start = place[(index[0].start or 0) // block]
        return local[(slice(start, start + block), *index[1:])]

    shape = (block * ways, *local.shape[1:])
    return jax.make_array_from_callback(shape, sharding, rows_of_device)


def _local_rows(path: Any, array: Any) -> np.ndarray:
    if not isinstance(array, jax.Array) or not array.ndim:
        raise ValueError(f'{_name(path)} is {array!r}, not a jax.Array [batch, ...]')
    shards = {bounds_of(s.index, array.shape): s for s in array.addressable_shards}
    blocks = sorted({ranges[0] for ranges in shards})
    place, local_rows = {}, 0
    for start, stop in blocks:
        place[start, stop] = local_rows
        local_rows += stop - start
    local = np.empty((local_rows, *array.shape[1:]), array.dtype)
    if sum(math.prod(stop - start for start, stop in ranges) for ranges in shards) != local.size:
        raise ValueError(
            f'{_name(path)} {array.shape}: process {jax.process_index()} holds only a part of some '
            f'rows ({array.sharding}); gather their columns first'
        )
    for ranges, shard in shards.items():
        first = place[ranges[0]]
        rows = slice(first, first + ranges[0][1] - ranges[0][0])
        local[(rows, *(slice(*r) for r in ranges[1:]))] = shard.data
    return local


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator='/') or 'the batch'
