"""Sources of documents: text files, JSON lines, and any sequence of texts.

A source is read once, from front to back, when its token index is built; see `token_index`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import io
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, BinaryIO

import numpy as np

from partitioning.rules import nearest
from partitioning.untrusted_text import parse_json
from train.data.text.files import (
    HOLDOUT_PERCENT,
    MAX_WINDOW_BYTES,
    File,
    decompressed_limit,
    find_files,
    is_held_out,
    open_file,
    too_large,
)
from train.errors import ConfigError, check_counts, first_line
from train.paths import absolute

# Fields of sources that decide whether a file is refused, and not what is read.
_LIMITS = ('max_document_bytes', 'max_decompressed_bytes', 'max_window_bytes')


class Tokens(bytes):
    """The tokens of a document that needs no tokenizer, as the bytes of an int32 array."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text of a source.

    Attributes:
      name: its name in the source. The name alone decides whether the document is held out.
      content: its bytes; text is encoded as UTF-8. `Tokens` are not encoded again.
      done: how much of the source has been read after this document, in the units of
        `Listing.size`.
      where: its place, for messages; by default `name`.
    """

    name: str
    content: bytes
    done: int
    where: str = ''

    @property
    def place(self) -> str:
        return self.where or self.name


@dataclasses.dataclass(frozen=True)
class Listing:
    """The current contents of a source.

    Attributes:
      signature: JSON data that changes whenever the documents change, or None if changes cannot be
        detected.
      size: how much there is to read, in bytes or records.
      documents: all documents in order, read while iterating. The iteration raises a ConfigError
        that names the place of a document that cannot be read.
    """

    signature: Any
    size: int
    documents: Iterable[Document]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(abc.ABC):
    """Documents in a fixed order.

    Attributes:
      holdout_percent: about this percentage of the documents is held out for evaluation. A
        document's name alone decides whether it is held out, so adding documents does not change
        which of the others are held out.
    """

    holdout_percent: float = HOLDOUT_PERCENT

    def __post_init__(self) -> None:
        percent = self.holdout_percent
        if not isinstance(percent, int | float) or not 0 <= percent <= 100:
            raise ConfigError(
                f'{type(self).__name__}.holdout_percent is {self.holdout_percent!r}: it must be a '
                'number from 0 to 100'
            )

    @abc.abstractmethod
    def listing(self) -> Listing:
        """Lists the documents. Raises a ConfigError if there is nothing to read."""

    def select(self, field: str | int) -> Source:
        """The same records, with another field as the text.

        Args:
          field: the name of the field, or its number if fields have no names.

        Raises:
          ConfigError: if this kind of source has no fields.
        """
        raise ConfigError(
            f'{type(self).__name__} has no fields, so it has no {field!r}: use JsonLines, '
            'TsvFiles, ParquetFiles or Records'
        )

    def is_held_out(self, name: str) -> bool:
        """Whether the document with this name is held out."""
        return is_held_out(name, self.holdout_percent)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """Documents in files.

    To read another format, subclass it and implement `contents`. The token index is built again
    when a field or the source code of the subclass changes. When functions that it calls change,
    change a field too, such as a `version`.

    Attributes:
      pattern: a glob, or a list of globs; `**` matches any number of directories.
      exclude: a file is left out if its path contains any of these strings, such as '/test/'.
      root: the directory that patterns and the names of documents are relative to; by default the
        current directory.
      max_document_bytes: a larger document is refused before it is read as a whole. A line of JSON
        or a record counts with all its fields.
      max_decompressed_bytes: a compressed file with more bytes is refused. By default, it may have
        1 GiB, or 100 times its compressed size if that is more.
      max_window_bytes: the memory that a decompressor may take for what it has read before. Files
        of `zstd --long=31` need 2 GiB.
    """

    pattern: str | Sequence[str]
    exclude: str | Sequence[str] = ()
    root: str = ''
    # A JSON object in Python takes up to 33 times the memory of its text.
    max_document_bytes: int = 8 << 20
    max_decompressed_bytes: int | None = None
    max_window_bytes: int = MAX_WINDOW_BYTES

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = {f'{type(self).__name__}.{name}': getattr(self, name) for name in _LIMITS}
        if self.max_decompressed_bytes is None:
            del limits[f'{type(self).__name__}.max_decompressed_bytes']
        check_counts(**limits)

    def listing(self) -> Listing:
        files = find_files(self.pattern, self.exclude, self.root)
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ('pattern', 'exclude', 'root', *_LIMITS)
        }
        signature = {
            'source': f'{type(self).__module__}.{type(self).__qualname__}',
            **settings,
            'holdout_percent': float(self.holdout_percent),
            'files': [[f.name, str(absolute(f.path)), f.size, f.modified] for f in files],
        }
        if not type(self).__module__.startswith('train.'):
            with contextlib.suppress(OSError, TypeError):  # There is no file of the source code.
                signature['code'] = inspect.getsource(type(self))
        return Listing(signature, sum(f.size for f in files), self._documents(files))

    def _documents(self, files: Sequence[File]) -> Iterator[Document]:
        before = 0
        for file in files:
            # Records can be copies of each other, which take no room in a file.
            total, limit = 0, decompressed_limit(file, self.max_decompressed_bytes)
            for found in self.contents(file):
                kinds = [*map(type, found)][1:] if isinstance(found, tuple) else None
                if kinds not in ([bytes, int], [Tokens, int]):
                    raise ConfigError(
                        f'{file.path}: {type(self).__name__}.contents yields {str(found)[:60]}: it '
                        'must yield (number or None, bytes, int); write text.encode() for text'
                    )
                number, content, read = found
                name = file.name if number is None else f'{file.name}:{number}'
                where = str(file.path) if number is None else f'{file.path}:{number}'
                if len(content) > self.max_document_bytes:
                    raise ConfigError(
                        f'{where} has more than {self.max_document_bytes:,} bytes: split the '
                        f'document, or raise {type(self).__name__}.max_document_bytes'
                    )
                total += len(content)
                if total > limit:
                    raise ConfigError(too_large(file, limit))
                yield Document(name, content, before + min(read, file.size), where)
            before += file.size

    def open(self, file: File) -> AbstractContextManager[tuple[BinaryIO, BinaryIO]]:
        """Opens a file, decompressed within the limits of the source; see `open_file`."""
        return open_file(file, self.max_decompressed_bytes, self.max_window_bytes)

    def lines(self, file: File) -> Iterator[tuple[int, bytes, int]]:
        """Yields (number, line, bytes read) for the lines of a file that are not empty.

        A line with more than `max_document_bytes` is cut after one byte more.
        """
        with self.open(file) as (stream, raw):
            lines = iter(lambda: stream.readline(self.max_document_bytes + 1), b'')
            for number, line in enumerate(lines, 1):
                if len(line) > self.max_document_bytes or line.strip():
                    yield number, line, raw.tell()

    @abc.abstractmethod
    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        """Yields (number, content, bytes read) for each document of a file.

        The number is the document's place in the file, or None if the whole file is one document.
        The third value is the number of bytes of the file that have been read after the document.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles(FileSource):
    """Text files: each file is one document. Compressed files are read as `open_file` does."""

    max_document_bytes: int = 128 << 20

    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        # A small compressed file can have gigabytes, so memory is taken only as they come.
        content, limit = io.BytesIO(), self.max_document_bytes + 1
        with self.open(file) as (stream, _):
            while piece := stream.read(min(1 << 20, limit - content.tell())):
                content.write(piece)
            yield None, content.getvalue(), file.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines(FileSource):
    """Files with one JSON object per line: each line is one document.

    Compressed files are read as `open_file` does.

    Attributes:
      field: the field that holds the text.
    """

    field: str = 'text'

    def select(self, field: str | int) -> JsonLines:
        return dataclasses.replace(self, field=str(field))

    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        for number, line, read in self.lines(file):
            if len(line) <= self.max_document_bytes:  # Otherwise, it is refused for its size.
                line = text_of_json(line, self.field, f'{file.path}:{number}')
            yield number, line, read


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records(Source):
    """Any object with `__len__` and `__getitem__`, in which each item is a document.

    Attributes:
      records: the object. Its items are strings, bytes, lists of tokens, or mappings or tuples with
        the key `field`.
      field: the key that holds the text, if items are mappings; the number of the element, if they
        are tuples.
      cache_key: a name for this version of the records in the cache of token indices. With None,
        every run builds the index again.
    """

    records: Any
    field: str | int = 'text'
    cache_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        indexed = hasattr(self.records, '__len__') and hasattr(self.records, '__getitem__')
        if not indexed or isinstance(self.records, str | bytes | Mapping):
            raise ConfigError(
                f'Records.records is a {type(self.records).__name__}: it must be a sequence of '
                'texts with __len__ and __getitem__(int)'
            )

    def select(self, field: str | int) -> Records:
        return dataclasses.replace(self, field=field)

    def listing(self) -> Listing:
        signature = None
        if self.cache_key is not None:
            signature = {
                'source': 'Records',
                'key': self.cache_key,
                'field': self.field,
                'holdout_percent': float(self.holdout_percent),
            }
        return Listing(signature, len(self.records), self._documents())

    def _documents(self) -> Iterator[Document]:
        for i in range(len(self.records)):
            where, value = f'record {i}', self.records[i]
            if isinstance(value, Mapping | tuple):
                fields = value if isinstance(value, Mapping) else range(len(value))
                if self.field not in fields:
                    raise ConfigError(missing_field(where, self.field, fields))
                where, value = f'{where}: {self.field!r}', value[self.field]  # type: ignore[index]
            yield Document(f'{i}', as_content(value, where), i + 1, where)


def python_library() -> TextFiles:
    """The source code of Python's standard library: several MB of text that every machine has."""
    return TextFiles(
        pattern='**/*.py',
        exclude=('/site-packages/', '/dist-packages/', '/test/', '/tests/', '/idle_test/'),
        holdout_percent=1.0,
        root=sysconfig.get_path('stdlib'),
    )


def text_of_json(line: bytes, field: str, where: str) -> bytes:
    """The text in a field of a JSON object, encoded as UTF-8."""
    try:
        record = parse_json(line)
    except UnicodeDecodeError as error:
        raise ConfigError(f'{where} is not UTF-8: {error.reason} at byte {error.start}') from error
    except ValueError as error:
        raise ConfigError(f'{where} is not JSON: {first_line(error)}') from error
    if not isinstance(record, dict):
        shown = line.decode().strip()
        raise ConfigError(f'{where} is {shown[:40]}, not an object with {field!r}')
    if field not in record:
        raise ConfigError(missing_field(where, field, record))
    return as_content(record[field], f'{where}: {field!r}')


def as_content(value: Any, where: str) -> bytes:
    """The bytes of a text, encoded as UTF-8; bytes stay as they are. Integers are tokens."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, list | np.ndarray):
        tokens = np.asarray(value, np.int32 if len(value) == 0 else None)
        if tokens.ndim == 1 and tokens.dtype.kind in 'iu':
            return Tokens(tokens.astype(np.int32).tobytes())
    if not isinstance(value, str):
        raise ConfigError(f'{where} is {"null" if value is None else repr(value)[:40]}, not text')
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f'{where} has an unpaired surrogate at character {error.start}, which UTF-8 cannot '
            'encode'
        ) from error


def missing_field(where: str, field: str | int, fields: Any) -> str:
    """The message for a field that does not exist."""
    names = list(map(str, fields))
    shown = ', '.join(map(repr, names[:8])) + (', ...' if len(names) > 8 else '')
    return f'{where} has no {field!r}, only {shown or "nothing"}.{nearest(str(field), names)}'
