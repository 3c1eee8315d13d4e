"""Arrays in files, which are read through TensorStore, slice by slice or piece by piece."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from etils import epath

from train.errors import ConfigError
from train.paths import is_remote

Index = tuple[slice, ...]
Bounds = tuple[tuple[int, int], ...]
CACHE_BYTES = 100_000_000


class HasShape(Protocol):
    """An array, or what is known about one."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...


def is_floating(array: HasShape) -> bool:
    """Whether the values of an array are floating-point numbers, bfloat16 among them."""
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredArray:
    """An array that is read when it is needed, the whole array or a slice of it.

    Usage:
      array.read()                      # all of it
      array.read((slice(0, 4), ...))    # some rows
      np.asarray(array)                 # all of it

    Attributes:
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


@dataclasses.dataclass(frozen=True)
class StoreReader:
    """Reads slices of an open TensorStore, after a check of the files that contain them.

    Attributes:
      check: checks the files of a slice, which has a first and a last index for each dimension.
      read_file: reads a slice that is exactly one file into a contiguous array of its shape, and
        returns whether it could.
    """

    store: Any
    check: Callable[[Bounds], None] | None = None
    read_file: Callable[[Bounds, np.ndarray], bool] | None = None

    def __call__(self, index: Any) -> Any:
        """Starts to read a slice, and returns a future of its values."""
        self._check(index)
        return self.store[index].read()

    def read_into(self, index: Any, out: np.ndarray) -> None:
        """Reads a slice into an array of its shape, without another copy of the values."""
        import tensorstore as ts

        bounds, read_file = bounds_of(index, self.store.shape), self.read_file
        if read_file is not None and out.flags.c_contiguous and read_file(bounds, out):
            return
        self._check(index)
        ts.array(out).write(self.store[index]).result()

    def _check(self, index: Any) -> None:
        if self.check is not None:
            self.check(bounds_of(index, self.store.shape))


def in_store(
    store: Any,
    check: Callable[[Bounds], None] | None = None,
    read_file: Callable[[Bounds, np.ndarray], bool] | None = None,
) -> StoredArray:
    """An array of an open tensorstore.TensorStore; `StoreReader` describes the arguments."""
    layout = store.chunk_layout
    # A file can contain several chunks, but it can only be checked as a whole.
    chunk = layout.read_chunk if check is None else layout.write_chunk
    return StoredArray(
        shape=tuple(store.shape),
        dtype=np.dtype(store.dtype.numpy_dtype),
        start=StoreReader(store, check, read_file),
        chunk=tuple(chunk.shape or ()),
    )


def as_bfloat16(array: StoredArray) -> StoredArray:
    """An array of uint16 with the bits of bfloat16 values."""
    return _map(array, np.dtype(jnp.bfloat16), lambda x: x.view(jnp.bfloat16))


def with_dtype(array: StoredArray, dtype: np.dtype, name: str) -> StoredArray:
    """An array whose values are converted to another floating-point dtype when they are read.

    Raises a ConfigError when a slice is read that has finite values beyond the range of the dtype.
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

    return _map(array, dtype, convert)


def _map(
    array: StoredArray, dtype: np.dtype, function: Callable[[np.ndarray], np.ndarray]
) -> StoredArray:
    """An array whose values a function changes when they are read."""
    start = array.start
    return dataclasses.replace(array, dtype=dtype, start=lambda i: _Mapped(start(i), function))


def repeat_first(array: StoredArray, count: int) -> StoredArray:
    """An array with a new first dimension, along which the values are repeated `count` times."""

    def start(index: Any) -> Any:
        (first, last), *others = bounds_of(index, (count, *array.shape))
        values = array.start(tuple(slice(*bounds) for bounds in others))
        return _Mapped(values, lambda x: np.broadcast_to(x, (last - first, *x.shape)))

    return StoredArray(shape=(count, *array.shape), dtype=array.dtype, start=start)


def bounds_of(index: Any, shape: tuple[int, ...]) -> Bounds:
    """The bounds of a slice, of slices of the first dimensions, or of `...` for everything."""
    given = tuple(i for i in (index if isinstance(index, tuple) else (index,)) if i is not ...)
    full = (*given, *[slice(None)] * (len(shape) - len(given)))
    bounds = [i.indices(size) for i, size in zip(full, shape, strict=True)]
    if any(step != 1 for _, _, step in bounds):
        raise ValueError(f'{index} has a step: slices of stored arrays have none')
    return tuple((first, max(first, last)) for first, last, _ in bounds)


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """A future whose result is changed by a function."""

    future: Any
    function: Callable[[np.ndarray], np.ndarray]

    def result(self) -> np.ndarray:
        return self.function(np.asarray(self.future.result()))


def open_stores(
    specs: Mapping[str, dict[str, Any]],
    check: Callable[[str, Any, Bounds], None] | None = None,
    read_file: Callable[[str, Any, Bounds, np.ndarray], bool] | None = None,
) -> dict[str, StoredArray]:
    """Opens arrays, all at the same time, by their TensorStore specifications.

    `check` checks the files of a slice, and `read_file` reads a slice that is one file into an
    array; see `StoreReader`. Raises TensorStore's ValueError if an array is missing or damaged.
    """
    import tensorstore as ts

    # The cache keeps chunks that several devices share. It is freed with the last array.
    limits: dict[str, Any] = {'cache_pool': {'total_bytes_limit': CACHE_BYTES}}
    if check is not None:
        # A file that has just been checked is whole and in the page cache, so it can be mapped.
        limits['file_io_mode'] = {'mode': 'memmap'}
    context = ts.Context(limits)
    opening = {n: ts.open(ts.Spec(s), context=context, read=True) for n, s in specs.items()}
    stores = {name: future.result() for name, future in opening.items()}
    if check is None:
        return {name: in_store(store) for name, store in stores.items()}
    partial = functools.partial
    return {
        n: in_store(s, partial(check, n, s), read_file and partial(read_file, n, s))
        for n, s in stores.items()
    }


def in_s3(description: Any) -> Any:
    """A description for TensorStore in which each part in `gs://` is in S3 instead."""
    if isinstance(description, str) and description.startswith('gs://'):
        bucket, _, path = description.removeprefix('gs://').partition('/')
        description = {'driver': 'gcs', 'bucket': bucket, 'path': path}
    if not isinstance(description, dict):
        return description
    description = {key: in_s3(value) for key, value in description.items()}
    if not str(description.get('driver')).startswith('gcs'):
        return description
    # Settings of the environment that boto3 and s3fs obey and TensorStore does not.
    given = os.environ
    if endpoint := given.get('AWS_ENDPOINT_URL_S3') or given.get('AWS_ENDPOINT_URL'):
        region = given.get('AWS_REGION') or given.get('AWS_DEFAULT_REGION') or 'us-east-1'
        description |= {'endpoint': endpoint, 'aws_region': region}
    if 'AWS_ACCESS_KEY_ID' in given:  # Otherwise it also looks for files, and logs if they miss.
        description['aws_credentials'] = {'type': 'environment'}
    return {**description, 'driver': 's3'}


def kvstore_of(folder: epath.Path) -> dict[str, Any]:
    """The TensorStore specification of a folder: local, in gs:// or in s3://."""
    text = str(folder)
    if not is_remote(folder):
        return {'driver': 'file', 'path': text.rstrip('/') + '/'}
    bucket, _, path = text.partition('://')[2].partition('/')
    spec = {'driver': 'gcs', 'bucket': bucket, 'path': path.rstrip('/') + '/'}
    return in_s3(spec) if text.startswith('s3://') else spec


# A piece is larger only if one chunk of the file is.
PIECE_BYTES = 2**28


def split(array: StoredArray) -> Iterator[Index]:
    """The slices of an array, in the order of its values, of at most 256 MiB each.

    Every chunk of the file is in one piece, because a part of it costs as much as all of it.
    """
    return grid(array.shape, piece_shape(array))


def grid(shape: Sequence[int], part: Sequence[int]) -> Iterator[Index]:
    """The slices that divide a shape into parts; the last ones may be smaller."""
    starts = (range(0, size, max(step, 1)) for size, step in zip(shape, part, strict=True))
    for corner in itertools.product(*starts):
        bounds = zip(corner, part, shape, strict=True)
        yield tuple(slice(at, min(at + step, size)) for at, step, size in bounds)


def piece_shape(array: StoredArray) -> tuple[int, ...]:
    """The shape of all pieces of an array but the last ones, which may be smaller."""
    chunk = array.chunk or (1,) * array.ndim
    shape = list(map(min, chunk, array.shape))
    for dimension in reversed(range(array.ndim)):
        rest = math.prod(shape) // max(shape[dimension], 1) * array.dtype.itemsize
        step = min(chunk[dimension], array.shape[dimension])
        count = max(PIECE_BYTES // max(rest * step, 1), 1)
        # A power of two, which `chunk_shape` can divide.
        whole = count * step >= array.shape[dimension]
        count = count if whole else 2 ** (count.bit_length() - 1)
        shape[dimension] = min(count * step, array.shape[dimension])
        if shape[dimension] < array.shape[dimension]:
            break
    return tuple(shape)


def chunk_shape(array: StoredArray, max_bytes: int) -> tuple[int, ...]:
    """The shape of the chunks in which the pieces of an array are written, of at most `max_bytes`.

    A chunk is a part of one piece, so it is written once. It is larger if the sizes of the chunks
    that are read have only large factors.
    """
    piece = piece_shape(array)
    chunk = list(piece)
    while math.prod(chunk) * array.dtype.itemsize > max_bytes:
        halves = {
            dimension: half
            for dimension, size in enumerate(chunk)
            if (half := _divide(size, piece[dimension] == array.shape[dimension])) < size
        }
        if not halves:
            break
        largest = max(halves, key=chunk.__getitem__)
        chunk[largest] = halves[largest]
    return tuple(chunk)


def _divide(size: int, is_whole: bool) -> int:
    """A part of a size, about half of it. Parts of a piece that is not a whole array are equal."""
    if is_whole:
        return -(-size // 2)
    return size // next((factor for factor in (2, 3, 5, 7) if size % factor == 0), 1)
