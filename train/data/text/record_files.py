"""Sources that read files of records: tables of text, Parquet and ArrayRecord.

Sources: parquet-format's parquet.thrift (PageHeader) with Thrift's compact protocol, and "Riegeli/
records file format specification", https://github.com/google/riegeli.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from train.data.text.files import MAX_RATIO, File
from train.data.text.sources import FileSource, as_content, missing_field, text_of_json
from train.data.text.tf_records import read_varint
from train.errors import ConfigError, first_line, import_optional
from train.paths import is_remote

# A batch, a dictionary or a group of records may have this size, and one document more if a source
# allows it.
GROUP_BYTES = 64 << 20
MAX_BATCH = 256

# Riegeli divides a file into blocks of this size, each of which begins with a header of 24 bytes.
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_USABLE = _BLOCK - _BLOCK_HEADER
_KINDS = b'smprt'  # signature, metadata, padding, and records of two kinds


@dataclasses.dataclass(frozen=True, kw_only=True)
class TsvFiles(FileSource):
    """Tables as text: each line is a document, and its columns are separated by tabs.

    Compressed files are read as `open_file` does. Nothing is quoted or escaped.

    Attributes:
      column: the column that holds the text. If it is a name, the first line of each file names the
        columns. If it is a number, there is no such line, and columns are counted from 0.
      separator: the character between columns.
    """

    column: str | int = 0
    separator: str = '\t'

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.separator, str) or not self.separator:
            raise ConfigError(f'TsvFiles.separator is {self.separator!r}: write a character')

    def select(self, field: str | int) -> TsvFiles:
        return dataclasses.replace(self, column=field)

    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        separator, column = self.separator.encode(), self.column
        for number, line, read in self.lines(file):
            if len(line) > self.max_document_bytes:
                yield number, line, read  # It is refused for its size.
                continue
            cells = line.rstrip(b'\r\n').split(separator)
            if not isinstance(column, int):
                names = [cell.decode(errors='replace') for cell in cells]
                if column not in names:
                    raise ConfigError(missing_field(f'{file.path}: line {number}', column, names))
                column = names.index(column)
                continue
            if not column < len(cells):
                raise ConfigError(
                    f'{file.path}:{number} has no column {column}, only {len(cells)} columns '
                    f'separated by {self.separator!r}'
                )
            yield number, cells[column], read


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetFiles(FileSource):
    """Parquet files in which each row is a document. Needs the package pyarrow.

    Attributes:
      column: the column that holds the text, as strings or bytes.
    """

    column: str = 'text'

    def select(self, field: str | int) -> ParquetFiles:
        return dataclasses.replace(self, column=str(field))

    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        arrow = import_optional('pyarrow', 'data', f'ParquetFiles ({file.path})')
        parquet = import_optional('pyarrow.parquet', 'data', f'ParquetFiles ({file.path})')
        number = 0
        try:
            # pyarrow opens local files faster by their path.
            opened = file.path.open('rb') if is_remote(file.path) else str(file.path)
            with parquet.ParquetFile(opened) as table:
                if self.column not in (names := table.schema_arrow.names):
                    raise ConfigError(missing_field(str(file.path), self.column, names))
                with file.path.open('rb') as stream:
                    size = parquet_batch_size(
                        table.metadata, stream, self.column, file, self.max_decompressed_bytes
                    )
                count = table.metadata.num_rows
                for batch in table.iter_batches(batch_size=size, columns=[self.column]):
                    for value in _as_bytes(arrow, batch.column(0)).to_pylist():
                        content = as_content(value, f'{file.path}: row {number}: {self.column!r}')
                        yield number, content, file.size * (number + 1) // count
                        number += 1
        except (arrow.ArrowException, OSError) as error:
            raise ConfigError(
                f'{file.path} cannot be read as Parquet after {number} rows: {first_line(error)}'
            ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecords(FileSource):
    """ArrayRecord files in which each record is a document. Their library opens local files only.

    Attributes:
      field: the field that holds the text, if records are JSON objects. With None, each record is
        itself the text.
    """

    field: str | None = None

    def select(self, field: str | int) -> ArrayRecords:
        return dataclasses.replace(self, field=str(field))

    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        if is_remote(file.path):
            raise ConfigError(
                f'{file.path} is not a local file, as ArrayRecords needs: copy it to a local or '
                'mounted folder, or use ParquetFiles or JsonLines'
            )
        module = import_optional('array_record.python.array_record_module', 'train', 'ArrayRecords')
        number = 0
        try:
            # All of them are checked first, because the reader opens the index of the file.
            ranges = list(record_ranges(file, self.max_document_bytes))
            reader = module.ArrayRecordReader(str(file.path))
            count = reader.num_records()
            for first, last in ranges:
                for record in reader.read(first, min(last, count)) if first < count else ():
                    where = f'{file.path}: record {number}'
                    text = record if self.field is None else text_of_json(record, self.field, where)
                    yield number, text, file.size * (number + 1) // count
                    number += 1
            reader.close()
        except ConfigError:
            raise
        except (OSError, RuntimeError, ValueError, IndexError) as error:
            raise ConfigError(
                f'{file.path} cannot be read as ArrayRecord after {number} records: '
                f'{first_line(error)}'
            ) from error


def _as_bytes(arrow: Any, column: Any) -> Any:
    """A column of text as bytes, without decoding it."""
    kinds = arrow.types
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kinds.is_string(column.type) or kinds.is_large_string(column.type):
        return column.cast(arrow.large_binary())
    return column


# How much memory records take when they are decompressed, read from headers before that happens:
# the libraries that read Parquet and ArrayRecord decompress whole pages and chunks without a limit.


def parquet_batch_size(
    metadata: Any, stream: BinaryIO, column: str, file: File, max_decompressed: int | None
) -> int:
    """The number of rows of a Parquet file that can be decompressed at once.

    By default, the column in one row group may have GROUP_BYTES, or 100 times the compressed bytes
    if that is more. Raises a ConfigError if a row group or a dictionary is too large.
    """
    largest = 1
    for group in range(metadata.num_row_groups):
        columns = map(metadata.row_group(group).column, range(metadata.num_columns))
        for about in columns:
            if about.path_in_schema.partition('.')[0] != column:
                continue
            size = about.total_uncompressed_size
            limit = max(GROUP_BYTES, MAX_RATIO * about.total_compressed_size)
            if size > (max_decompressed or limit):
                raise ConfigError(
                    f'{file.path} has {size:,} bytes in row group {group} of {column!r} when it is '
                    'decompressed: raise ParquetFiles.max_decompressed_bytes if you trust the file'
                )
            if about.has_dictionary_page:
                # Each row of a batch may be a copy of the largest entry.
                largest = max(largest, _page_size(stream, about.dictionary_page_offset))
    if largest > (max_decompressed or GROUP_BYTES):
        raise ConfigError(
            f'{file.path} has a dictionary of {largest:,} bytes in {column!r}: raise '
            'ParquetFiles.max_decompressed_bytes if you trust the file'
        )
    return max(1, min(MAX_BATCH, GROUP_BYTES // largest))


def _page_size(stream: BinaryIO, offset: int) -> int:
    """The size of a page when it is decompressed: the second number of its header."""
    stream.seek(offset)
    header, numbers, place = stream.read(32), list[int](), 0
    with contextlib.suppress(IndexError, ValueError):  # pyarrow refuses malformed headers.
        while len(numbers) < 2 and header[place] == 0x15:  # a field, an i32
            number, place = read_varint(header, place + 1)
            numbers.append(number >> 1)  # "zigzag": the last bit is the sign
    return numbers[1] if len(numbers) == 2 else 0


def record_ranges(file: File, max_document_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of records of an ArrayRecord file that can be decompressed at once.

    The last range contains the file's own index, too, which consists of records. Raises a
    ConfigError if a group of records is too large, or the file is damaged.
    """
    first = last = size = 0
    for place, records, decoded in _chunks(file):
        if decoded > max(GROUP_BYTES, max_document_bytes):
            raise ConfigError(
                f'{file.path}: the group of records at byte {place:,} has {decoded:,} bytes when '
                'it is decompressed: write ArrayRecord files with a smaller group_size, or raise '
                'ArrayRecords.max_document_bytes if you trust the file'
            )
        if last > first and (size + decoded > GROUP_BYTES or last - first >= 1024):
            yield first, last
            first, size = last, 0
        last, size = last + records, size + decoded
    yield first, last


def _chunks(file: File) -> Iterator[tuple[int, int, int]]:
    """Yields the place, the number of records, and the decompressed size of each chunk."""
    with Path(file.path).open('rb') as opened:
        if not file.size:
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as held:
            place = 0
            while place < len(held):
                header = _read(held, place, _CHUNK_HEADER)
                if len(header) < _CHUNK_HEADER:
                    return _refuse(file, place)
                _, stored, _, kind_and_records, decoded = struct.unpack('<5Q', header)
                kind, records = kind_and_records & 0xFF, kind_and_records >> 8
                size = _CHUNK_HEADER + stored
                blocks = (size + (place + _USABLE - 1) % _BLOCK) // _USABLE
                end = place + size + blocks * _BLOCK_HEADER
                if kind not in _KINDS or (place == 0) != (kind == _KINDS[0]) or end > len(held):
                    return _refuse(file, place)
                if kind in b'rt':
                    yield place, records, decoded
                # A chunk takes at least one byte per record.
                least = place + records
                least += max(0, _BLOCK_HEADER - least % _BLOCK) if least % _BLOCK else 0
                place = max(end, least)


def _read(held: mmap.mmap, place: int, size: int) -> bytes:
    """Reads the bytes of a chunk, without the headers of blocks."""
    found = b''
    while len(found) < size and place < len(held):
        if place % _BLOCK < _BLOCK_HEADER:
            place += _BLOCK_HEADER - place % _BLOCK
        taken = held[place : min(place + size - len(found), (place // _BLOCK + 1) * _BLOCK)]
        found, place = found + taken, place + max(len(taken), 1)
    return found


def _refuse(file: File, place: int) -> None:
    raise ConfigError(f'{file.path} cannot be read as ArrayRecord: it is damaged at byte {place:,}')
