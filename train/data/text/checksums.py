"""Checksums of the files of a token index, so that damaged ones are not trained on.

The tokens of an index may be many gigabytes, of which a run reads a part in random order. So each
block of 64 KiB has a checksum, and is verified when something in it is read for the first time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash

from train.errors import ConfigError

BLOCK_BYTES = 1 << 16


def checksum(content: bytes | memoryview) -> str:
    """The checksum of bytes."""
    return xxhash.xxh3_128_hexdigest(content)


def block_checksums(values: np.ndarray) -> np.ndarray:
    """The checksum of each block of an array, uint64 [blocks]."""
    content = values.view(np.uint8).data
    blocks = range(0, len(content), BLOCK_BYTES)
    found = (xxhash.xxh3_64_intdigest(content[first : first + BLOCK_BYTES]) for first in blocks)
    return np.fromiter(found, np.uint64, len(blocks))


class VerifiedBlocks:
    """The blocks of a file of tokens, each of which is verified once.

    Threads may share it: at worst, two of them verify the same block.

    Args:
      path: the file, for the message.
      values: its values.
      checksums: uint64 [blocks], the checksum of each block when the file was written.
    """

    def __init__(self, path: Path, values: np.ndarray, checksums: np.ndarray):
        self._path, self._checksums = path, checksums
        self._content, self._item_bytes = values.view(np.uint8).data, values.itemsize
        self._is_verified = bytearray(len(checksums))

    def verify(self, start: int, stop: int) -> None:
        """Verifies the blocks with the values from number `start` up to, but without, `stop`.

        Raises:
          ConfigError: if the file has changed since it was written.
        """
        first = start * self._item_bytes // BLOCK_BYTES
        last = -(-stop * self._item_bytes // BLOCK_BYTES)
        while (first := self._is_verified.find(0, first, last)) >= 0:
            block = self._content[first * BLOCK_BYTES : (first + 1) * BLOCK_BYTES]
            if xxhash.xxh3_64_intdigest(block) != self._checksums[first]:
                raise ConfigError(
                    f'{self._path} is damaged: {len(block):,} bytes from byte '
                    f'{first * BLOCK_BYTES:,} have changed since they were written. Delete the '
                    f'token index {self._path.parent}, and the next run builds it again'
                )
            self._is_verified[first] = 1
