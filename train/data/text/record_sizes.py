"""How much memory records take when they are decompressed, read from headers before any of them is.

The libraries that read Parquet and ArrayRecord decompress whole pages and chunks, without a limit.

Sources: parquet-format's parquet.thrift (PageHeader) with Thrift's compact protocol, and "Riegeli/
records file format specification", https://github.com/google/riegeli.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from train.data.text.files import MAX_RATIO, File
from train.errors import ConfigError

# A batch, a dictionary or a group of records may have this size, and one document more if a source
# allows it.
GROUP_BYTES = 64 << 20
MAX_BATCH = 256

# Riegeli divides a file into blocks of this size, each of which begins with a header of 24 bytes.
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40
_USABLE = _BLOCK - _BLOCK_HEADER
_KINDS = b'smprt'  # signature, metadata, padding, and records of two kinds


def parquet_batch_size(
    metadata: Any, stream: BinaryIO, column: str, file: File, max_decompressed: int | None
) -> int:
    """The number of rows of a Parquet file that can be decompressed at once.

    Args:
      metadata: the metadata of the file, of pyarrow.
      stream: the file.
      column: the column that is read.
      file: the file, for messages.
      max_decompressed: the greatest number of bytes of the column in one row group. By default,
        it is GROUP_BYTES, or 100 times the compressed bytes if that is more.

    Raises:
      ConfigError: if a row group or a dictionary is too large.
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
    while len(numbers) < 2 and place < len(header) and header[place] == 0x15:  # a field, an i32
        number, shift, place = 0, 0, place + 1
        while place < len(header):
            number |= (header[place] & 0x7F) << shift
            shift, place = shift + 7, place + 1
            if header[place - 1] < 0x80:
                break
        numbers.append(number >> 1)  # "zigzag": the last bit is the sign
    return numbers[1] if len(numbers) == 2 else 0


def record_ranges(file: File, max_document_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of records of an ArrayRecord file that can be decompressed at once.

    The last range contains the file's own index, too, which consists of records.

    Args:
      file: the file.
      max_document_bytes: the greatest size of a document.

    Raises:
      ConfigError: if a group of records is too large, or the file is damaged.
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
