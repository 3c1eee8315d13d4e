"""Reads stored arrays onto their devices, piece by piece, so that no part is read twice.

Each shard is cut into pieces. If several processes hold a shard, each of them reads some of its
pieces, and their devices exchange them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from partitioning.rules import sharding_axes
from train.checkpoints.arrays.stored import (
    Bounds,
    Index,
    StoredArray,
    StoreReader,
    bounds_of,
    is_floating,
)
from train.errors import first_line
from train.processes.activity import calling_compiler, wait_for_devices

# The approximate size of a piece.
PIECE_BYTES = 8 * 2**20
# Each process reads smaller shards itself, because that takes less time than to exchange them.
MIN_EXCHANGED_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a shard that is read at once, by its bounds in the array, and who reads it."""

    bounds: Bounds
    readers: tuple[int, ...]

    @property
    def index(self) -> Index:
        """The slices of the piece in the array."""
        return tuple(slice(*bounds) for bounds in self.bounds)

    def index_in(self, shard: Bounds) -> tuple[Any, ...]:
        """The index of the piece in a shard that contains it, which selects a view of an array."""
        bounds = zip(self.bounds, shard, strict=True)
        slices = (slice(first - start, last - start) for (first, last), (start, _) in bounds)
        return (*slices, ...)  # Without dimensions, an index without an ellipsis makes a copy.


@dataclasses.dataclass(frozen=True)
class Share:
    """A shard of an array, and how it is read.

    Attributes:
      holders: the processes whose devices hold it, in ascending order.
      pieces: its pieces, which do not overlap.
    """

    bounds: Bounds
    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the shard."""
        return tuple(last - first for first, last in self.bounds)


def by_size(stored: Mapping[str, StoredArray]) -> list[str]:
    """The names of arrays in the order in which they are read, the largest first."""
    return sorted(stored, key=lambda name: (-stored[name].nbytes, name))


def find_shares(array: StoredArray, struct: jax.ShapeDtypeStruct, number: int) -> list[Share]:
    """Divides the reading of an array among processes.

    A shard that devices of several processes hold is cut into pieces, and each of these processes
    reads some of them, if `exchanges` says so. `struct` has the sharding that the array is restored
    to. By the `number` of the array, single pieces of successive arrays have different readers.
    """
    shares = []
    for bounds, holders in holders_of(struct.sharding, struct.shape):
        pieces = [Piece(one, holders) for one in split(bounds, array.chunk, array.dtype.itemsize)]
        if len(holders) > 1 and exchanges(struct, bounds):
            turns = itertools.cycle((holder,) for holder in holders)
            readers = itertools.islice(turns, number % len(holders), None)
            pieces = [Piece(piece.bounds, next(readers)) for piece in pieces]
        shares.append(Share(bounds, holders, tuple(pieces)))
    return shares


def exchanges(struct: jax.ShapeDtypeStruct, shard: Bounds) -> bool:
    """Whether processes exchange the pieces of a shard that they hold together.

    It must be large enough, and its values must have as many bits as they have in memory, so that
    devices can add them as integers.
    """
    dtype = struct.dtype
    size = math.prod(last - first for first, last in shard) * dtype.itemsize
    if size < MIN_EXCHANGED_BYTES or not isinstance(struct.sharding, NamedSharding):
        return False
    if is_floating(struct):
        return bool(jnp.finfo(dtype).bits == 8 * dtype.itemsize)
    return dtype.kind in 'iu' and jnp.iinfo(dtype).bits == 8 * dtype.itemsize


@functools.lru_cache(maxsize=1024)
def holders_of(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> Sequence[tuple[Bounds, tuple[int, ...]]]:
    """The shards of an array, each with the processes whose devices hold it, in ascending order."""
    holders = dict[Bounds, set[int]]()
    index_map: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in index_map.items():
        holders.setdefault(bounds_of(index, shape), set()).add(device.process_index)
    return [(bounds, tuple(sorted(of))) for bounds, of in sorted(holders.items())]


def split(shard: Bounds, chunk: tuple[int, ...] | None, itemsize: int) -> list[Bounds]:
    """Cuts a shard into pieces of about `PIECE_BYTES`, in the order of their values in memory.

    Stored chunks, whose shape is `chunk` if they matter, are not cut further than the shard cuts
    them. `itemsize` is the size of a value, in bytes.
    """
    step = list(chunk) if chunk is not None else [1] * len(shard)
    size = math.prod(step) * itemsize
    for dim in reversed(range(len(step))):
        first, last = shard[dim]
        count = max(1, min(PIECE_BYTES // max(size, 1), -(-(last - first) // step[dim])))
        step[dim] *= count
        size *= count
    ranges = []
    for (first, last), length in zip(shard, step, strict=True):
        cuts = range((first // length + 1) * length, last, length)
        ranges.append(list(itertools.pairwise([first, *cuts, last])))
    return list(itertools.product(*ranges))


# The host memory of arrays that are read at the same time; at least one is read.
MAX_BYTES_IN_FLIGHT = 2**27
# They wait for the disk, and for each other where several shards need the same file.
NUM_THREADS = 8
_ALIGNMENT = 4096  # pages, into which files are read past the cache; CPU devices need 64


class UnreadableArrayError(Exception):
    """An array whose files are missing or damaged. Its cause is the error of reading."""


class _Reading(NamedTuple):
    """An array that is being read.

    Attributes:
      buffers: the host memory of each shard of this process.
      exchanged: whether processes read parts of the same shards, and exchange them.
      pieces: the futures of the pieces that this process reads.
    """

    name: str
    struct: jax.ShapeDtypeStruct
    buffers: Mapping[Bounds, np.ndarray]
    exchanged: bool
    pieces: list[Future[None]]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())


def read_all(
    stored: Mapping[str, StoredArray], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Reads arrays, by name, onto their devices. All processes must call it together.

    Each process reads the pieces of its own shards. A shard that several processes hold is read
    once by all of them together; their devices exchange its pieces. Large arrays come first: their
    copies need the most memory, and later there is less of it. Values are converted to the wanted
    dtypes. Raises an UnreadableArrayError on the processes that cannot read a file, after all
    exchanges, because other processes wait for those.
    """
    order = by_size(stored)
    reading, arrays = deque[_Reading](), dict[str, jax.Array]()
    error: UnreadableArrayError | None = None
    pool = ThreadPoolExecutor(NUM_THREADS, 'restore')
    try:
        for number, name in enumerate(order):
            one = _start(name, stored[name], wanted[name], number, None if error else pool)
            reading.append(one)
            in_flight = sum(r.nbytes for r in reading)
            while reading and (in_flight > MAX_BYTES_IN_FLIGHT or number + 1 == len(order)):
                first = reading.popleft()
                arrays[first.name], new = _finish(first)
                in_flight -= first.nbytes
                error = error or new
            if error and jax.process_count() == 1:
                break
    finally:
        pool.shutdown(cancel_futures=True)
    if error is not None:
        raise error
    return arrays


def _start(
    name: str,
    array: StoredArray,
    struct: jax.ShapeDtypeStruct,
    number: int,
    pool: ThreadPoolExecutor | None,
) -> _Reading:
    """Starts to read the pieces of an array, or nothing without threads."""
    me, everything = jax.process_index(), find_shares(array, struct, number)
    exchanged = any(
        piece.readers != share.holders for share in everything for piece in share.pieces
    )
    shares = [share for share in everything if me in share.holders]
    shapes = {share.bounds: share.shape for share in shares}
    buffers = _allocate(np.zeros if exchanged else np.empty, shapes, struct.dtype)
    mine = [(share, piece) for share in shares for piece in share.pieces if me in piece.readers]
    # Shards that share a chunk read it one after the other, while it is in TensorStore's cache.
    mine.sort(key=lambda both: both[1].bounds)

    def read(share: Share, piece: Piece) -> None:
        out = buffers[share.bounds][piece.index_in(share.bounds)]
        if isinstance(array.start, StoreReader) and array.dtype == out.dtype:
            array.start.read_into(piece.index, out)
        else:
            out[...] = array.read(piece.index).astype(out.dtype, copy=False)

    pieces = [] if pool is None else [pool.submit(read, *each) for each in mine]
    return _Reading(name, struct, buffers, exchanged, pieces)


def _allocate(
    make: Callable[..., np.ndarray], shapes: Mapping[Bounds, tuple[int, ...]], dtype: np.dtype
) -> dict[Bounds, np.ndarray]:
    """Host memory for shards, which devices on CPUs can use as it is.

    It is one block, because the operating system provides few large pages faster than many small.
    """
    sizes = {bounds: math.prod(shape) * dtype.itemsize for bounds, shape in shapes.items()}
    aligned = {bounds: -(-size // _ALIGNMENT) * _ALIGNMENT for bounds, size in sizes.items()}
    memory = make(sum(aligned.values()) + _ALIGNMENT, np.uint8)
    start, buffers = -memory.ctypes.data % _ALIGNMENT, dict[Bounds, np.ndarray]()
    for bounds, shape in shapes.items():
        values = memory[start : start + sizes[bounds]]
        buffers[bounds] = values.view(dtype).reshape(shape)
        start += aligned[bounds]
    return buffers


def _finish(reading: _Reading) -> tuple[jax.Array, UnreadableArrayError | None]:
    """Waits for the pieces of an array, and puts it onto its devices."""
    error = None
    for piece in reading.pieces:
        if (cause := piece.exception()) is not None and error is None:
            error = UnreadableArrayError(f'{reading.name}: {first_line(cause)}')
            error.__cause__ = cause
    place = _exchange if reading.exchanged else _place
    return place(reading.struct, reading.buffers), error


def _place(struct: jax.ShapeDtypeStruct, buffers: Mapping[Bounds, np.ndarray]) -> jax.Array:
    """The array whose shards are in host memory."""
    sharding = struct.sharding
    shards = [
        _put(buffers[bounds_of(index, struct.shape)], device, sharding)
        for device, index in sharding.addressable_devices_indices_map(struct.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(struct.shape, sharding, shards)


def _put(values: np.ndarray, device: jax.Device, sharding: jax.sharding.Sharding) -> jax.Array:
    target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
    return jax.device_put(values, target)


def _exchange(struct: jax.ShapeDtypeStruct, buffers: Mapping[Bounds, np.ndarray]) -> jax.Array:
    """Makes an array by adding what each process has read of a shard that several processes hold.

    Every process has zeros where another one has read the values. Their bits are added as integers,
    which changes none of them.
    """
    sharding = struct.sharding
    assert isinstance(sharding, NamedSharding)
    mesh, spec = sharding.mesh, sharding.spec
    used = {axis for entry in spec for axis in sharding_axes(entry)}
    copies = tuple(axis for axis in mesh.axis_names if axis not in used)
    shape = (math.prod(mesh.shape[axis] for axis in copies), *struct.shape)
    stacked = NamedSharding(mesh, PartitionSpec(copies, *spec))
    shards, placed = [], set[Bounds]()
    index_map: Mapping[Any, Any] = stacked.addressable_devices_indices_map(shape)
    for device, (_, *index) in index_map.items():
        bounds = bounds_of(tuple(index), struct.shape)
        values = buffers[bounds].view(f'u{struct.dtype.itemsize}')
        if bounds in placed:  # Only one device of a process brings its values.
            values = np.zeros_like(values)
        placed.add(bounds)
        shards.append(_put(values[None], device, stacked))
    bits = jax.make_array_from_single_device_arrays(shape, stacked, shards)
    with calling_compiler():
        added = _adder(sharding, struct.dtype)(bits)
    # Processes on CPUs whose programs run ahead of each other can wait forever.
    return wait_for_devices(added)


@functools.lru_cache
def _adder(sharding: NamedSharding, dtype: np.dtype) -> Any:
    """The program that adds the bits of the copies of an array."""

    def add(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jnp.sum(bits, axis=0, dtype=bits.dtype), dtype)

    return jax.jit(add, out_shardings=sharding)
