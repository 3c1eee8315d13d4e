"""Streams of decompressed bytes that end in an error before they take too much memory or disk."""

from __future__ import annotations

import io
from lzma import LZMADecompressor
from typing import BinaryIO

from train.errors import ConfigError

CHUNK_BYTES = 1 << 16


class Bounded(io.RawIOBase):
    """Reads a stream of decompressed bytes up to a limit.

    Args:
      stream: the stream.
      limit: the greatest number of bytes.
      message: the error if there are more.
    """

    def __init__(self, stream: BinaryIO, limit: int, message: str):
        self._stream, self._limit, self._message, self._read = stream, limit, message, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads into a buffer, and returns the number of bytes.

        Raises:
          ConfigError: if the stream has more bytes than the limit.
        """
        data = self._stream.read(len(buffer))
        self._read += len(data)
        if self._read > self._limit:
            raise ConfigError(self._message)
        buffer[: len(data)] = data
        return len(data)


class XzReader(io.RawIOBase):
    """Decompresses an .xz file with a limit on memory, which `lzma.LZMAFile` does not have.

    Args:
      raw: the file.
      max_window_bytes: the memory that may be taken for what has been read before.
    """

    def __init__(self, raw: BinaryIO, max_window_bytes: int):
        # The decoder needs some memory apart from the window.
        self._raw, self._limit = raw, max_window_bytes + (1 << 20)
        self._decoder = LZMADecompressor(memlimit=self._limit)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Reads into a buffer, and returns the number of bytes.

        Raises:
          EOFError, LZMAError: if the file is damaged, or needs more memory.
        """
        while True:
            data = b''
            if self._decoder.eof:
                # Another stream may follow, after zeros.
                data = self._decoder.unused_data.lstrip(b'\0')
                while not data:
                    if not (read := self._raw.read(CHUNK_BYTES)):
                        return 0
                    data = read.lstrip(b'\0')
                self._decoder = LZMADecompressor(memlimit=self._limit)
            elif self._decoder.needs_input and not (data := self._raw.read(CHUNK_BYTES)):
                raise EOFError('it ends in the middle of a stream')
            if found := self._decoder.decompress(data, len(buffer)):
                buffer[: len(found)] = found
                return len(found)
