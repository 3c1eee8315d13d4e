"""The tokens of documents, one after another, in files that are mapped into memory.

Every document stands between two separators:

    separator  document 0  separator  document 1  separator
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

from train.data.text.tokenizers import Tokenizer
from train.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Stream:
    """The tokens of documents.

    Attributes:
      tokens: uint16 or uint32 [tokens], a separator before each document and one at the end.
      starts: int64 [documents + 1], where those separators are.
      sizes: int64 [documents], bytes of the documents.
    """

    tokens: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray

    @property
    def num_documents(self) -> int:
        return len(self.sizes)

    @property
    def num_targets(self) -> int:
        """Tokens that follow another one: the last of each document is the separator behind it."""
        return len(self.tokens) - 1

    @functools.cached_property
    def num_bytes(self) -> int:
        return int(np.sum(self.sizes))

    def head(self, num_targets: int, tokenizer: Tokenizer) -> Stream:
        """The first so many targets; the last of their documents may be cut short."""
        if num_targets >= self.num_targets:
            return self
        count = int(np.searchsorted(self.starts[:-1], num_targets))
        starts = np.append(self.starts[:count], min(num_targets, self.starts[count]))
        sizes = np.array(self.sizes[:count])
        if count and num_targets < self.starts[count]:
            cut = self.tokens[starts[-2] + 1 : num_targets + 1]
            sizes[-1] = len(tokenizer.decode(cut))
        return Stream(self.tokens[: num_targets + 1], starts, sizes)


class StreamWriter:
    """Writes a stream, document by document."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        """Args:
        path: of its files, which have endings of their own.
        tokenizer: has made the tokens.
        """
        self._path = path
        self._num_tokens = tokenizer.num_tokens
        self._dtype = np.dtype('uint16' if tokenizer.num_tokens <= 1 << 16 else 'uint32')
        self._separator = np.array([tokenizer.separator], self._dtype).tobytes()
        with writing(path.parent):
            self._file = path.with_suffix('.tokens').open('wb')
        # Not lists: there may be very many documents.
        self._starts = array.array('q', [0])
        self._sizes = array.array('q')

    def add(self, place: str, tokens: np.ndarray, num_bytes: int) -> None:
        """Adds a document.

        Raises:
          ConfigError: a token that the tokenizer says it does not have; a disk that is full.
        """
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._num_tokens:
            worst = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ConfigError(
                f'{place} has token {worst}, but the tokenizer says that its tokens are below '
                f'{self._num_tokens} (num_tokens)'
            )
        with writing(self._path.parent):
            self._file.write(self._separator)
            self._file.write(tokens.astype(self._dtype).tobytes())
        self._starts.append(self._starts[-1] + 1 + len(tokens))
        self._sizes.append(num_bytes)

    def finish(self) -> dict[str, Any]:
        """Completes the files.

        Returns:
          What `open_stream` needs to know of them, as JSON.
        """
        with writing(self._path.parent):
            self._file.write(self._separator)
            self._file.close()
            np.save(self._path.with_suffix('.starts.npy'), np.asarray(self._starts))
            np.save(self._path.with_suffix('.sizes.npy'), np.asarray(self._sizes))
        return {
            'dtype': self._dtype.name,
            'num_tokens': self._starts[-1] + 1,
            'num_documents': len(self._sizes),
            'num_bytes': sum(self._sizes),
        }

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the disk may be full: that has been said
            self._file.close()


def open_stream(path: Path, about: dict[str, Any]) -> Stream:
    """Maps the files of a stream into memory.

    Raises:
      OSError, ValueError, KeyError, EOFError: they are not what `StreamWriter.finish` said.
    """
    tokens = np.memmap(path.with_suffix('.tokens'), about['dtype'], mode='r')
    starts = np.load(path.with_suffix('.starts.npy'), mmap_mode='r')
    sizes = np.load(path.with_suffix('.sizes.npy'), mmap_mode='r')
    found = (len(tokens), len(sizes), len(starts))
    said = (about['num_tokens'], about['num_documents'], about['num_documents'] + 1)
    if found != said:
        raise ValueError(f'{path.name} has {found} tokens, documents and starts, not {said}')
    # As plain arrays: slices of memory maps are slow to make.
    return Stream(np.asarray(tokens), np.asarray(starts), np.asarray(sizes))


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Tells in one line of what keeps files from being written there."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f'the cache of token indices {directory.parent} cannot be written: {error.strerror}. '
            'Name another as cache_dir'
        ) from error
