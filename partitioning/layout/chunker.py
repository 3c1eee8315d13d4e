"""Chunks: the part of any array that a process reads, and which process writes each shard of it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jax.sharding import Mesh

from partitioning.hardware import this_process
from partitioning.layout.ownership import Axes, ShardOwnership, axes_per_dimension, shard_ownership
from partitioning.rules import MeshAxes, as_tuple, indivisible, rank_problem

Indivisible = Literal['error', 'pad']


@dataclass(frozen=True)
class LocalChunkInfo:
    """A chunk of an array that a process holds.

    Attributes:
      slice: its global index range in each dimension.
      replica_id: the number of this process among those that hold the same chunk. The process with
        number 0 writes the chunk.
    """

    slice: tuple[slice, ...]
    replica_id: int


class LocalChunker:
    """The chunks of arrays that one process of a mesh holds.

    Args:
      global_mesh: any mesh.
      process_index: the process that holds the chunks; by default this one.

    The attributes have the names of the arguments, and `mesh_axes` the names of the mesh axes.

    Raises:
      ValueError: if the process holds no device of the mesh.
    """

    def __init__(self, global_mesh: Mesh, process_index: int | None = None):
        self.global_mesh = global_mesh
        self.process_index = this_process() if process_index is None else process_index
        self.mesh_axes = list(global_mesh.axis_names)
        shard_ownership(global_mesh, ()).check_process(self.process_index, global_mesh)

    @functools.cached_property
    def num_chunks(self) -> dict[str, int]:
        """For each mesh axis, the number of distinct chunks of a dimension sharded over it."""
        return {axis: self.get_num_shards(axis) for axis in self.mesh_axes}

    @functools.cached_property
    def chunk_ids(self) -> dict[str, int]:
        """For each mesh axis, the number of the chunk that this process holds."""
        return {axis: self.get_shard_id(axis) for axis in self.mesh_axes}

    def get_local_chunk_info(
        self,
        global_shape: Sequence[int],
        mesh_axes: Sequence[MeshAxes],
        on_indivisible: Indivisible = 'error',
    ) -> LocalChunkInfo:
        """The chunk of an array that this process holds, if one slice per dimension describes it.

        Args:
          global_shape: the shape of the array.
          mesh_axes: for each dimension, the mesh axis, axes or None that shard it.
          on_indivisible: what to do if the shards do not divide the size of a dimension. 'error'
            raises; 'pad' computes the shards of the next divisible size, without the padding.

        Raises:
          ValueError: if the ranks differ, if an axis does not exist or appears twice, if a size
            does not divide, or if the shards of this process do not form one rectangular chunk that
            is disjoint from the others. `get_local_chunks` describes any shards.
        """
        shape, axes, ownership = self._ownership(global_shape, mesh_axes, on_indivisible)
        chunk = ownership.chunks[self.process_index]
        positions = ownership.positions(chunk)
        if ownership.chunks_overlap or len(chunk) != math.prod(map(len, positions)):
            why = (
                'some of them also belong to other chunks'
                if ownership.chunks_overlap
                else 'they do not form a rectangle'
            )
            raise ValueError(
                f'process {self.process_index} holds {len(chunk)} shards over mesh axes '
                f'{tuple(mesh_axes)}, but {why}: use get_local_chunks, which lists every shard'
            )
        slices = self._slices(shape, axes, ownership, positions)
        return LocalChunkInfo(slices, ownership.replica_ids[self.process_index])

    def get_local_chunks(
        self,
        global_shape: Sequence[int],
        mesh_axes: Sequence[MeshAxes],
        on_indivisible: Indivisible = 'error',
    ) -> tuple[LocalChunkInfo, ...]:
        """Every shard of an array that this process holds, each as a chunk; works on any mesh.

        If each process writes the chunks whose `replica_id` is 0, every element of the array is
        written exactly once. The arguments and errors are as for `get_local_chunk_info`, but the
        shards need not form one chunk.
        """
        shape, axes, ownership = self._ownership(global_shape, mesh_axes, on_indivisible)
        chunks = []
        for shard in ownership.chunks[self.process_index]:
            slices = self._slices(shape, axes, ownership, ownership.positions([shard]))
            replica_id = ownership.shard_replica_ids[shard][self.process_index]
            chunks.append(LocalChunkInfo(slices, replica_id))
        return tuple(chunks)

    def get_shard_id(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """The number of this process's chunk of a dimension sharded over these axes in this order.

        If chunks overlap, each distinct chunk still has its own number.
        """
        ownership = self._ownership_of_dimension(sharded_mesh_axes)
        return ownership.chunk_ids[ownership.chunks[self.process_index]]

    def get_num_shards(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """The number of distinct chunks of a dimension sharded over these axes."""
        return len(self._ownership_of_dimension(sharded_mesh_axes).chunk_ids)

    def get_replica_id(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """The number of this process among those that hold the same chunk of such a dimension."""
        return self._ownership_of_dimension(sharded_mesh_axes).replica_ids[self.process_index]

    def _ownership_of_dimension(self, mesh_axes: str | Sequence[str]) -> ShardOwnership:
        if isinstance(mesh_axes, set | frozenset):
            raise ValueError(
                f'mesh axes {mesh_axes!r} have no order, so shards cannot be numbered; use a tuple'
            )
        return shard_ownership(self.global_mesh, (as_tuple(mesh_axes),))

    def _ownership(
        self, global_shape: Sequence[int], mesh_axes: Sequence[MeshAxes], on_indivisible: str
    ) -> tuple[tuple[int, ...], Axes, ShardOwnership]:
        shape, axes = tuple(global_shape), axes_per_dimension(mesh_axes)
        if not all(isinstance(size, int | np.integer) and size >= 0 for size in shape):
            raise ValueError(f'shape {shape}: every size must be an integer >= 0')
        if on_indivisible not in get_args(Indivisible):
            raise ValueError(f"on_indivisible must be 'error' or 'pad', not {on_indivisible!r}")
        if len(shape) != len(axes):
            problem = rank_problem(f'mesh_axes={tuple(mesh_axes)}', len(axes), shape)
            raise ValueError(f'the array: {problem.message}')
        ownership = shard_ownership(self.global_mesh, axes)
        for dim, (size, num_shards) in enumerate(zip(shape, ownership.num_shards, strict=True)):
            if size % num_shards and on_indivisible == 'error':
                problem = indivisible(dim, shape, axes[dim], self.global_mesh, policies=('pad',))
                raise ValueError(f'the array: {problem.message}')
        return shape, axes, ownership

    def _slices(
        self,
        shape: tuple[int, ...],
        axes: Axes,
        ownership: ShardOwnership,
        positions: Sequence[Sequence[int]],
    ) -> tuple[slice, ...]:
        """The slice of each dimension that joins the shards at these positions along it."""
        return tuple(
            self._joined_slice(dim, int(shape[dim]), along, ownership.num_shards[dim])
            if axes[dim]
            else slice(None)
            for dim, along in enumerate(positions)
        )

    def _joined_slice(
        self, dim: int, size: int, positions: Sequence[int], num_shards: int
    ) -> slice:
        """The elements of the shards at these positions along a dimension, without the padding."""
        first, last, steps = positions[0], positions[-1], set(np.diff(positions).tolist())
        if steps <= {1}:
            per_shard = -(-size // num_shards)
            return slice(min(first * per_shard, size), min((last + 1) * per_shard, size))
        if len(steps) == 1 and size <= num_shards:  # A shard is one element: use a stride.
            return slice(min(first, size), min(last + 1, size), steps.pop())
        raise ValueError(
            f'process {self.process_index} holds shards {list(positions)} of {num_shards} along '
            f'dimension {dim}, which do not form a slice: use get_local_chunks, which lists every '
            'shard'
        )
