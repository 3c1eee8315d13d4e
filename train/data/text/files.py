"""Finding files by glob patterns, and reading their bytes, decompressed if necessary."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import io
import itertools
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from gzip import BadGzipFile
from lzma import LZMADecompressor, LZMAError
from stat import S_ISREG
from typing import Any, BinaryIO

import fsspec
from etils import epath
from fsspec.compression import compr

from train.errors import ConfigError, first_line, import_optional, os_errors_as
from train.paths import absolute, as_path, is_remote

# The end of a file's name -> the name of its compression in fsspec.
COMPRESSIONS = {'.gz': 'gzip', '.zst': 'zstd', '.bz2': 'bz2', '.xz': 'xz'}
# Enough for files of `zstd --long=28`.
MAX_WINDOW_BYTES = 256 << 20
# If no limit is set, a decompressed file may have this size, or this many times the size of the
# compressed file. Text is rarely compressed to a twentieth.
MAX_DECOMPRESSED_BYTES, MAX_RATIO = 1 << 30, 100
CHUNK_BYTES = 1 << 16
# About this percentage of the documents of a source is held out by default.
HOLDOUT_PERCENT = 2.0


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a corpus.

    Attributes:
      name: its path relative to the root of the corpus, with slashes. A file outside the root keeps
        its absolute path.
      size: its size as it is stored, in bytes.
      modified: the time of its last change in nanoseconds, or, in a store of objects, a string that
        changes with the content.
    """

    name: str
    path: epath.Path
    size: int
    modified: int | str


def find_files(
    pattern: str | Sequence[str],
    exclude: str | Sequence[str],
    root: str,
    *,
    most: int | None = None,
) -> tuple[File, ...]:
    """The files that match, sorted by name.

    It takes the arguments of `FileSource`. Each pattern ends after `most` files, by default never.
    Raises a ConfigError if an argument is malformed, a pattern matches no file, or a file cannot be
    read.
    """
    patterns, exclude = _as_list('pattern', pattern), _as_list('exclude', exclude)
    if not patterns:
        raise ConfigError('pattern is empty: write a path, or a list of them')
    folder = as_path('root', root or '.')
    found: dict[str, File] = {}
    for one in patterns:
        place = folder / as_path('pattern', one)
        if is_remote(place):
            found_there = _objects(folder, place, exclude)
        else:
            found_there = _local_files(folder if root else None, one, exclude)
        matches = list(itertools.islice(found_there, most))
        if not matches:
            excluded = f' after excluding {exclude}' if exclude else ''
            hint = '' if folder.is_dir() else ': this root is not a directory'
            if place.is_dir():
                hint = f': it matches a directory; write {one.rstrip("/")}/**/*.txt'
            raise ConfigError(
                f'empty corpus: no file matches {one!r} in {absolute(folder)}{excluded}{hint}'
            )
        found |= {file.name: file for file in matches}
    return tuple(found[name] for name in sorted(found))


def is_held_out(name: str, percent: float) -> bool:
    """Whether a document is held out, if about this percentage of the documents is.

    `name` is the name of the document in its source, which alone decides.
    """
    return zlib.crc32(name.encode(errors='surrogateescape')) / (1 << 32) < percent / 100


def _local_files(root: epath.Path | None, pattern: str, exclude: Sequence[str]) -> Iterator[File]:
    def is_excluded(name: str) -> bool:
        return any(part in f'/{name}' for part in exclude)

    def name_of(match: str) -> str:
        name = os.path.normpath(match)
        if root is not None and os.path.isabs(match):
            name = name.removeprefix(f'{os.path.abspath(root)}/')
        return name

    def skip(folder: str) -> bool:
        return is_excluded(f'{name_of(folder)}/')

    for match in _glob('' if root is None else str(root), os.path.expanduser(pattern), skip):
        if is_excluded(name := name_of(match)):
            continue
        path = (root or epath.Path()) / match
        with os_errors_as(f'{path} cannot be read:'):
            status = os.stat(path)
        if S_ISREG(status.st_mode):
            yield File(name, path, status.st_size, status.st_mtime_ns)


def _glob(root: str, pattern: str, skip: Callable[[str], bool]) -> Iterator[str]:
    """Yields what `glob` does, but does not look into the folders below `**` that `skip` names.

    Python's own library may contain all installed packages, which are many more files.
    """
    head, recursive, tail = pattern.partition('**/')
    if not recursive or '**' in tail or head[-1:] not in ('', '/'):
        yield from glob.iglob(pattern, root_dir=root or None, recursive=True)
        return
    folders = [*glob.iglob(head, root_dir=root or None)] if head else ['']
    while folders:
        folder = folders.pop()
        place = os.path.join(root, folder) or os.curdir
        for match in glob.iglob(tail, root_dir=place):
            yield os.path.join(folder, match)
        with contextlib.suppress(OSError), os.scandir(place) as entries:  # as glob does
            names = [e.name for e in entries if e.name[0] != '.' and e.is_dir()]
            inside = (os.path.join(folder, name) for name in names)
            folders += [one for one in inside if not skip(one)]


def _objects(folder: epath.Path, place: epath.Path, exclude: Sequence[str]) -> Iterator[File]:
    """The objects of a store that match. The store is asked once for each folder."""
    scheme = str(place).partition('://')[0]
    store = fsspec.filesystem(scheme)
    try:
        found = store.glob(str(place), detail=True)
    except Exception as error:  # Each store has its own errors, for example without credentials.
        raise ConfigError(f'{place} cannot be listed: {first_line(error)}') from error
    for key, about in found.items():
        path = epath.Path(f'{scheme}://{key}')
        name = str(path).removeprefix(f'{folder}/')
        if about['type'] == 'file' and not any(part in f'/{name}' for part in exclude):
            changed = about.get('ETag') or about.get('etag') or store.ukey(key)
            yield File(name, path, about['size'], str(changed))


def _as_list(name: str, value: Any) -> list[str]:
    """A list of path strings from one path or several."""
    values = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(values, Sequence) or not all(
        isinstance(v, str | os.PathLike) for v in values
    ):
        raise ConfigError(f'{name} is {value!r}: write a path, or a list of them')
    return [os.fspath(v) for v in values]


@contextlib.contextmanager
def open_file(
    file: File, max_bytes: int | None = None, max_window_bytes: int = MAX_WINDOW_BYTES
) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file, and decompresses it if its name ends in .gz, .zst, .bz2 or .xz.

    Yields the stream of decompressed bytes, and the raw file, whose position tells how much of it
    has been read. `FileSource` describes the limits. Raises a ConfigError if the file cannot be
    read or decompressed, or exceeds one.
    """
    compression = COMPRESSIONS.get(os.path.splitext(file.name)[1])
    # Other errors belong to the body of the context.
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, LZMAError, BadGzipFile)
    try:
        with contextlib.ExitStack() as stack:
            raw: Any = stack.enter_context(file.path.open('rb'))
            stream = raw
            if compression == 'zstd':
                module = 'compression.zstd' if sys.version_info >= (3, 14) else 'backports.zstd'
                zstd = import_optional(module, 'data', f'{file.path}')
                damage += (zstd.ZstdError,)
                bits = min(max(max_window_bytes.bit_length() - 1, 10), 31)
                options = {zstd.DecompressionParameter.window_log_max: bits}
                stream = stack.enter_context(zstd.ZstdFile(raw, options=options))
            elif compression == 'xz':
                stream = io.BufferedReader(_decompress_xz(raw, max_window_bytes), 1 << 16)
            elif compression:
                stream = stack.enter_context(compr[compression](raw, mode='rb'))
            elif is_remote(file.path):
                stream = io.BufferedReader(raw, buffer_size=1 << 20)
            if compression and not file.size:
                raise EOFError('it is empty')
            if compression:
                limit = decompressed_limit(file, max_bytes)
                stream = io.BufferedReader(_bounded(stream, limit, too_large(file, limit)), 1 << 16)
            yield stream, raw
    except damage as error:
        if 'memory' in str(error).lower():
            raise ConfigError(
                f'{file.path} needs more than {max_window_bytes:,} bytes of memory to be '
                'decompressed: raise max_window_bytes of its source if you trust the file'
            ) from error
        raise ConfigError(f'{file.path} is not a complete {compression} file: {error}') from error
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise ConfigError(f'{file.path} cannot be read: {reason}') from error


def decompressed_limit(file: File, max_bytes: int | None) -> int:
    """The number of bytes that a file may have when it is decompressed; see `open_file`."""
    return max_bytes or max(MAX_DECOMPRESSED_BYTES, MAX_RATIO * file.size)


def too_large(file: File, limit: int) -> str:
    """The message for a file with more bytes than `decompressed_limit`."""
    return (
        f'{file.path} has more than {limit:,} bytes when it is decompressed: raise '
        'max_decompressed_bytes of its source if you trust the file'
    )


# Streams that end in an error before they take too much memory or disk.


class _Stream(io.RawIOBase):
    """A stream of what a function returns, which is called with the number of bytes to read."""

    def __init__(self, read_some: Callable[[int], bytes]):
        self._read_some = read_some

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._read_some(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _bounded(stream: BinaryIO, limit: int, message: str) -> _Stream:
    """A stream that raises a ConfigError with a message if it has more bytes than the limit."""
    total = 0

    def read_some(size: int) -> bytes:
        nonlocal total
        data = stream.read(size)
        total += len(data)
        if total > limit:
            raise ConfigError(message)
        return data

    return _Stream(read_some)


def _decompress_xz(raw: BinaryIO, max_window_bytes: int) -> _Stream:
    """Decompresses an .xz file with a limit on memory, which `lzma.LZMAFile` does not have.

    Reading raises an EOFError or LZMAError if the file is damaged, or needs more memory for what
    has been read before.
    """
    limit = max_window_bytes + (1 << 20)  # The decoder needs some memory apart from the window.
    decoder = LZMADecompressor(memlimit=limit)

    def read_some(size: int) -> bytes:
        nonlocal decoder
        while True:
            data = b''
            if decoder.eof:
                # Another stream may follow, after zeros.
                data = decoder.unused_data.lstrip(b'\0')
                while not data:
                    if not (read := raw.read(CHUNK_BYTES)):
                        return b''
                    data = read.lstrip(b'\0')
                decoder = LZMADecompressor(memlimit=limit)
            elif decoder.needs_input and not (data := raw.read(CHUNK_BYTES)):
                raise EOFError('it ends in the middle of a stream')
            if found := decoder.decompress(data, size):
                return found

    return _Stream(read_some)
