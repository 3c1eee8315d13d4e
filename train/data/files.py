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
from typing import Any, BinaryIO

from train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a corpus.

    Attributes:
      name: its path below the root of the corpus, with slashes.
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
      ConfigError: no file matches.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    exclude = [exclude] if isinstance(exclude, str) else list(exclude)
    folder = Path(os.path.expanduser(root or '.'))
    matches = (
        match
        for p in patterns
        for match in glob.glob(os.path.expanduser(p), root_dir=folder, recursive=True)
    )
    names = {
        os.path.relpath(match, folder) if os.path.isabs(match) else os.path.normpath(match)
        for match in matches
    }
    files = []
    for name in sorted(name.replace(os.sep, '/') for name in names):
        if not any(part in f'/{name}' for part in exclude) and (folder / name).is_file():
            stat = (folder / name).stat()
            files.append(File(name, folder / name, stat.st_size, stat.st_mtime_ns))
    if not files:
        without = f' without {exclude}' if exclude else ''
        raise ConfigError(
            f'empty corpus: no file matches {patterns} in {folder.resolve()}{without}'
        )
    return tuple(files)


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
        self._decompressor = zstandard.ZstdDecompressor()
        self._error = zstandard.ZstdError
        self._frame: Any = None
        self._pending = b''

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            chunk = self._raw.read(1 << 17)
            if not chunk:
                if self._frame is not None:
                    raise ConfigError(
                        f'{self._file.path} is no whole zstandard file: it ends early'
                    )
                return 0
            self._pending = self._decompress(chunk)
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

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
