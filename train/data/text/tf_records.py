"""Reads TFRecord files of `tf.train.Example` without TensorFlow.

Sources: "TFRecord and tf.train.Example" in TensorFlow's documentation, the messages of
tensorflow/core/example/example.proto, and the encoding of protocol buffers.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import BinaryIO

from train.data.text.files import File
from train.data.text.sources import FileSource, missing_field
from train.errors import ConfigError

# The numbers of the fields in a tf.train.Example.
_FEATURES = _ENTRY = _NAME = _BYTES_LIST = _VALUE = 1
_FEATURE = 2
# Protocol buffers write a number, 8 bytes, a length N and N bytes, or 4 bytes.
_NUMBER, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class TfRecords(FileSource):
    """TFRecord files in which each record is a serialized `tf.train.Example`.

    Compressed files are read as `open_file` does. The checksum of each record's length is verified.

    Attributes:
      feature: the feature that holds the text, a list of one byte string.
    """

    feature: str = 'text'

    def select(self, field: str | int) -> TfRecords:
        return dataclasses.replace(self, feature=str(field))

    def contents(self, file: File) -> Iterator[tuple[int | None, bytes, int]]:
        with self.open(file) as (stream, raw):
            for number, record in enumerate(self._records(stream, file)):
                where = f'{file.path}: record {number}'
                try:
                    features = dict(parse_example(record))
                    values = features.get(self.feature)
                except (ValueError, IndexError) as error:
                    raise ConfigError(f'{where} is not a tf.train.Example: {error}') from error
                if values is None:
                    raise ConfigError(missing_field(where, self.feature, sorted(features)))
                if len(values) != 1:
                    raise ConfigError(
                        f'{where}: the feature {self.feature!r} has {len(values)} byte strings: it '
                        'must have one, the text'
                    )
                yield number, values[0], raw.tell()

    def _records(self, stream: BinaryIO, file: File) -> Iterator[bytes]:
        """Yields the records: a length, its checksum, the bytes, and their checksum."""
        number = 0
        while header := stream.read(12):
            if len(header) == 12:
                length, checksum = struct.unpack('<QI', header)
                if _masked_crc(header[:8]) != checksum:
                    raise ConfigError(f'{file.path} is not a TFRecord file, or it is damaged')
                if length > self.max_document_bytes:
                    raise ConfigError(
                        f'{file.path}: record {number} has {length:,} bytes, more than '
                        f'{self.max_document_bytes:,}: raise {type(self).__name__}.'
                        'max_document_bytes'
                    )
                record = stream.read(length)
                if len(record) == length and len(stream.read(4)) == 4:
                    yield record
                    number += 1
                    continue
            raise ConfigError(f'{file.path} ends in the middle of a record: copy it again')


def parse_example(record: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Yields the features of a serialized `tf.train.Example`: names and lists of byte strings.

    Features with numbers have empty lists. Raises a ValueError or IndexError if the record is
    malformed.
    """
    for features in _fields(record, _FEATURES):
        for entry in _fields(features, _ENTRY):
            [name] = _fields(entry, _NAME)
            feature = b''.join(_fields(entry, _FEATURE))
            values = [v for found in _fields(feature, _BYTES_LIST) for v in _fields(found, _VALUE)]
            yield name.decode(), values


def _fields(message: bytes, wanted: int) -> list[bytes]:
    """The values of one field of a message, as bytes."""
    found, place = [], 0
    while place < len(message):
        tag, place = read_varint(message, place)
        kind = tag & 7
        if kind == _NUMBER:
            _, place = read_varint(message, place)
            continue
        sizes = {_EIGHT: 8, _FOUR: 4}
        if kind == _BYTES:
            size, place = read_varint(message, place)
        elif kind in sizes:
            size = sizes[kind]
        else:
            raise ValueError(f'a field has the unknown type {kind}')
        if place + size > len(message):
            raise ValueError('a field is longer than its message')
        if tag >> 3 == wanted and kind == _BYTES:
            found.append(message[place : place + size])
        place += size
    return found


def read_varint(message: bytes, place: int) -> tuple[int, int]:
    """Reads a number of at most 64 bits, 7 per byte, and returns the place after it, too."""
    number = 0
    for shift in range(0, 64, 7):
        byte = message[place]
        number |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return number, place
    raise ValueError('a number has more than 64 bits')


def _make_table() -> list[int]:
    """The CRC of each byte, with Castagnoli's polynomial in reversed order."""
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _make_table()


def _masked_crc(data: bytes) -> int:
    """The masked CRC-32C that TFRecord files store. tensorboardX has it, but loads in seconds."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
