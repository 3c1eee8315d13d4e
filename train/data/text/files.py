"""Finding files by glob patterns, and reading their bytes, decompressed if necessary."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO

from train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a corpus.

    Attributes:
      name: its path relative to the root of the corpus, with slashes. A file outside the root keeps
        its absolute path.
      path: its path.
      size: its size on disk, in bytes.
      modified: the time of its last change, in nanoseconds.
    """

    name: str
    path: Path
    size: int
    modified: int


def find_files(
    pattern: str | Sequence[str], exclude: str | Sequence[str], root: str
) -> tuple[File, ...]:
    """The files that match, sorted by name.

    Args:
      pattern: a glob, or a list of globs; `**` matches any number of directories.
      exclude: a file is left out if its path contains any of these strings.
      root: the directory that relative patterns start at; '' is the current directory.

    Raises:
      ConfigError: if an argument is malformed, a pattern matches no file, or a file cannot be read.
    """
    patterns, exclude = _as_paths('pattern', pattern), _as_paths('exclude', exclude)
    if not patterns:
        raise ConfigError('pattern is empty: write a path, or a list of them')
    [root] = _as_paths('root', root)
    folder = Path(os.path.expanduser(root or '.'))
    found: dict[str, File] = {}
    for one in patterns:
        matches = [
            file
            for match in glob.glob(os.path.expanduser(one), root_dir=folder, recursive=True)
            if (file := _file(folder, match, exclude, relative_to_root=bool(root))) is not None
        ]
        if not matches:
            excluded = f' after excluding {exclude}' if exclude else ''
            hint = '' if folder.is_dir() else ': this root is not a directory'
            if (folder / os.path.expanduser(one)).is_dir():
                hint = f': it matches a directory; write {one.rstrip("/")}/**/*.txt'
            raise ConfigError(
                f'empty corpus: no file matches {one!r} in {folder.resolve()}{excluded}{hint}'
            )
        found |= {file.name: file for file in matches}
    return tuple(found[name] for name in sorted(found))


def _file(folder: Path, match: str, exclude: Sequence[str], relative_to_root: bool) -> File | None:
    """The file that a glob matched, or None if it is a directory or excluded."""
    path, relative = folder / match, os.path.normpath(match)
    if os.path.isabs(match) and relative_to_root:
        from_root = os.path.relpath(match, folder)
        relative = relative if from_root.split(os.sep)[0] == os.pardir else from_root
    name = relative.replace(os.sep, '/')
    if any(part in f'/{name}' for part in exclude):
        return None
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f'{path} cannot be read: {error.strerror}') from error
    return File(name, path, status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else None


def _as_paths(name: str, value: Any) -> list[str]:
    """A list of path strings from one path or several."""
    values = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(values, Sequence) or not all(
        isinstance(v, str | os.PathLike) for v in values
    ):
        raise ConfigError(f'{name} is {value!r}: write a path, or a list of them')
    return [os.fspath(v) for v in values]


@contextlib.contextmanager
def open_file(file: File) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file, and decompresses it if its name ends in .gz or .zst.

    Yields:
      The stream of decompressed bytes, and the raw file. The position in the raw file tells how
      much of it has been read.

    Raises:
      ConfigError: if the file cannot be read or decompressed.
    """
    try:
        with file.path.open('rb') as raw, _decompressed(file, raw) as stream:
            if not file.size and stream is not raw:
                kind = 'gzip' if file.name.endswith('.gz') else 'zstandard'
                raise ConfigError(f'{file.path} is empty: it is not a valid {kind} file')
            yield stream, raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f'{file.path} is not a complete gzip file: {error}') from error
    except OSError as error:
        raise ConfigError(f'{file.path} cannot be read: {error.strerror or error}') from error


def _decompressed(file: File, raw: BinaryIO) -> Any:
    if file.name.endswith('.gz'):
        return gzip.GzipFile(fileobj=raw)
    if file.name.endswith('.zst'):
        return io.BufferedReader(_Zstandard(file, raw), buffer_size=1 << 20)
    return contextlib.nullcontext(raw)


class _Zstandard(io.RawIOBase):
    """The bytes of zstandard frames. Unlike the package's reader, it detects truncated files."""

    def __init__(self, file: File, raw: BinaryIO):
        zstandard = import_optional('zstandard', 'data', f'{file.path}')
        self._file, self._raw = file, raw
        # Files made by `zstd --long=31` need a window of 2 GiB.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._pending = memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            chunk = self._raw.read(512)  # 512 compressed bytes can expand to megabytes
            if not chunk:
                if self._frame is not None:
                    raise ConfigError(
                        f'{self._file.path} is not a complete zstandard file: it ends early'
                    )
                return 0
            self._pending = memoryview(self._decompress(chunk))
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def readall(self) -> bytes:
        pieces = [bytes(self._pending)]
        self._pending = memoryview(b'')
        while piece := self.read(1 << 20):
            pieces.append(piece)
        return b''.join(pieces)

    def _decompress(self, chunk: bytes) -> bytes:
        out = []
        while chunk:
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                out.append(self._frame.decompress(chunk))
            except self._error as error:
                raise ConfigError(
                    f'{self._file.path} is not a complete zstandard file: {error}'
                ) from error
            chunk = b''
            if self._frame.eof:
                chunk, self._frame = self._frame.unused_data, None
        return b''.join(out)


def import_optional(module: str, extra: str, user: str) -> Any:
    """Imports a module of an optional package.

    Args:
      module: the module.
      extra: the extra of meshwright that installs its package.
      user: what needs the package, for the message.

    Raises:
      ConfigError: if the package is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split('.')[0]
        raise ConfigError(
            f"{user} needs the package {package}: pip install 'meshwright[{extra}]'"
        ) from error
