"""Reads arrays from safetensors files, slice by slice.

A file begins with 8 bytes that contain the length of its header. The header is JSON with the
dtype, the shape and the position of each array. The arrays follow without gaps. A model is one such
file, or a folder of them with an index. Nothing in them can run code. The package safetensors
reads only local files and maps whole files into memory, so this module reads them itself, and
limits what a hostile file can make it allocate.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from etils import epath

from partitioning.untrusted_text import parse_json
from train.checkpoints.arrays.stored import Bounds, StoredArray, bounds_of
from train.errors import ConfigError
from train.paths import as_path

MODEL, INDEX = 'model.safetensors', 'model.safetensors.index.json'
DTYPES: dict[str, np.dtype] = {
    'F64': np.dtype(np.float64),
    'F32': np.dtype(np.float32),
    'F16': np.dtype(np.float16),
    'BF16': np.dtype(ml_dtypes.bfloat16),
    'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
    'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
    'BOOL': np.dtype(np.bool_),
} | {
    f'{kind}{8 * size}': np.dtype(f'{kind.lower()}{size}') for kind in 'IU' for size in (1, 2, 4, 8)
}
# Parsed JSON takes up to 20 times the memory of its text. The largest real headers have 100 kB, and
# the largest real index, for 90,000 arrays, has 9 MB.
MAX_HEADER_BYTES, MAX_INDEX_BYTES = 8 * 2**20, 16 * 2**20
# The most bytes that are read at once when only some columns of the rows are wanted.
BLOCK_BYTES = 16 * 2**20
# The endings of pickled weights. They are never read, because unpickling can run any program.
PICKLED = ('.bin', '.pt', '.pth', '.ckpt')


class Place(NamedTuple):
    """The position of an array in a file, in bytes, with its dtype and shape."""

    file: epath.Path
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int


def has_safetensors(path: epath.Path) -> bool:
    """Whether a path is a safetensors file, or a folder with such files."""
    if path.is_dir():
        return (path / INDEX).exists() or bool(_list(path, '.safetensors'))
    return path.suffix == '.safetensors' and path.exists()


def open_safetensors(path: Any) -> dict[str, StoredArray]:
    """Opens the arrays of a safetensors file, or of a folder of them, by name.

    A folder contains an index and its files, or `model.safetensors`, or a single file of any name.
    Paths are local, gs:// or s3://. A slice is read from its file when it is needed. Raises a
    ConfigError if there are no such files, or one of them is missing or malformed.
    """
    places = list_places(as_path('the path of safetensors', path))
    return {name: as_stored(place) for name, place in places.items()}


def list_places(path: epath.Path) -> dict[str, Place]:
    """Finds the arrays of a file or folder by name; see `open_safetensors`."""
    if not path.is_dir():
        return read_header(path)
    if (path / INDEX).exists():
        return _places_by_index(path / INDEX)
    files = _list(path, '.safetensors')
    if (path / MODEL) in files:
        return read_header(path / MODEL)
    if len(files) == 1:
        return read_header(files[0])
    if files:
        raise ConfigError(
            f'{path} has {len(files)} safetensors files, such as {files[0].name}, but no {INDEX}: '
            'add the index, or write the path of one file'
        )
    if pickled := [file for ending in PICKLED for file in _list(path, ending)]:
        raise ConfigError(
            f'{path} has no safetensors, and {pickled[0].name} is a pickle, which could run any '
            'program: save the model with model.save_pretrained(folder, safe_serialization=True)'
        )
    raise ConfigError(f'{path} has no safetensors files')


def read_header(file: epath.Path) -> dict[str, Place]:
    """Returns the position of each array of one file, by name, from its header.

    Raises a ConfigError if the file is not a safetensors file, or is truncated.
    """
    if not file.exists():
        raise ConfigError(f'{file} does not exist')
    if file.suffix in PICKLED:
        raise ConfigError(
            f'{file} is a pickle, which could run any program: save the model with '
            'model.save_pretrained(folder, safe_serialization=True)'
        )
    size = file.stat().length
    try:
        with file.open('rb') as opened:
            header_size = int.from_bytes(opened.read(8), 'little')
            if size < 8 or not 2 <= header_size <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(
                    f'its header would have {header_size:,} bytes; the file has {size:,}, and '
                    f'headers have at most {MAX_HEADER_BYTES:,}'
                )
            header = _parse(opened.read(header_size))
        header.pop('__metadata__', None)
        start = 8 + header_size
        return _check_entries(file, header, start, size - start)
    except ValueError as error:
        raise ConfigError(
            f'{file} is not a safetensors file, or it is damaged: {error}. Download it again'
        ) from error


def _parse(text: bytes) -> dict[str, Any]:
    """Parses a JSON object in which no key appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            name = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f'the name {_quoted(name)} appears twice')
        return found

    try:
        parsed = parse_json(text, object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise ValueError('it is not UTF-8') from error
    if not isinstance(parsed, dict):
        raise ValueError('it contains no JSON object')
    return parsed


def _check_entries(
    file: epath.Path, header: dict[str, Any], start: int, size: int
) -> dict[str, Place]:
    """Returns the checked positions of arrays, which must fill `size` bytes after `start`."""
    places, spans = dict[str, Place](), list[tuple[int, int, str]]()
    for name, entry in header.items():
        entry = entry if isinstance(entry, dict) else {}
        shape: Any = entry.get('shape')
        offsets: Any = entry.get('data_offsets')
        dtype = entry.get('dtype')
        if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise ValueError(f'{_quoted(name)} has no valid shape and data_offsets')
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f'{_quoted(name)} has the dtype {_quoted(dtype)}, which is not known')
        num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != num_bytes:
            raise ValueError(
                f'{_quoted(name)} of shape {_quoted(shape)} needs {_count(num_bytes)} bytes and '
                f'has {_count(offsets[1] - offsets[0])}'
            )
        spans.append((offsets[0], offsets[1], name))
        places[name] = Place(file, DTYPES[dtype], tuple(shape), start + offsets[0])
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            what = 'overlaps' if first < end else 'leaves a gap after'
            raise ValueError(f'{_quoted(name)} {what} the array before it')
        end = last
    if end != size:
        raise ValueError(f'its arrays have {_count(end)} bytes, and the file has {size:,} for them')
    return places


def _are_counts(value: Any) -> bool:
    """Whether a value of JSON is a short list of integers >= 0."""
    return (
        isinstance(value, list)
        and len(value) <= 32
        and all(type(count) is int and 0 <= count < 2**48 for count in value)
    )


def _count(number: int) -> str:
    return f'{number:,}' if number < 2**63 else 'more than 2**63'


def _quoted(value: Any) -> str:
    """A value from a file, for messages: in ASCII, cut after 100 characters."""
    text = ascii(value)
    return text if len(text) <= 100 else f'{text[:100]}...'


def _places_by_index(index: epath.Path) -> dict[str, Place]:
    """Finds all arrays in the files that an index names, and checks that the index is right."""
    folder, size = index.parent, index.stat().length
    try:
        if size > MAX_INDEX_BYTES:
            raise ValueError(f'it has {size:,} bytes, and indices have at most {MAX_INDEX_BYTES:,}')
        files = _parse(index.read_bytes()).get('weight_map')
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise ValueError('it has no weight_map')
        for file in {*files.values()}:
            # An index must not lead out of its folder.
            if not re.fullmatch(r'[\w.\- ]+\.safetensors', file):
                raise ValueError(f'{_quoted(file)} is not the name of a safetensors file')
    except ValueError as error:
        raise ConfigError(f'{index} is not an index of safetensors: {error}') from error
    counts, places = Counter(files.values()), dict[str, Place]()
    for file in sorted(counts):
        if not (folder / file).exists():
            raise ConfigError(
                f'{folder} has no file {file}, but {index.name} lists '
                f'{counts[file]:,} arrays in it: download it too'
            )
        found = read_header(folder / file)
        if twice := places.keys() & found.keys():
            raise ConfigError(f'{folder / file}: {_quoted(min(twice))} is in another file as well')
        places |= found
    for name, file in files.items():
        if name not in places or places[name].file.name != file:
            raise ConfigError(f'{folder / file} has no array {_quoted(name)}, unlike {index.name}')
    return places


def _list(folder: epath.Path, ending: str) -> list[epath.Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(ending))


@functools.cache
def readers() -> ThreadPoolExecutor:
    """The threads that read files. They wait for the disk most of the time."""
    return ThreadPoolExecutor(8, 'safetensors')


def as_stored(place: Place) -> StoredArray:
    """Returns the array at a place. Its values are read when they are needed."""

    def start(index: Any) -> Any:
        return readers().submit(read_slice, place, bounds_of(index, place.shape))

    return StoredArray(shape=place.shape, dtype=place.dtype, start=start)


def read_slice(place: Place, bounds: Bounds) -> np.ndarray:
    """Reads a slice of an array from its file.

    Raises an OSError if the file cannot be read, or ends too early.
    """
    values = np.empty([last - first for first, last in bounds], place.dtype)
    if not values.size:
        return values
    with place.file.open('rb') as opened:

        def read(offset: int, out: np.ndarray) -> None:
            opened.seek(offset)
            view = memoryview(as_bytes(out))
            while view:
                if not (count := opened.readinto(view)):
                    raise OSError(f'{place.file} ends in the middle of an array')
                view = view[count:]

        _fill(values, read, place.offset, place.shape, bounds)
    return values


def as_bytes(contiguous: np.ndarray) -> Any:
    """Returns the bytes of an array as a buffer, which works for bfloat16 as well."""
    return contiguous.reshape(-1).view(np.uint8)


def _fill(
    out: np.ndarray,
    read: Callable[[int, np.ndarray], None],
    offset: int,
    shape: tuple[int, ...],
    bounds: Bounds,
) -> None:
    """Fills `out` with the slice `bounds` of an array at `offset`."""
    if all(bound == (0, size) for bound, size in zip(bounds[1:], shape[1:], strict=True)):
        row_bytes = math.prod(shape[1:]) * out.itemsize
        read(offset + (bounds[0][0] if shape else 0) * row_bytes, out)
        return
    (first, last), row_shape = bounds[0], shape[1:]
    row_bytes = math.prod(row_shape) * out.itemsize
    if row_bytes > BLOCK_BYTES:
        for i in range(first, last):
            _fill(out[i - first], read, offset + i * row_bytes, row_shape, bounds[1:])
        return
    columns = tuple(slice(*bound) for bound in bounds[1:])
    step = max(1, BLOCK_BYTES // max(row_bytes, 1))
    for i in range(first, last, step):
        rows = np.empty((min(step, last - i), *row_shape), out.dtype)
        read(offset + i * row_bytes, rows)
        out[i - first : i - first + len(rows)] = rows[:, *columns]
