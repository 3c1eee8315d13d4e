"""Files by patterns, and their bytes, compressed or not."""

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
      name: its path below the root of the corpus, with slashes; whole where it is elsewhere.
      path: where it is.
      size: in bytes, as it lies there.
      modified: time of the last change, in nanoseconds.
    """

    name: str
    path: Path
    size: int
    modified: int


def find_files(
    pattern: str | Sequence[str], exclude: str | Sequence[str], root: str
) -> tuple[File, ...]:
    """The files that match, in the order of their names.

    Args:
      pattern: a glob, or several; `**` crosses folders.
      exclude: parts of paths that leave a file out.
      root: the folder that patterns start at; '' is the current one.

    Raises:
      ConfigError: a pattern that matches no file, or a link to none.
    """
    patterns, exclude = _listed('pattern', pattern), _listed('exclude', exclude)
    if not patterns:
        raise ConfigError('pattern is empty: write a path, or a list of them')
    [below] = _listed('root', root)
    folder = Path(os.path.expanduser(below or '.'))
    found: dict[str, File] = {}
    for one in patterns:
        matches = [
            file
            for match in glob.glob(os.path.expanduser(one), root_dir=folder, recursive=True)
            if (file := _file(folder, match, exclude, named_below=bool(below))) is not None
        ]
        if not matches:
            without = f' without {exclude}' if exclude else ''
            missing = '' if folder.is_dir() else ', which is no folder'
            if (folder / os.path.expanduser(one)).is_dir():
                missing = f', only a folder: write {one.rstrip("/")}/**/*.txt or the like'
            raise ConfigError(
                f'empty corpus: no file matches {one!r} in {folder.resolve()}{missing}{without}'
            )
        found |= {file.name: file for file in matches}
    return tuple(found[name] for name in sorted(found))


def _file(folder: Path, match: str, exclude: Sequence[str], named_below: bool) -> File | None:
    """The file that a glob has found; None if it is a folder, or left out."""
    path, relative = folder / match, os.path.normpath(match)
    if os.path.isabs(match) and named_below:
        below = os.path.relpath(match, folder)
        relative = relative if below.split(os.sep)[0] == os.pardir else below
    name = relative.replace(os.sep, '/')
    if any(part in f'/{name}' for part in exclude):
        return None
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f'{path} cannot be read: {error.strerror}') from error
    return File(name, path, status.st_size, status.st_mtime_ns) if S_ISREG(status.st_mode) else None


def _listed(name: str, value: Any) -> list[str]:
    """One path or several, as strings."""
    values = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(values, Sequence) or not all(
        isinstance(v, str | os.PathLike) for v in values
    ):
        raise ConfigError(f'{name} is {value!r}: write a path, or a list of them')
    return [os.fspath(v) for v in values]


@contextlib.contextmanager
def reading(file: File) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file, decompressed if its name ends in .gz or .zst.

    Yields:
      The bytes, and the file as it lies there, whose position tells how far the reading is.

    Raises:
      ConfigError: what is wrong with the file.
    """
    try:
        with file.path.open('rb') as raw, _decompressed(file, raw) as stream:
            if not file.size and stream is not raw:
                raise ConfigError(f'{file.path} is empty, which no compressed file is')
            yield stream, raw
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f'{file.path} is no whole gzip file: {error}') from error
    except OSError as error:
        raise ConfigError(f'{file.path} cannot be read: {error.strerror or error}') from error


def _decompressed(file: File, raw: BinaryIO) -> Any:
    if file.name.endswith('.gz'):
        return gzip.GzipFile(fileobj=raw)
    if file.name.endswith('.zst'):
        return io.BufferedReader(_Zstandard(file, raw), buffer_size=1 << 20)
    return contextlib.nullcontext(raw)


class _Zstandard(io.RawIOBase):
    """The bytes of zstandard frames; unlike the package's own reader it sees a cut-off end."""

    def __init__(self, file: File, raw: BinaryIO):
        zstandard = needed('zstandard', 'data', f'{file.path}')
        self._file, self._raw = file, raw
        # Files of `zstd --long=31` need as much memory to look back into.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._pending = memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            chunk = self._raw.read(512)  # of text that repeats itself, some megabytes
            if not chunk:
                if self._frame is not None:
                    raise ConfigError(
                        f'{self._file.path} is no whole zstandard file: it ends early'
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
                    f'{self._file.path} is no whole zstandard file: {error}'
                ) from error
            chunk = b''
            if self._frame.eof:
                chunk, self._frame = self._frame.unused_data, None
        return b''.join(out)


def needed(module: str, extra: str, what: str) -> Any:
    """A module of an optional package.

    Raises:
      ConfigError: it is not installed; the message names the extra that has it.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split('.')[0]
        raise ConfigError(
            f"{what} needs the package {package}: pip install 'meshwright[{extra}]'"
        ) from error
