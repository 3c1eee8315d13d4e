"""Which device holds which tile of an array, from the places of the devices alone."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from partitioning.compat.torch_xla.meshes import get_logical_mesh, mesh_or_global
from partitioning.compat.torch_xla.partition_spec import SpecLike, resolve_partition_spec, ways_of
from partitioning.rules import as_tuple


class ShardingType(enum.IntEnum):
    """How an array lies on its devices, with torch_xla's numbers."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


class IotaTileAssignment(NamedTuple):
    """A tile assignment as device numbers 0, 1, ... that are reshaped and transposed.

    Attributes:
      dims: tiles of each dimension, and last the replicas of a tile if it has several.
      reshape_dims: the shape that the numbers are given, that of the mesh.
      transpose_perm: the permutation of its dimensions; then they are reshaped to `dims`.
      subgroup: what the last of `dims` is: [REPLICATED], or [] where all are tiles.
    """

    dims: list[int]
    reshape_dims: list[int]
    transpose_perm: list[int]
    subgroup: list[ShardingType]


class _Tiling(NamedTuple):
    ids: np.ndarray  # of the devices, in the shape of the mesh
    ways: tuple[int, ...]  # tiles of each dimension
    order: tuple[int, ...]  # mesh dimensions: those of the spec, major first, then the others
    replicas: int  # devices that hold the same tile


def sharding_type(mesh: Mesh | None, partition_spec: SpecLike) -> ShardingType:
    """How arrays of this spec lie on the mesh in effect: axes of size 1 divide nothing.

    Returns:
      MAXIMAL on one device, REPLICATED where all hold the whole array, TILED where each device has
      a tile of its own, PARTIAL where several hold the same tile.

    Raises:
      ValueError: a spec that the mesh cannot have; see `resolve_partition_spec`.
    """
    return _type_of(_tiling(mesh, partition_spec))


def tile_assignment(mesh: Mesh | None, partition_spec: SpecLike) -> np.ndarray:
    """Device ids by tile.

    Usage:
      tile_assignment(mesh, (None, 1))  # of 4 x 2: shape (1, 2, 4), [[[0, 2, 4, 6], [1, 3, 5, 7]]]

    Returns:
      The ids, of shape (tiles of each dimension..., replicas of a tile); the last dimension is
      there only where tiles have several holders (PARTIAL and REPLICATED), as in HLO.

    Raises:
      ValueError: a spec that the mesh cannot have; see `resolve_partition_spec`.
    """
    tiling = _tiling(mesh, partition_spec)
    return tiling.ids.transpose(tiling.order).reshape(_dims(tiling))


def replication_groups(mesh: Mesh | None, partition_spec: SpecLike) -> list[list[int]]:
    """For each tile, in row-major order, the ids of the devices that hold it.

    Raises:
      ValueError: a spec that the mesh cannot have; see `resolve_partition_spec`.
    """
    tiling = _tiling(mesh, partition_spec)
    return tiling.ids.transpose(tiling.order).reshape(-1, tiling.replicas).tolist()


def group_assignment(mesh: Mesh | None, partition_spec: SpecLike) -> list[Any]:
    """The numbers of the replication groups, nested as the tiles they hold.

    Usage:
      group_assignment(mesh, (0, None))  # of 4 x 2: [[0], [1], [2], [3]]

    Returns:
      Nested lists; empty where tiles have no replicas, or the array is whole on each device.

    Raises:
      ValueError: a spec that the mesh cannot have; see `resolve_partition_spec`.
    """
    tiling = _tiling(mesh, partition_spec)
    if _type_of(tiling) != ShardingType.PARTIAL:
        return []
    return np.arange(math.prod(tiling.ways)).reshape(tiling.ways).tolist()


def iota_tile_assignment(mesh: Mesh | None, partition_spec: SpecLike) -> IotaTileAssignment:
    """The arguments of a tile assignment without a list of devices.

    Devices have the numbers of torch_xla's partitions: 0, 1, ... by rising id.

    Raises:
      ValueError: the devices of the mesh are not in that order; or a spec that it cannot have, see
        `resolve_partition_spec`.
    """
    tiling = _tiling(mesh, partition_spec)
    numbers = _partition_numbers(tiling.ids)
    if not _is_iota(numbers):
        first = int(np.argmax(numbers.ravel() != np.arange(numbers.size)))
        raise ValueError(
            f'the mesh has device {tiling.ids.flat[first]} at place {first}, so its devices are '
            'not in the order of their ids: tile_assignment lists them'
        )
    return IotaTileAssignment(
        dims=list(_dims(tiling)),
        reshape_dims=list(tiling.ids.shape),
        transpose_perm=list(tiling.order),
        subgroup=[ShardingType.REPLICATED] if tiling.replicas > 1 else [],
    )


def hlo_sharding(mesh: Mesh | None, partition_spec: SpecLike) -> str:
    """The sharding as HLO writes it.

    Usage:
      hlo_sharding(mesh, (None, 1))  # of 4 x 2:
      # '{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}'

    Devices have the numbers of torch_xla's partitions: 0, 1, ... by rising id. A mesh in that order
    is written as a transposed range, any other as a list. (jax numbers them by their places in the
    mesh instead, so its own text is always that of a mesh in order.)

    Raises:
      ValueError: a spec that the mesh cannot have; see `resolve_partition_spec`.
    """
    tiling = _tiling(mesh, partition_spec)
    kind = _type_of(tiling)
    if kind == ShardingType.MAXIMAL:
        return '{maximal device=0}'
    if kind == ShardingType.REPLICATED:
        return '{replicated}'
    numbers = _partition_numbers(tiling.ids)
    if _is_iota(numbers):
        devices = _iota_text(numbers.shape, tiling.order)
    else:
        groups = numbers.transpose(tiling.order).reshape(-1, tiling.replicas)
        devices = _joined(np.sort(groups).flat)  # XLA lists the holders of a tile by number
    last = ' last_tile_dim_replicate' if kind == ShardingType.PARTIAL else ''
    return f'{{devices=[{_joined(_dims(tiling))}]{devices}{last}}}'


def _tiling(mesh: Mesh | None, partition_spec: SpecLike) -> _Tiling:
    mesh = mesh_or_global(mesh)
    spec = resolve_partition_spec(mesh, partition_spec)
    used = [mesh.axis_names.index(axis) for axes in spec for axis in as_tuple(axes)]
    others = [dim for dim in range(len(mesh.axis_names)) if dim not in used]
    ways = ways_of(mesh, spec)
    return _Tiling(get_logical_mesh(mesh), ways, (*used, *others), mesh.size // math.prod(ways))


def _type_of(tiling: _Tiling) -> ShardingType:
    if tiling.ids.size == 1:
        return ShardingType.MAXIMAL
    if tiling.replicas == tiling.ids.size:
        return ShardingType.REPLICATED
    return ShardingType.PARTIAL if tiling.replicas > 1 else ShardingType.TILED


def _dims(tiling: _Tiling) -> tuple[int, ...]:
    return (*tiling.ways, tiling.replicas) if tiling.replicas > 1 else tiling.ways


def _partition_numbers(ids: np.ndarray) -> np.ndarray:
    """The rank of each id, which is the id itself where ids are 0, 1, ..."""
    return np.argsort(np.argsort(ids, axis=None)).reshape(ids.shape)


def _is_iota(numbers: np.ndarray) -> bool:
    return bool((numbers.ravel() == np.arange(numbers.size)).all())


def _iota_text(shape: Sequence[int], order: Sequence[int]) -> str:
    """`<=[4,2]T(1,0)`, with the fewest dimensions that say it, as XLA has it."""
    wide = [dim for dim, size in enumerate(shape) if size > 1]
    runs: list[list[int]] = []  # dimensions that stay next to each other are one
    for dim in (wide.index(dim) for dim in order if dim in wide):
        if runs and dim == runs[-1][-1] + 1:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    rising = sorted(runs)
    sizes = [math.prod(shape[wide[dim]] for dim in run) for run in rising]
    text = f'<=[{_joined(sizes)}]'
    if len(runs) == 1:
        return text
    return f'{text}T({_joined(rising.index(run) for run in runs)})'


def _joined(numbers: Any) -> str:
    return ','.join(map(str, numbers))
