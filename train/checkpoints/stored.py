"""Arrays in files, which are read slice by slice through TensorStore."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from train.errors import ConfigError
from train.paths import is_remote
from train.runtime.arrays_on_s3 import in_s3

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
    """An array that is read when it is needed, the whole array or a slice of it.

    Usage:
      array.read()                      # all of it
      array.read((slice(0, 4), ...))    # some rows
      np.asarray(array)                 # all of it

    Attributes:
      shape: the shape.
      dtype: the dtype of the values that are read.
      start: starts to read a slice, and returns a future of the values in file order.
      chunk: the shape of the chunks in which it is stored. Each is read as a whole, whatever part
        of it is wanted. None if any slice can be read alone.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    start: Callable[[Any], Any] = dataclasses.field(repr=False)
    chunk: tuple[int, ...] | None = None

    def read(self, index: Any = ...) -> np.ndarray:
        """Reads a slice, by default the whole array."""
        return np.asarray(self.start(index).result())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all values in memory, in bytes."""
        return self.size * self.dtype.itemsize


def in_memory(values: Any) -> StoredArray:
    """An array that a file contained inline, so that it is in memory already."""
    array = np.asarray(values)

    def start(index: Any) -> Future[np.ndarray]:
        future: Future[np.ndarray] = Future()
        future.set_result(array[index])
        return future

    return StoredArray(shape=array.shape, dtype=array.dtype, start=start)


def in_store(store: Any) -> StoredArray:
    """An array of an open tensorstore.TensorStore."""
    return StoredArray(
        shape=tuple(store.shape),
        dtype=np.dtype(store.dtype.numpy_dtype),
        start=lambda i: store[i].read(),
        chunk=tuple(store.chunk_layout.read_chunk.shape or ()),
    )


def as_bfloat16(array: StoredArray) -> StoredArray:
    """An array of uint16 whose bits are those of bfloat16 values."""
    return dataclasses.replace(
        array,
        dtype=np.dtype(jnp.bfloat16),
        start=lambda i: _Mapped(array.start(i), lambda x: x.view(jnp.bfloat16)),
    )


def with_dtype(array: StoredArray, dtype: np.dtype, name: str) -> StoredArray:
    """An array whose values are converted to another floating-point dtype when they are read.

    Args:
      array: the array.
      dtype: the dtype.
      name: the name of the array, for the message.

    Raises:
      ConfigError: when a slice is read that has finite values beyond the range of the dtype.
    """

    def convert(values: np.ndarray) -> np.ndarray:
        with np.errstate(over='ignore'):
            converted = values.astype(dtype)
        if np.any(np.isinf(converted) & ~np.isinf(values)):
            raise ConfigError(
                f'{name} has values up to {np.max(np.abs(values)):g}, which {dtype} cannot '
                "represent: use 'bfloat16' or 'float32'"
            )
        return converted

    def start(index: Any) -> Any:
        return _Mapped(array.start(index), convert)

    return dataclasses.replace(array, dtype=np.dtype(dtype), start=start)


def repeat_first(array: StoredArray, count: int) -> StoredArray:
    """An array with a new first dimension, along which the values are repeated `count` times."""

    def start(index: Any) -> Any:
        index = _full(index, array.ndim + 1)
        rows = len(range(*index[0].indices(count)))
        return _Mapped(array.start(index[1:]), lambda x: np.broadcast_to(x, (rows, *x.shape)))

    return StoredArray(shape=(count, *array.shape), dtype=array.dtype, start=start)


def _full(index: Any, ndim: int) -> Index:
    """The index with one slice for each dimension."""
    given = index if isinstance(index, tuple) else (index,)
    given = tuple(i for i in given if i is not ...)
    return (*given, *[slice(None)] * (ndim - len(given)))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A future whose result is changed by a function."""

    future: Any
    function: Callable[[np.ndarray], np.ndarray]

    def result(self) -> np.ndarray:
        return self.function(np.asarray(self.future.result()))


@functools.cache
def _context() -> Any:
    """The caches and limits that all reads of this process share."""
    import tensorstore as ts

    return ts.Context({'cache_pool': {'total_bytes_limit': 100_000_000}})


def open_stores(specs: Mapping[str, dict[str, Any]]) -> dict[str, StoredArray]:
    """Opens arrays, all at the same time.

    Args:
      specs: the TensorStore specification of each array, by its name.

    Raises:
      ValueError: if an array is missing or damaged. TensorStore raises it.
    """
    import tensorstore as ts

    opening = {n: ts.open(ts.Spec(s), context=_context(), read=True) for n, s in specs.items()}
    return {name: in_store(future.result()) for name, future in opening.items()}


def kvstore_of(folder: epath.Path) -> dict[str, Any]:
    """The TensorStore specification of a folder: local, in gs:// or in s3://."""
    text = str(folder)
    if not is_remote(folder):
        return {'driver': 'file', 'path': text.rstrip('/') + '/'}
    bucket, _, path = text.partition('://')[2].partition('/')
    spec = {'driver': 'gcs', 'bucket': bucket, 'path': path.rstrip('/') + '/'}
    return in_s3(spec) if text.startswith('s3://') else spec


def place(array: StoredArray, wanted: jax.ShapeDtypeStruct) -> Any:
    """Starts to read the slices that this process's devices hold, each of them once.

    Args:
      array: the stored array, which has the shape of `wanted`.
      wanted: the shape, the dtype, to which the values are cast, and the sharding of the result.

    Returns:
      A function that waits for the values, and returns the global array.
    """
    devices = wanted.sharding.addressable_devices_indices_map(wanted.shape)
    unique = {_key(index, wanted.shape): index for index in devices.values()}
    reads = {key: array.start(index) for key, index in unique.items()}

    def finish() -> jax.Array:
        values = {k: np.asarray(read.result()).astype(wanted.dtype) for k, read in reads.items()}
        shards = [
            jax.device_put(values[_key(index, wanted.shape)], device)
            for device, index in devices.items()
        ]
        return jax.make_array_from_single_device_arrays(wanted.shape, wanted.sharding, shards)

    return finish


def _key(index: Index, shape: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(i.indices(size) for i, size in zip(index, shape, strict=True))
