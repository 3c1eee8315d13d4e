"""Chunks: the part of any array that a process reads, and who writes each block of it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh

from partitioning.layout.held import Axes, Held, axes_of, held_parts
from partitioning.rules import MeshAxes, as_tuple

Indivisible = Literal['error', 'pad']


@dataclasses.dataclass(frozen=True)
class LocalChunkInfo:
    """A chunk of an array that a process holds.

    Attributes:
      slice: its global index range in each dimension.
      replica_id: number of this process among those that hold the same chunk; 0 writes it.
    """

    slice: tuple[slice, ...]
    replica_id: int


class LocalChunker:
    """The chunks of arrays that one process of a mesh holds.

    Attributes:
      global_mesh: the mesh.
      mesh_axes: its axis names, in order.
      process_index: the process it answers for.
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
        held_parts(global_mesh, ()).check_holds(self.process_index, global_mesh)

    @functools.cached_property
    def num_chunks(self) -> dict[str, int]:
        """For each mesh axis, into how many sets of parts the processes divide it."""
        return {axis: self.get_num_shards(axis) for axis in self.mesh_axes}

    @functools.cached_property
    def chunk_ids(self) -> dict[str, int]:
        """For each mesh axis, which of those sets this process holds."""
        return {axis: self.get_shard_id(axis) for axis in self.mesh_axes}

    def get_local_chunk_info(
        self,
        global_shape: Sequence[int],
        mesh_axes: Sequence[MeshAxes],
        on_indivisible: Indivisible = 'error',
    ) -> LocalChunkInfo:
        """The one chunk of an array that this process holds.

        Args:
          global_shape: the array's shape.
          mesh_axes: for each dimension the mesh axis, axes or None that shard it.
          on_indivisible: of a size that its axes do not divide; 'pad' takes the parts that it
            would have if padded up to the next size that they divide, less the padding.

        Raises:
          ValueError: ranks differ, an axis does not exist or is used twice, a size does not
            divide, or what the process holds is not one chunk of its own: `get_local_chunks`
            then says it block by block.
        """
        shape, axes, held = self._held(global_shape, mesh_axes, on_indivisible)
        mine = held.parts[self.process_index]
        along = [sorted(set(places)) for places in zip(*map(held.place, mine), strict=True)]
        if held.overlap or len(mine) != math.prod(map(len, along)):
            how = 'shared in part with other processes' if held.overlap else 'scattered'
            raise ValueError(
                f'process {self.process_index} holds {len(mine)} blocks of {tuple(mesh_axes)}, '
                f'{how}, not one chunk: get_local_chunks says which'
            )
        slices = tuple(
            self._joined(dim, shape[dim], axes[dim], parts, held.ways[dim])
            for dim, parts in enumerate(along)
        )
        return LocalChunkInfo(slices, held.replica_ids[self.process_index])

    def get_local_chunks(
        self,
        global_shape: Sequence[int],
        mesh_axes: Sequence[MeshAxes],
        on_indivisible: Indivisible = 'error',
    ) -> tuple[LocalChunkInfo, ...]:
        """Every block of an array that this process holds, on any mesh.

        A block is what one device holds. If each process writes those whose `replica_id` is 0,
        every element of the array is written once.

        Args:
          global_shape: the array's shape.
          mesh_axes: for each dimension the mesh axis, axes or None that shard it.
          on_indivisible: as in `get_local_chunk_info`.

        Raises:
          ValueError: ranks differ, an axis does not exist or is used twice, or a size does not
            divide.
        """
        shape, axes, held = self._held(global_shape, mesh_axes, on_indivisible)
        blocks = []
        for part in held.parts[self.process_index]:
            slices = tuple(
                _range(at, at, shape[dim], held.ways[dim]) if axes[dim] else slice(None)
                for dim, at in enumerate(held.place(part))
            )
            replica_id = held.part_replica_ids[part][self.process_index]
            blocks.append(LocalChunkInfo(slices, replica_id))
        return tuple(blocks)

    def get_shard_id(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """Which part of a dimension sharded over these axes, in their order, this process holds.

        Where processes share only some of their parts, each distinct set of parts has a number.
        """
        held = self._held_of_dimension(sharded_mesh_axes)
        return held.shards[held.parts[self.process_index]]

    def get_num_shards(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """Into how many parts (or sets of them) the processes divide such a dimension."""
        return len(self._held_of_dimension(sharded_mesh_axes).shards)

    def get_replica_id(self, sharded_mesh_axes: str | Sequence[str]) -> int:
        """Number of this process among those that hold the same part of such a dimension."""
        return self._held_of_dimension(sharded_mesh_axes).replica_ids[self.process_index]

    def _held_of_dimension(self, mesh_axes: str | Sequence[str]) -> Held:
        if isinstance(mesh_axes, set | frozenset):
            raise ValueError(f'{mesh_axes!r} has no order, which numbers the parts: use a tuple')
        return held_parts(self.global_mesh, (as_tuple(mesh_axes),))

    def _held(
        self, global_shape: Sequence[int], mesh_axes: Sequence[MeshAxes], on_indivisible: str
    ) -> tuple[tuple[int, ...], Axes, Held]:
        shape, axes = tuple(global_shape), axes_of(mesh_axes)
        if not all(isinstance(size, int | np.integer) and size >= 0 for size in shape):
            raise ValueError(f'shape {shape} must be of whole numbers, 0 or more')
        if on_indivisible not in get_args(Indivisible):
            raise ValueError(f"on_indivisible must be 'error' or 'pad', not {on_indivisible!r}")
        if len(shape) != len(axes):
            raise ValueError(
                f'{len(axes)} mesh axes {tuple(mesh_axes)} for an array of {len(shape)} dimensions '
                f'{shape}'
            )
        held = held_parts(self.global_mesh, axes)
        for dim, (size, ways) in enumerate(zip(shape, held.ways, strict=True)):
            if size % ways and on_indivisible == 'error':
                raise ValueError(
                    f'dimension {dim}: size {size} does not divide by {ways}, the size of mesh '
                    f"axes {axes[dim]}. Use {-(-size // ways) * ways}, or on_indivisible='pad'"
                )
        return shape, axes, held

    def _joined(
        self, dim: int, size: int, axes: tuple[str, ...], parts: Sequence[int], ways: int
    ) -> slice:
        """The slice that joins parts of a dimension."""
        if not axes:
            return slice(None)
        steps = set(np.diff(parts).tolist())
        if steps <= {1}:
            return _range(parts[0], parts[-1], size, ways)
        if len(steps) == 1 and size <= ways:  # a part is one element: a slice with a stride
            return slice(min(parts[0], size), min(parts[-1] + 1, size), steps.pop())
        raise ValueError(
            f'dimension {dim}: process {self.process_index} holds parts {list(parts)} of {ways}, '
            'which no slice describes: get_local_chunks has them one by one'
        )


def _range(first: int, last: int, size: int, ways: int) -> slice:
    """The elements of parts `first` to `last` of a dimension, without what would be padding."""
    size = int(size)
    block = -(-size // ways)
    return slice(min(first * block, size), min((last + 1) * block, size))
