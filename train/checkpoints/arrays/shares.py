"""Which process reads which part of a stored array, so that no part is read twice."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from train.checkpoints.arrays.stored import Bounds, Index, StoredArray, bounds_of

# About the size of what is read at once.
PIECE_BYTES = 8 * 2**20
# Each process reads smaller shards itself, because that takes less time than to exchange them.
MIN_EXCHANGED_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a shard that is read at once.

    Attributes:
      bounds: the first index and the end along each dimension of the array.
      readers: the processes that read it.
    """

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
      bounds: the first index and the end along each dimension of the array.
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
    reads some of them. `exchanges` says for which arrays that is possible.

    Args:
      array: the stored array.
      struct: the shape, the dtype and the sharding that the array is restored to.
      number: the number of the array in the checkpoint, so that single pieces of successive arrays
        have different readers.
    """
    shares = []
    for bounds, holders in _holders(struct.sharding, struct.shape):
        pieces = split(bounds, array.chunk, array.dtype.itemsize)
        divided = len(holders) > 1 and exchanges(struct, bounds)
        shares.append(
            Share(
                bounds,
                holders,
                tuple(
                    Piece(piece, (holders[(number + i) % len(holders)],) if divided else holders)
                    for i, piece in enumerate(pieces)
                ),
            )
        )
    return shares


def exchanges(struct: jax.ShapeDtypeStruct, shard: Bounds) -> bool:
    """Whether processes exchange the pieces of a shard that they hold together.

    It must be large enough, and its values must have as many bits as they have in memory, so that
    devices can add them as integers.
    """
    size = math.prod(last - first for first, last in shard) * struct.dtype.itemsize
    return (
        size >= MIN_EXCHANGED_BYTES
        and isinstance(struct.sharding, NamedSharding)
        and (jnp.issubdtype(struct.dtype, jnp.floating) or struct.dtype.kind in 'iu')
        and _bits(struct.dtype) == 8 * struct.dtype.itemsize
    )


def _bits(dtype: Any) -> int:
    return int((jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits)


@functools.lru_cache(maxsize=1024)
def _holders(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> Sequence[tuple[Bounds, tuple[int, ...]]]:
    """The shards of an array, each with the processes whose devices hold it."""
    holders = dict[Bounds, set[int]]()
    index_map: Mapping[Any, Any] = sharding.devices_indices_map(shape)
    for device, index in index_map.items():
        holders.setdefault(bounds_of(index, shape), set()).add(device.process_index)
    return [(bounds, tuple(sorted(of))) for bounds, of in sorted(holders.items())]


def split(shard: Bounds, chunk: tuple[int, ...] | None, itemsize: int) -> list[Bounds]:
    """Cuts a shard into pieces of about `PIECE_BYTES`, in the order of their values in memory.

    Args:
      shard: the first index and the end along each dimension of the array.
      chunk: the shape of the stored chunks, which are not cut further than the shard cuts them.
        None if they do not matter.
      itemsize: the size of a value, in bytes.
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
