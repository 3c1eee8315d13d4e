"""The shards of an array that this process holds, and arrays made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from partitioning.compat.torch_xla.meshes import mesh_or_global
from partitioning.compat.torch_xla.padded_array import PaddedArray
from partitioning.compat.torch_xla.partition_spec import SpecLike, resolve_partition_spec, ways_of
from partitioning.hardware import JaxDevice
from partitioning.layout.ownership import index_bounds
from partitioning.mesh.checks import as_tuple_of
from partitioning.rules import describe_axes


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """What one device of this process holds of an array.

    Attributes:
      device_id: the id of the device.
      data: its tile, on the device; with the padding of a PaddedArray.
      index: where the tile is in the array, for each dimension; without the padding, so a tile of
        nothing else has an empty slice.
      replica_id: number of the device among those that hold the same tile.
      global_shape: of the array, without padding.
    """

    device_id: int
    data: jax.Array = dataclasses.field(repr=False)
    index: tuple[slice, ...]
    replica_id: int
    global_shape: tuple[int, ...]

    @property
    def unpadded_data(self) -> jax.Array:
        """The tile without padding."""
        return self.data[tuple(slice(s.stop - s.start) for s in self.index)]


def local_shards(x: jax.Array | PaddedArray) -> tuple[LocalShard, ...]:
    """The shards of an array on the devices of this process, by device id.

    Usage:
      for shard in local_shards(mark_sharding(x, mesh, ('data', None))):
          print(shard.device_id, shard.index, shard.replica_id, shard.unpadded_data)

    Raises:
      ValueError: no jax.Array, or one within a traced function, which is on no device yet.
    """
    array, shape = (x.array, x.shape) if isinstance(x, PaddedArray) else (x, np.shape(x))
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            f'an array {array.dtype}{list(shape)} of a traced function is on no device yet: look '
            'at the shards of what the function returns'
        )
    if not isinstance(array, jax.Array):
        raise ValueError(
            f'{type(array).__qualname__} has no shards: lay it out with mark_sharding first'
        )
    shards = (
        LocalShard(
            device_id=shard.device.id,
            data=shard.data,
            index=tuple(
                slice(min(start, size), min(stop, size))
                for (start, stop), size in zip(
                    index_bounds(shard.index, array.shape), shape, strict=True
                )
            ),
            replica_id=shard.replica_id,
            global_shape=tuple(shape),
        )
        for shard in array.addressable_shards
    )
    return tuple(sorted(shards, key=lambda shard: shard.device_id))


def global_from_shards(
    shards: Sequence[Any],
    mesh: Mesh | None,
    partition_spec: SpecLike,
    global_shape: Sequence[int] | None = None,
) -> jax.Array | PaddedArray:
    """The array whose shards these are: `local_shards` undone.

    Usage:
      x = global_from_shards([np.array([[i]]) for i in range(8)], mesh, (0, 1))  # of 4 x 2

    Args:
      shards: one for each device of the mesh in this process: arrays in the order of the device
        ids, or LocalShards in any order. All have the same shape, padding included.
      mesh: the mesh; None for the global one.
      partition_spec: for each dimension a mesh dimension or name, a tuple of them, or None.
      global_shape: shape of the array; by default what LocalShards say, or all of what the shards
        make. A smaller one says that the last tiles end in padding.

    Returns:
      The array; a PaddedArray where its shards end in padding.

    Raises:
      ValueError: too few shards or too many; shards whose shapes or types differ, or that cannot
        make `global_shape`; devices that should hold the same tile and do not; LocalShards of
        arrays of several shapes, or of another than `global_shape`.
    """
    mesh = mesh_or_global(mesh)
    mine: list[JaxDevice] = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    devices = sorted(mine, key=lambda device: device.id)
    if not devices:
        raise ValueError(
            f'process {jax.process_index()} holds no device of the mesh {describe_axes(mesh.shape)}'
        )
    blocks, said = _in_order(shards, [device.id for device in devices])
    global_shape = _one_shape(said, global_shape)
    tile = _check_alike(blocks)
    spec = resolve_partition_spec(mesh, partition_spec, len(tile))
    ways = ways_of(mesh, spec)
    shape = _check_global(tile, ways, global_shape)
    padded = tuple(size * n for size, n in zip(tile, ways, strict=True))
    sharding = NamedSharding(mesh, spec)
    _check_replicas(blocks, devices, sharding, padded)
    placed = [jax.device_put(block, d) for block, d in zip(blocks, devices, strict=True)]
    array = jax.make_array_from_single_device_arrays(padded, sharding, placed)
    return array if shape == padded else PaddedArray(array=array, shape=shape)


def _in_order(shards: Sequence[Any], ids: list[int]) -> tuple[list[Any], list[Any]]:
    """The data of the shards, in the order of the devices, and the shapes that LocalShards say."""
    if isinstance(shards, PaddedArray | np.ndarray | jax.Array | str | dict):
        raise ValueError(
            f'shards must be a sequence with one array for each of the {len(ids)} devices of this '
            f'process, not {type(shards).__qualname__}'
        )
    blocks = list(shards)
    if len(blocks) != len(ids):
        raise ValueError(
            f'{len(blocks)} shards for {len(ids)} devices: give one for each, in the order of the '
            f'device ids {ids}'
        )
    known = [isinstance(block, LocalShard) for block in blocks]
    if not any(known):
        return [x if isinstance(x, jax.Array) else np.asarray(x) for x in blocks], []
    if not all(known):
        raise ValueError(
            f'{sum(known)} of {len(known)} shards are LocalShards, the others arrays: give either'
        )
    of_device = {shard.device_id: shard for shard in blocks}
    if sorted(of_device) != ids:
        raise ValueError(
            f'shards of devices {sorted(shard.device_id for shard in blocks)} for a mesh whose '
            f'devices in this process are {ids}'
        )
    ordered = [of_device[number] for number in ids]
    return [shard.data for shard in ordered], [shard.global_shape for shard in ordered]


def _one_shape(
    said: Sequence[tuple[int, ...]], global_shape: Sequence[int] | None
) -> Sequence[int] | None:
    """The shape of the array, by all LocalShards the same, and by what is given."""
    given = [] if global_shape is None else [as_tuple_of(global_shape, 'global_shape')]
    shapes = {*said, *given}
    if said and len(shapes) > 1:
        by_shards = ', '.join(map(str, sorted({*said})))
        wanted = f', and global_shape is {given[0]}' if given else ''
        raise ValueError(
            f'the shards are of arrays of shape {by_shards}{wanted}: give those of one array, or '
            'the data of each, in the order of the device ids'
        )
    return next(iter(shapes), None)


def _check_alike(blocks: Sequence[Any]) -> tuple[int, ...]:
    """The one shape that all shards have."""
    first = blocks[0]
    for i, block in enumerate(blocks):
        if block.shape != first.shape or block.dtype != first.dtype:
            raise ValueError(
                f'shard {i} is {block.dtype} {block.shape}, but shard 0 is {first.dtype} '
                f'{first.shape}: all must be alike, padding included'
            )
    return tuple(first.shape)


def _check_global(
    tile: tuple[int, ...], ways: tuple[int, ...], global_shape: Sequence[int] | None
) -> tuple[int, ...]:
    """The shape of the array, which tiles of this shape must be able to make."""
    full = tuple(size * n for size, n in zip(tile, ways, strict=True))
    if global_shape is None:
        return full
    given = as_tuple_of(global_shape, 'global_shape')
    if len(given) != len(tile):
        raise ValueError(
            f'global_shape {given} has {len(given)} dimensions, shards of shape {tile} {len(tile)}'
        )
    for dim, (size, block, n) in enumerate(zip(given, tile, ways, strict=True)):
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not whole or not 0 <= size <= block * n or -(-size // n) != block:
            least = max((block - 1) * n + 1, 0)
            fits = f'{least} to {block * n}' if least < block * n else block * n
            raise ValueError(
                f'global_shape {given}: dimension {dim} in {n} tiles of {block} can be {fits}, not '
                f'{size!r}'
            )
    return tuple(int(size) for size in given)


def _check_replicas(
    blocks: Sequence[Any],
    devices: Sequence[JaxDevice],
    sharding: NamedSharding,
    shape: tuple[int, ...],
) -> None:
    """Devices that hold the same tile have been given the same."""
    held = sharding.devices_indices_map(shape)
    first: dict[Any, int] = {}
    for place, device in enumerate(devices):
        other = first.setdefault(index_bounds(held[device], shape), place)
        if other != place and _bytes(blocks[other]) != _bytes(blocks[place]):
            raise ValueError(
                f'shards {other} and {place}, of devices {devices[other].id} and {device.id}, hold '
                f'the same tile by partition spec {tuple(sharding.spec)}, but differ'
            )


def _bytes(block: Any) -> bytes:
    return np.asarray(block).tobytes()
