"""Who holds what: each process's part of the batch and of any array, read off the mesh.

What a process holds follows from where its devices stand in the mesh, never from an assumption
that they are neighbours: orders that suit a torus give a process strided rows, and that is fine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from partitioning.rules import (
    MeshAxes,
    as_tuple,
    check_spec,
    describe_axes,
    nearest,
    replicate_none,
)


@dataclasses.dataclass(frozen=True)
class LocalChunkInfo:
    """One process's part of an array.

    Attributes:
      slice: the global index range of each dimension that the process holds.
      replica_id: number of this process among those that hold the same part; 0 writes it.
    """

    slice: tuple[slice, ...]
    replica_id: int


@dataclasses.dataclass(frozen=True)
class DataLayout:
    """One process's part of the batch.

    Attributes:
      batch_size: rows of the global batch.
      shard_id: which shard of the batch this process reads.
      num_shards: number of shards that processes read.
      is_first_host_in_replica_set: True for one of the processes that read the same shard.
    """

    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool


class LocalChunker:
    """The chunks of arrays that one process of a mesh holds.

    Attributes:
      global_mesh: the mesh.
      mesh_axes: its axis names, in order.
      num_chunks: for each mesh axis, into how many parts the processes divide it.
      chunk_ids: for each mesh axis, which of those parts this process holds.
    """

    def __init__(self, global_mesh: Mesh, process_index: int | None = None):
        """Args:
        global_mesh: any mesh.
        process_index: the process to answer for; by default this one.

        Raises:
          ValueError: the process holds no device of the mesh.
        """
        self.global_mesh = global_mesh
        self.process_index = jax.process_index() if process_index is None else process_index
        self.mesh_axes = list(global_mesh.axis_names)
        self._processes = np.vectorize(lambda d: d.process_index, otypes=[int])(global_mesh.devices)
        if self.process_index not in self._processes:
            raise ValueError(
                f'process {self.process_index} holds no device of the mesh '
                f'{describe_axes(global_mesh.shape)}; it has processes '
                f'{sorted(set(self._processes.ravel().tolist()))}'
            )
        self.num_chunks = {axis: self.get_num_shards(axis) for axis in self.mesh_axes}
        self.chunk_ids = {axis: self.get_shard_id(axis) for axis in self.mesh_axes}

    def get_local_chunk_info(
        self, global_shape: Sequence[int], mesh_axes: Sequence[MeshAxes]
    ) -> LocalChunkInfo:
        """The part of an array that this process holds.

        Args:
          global_shape: the array's shape.
          mesh_axes: for each dimension the mesh axis, axes or None that shard it.

        Raises:
          ValueError: ranks differ, an axis does not exist or is used twice, a size does not
            divide, or the process's part is not one block.
        """
        shape, axes = tuple(global_shape), [as_tuple(a) for a in mesh_axes]
        flat = tuple(a for dim_axes in axes for a in dim_axes)
        if len(shape) != len(axes):
            raise ValueError(
                f'{len(axes)} mesh axes {tuple(mesh_axes)} for an array of {len(shape)} dimensions '
                f'{shape}'
            )
        self._check(flat)
        slices = tuple(
            self._dimension_slice(dim, size, dim_axes)
            for dim, (size, dim_axes) in enumerate(zip(shape, axes, strict=True))
        )
        held = len(self._positions(flat)[self.process_index])
        if held != math.prod(len(self._positions(a)[self.process_index]) for a in axes):
            raise ValueError(
                f'process {self.process_index} holds {held} scattered blocks of '
                f'{tuple(mesh_axes)}, not one: use NamedSharding.devices_indices_map'
            )
        return LocalChunkInfo(slices, self.get_replica_id(flat))

    def get_shard_id(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """Which part of a dimension sharded over these axes, in their order, this process holds."""
        axes = as_tuple(sharded_mesh_axes)
        self._check(axes)
        return self._parts(axes).index(self._positions(axes)[self.process_index])

    def get_num_shards(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """Into how many parts the processes divide a dimension sharded over these axes."""
        axes = as_tuple(sharded_mesh_axes)
        self._check(axes)
        return len(self._parts(axes))

    def get_replica_id(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """Number of this process among those that hold the same part of such a dimension."""
        axes = as_tuple(sharded_mesh_axes)
        self._check(axes)
        positions = self._positions(axes)
        mine = positions[self.process_index]
        others = self._positions(tuple(a for a in self.mesh_axes if a not in axes))
        replicas = sorted(
            (p for p in positions if positions[p] == mine), key=lambda p: (others[p], p)
        )
        return replicas.index(self.process_index)

    def _check(self, axes: tuple[str, ...]) -> None:
        for axis in axes:
            if axis not in self.mesh_axes:
                raise ValueError(
                    f'mesh axis {axis!r} does not exist: the mesh is '
                    f'{describe_axes(self.global_mesh.shape)}.{nearest(axis, self.mesh_axes)}'
                )
            if axes.count(axis) > 1:
                raise ValueError(f'mesh axis {axis!r} is used twice in {axes}')

    def _positions(self, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
        """For each process, its row-major positions along `axes`, sorted."""
        sizes = [self.global_mesh.shape[a] for a in axes]
        strides = np.cumprod([1, *sizes[::-1]])[:-1][::-1]
        grid = np.indices(self._processes.shape)
        flat = sum(
            (grid[self.mesh_axes.index(a)] * s for a, s in zip(axes, strides, strict=True)),
            start=np.zeros(self._processes.shape, int),
        )
        pairs = np.unique(np.stack([self._processes.ravel(), flat.ravel()]), axis=1)
        processes, starts = np.unique(pairs[0], return_index=True)
        held = np.split(pairs[1], starts[1:])
        return {int(p): tuple(h.tolist()) for p, h in zip(processes, held, strict=True)}

    def _parts(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """The distinct sets of positions along `axes` that processes hold, in order."""
        parts = sorted(set(self._positions(axes).values()))
        if sum(map(len, parts)) != math.prod(self.global_mesh.shape[a] for a in axes):
            raise ValueError(
                f'processes hold overlapping parts of mesh axes {axes}, so the parts have no '
                'numbers: use NamedSharding.devices_indices_map'
            )
        return parts

    def _dimension_slice(self, dim: int, size: int, axes: tuple[str, ...]) -> slice:
        if not axes:
            return slice(None)
        ways = math.prod(self.global_mesh.shape[a] for a in axes)
        if size % ways:
            raise ValueError(
                f'dimension {dim}: size {size} does not divide by {ways}, the size of mesh axes '
                f'{axes}'
            )
        held, block = self._positions(axes)[self.process_index], size // ways
        steps = set(np.diff(held).tolist())
        if steps <= {1}:
            return slice(held[0] * block, (held[-1] + 1) * block)
        if len(steps) == 1 and block == 1:
            return slice(held[0], held[-1] + 1, steps.pop())
        raise ValueError(
            f'dimension {dim}: process {self.process_index} holds blocks {held} of {ways}, which '
            'no slice describes: use NamedSharding.devices_indices_map'
        )


def host_local_array_to_global_array(arr_tree: Any, mesh: Mesh, pspecs: Any) -> Any:
    """Puts each process's part together to global arrays.

    Args:
      arr_tree: pytree of arrays, each this process's part.
      mesh: the global mesh.
      pspecs: PartitionSpecs, a pytree that is a prefix of `arr_tree`; None: replicated.

    Returns:
      A pytree of global jax.Arrays.

    Raises:
      ValueError: a spec that the mesh or its array cannot have.
    """
    from jax.experimental import multihost_utils

    specs = replicate_none(pspecs)

    def check(path: Any, spec: PartitionSpec, below: Any) -> None:
        for deeper, array in jax.tree_util.tree_leaves_with_path(below):
            where = jax.tree_util.keystr((*path, *deeper), simple=True, separator='/')
            check_spec(spec, mesh, where or 'the array', np.shape(array))

    jax.tree_util.tree_map_with_path(
        check, specs, arr_tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return multihost_utils.host_local_array_to_global_array(arr_tree, mesh, specs)
