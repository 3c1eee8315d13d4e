"""Arrays from the parts that processes hold: shards of devices, and batches of an input loader."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from partitioning.compat.torch_xla.marking import PaddedArray, check_array, lay_out_evenly
from partitioning.compat.torch_xla.meshes_and_specs import (
    SpecLike,
    mesh_or_global,
    resolve_partition_spec,
    shards_per_dimension,
)
from partitioning.hardware import JaxDevice
from partitioning.layout import local_to_global
from partitioning.layout.ownership import index_bounds
from partitioning.mesh.validation import as_tuple_of
from partitioning.rules import describe_axes, nearest


@dataclasses.dataclass(frozen=True)
class LocalShard:
    """The part of an array that one device of this process holds.

    Attributes:
      device_id: the id of the device.
      data: the tile, on the device; it includes the padding of a PaddedArray.
      index: the position of the tile in the array, one slice per dimension, without padding.
      replica_id: the number of the device among those that hold the same tile.
      global_shape: the shape of the array, without padding.
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
    """Returns the shards of an array on the devices of this process, ordered by device id.

    Raises:
      ValueError: if `x` is not a jax.Array, or if it is traced and so is not on any device yet.
    """
    array, shape = (x.array, x.shape) if isinstance(x, PaddedArray) else (x, np.shape(x))
    if isinstance(array, jax.core.Tracer):
        raise ValueError('a traced array is not on any device yet: use the result of the function')
    if not isinstance(array, jax.Array):
        raise ValueError(
            f'{type(array).__qualname__} has no shards: lay it out with mark_sharding first'
        )

    def index_of(shard: jax.Shard) -> tuple[slice, ...]:
        bounds = zip(index_bounds(shard.index, array.shape), shape, strict=True)
        return tuple(slice(min(start, size), min(stop, size)) for (start, stop), size in bounds)

    shards = [
        LocalShard(s.device.id, s.data, index_of(s), s.replica_id, tuple(shape))
        for s in array.addressable_shards
    ]
    return tuple(sorted(shards, key=lambda shard: shard.device_id))


def global_from_shards(
    shards: Sequence[Any],
    mesh: Mesh | None,
    partition_spec: SpecLike,
    global_shape: Sequence[int] | None = None,
) -> jax.Array | PaddedArray:
    """Returns the array that consists of these shards; the inverse of `local_shards`.

    Args:
      shards: one shard per device of the mesh in this process: either arrays ordered by device id,
        or LocalShards in any order. All have the same shape, padding included.
      mesh: the mesh; None means the global mesh.
      partition_spec: for each dimension a mesh dimension or name, a tuple of them, or None.
      global_shape: the shape of the array. By default it is read from LocalShards, or is the shape
        that the shards add up to. If it is smaller, the result is a PaddedArray.

    Raises:
      ValueError: if the number of shards is wrong; if their shapes or dtypes differ, or do not fit
        `global_shape`; or if devices that hold the same tile have different shards.
    """
    mesh = mesh_or_global(mesh)
    here: list[JaxDevice] = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if not here:
        raise ValueError(
            f'process {jax.process_index()} has no device of the mesh {describe_axes(mesh)}'
        )
    devices = sorted(here, key=lambda device: device.id)
    given = None if global_shape is None else as_tuple_of(global_shape, 'global_shape')
    blocks, given = _in_order(shards, [device.id for device in devices], given)
    tile = tuple(blocks[0].shape)
    for i, block in enumerate(blocks):
        if block.shape != tile or block.dtype != blocks[0].dtype:
            raise ValueError(
                f'shard {i} is {block.dtype} {block.shape}, but shard 0 is {blocks[0].dtype} '
                f'{tile}: all shards must have one dtype and shape, padding included'
            )
    spec = resolve_partition_spec(mesh, partition_spec, tile)
    counts = shards_per_dimension(mesh, spec)
    padded = tuple(size * n for size, n in zip(tile, counts, strict=True))
    shape = padded if given is None else _check_global_shape(given, tile, counts)
    sharding = NamedSharding(mesh, spec)
    indices = sharding.devices_indices_map(padded)
    first: dict[Any, int] = {}
    for i, device in enumerate(devices):
        other = first.setdefault(index_bounds(indices[device], padded), i)
        if np.asarray(blocks[other]).tobytes() != np.asarray(blocks[i]).tobytes():
            raise ValueError(
                f'shards {other} and {i}, on devices {devices[other].id} and {device.id}, hold the '
                f'same tile of partition spec {tuple(spec)} but have different values'
            )
    placed = [jax.device_put(block, d) for block, d in zip(blocks, devices, strict=True)]
    array = jax.make_array_from_single_device_arrays(padded, sharding, placed)
    return array if shape == padded else PaddedArray(array=array, shape=shape)


def _in_order(
    shards: Sequence[Any], ids: list[int], shape: tuple[int, ...] | None
) -> tuple[list[Any], tuple[int, ...] | None]:
    """Returns the data of the shards by device id, and the global shape if it is known."""
    if isinstance(shards, PaddedArray | np.ndarray | jax.Array | str | dict):
        raise ValueError(f'shards must be a list of {len(ids)} arrays, not {type(shards).__name__}')
    blocks = list(shards)
    if len(blocks) != len(ids):
        raise ValueError(f'{len(blocks)} shards for {len(ids)} devices: pass one per id, {ids}')
    num_local = sum(isinstance(block, LocalShard) for block in blocks)
    if num_local == 0:
        return [x if isinstance(x, jax.Array) else np.asarray(x) for x in blocks], shape
    if num_local < len(blocks):
        raise ValueError(
            f'{num_local} of {len(blocks)} shards are LocalShards, the others arrays: pass one kind'
        )
    blocks.sort(key=lambda shard: shard.device_id)
    if [shard.device_id for shard in blocks] != ids:
        raise ValueError(
            f'the shards are from devices {[shard.device_id for shard in blocks]}, but this '
            f'process has the devices {ids} of the mesh'
        )
    found = {shard.global_shape for shard in blocks}
    if len(found if shape is None else found | {shape}) > 1:
        wanted = '' if shape is None else f', and global_shape is {shape}'
        raise ValueError(
            f'the shards are from arrays of shape {", ".join(map(str, sorted(found)))}{wanted}: '
            'pass the shards of one array, or only their data, ordered by device id'
        )
    return [shard.data for shard in blocks], blocks[0].global_shape


def _check_global_shape(
    shape: Sequence[int], tile: tuple[int, ...], counts: tuple[int, ...]
) -> tuple[int, ...]:
    """Returns the shape; tiles of this shape must add up to it, except for padding at the end."""
    if len(shape) != len(tile):
        raise ValueError(
            f'global_shape {shape} has {len(shape)} dimensions, but shards {tile} have {len(tile)}'
        )
    for dim, (size, block, n) in enumerate(zip(shape, tile, counts, strict=True)):
        least, most = max((block - 1) * n + 1, 0), block * n
        whole = isinstance(size, int | np.integer) and not isinstance(size, bool)
        if not whole or not least <= size <= most:
            fits = f'{least} to {most}' if least < most else most
            raise ValueError(
                f'global_shape {shape}: dimension {dim} has {n} tiles of {block}, so its size can '
                f'be {fits}, not {size!r}'
            )
    return tuple(int(size) for size in shape)


@dataclasses.dataclass(frozen=True)
class ShardingSpec:
    """A mesh and a partition spec: the layout of arrays of one rank.

    Attributes:
      mesh: the mesh. The constructor also accepts None for the global mesh.
      partition_spec: the spec, as a PartitionSpec. The constructor accepts every form of spec.
      minibatch: if True, an array holds only the rows of this process, and the rows of all
        processes form the batch; by default, an array is the whole batch.

    Raises:
      ValueError: if the mesh cannot have this spec; with `minibatch`, if no axis shards the rows.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool = False

    def __init__(self, mesh: Mesh | None, partition_spec: SpecLike, minibatch: bool = False):
        spec = resolve_partition_spec(mesh, partition_spec)
        if not isinstance(minibatch, bool):
            raise ValueError(f'minibatch={minibatch!r} must be True or False')
        if minibatch and (not len(spec) or spec[0] is None):
            raise ValueError(f'minibatch=True needs a mesh axis as first entry, not {tuple(spec)}')
        object.__setattr__(self, 'mesh', mesh_or_global(mesh))
        object.__setattr__(self, 'partition_spec', spec)
        object.__setattr__(self, 'minibatch', minibatch)

    def can_apply(self, t: Any) -> bool:
        """Returns whether an array has the rank of the spec."""
        return len(check_array(t)) == len(self.partition_spec)

    def sharding(self, t: Any) -> NamedSharding | None:
        """Returns the sharding that an array gets, or None if it has another rank than the spec."""
        return NamedSharding(self.mesh, self.partition_spec) if self.can_apply(t) else None

    def apply(self, t: Any) -> jax.Array:
        """Lays out an array.

        An array of another rank, a size that is not divisible, and with `minibatch` a traced array
        are a ValueError.
        """
        if not self.minibatch:
            remedy = 'drop or fill up a last batch that is too small'
            return lay_out_evenly(t, self.mesh, self.partition_spec, remedy)[0]
        if isinstance(t, jax.core.Tracer):
            raise ValueError('minibatch=True cannot be used inside a traced function')
        spec = resolve_partition_spec(self.mesh, self.partition_spec, check_array(t))
        return local_to_global(t, self.mesh, spec)


InputSharding = ShardingSpec | SpecLike | Mapping[str, ShardingSpec | SpecLike | None] | None


def shard_batch(batch: Any, input_sharding: InputSharding, mesh: Mesh | None = None) -> Any:
    """Lays out the arrays of a batch.

    Usage:
      batch = shard_batch(batch, {'x': ('data', None), 'y': ('data', None, None)}, mesh)

    Args:
      input_sharding: a partition spec, a ShardingSpec, or None to replicate, for all arrays; or a
        dict with one of these per entry of the batch, which is then a dict too.
      mesh: the mesh for partition specs and None; by default the global mesh.

    Raises:
      ValueError: if there are several specs but the batch is not a dict; if an array has another
        rank than its spec; if a size is not divisible; or if a ShardingSpec has another mesh.
      KeyError: if an array has no entry in `input_sharding`, or an entry has no array.
    """
    if not isinstance(input_sharding, Mapping):
        return _shard(batch, input_sharding, mesh)
    if not isinstance(batch, Mapping):
        raise ValueError(
            f'input_sharding is a dict for {sorted(input_sharding)}, but the batch is '
            f'{type(batch).__qualname__}'
        )
    _check_keys('array', batch, 'input_sharding', input_sharding)
    _check_keys('spec', input_sharding, 'batch', batch)
    return {name: _shard(part, input_sharding[name], mesh, name) for name, part in batch.items()}


def _shard(batch: Any, given: Any, mesh: Mesh | None, name: str = '') -> Any:
    if isinstance(given, ShardingSpec) and mesh not in (None, given.mesh):
        raise ValueError(f'{name or "the batch"}: the ShardingSpec has another mesh: remove mesh=')

    def place(path: Any, array: Any) -> jax.Array:
        try:
            if isinstance(given, ShardingSpec):
                return given.apply(array)
            entries = (None,) * np.ndim(array) if given is None else given
            return ShardingSpec(mesh, entries).apply(array)
        except ValueError as error:
            where = name + jax.tree_util.keystr(path)
            raise ValueError(f'{where or "the batch"}: {error}') from error

    return jax.tree_util.tree_map_with_path(place, batch)


def _check_keys(noun: str, needed: Iterable[str], where: str, given: Iterable[str]) -> None:
    for name in needed:
        if name not in given:
            hint = nearest(name, given)
            raise KeyError(f'{noun} {name!r} has no entry in {where}, which has {[*given]}.{hint}')
