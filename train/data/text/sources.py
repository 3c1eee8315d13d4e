"""Where text comes from: files of text, JSON lines, Parquet or ArrayRecord, and any sequence.

A source is read once, front to back, when its token index is built; see `token_index`.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import gin

from partitioning.rules import nearest
from train.data.text.files import File, find_files, reading
from train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Document:
    """A text.

    Attributes:
      name: where it is from; it decides whether the document is held out.
      content: its bytes, of text in UTF-8.
      done: how much of the source has been read by now, in the units of `Listing.size`.
      where: the place to name in messages; by default `name`.
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
    """What a source holds now.

    Attributes:
      signature: JSON that changes when the documents do; None if that cannot be told.
      size: how much there is to read, in bytes or records.
      documents: all of them, in order, read as they are asked for. ConfigError tells of what cannot
        be read, and of the place where it stands.
    """

    signature: Any
    size: int
    documents: Iterable[Document]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source(abc.ABC):
    """Documents in an order that never changes.

    Attributes:
      holdout_percent: about this share of the documents is held out for evaluation, each whole.
        Which ones depends on their names alone, so adding others moves none. 100: all of them.
    """

    holdout_percent: float = 2.0

    def __post_init__(self) -> None:
        percent = self.holdout_percent
        if not isinstance(percent, int | float) or not 0 <= percent <= 100:
            raise ConfigError(
                f'{type(self).__name__}.holdout_percent is {self.holdout_percent!r}: use 0 to 100'
            )

    @abc.abstractmethod
    def listing(self) -> Listing:
        """What there is.

        Raises:
          ConfigError: nothing.
        """

    def is_held_out(self, name: str) -> bool:
        """Whether the document of this name is held out."""
        place = zlib.crc32(name.encode(errors='surrogateescape')) / (1 << 32)
        return place < self.holdout_percent / 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """Documents in files.

    A subclass of your own says what the `contents` of a file are. Its fields are part of what names
    the token index: when `contents` is changed, change one, such as a `version`.

    Attributes:
      pattern: a glob, or several; `**` crosses folders.
      exclude: parts of paths that leave a file out, such as '/test/'.
      root: the folder that patterns and the names of documents start at; by default the current.
    """

    pattern: str | Sequence[str]
    exclude: str | Sequence[str] = ()
    root: str = ''

    def listing(self) -> Listing:
        files = find_files(self.pattern, self.exclude, self.root)
        settings = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ('pattern', 'exclude', 'root')
        }
        signature = {
            'source': f'{type(self).__module__}.{type(self).__qualname__}',
            **settings,
            'holdout_percent': float(self.holdout_percent),
            'files': [[f.name, os.path.abspath(f.path), f.size, f.modified] for f in files],
        }
        return Listing(signature, sum(f.size for f in files), self._documents(files))

    def _documents(self, files: Sequence[File]) -> Iterator[Document]:
        before = 0
        for file in files:
            for number, content, read in self.contents(file):
                name = file.name if number is None else f'{file.name}:{number}'
                where = str(file.path) if number is None else f'{file.path}:{number}'
                yield Document(name, content, before + min(read, file.size), where)
            before += file.size

    @abc.abstractmethod
    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        """(number in the file, content, bytes of it read by then) of each document of a file.

        The number is None where the file is the document.
        """


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class TextFiles(FileSource):
    """Files of text, each a document. Names that end in .gz or .zst are decompressed."""

    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        with reading(file) as (stream, _):
            yield None, stream.read(), file.size


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonLines(FileSource):
    """Files with a JSON object a line, each a document; .gz and .zst are decompressed.

    Attributes:
      field: the one that holds the text.
    """

    field: str = 'text'

    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        with reading(file) as (stream, raw):
            for number, line in enumerate(stream, 1):
                if line.strip():
                    content = text_of_json(line, self.field, f'{file.path}:{number}')
                    yield number, content, raw.tell()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Records(Source):
    """Any object with `__len__` and `__getitem__`, each item a document.

    Attributes:
      records: items are strings, bytes, or mappings with `field`.
      field: the one that holds the text, in mappings.
      cache_key: names these records, in this version, for the cache of token indices; None: their
        index is built anew in each run.
    """

    records: Any
    field: str = 'text'
    cache_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        indexed = hasattr(self.records, '__len__') and hasattr(self.records, '__getitem__')
        if not indexed or isinstance(self.records, str | bytes | Mapping):
            raise ConfigError(
                f'Records.records is a {type(self.records).__name__}: give a sequence of texts, '
                'with __len__ and __getitem__ by number'
            )

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
            if isinstance(value, Mapping):
                if self.field not in value:
                    raise ConfigError(missing(where, self.field, value))
                where, value = f'{where}: {self.field!r}', value[self.field]
            yield Document(f'{i}', as_content(value, where), i + 1, where)


@gin.configurable
def python_library() -> TextFiles:
    """The sources of the running Python's standard library: several MB of text on any machine."""
    return TextFiles(
        pattern='**/*.py',
        exclude=('/site-packages/', '/dist-packages/', '/test/', '/tests/', '/idle_test/'),
        holdout_percent=1.0,
        root=sysconfig.get_path('stdlib'),
    )


def text_of_json(line: bytes, field: str, where: str) -> bytes:
    """The text in a field of a JSON object, in UTF-8."""
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise ConfigError(f'{where} is not UTF-8: {error.reason} at byte {error.start}') from error
    except json.JSONDecodeError as error:
        raise ConfigError(f'{where} is not JSON: {error.msg} at column {error.colno}') from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f'{where} is not JSON: {error}') from error
    if not isinstance(record, dict):
        shown = line.decode().strip()
        raise ConfigError(f'{where} is {shown[:40]}, not an object with {field!r}')
    if field not in record:
        raise ConfigError(missing(where, field, record))
    return as_content(record[field], f'{where}: {field!r}')


def as_content(value: Any, where: str) -> bytes:
    """The bytes of a text, in UTF-8."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise ConfigError(f'{where} is {"null" if value is None else repr(value)[:40]}, not text')
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f'{where} has half a surrogate pair at character {error.start}, which is no text'
        ) from error


def missing(where: str, field: str, fields: Any) -> str:
    """The message for a field that is not there."""
    names = list(map(str, fields))
    shown = ', '.join(map(repr, names[:8])) + (', ...' if len(names) > 8 else '')
    return f'{where} has no {field!r}, only {shown or "nothing"}.{nearest(field, names)}'
