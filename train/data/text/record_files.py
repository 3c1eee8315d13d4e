"""Sources that read files of records: tables of text, Parquet and ArrayRecord."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from train.data.text.files import File
from train.data.text.record_sizes import parquet_batch_size, record_ranges
from train.data.text.sources import FileSource, as_content, missing_field, text_of_json
from train.errors import ConfigError, first_line, import_optional
from train.paths import is_remote


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
        with self.open(file) as (stream, raw):
            lines = iter(lambda: stream.readline(self.max_document_bytes + 1), b'')
            for number, line in enumerate(lines, 1):
                if len(line) > self.max_document_bytes:
                    yield number, line, raw.tell()  # It is refused for its size.
                    continue
                cells = line.rstrip(b'\r\n').split(separator)
                if not isinstance(column, int):
                    names = [cell.decode(errors='replace') for cell in cells]
                    if column not in names:
                        raise ConfigError(missing_field(f'{file.path}: line 1', column, names))
                    column = names.index(column)
                elif line.strip():
                    if not column < len(cells):
                        raise ConfigError(
                            f'{file.path}:{number} has no column {column}, only {len(cells)} '
                            f'columns separated by {self.separator!r}'
                        )
                    yield number, cells[column], raw.tell()


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
