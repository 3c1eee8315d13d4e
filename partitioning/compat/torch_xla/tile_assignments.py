"""Tile assignments: which device holds which tile of an array, before any array exists.

Every function takes a mesh (None means the global mesh) and a partition spec, and raises ValueError
if the mesh cannot have the spec; see `resolve_partition_spec`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from partitioning.compat.torch_xla.meshes_and_specs import (
    SpecLike,
    get_logical_mesh,
    mesh_or_global,
    resolve_partition_spec,
    shards_per_dimension,
)
from partitioning.rules import as_tuple


class ShardingType(enum.IntEnum):
    """How an array is spread over its devices, with torch_xla's numbers."""

    REPLICATED, MAXIMAL, TUPLE, TILED, MANUAL, PARTIAL, UNKNOWN = range(7)


class IotaTileAssignment(NamedTuple):
    """A tile assignment without a list: the numbers 0, 1, ... are reshaped to `reshape_dims`,
    transposed by `transpose_perm`, and reshaped to `dims`.

    Attributes:
      dims: the number of tiles along each dimension, then the replicas of a tile if there are any.
      reshape_dims: the first shape of the device numbers, which is the shape of the mesh.
      transpose_perm: the permutation of the dimensions of that shape.
      subgroup: the meaning of the last of `dims`: [REPLICATED], or [] if all of them are tiles.
    """

    dims: list[int]
    reshape_dims: list[int]
    transpose_perm: list[int]
    subgroup: list[ShardingType]


class _Tiling(NamedTuple):
    ids: np.ndarray  # the device ids, in the shape of the mesh
    counts: tuple[int, ...]  # the number of tiles along each dimension
    order: tuple[int, ...]  # the mesh dimensions that the spec uses, major first, then the others
    replicas: int  # the number of devices that hold the same tile

    @property
    def dims(self) -> tuple[int, ...]:
        return (*self.counts, self.replicas) if self.replicas > 1 else self.counts

    @property
    def type(self) -> ShardingType:
        if self.ids.size == 1:
            return ShardingType.MAXIMAL
        if self.replicas == self.ids.size:
            return ShardingType.REPLICATED
        return ShardingType.PARTIAL if self.replicas > 1 else ShardingType.TILED

    @property
    def partition_numbers(self) -> np.ndarray:
        """torch_xla's numbers of the devices: 0, 1, ... by increasing id."""
        return np.argsort(np.argsort(self.ids, axis=None)).reshape(self.ids.shape)

    def by_tile(self, values: np.ndarray) -> np.ndarray:
        """Turns one value per device, in the shape of the mesh, into one row per tile."""
        return values.transpose(self.order).reshape(-1, self.replicas)


def sharding_type(mesh: Mesh | None, partition_spec: SpecLike) -> ShardingType:
    """Returns the type of arrays with this spec. Mesh axes of size 1 do not count.

    It is MAXIMAL on one device, REPLICATED if all devices hold the whole array, TILED if every
    device has its own tile, and PARTIAL if several devices hold the same tile.
    """
    return _tiling(mesh, partition_spec).type


def tile_assignment(mesh: Mesh | None, partition_spec: SpecLike) -> np.ndarray:
    """Returns the device ids by tile.

    Usage:
      tile_assignment(mesh, (None, 1))  # over 4 x 2: [[[0, 2, 4, 6], [1, 3, 5, 7]]], (1, 2, 4)

    The shape is (tiles of each dimension..., replicas of a tile). As in HLO, the last dimension
    exists only if several devices hold each tile (PARTIAL and REPLICATED).
    """
    tiling = _tiling(mesh, partition_spec)
    return tiling.by_tile(tiling.ids).reshape(tiling.dims)


def replication_groups(mesh: Mesh | None, partition_spec: SpecLike) -> list[list[int]]:
    """Returns the ids of the devices that hold each tile, for the tiles in row-major order."""
    tiling = _tiling(mesh, partition_spec)
    return tiling.by_tile(tiling.ids).tolist()


def group_assignment(mesh: Mesh | None, partition_spec: SpecLike) -> list[Any]:
    """Returns the numbers of the replication groups, nested like their tiles.

    Over a 4 x 2 mesh, (0, None) gives [[0], [1], [2], [3]]. The list is empty if tiles have no
    replicas, or if the array is replicated.
    """
    tiling = _tiling(mesh, partition_spec)
    if tiling.type != ShardingType.PARTIAL:
        return []
    return np.arange(math.prod(tiling.counts)).reshape(tiling.counts).tolist()


def iota_tile_assignment(mesh: Mesh | None, partition_spec: SpecLike) -> IotaTileAssignment:
    """Returns a tile assignment in a form without a list of devices.

    It numbers devices as torch_xla numbers its partitions: 0, 1, ... by increasing id.

    Raises:
      ValueError: if the devices of the mesh are not in this order.
    """
    tiling = _tiling(mesh, partition_spec)
    numbers = tiling.partition_numbers.ravel()
    misplaced = np.flatnonzero(numbers != np.arange(numbers.size))
    if misplaced.size:
        raise ValueError(
            f'the mesh is not ordered by id, because device {tiling.ids.flat[misplaced[0]]} is at '
            f'position {misplaced[0]}: use tile_assignment, which lists the ids'
        )
    return IotaTileAssignment(
        dims=list(tiling.dims),
        reshape_dims=list(tiling.ids.shape),
        transpose_perm=list(tiling.order),
        subgroup=[ShardingType.REPLICATED] if tiling.replicas > 1 else [],
    )


def hlo_sharding(mesh: Mesh | None, partition_spec: SpecLike) -> str:
    """Returns the sharding in the notation of HLO.

    Devices have the numbers of torch_xla's partitions: 0, 1, ... by increasing id, so a mesh in
    another order is written as a list. (jax numbers devices by their position in the mesh instead.)
    """
    tiling = _tiling(mesh, partition_spec)
    if tiling.type in (ShardingType.MAXIMAL, ShardingType.REPLICATED):
        return '{replicated}' if tiling.ids.size > 1 else '{maximal device=0}'
    numbers = tiling.partition_numbers
    if (numbers.ravel() == np.arange(numbers.size)).all():
        devices = _iota_text(numbers.shape, tiling.order)
    else:
        devices = _joined(np.sort(tiling.by_tile(numbers)).flat)  # XLA sorts the holders of a tile.
    last = ' last_tile_dim_replicate' if tiling.type == ShardingType.PARTIAL else ''
    return f'{{devices=[{_joined(tiling.dims)}]{devices}{last}}}'


def _tiling(mesh: Mesh | None, partition_spec: SpecLike) -> _Tiling:
    mesh = mesh_or_global(mesh)
    spec = resolve_partition_spec(mesh, partition_spec)
    used = [mesh.axis_names.index(axis) for axes in spec for axis in as_tuple(axes)]
    others = [dim for dim in range(len(mesh.axis_names)) if dim not in used]
    counts = shards_per_dimension(mesh, spec)
    replicas = mesh.size // math.prod(counts)
    return _Tiling(get_logical_mesh(mesh), counts, (*used, *others), replicas)


def _iota_text(shape: Sequence[int], order: Sequence[int]) -> str:
    """Returns text such as `<=[4,2]T(1,0)`, with as few dimensions as possible, as XLA does."""
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    kept = np.array([wide.index(dim) for dim in order if dim in wide])
    # Dimensions that stay next to each other are merged.
    runs = [run.tolist() for run in np.split(kept, np.flatnonzero(np.diff(kept) != 1) + 1)]
    ordered = sorted(runs)
    sizes = _joined(math.prod(shape[wide[dim]] for dim in run) for run in ordered)
    permutation = _joined(ordered.index(run) for run in runs)
    return f'<=[{sizes}]' if len(runs) == 1 else f'<=[{sizes}]T({permutation})'


def _joined(numbers: Any) -> str:
    return ','.join(map(str, numbers))
