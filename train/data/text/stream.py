"""Token streams: the tokens of documents, one after another, in memory-mapped files.

A separator stands before each document and at the end:

    separator  document 0  separator  document 1  separator

The files of a token index have checksums, so that a run does not train on damaged ones. The tokens
may be many gigabytes, and a run reads only a part of them, in random order. So each block of 64 KiB
has its own checksum, which is verified when a value of the block is read for the first time.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from train.data.text.tokenizers import Tokenizer
from train.errors import ConfigError

BLOCK_BYTES = 1 << 16


def checksum(content: bytes | memoryview) -> str:
    """Returns the checksum of a small file, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(content)


class VerifiedBlocks:
    """The blocks of a file of tokens, each of which is verified once.

    Threads may share it: at worst, two of them verify the same block.

    Args:
      checksums: uint64 [blocks], the checksum of each block when the file was written.
    """

    def __init__(self, path: Path, values: np.ndarray, checksums: np.ndarray):
        self._path, self._checksums = path, checksums
        self._content, self._item_bytes = values.view(np.uint8).data, values.itemsize
        self._is_verified = bytearray(len(checksums))

    def verify(self, start: int, stop: int) -> None:
        """Verifies the blocks with the values from number `start` up to, but without, `stop`.

        Raises a ConfigError if the file has changed since it was written.
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


@dataclasses.dataclass(frozen=True)
class Stream:
    """The tokens of documents.

    Attributes:
      tokens: uint16 or uint32 [tokens], with a separator before each document and one at the end.
      starts: int64 [documents + 1], the positions of those separators.
      sizes: int64 [documents], the sizes of the documents, in bytes.
      blocks: verifies the file of the tokens, or None if they are not in a file.
      first: the number of the first token in that file.
    """

    tokens: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    blocks: VerifiedBlocks | None = dataclasses.field(default=None, repr=False, compare=False)
    first: int = 0

    @property
    def num_documents(self) -> int:
        return len(self.sizes)

    @property
    def num_targets(self) -> int:
        """The number of tokens to predict: all except the first separator."""
        return len(self.tokens) - 1

    @functools.cached_property
    def num_bytes(self) -> int:
        return int(np.sum(self.sizes))

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from number `start` up to, but without, `stop`, or up to the last one.

        Raises a ConfigError if the file of the tokens has changed since it was written.
        """
        if self.blocks is not None:
            last = min(int(stop), len(self.tokens))
            self.blocks.verify(self.first + int(start), self.first + last)
        return self.tokens[start:stop]

    def document(self, index: int) -> np.ndarray:
        """The tokens of a document, without separators."""
        return self.read(self.starts[index] + 1, self.starts[index + 1])

    def documents(self, first: int, last: int) -> Stream:
        """The stream of the documents from number `first` up to, but without, number `last`."""
        starts = np.asarray(self.starts[first : last + 1])
        tokens = self.tokens[starts[0] : starts[-1] + 1]
        place = self.first + int(starts[0])
        return Stream(tokens, starts - starts[0], self.sizes[first:last], self.blocks, place)

    def head(self, num_targets: int, tokenizer: Tokenizer) -> Stream:
        """The stream up to the first `num_targets` targets. It may cut its last document short."""
        if num_targets >= self.num_targets:
            return self
        count = int(np.searchsorted(self.starts[:-1], num_targets))
        starts = np.append(self.starts[:count], min(num_targets, self.starts[count]))
        sizes = np.array(self.sizes[:count])
        if count and num_targets < self.starts[count]:
            cut = self.read(starts[-2] + 1, num_targets + 1)
            sizes[-1] = len(tokenizer.decode(cut))
        tokens = self.tokens[: num_targets + 1]
        return Stream(tokens, starts, sizes, self.blocks, self.first)


class StreamWriter:
    """Writes a stream, document by document, to files with this path and their suffixes."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self._path = path
        self._num_tokens = tokenizer.num_tokens
        self._dtype = np.dtype('uint16' if tokenizer.num_tokens <= 1 << 16 else 'uint32')
        self._separator = np.array([tokenizer.separator], self._dtype).tobytes()
        with writing(path.parent):
            self._file = path.with_suffix('.tokens').open('wb')
        # Arrays take much less memory than lists, and there may be very many documents.
        self._starts = array.array('q', [0])
        self._sizes = array.array('q')

    def add(self, place: str, tokens: np.ndarray, num_bytes: int) -> None:
        """Adds a document.

        `place` is where it is, for messages; `tokens` are int [tokens] without separators. Raises a
        ConfigError if a token is outside the tokenizer's vocabulary, or the files cannot be
        written.
        """
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._num_tokens:
            worst = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ConfigError(
                f'{place} has the token {worst}, which is outside the vocabulary of its tokenizer: '
                f'tokens must be >= 0 and < num_tokens ({self._num_tokens})'
            )
        with writing(self._path.parent):
            self._file.write(self._separator)
            # In pieces, so that a large document does not need several times its memory.
            for first in range(0, len(tokens), 1 << 20):
                self._file.write(tokens[first : first + (1 << 20)].astype(self._dtype).data)
        self._starts.append(self._starts[-1] + 1 + len(tokens))
        self._sizes.append(num_bytes)

    def finish(self) -> dict[str, Any]:
        """Completes the files, and returns what `open_stream` must know about them, as JSON."""
        with writing(self._path.parent):
            self._file.write(self._separator)
            self._file.close()
            content = np.memmap(self._path.with_suffix('.tokens'), np.uint8, mode='r').data
            blocks = range(0, len(content), BLOCK_BYTES)
            found = (xxhash.xxh3_64_intdigest(content[i : i + BLOCK_BYTES]) for i in blocks)
            arrays = {
                'starts': np.asarray(self._starts),
                'sizes': np.asarray(self._sizes),
                'checksums': np.fromiter(found, np.uint64, len(blocks)),
            }
            checksums = {}
            for name, values in arrays.items():
                path = self._path.with_suffix(f'.{name}.npy')
                np.save(path, values)
                checksums[name] = checksum(np.memmap(path, np.uint8, mode='r').data)
        return {
            'checksums': checksums,
            'dtype': self._dtype.name,
            'num_tokens': self._starts[-1] + 1,
            'num_documents': len(self._sizes),
            'num_bytes': sum(self._sizes),
        }

    def close(self) -> None:
        with contextlib.suppress(OSError):  # if the disk is full, an error has been raised already
            self._file.close()


def open_stream(path: Path, about: dict[str, Any]) -> Stream:
    """Maps the files of a stream into memory.

    Raises an OSError, ValueError, KeyError or EOFError if a file is missing or differs from what
    `StreamWriter.finish` described.
    """
    tokens = np.memmap(path.with_suffix('.tokens'), about['dtype'], mode='r')
    arrays = {}
    for name, expected_checksum in about['checksums'].items():
        file = path.with_suffix(f'.{name}.npy')
        if checksum(np.memmap(file, np.uint8, mode='r').data) != expected_checksum:
            raise ValueError(f'{file.name} has changed since it was written')
        arrays[name] = np.load(file, mmap_mode='r')
    starts, sizes = arrays['starts'], arrays['sizes']
    found = (len(tokens), len(sizes), len(starts))
    expected = (about['num_tokens'], about['num_documents'], about['num_documents'] + 1)
    if found != expected:
        raise ValueError(f'{path.name} has {found} tokens, documents and starts, not {expected}')
    # Plain views, because slicing a np.memmap is slow.
    values = np.asarray(tokens)
    blocks = VerifiedBlocks(path.with_suffix('.tokens'), values, np.asarray(arrays['checksums']))
    return Stream(values, np.asarray(starts), np.asarray(sizes), blocks)


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turns an OSError while writing an index to `directory` into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f'cannot write to the cache of token indices {directory.parent}: {error.strerror}. '
            'Set cache_dir to another directory'
        ) from error
