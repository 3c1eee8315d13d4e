"""The tokens of a source on disk: built once, memory-mapped, read at any place.

Every document stands between two separators, and one stream of tokens holds them all:

    separator  document 0  separator  document 1  separator
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from train.data.sources import Document, Listing, Records, Source
from train.data.tokenizers import Tokenizer
from train.errors import ConfigError

FORMAT = 1
# Documents are tokenized together, about so many bytes at a time.
GROUP_BYTES = 4 << 20
PARTS = ('training', 'held_out')

# Told how much of a source has been read: (name, done, total).
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Stream:
    """The tokens of documents, one after another.

    Attributes:
      tokens: uint16 or uint32 [tokens], a separator before each document and one at the end.
      starts: int64 [documents + 1], where those separators are.
      num_bytes: bytes of the documents.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_bytes: int

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def num_targets(self) -> int:
        """Tokens that follow another one: the last of each document is the separator behind it."""
        return len(self.tokens) - 1

    def head(self, num_targets: int, tokenizer: Tokenizer) -> Stream:
        """The first so many targets; the last of their documents may be cut short."""
        if num_targets >= self.num_targets:
            return self
        tokens = self.tokens[: num_targets + 1]
        starts = np.append(self.starts[self.starts < num_targets], num_targets)
        return Stream(tokens, starts, len(tokenizer.decode(tokens)))


@dataclasses.dataclass(frozen=True)
class TokenIndex:
    """The tokens of a source.

    Attributes:
      training: the documents to train on.
      held_out: those held out for evaluation.
      content_hash: of the documents' bytes, in order, and of which are held out.
      directory: where the index lies.
      keep: what has to live as long as the index.
    """

    training: Stream
    held_out: Stream
    content_hash: str
    directory: Path
    keep: Any = dataclasses.field(default=None, repr=False, compare=False)


def default_cache_dir() -> Path:
    """`meshwright/tokens` in the user's cache folder."""
    root = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return Path(root).expanduser() / 'meshwright' / 'tokens'


def open_index(
    source: Source, tokenizer: Tokenizer, cache_dir: str | None, progress: Progress
) -> TokenIndex:
    """The token index of a source, built if it is not in the cache.

    Another tokenizer, other files, or files of another size or date make another index. Processes
    that share the cache build it once; the others wait.

    Args:
      source: the documents.
      tokenizer: makes tokens of them.
      cache_dir: where indices are kept; None: `default_cache_dir()`.
      progress: told how far the building is.

    Raises:
      ConfigError: the source or the tokenizer cannot be read, there are no bytes in it, or the
        cache is damaged or cannot be written. Nothing half-built stays.
    """
    listing = source.listing()
    if listing.signature is None:
        temporary = tempfile.TemporaryDirectory(prefix='meshwright-tokens-')
        directory = Path(temporary.name) / 'index'
        _build(source, listing, tokenizer, directory, {}, progress)
        return _open(directory, {}, keep=temporary)
    settings = {'format': FORMAT, 'tokenizer': tokenizer.identity, **listing.signature}
    key = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=12).hexdigest()
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    directory = cache / key
    if not directory.exists():
        with _locked(cache, key):
            if not directory.exists():
                _build(source, listing, tokenizer, directory, settings, progress)
    index = _open(directory, settings)
    if isinstance(source, Records):
        _check_count(index, listing.size)
    return index


def _build(
    source: Source,
    listing: Listing,
    tokenizer: Tokenizer,
    directory: Path,
    settings: Any,
    progress: Progress,
) -> None:
    """Writes an index beside its place, and moves it there when it is whole."""
    unfinished = directory.with_name(f'{directory.name}.unfinished')
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        with contextlib.ExitStack() as stack:
            writers = {
                part: stack.enter_context(contextlib.closing(_Writer(unfinished / part, tokenizer)))
                for part in PARTS
            }
            content = hashlib.blake2b(digest_size=16)
            for group in _groups(listing.documents):
                encoded = tokenizer.encode([d.name for d in group], [d.content for d in group])
                for document, tokens in zip(group, encoded, strict=True):
                    part = PARTS[source.is_held_out(document.name)]
                    writers[part].add(tokens, len(document.content))
                    content.update(f'{part} {len(document.content)} '.encode() + document.content)
                progress(_name(source), group[-1].done, listing.size)
            parts = {part: writer.finish() for part, writer in writers.items()}
        if not any(part['num_bytes'] for part in parts.values()):
            documents = sum(part['num_documents'] for part in parts.values())
            raise ConfigError(f'empty corpus: {_name(source)} has {documents} documents, all empty')
        meta = {'settings': settings, 'content_hash': content.hexdigest(), 'parts': parts}
        (unfinished / 'index.json').write_text(json.dumps(meta, indent=1))
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _open(directory: Path, settings: Any, keep: Any = None) -> TokenIndex:
    try:
        meta = json.loads((directory / 'index.json').read_text())
        if meta['settings'] != settings:
            raise ConfigError(
                f'token index {directory} is of other settings than its name says: delete it'
            )
        streams = {part: _open_stream(directory / part, meta['parts'][part]) for part in PARTS}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f'token index {directory} is damaged: delete it, and the next run builds it again '
            f'({str(error).splitlines()[0]})'
        ) from error
    return TokenIndex(**streams, content_hash=meta['content_hash'], directory=directory, keep=keep)


def _open_stream(path: Path, part: Any) -> Stream:
    tokens = np.memmap(path.with_suffix('.tokens'), part['dtype'], mode='r')
    starts = np.load(path.with_suffix('.starts.npy'), mmap_mode='r')
    if len(tokens) != part['num_tokens'] or len(starts) != part['num_documents'] + 1:
        raise ValueError(f'{path.name} has {len(tokens)} tokens, not {part["num_tokens"]}')
    # As plain arrays: slices of memory maps are slow to make.
    return Stream(np.asarray(tokens), np.asarray(starts), part['num_bytes'])


class _Writer:
    """Writes a stream document by document."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self._path = path
        self._dtype = np.dtype('uint16' if tokenizer.num_tokens <= 1 << 16 else 'uint32')
        self._separator = np.array([tokenizer.separator], self._dtype).tobytes()
        self._file = path.with_suffix('.tokens').open('wb')
        self._starts = [0]
        self._num_bytes = 0

    def add(self, tokens: np.ndarray, num_bytes: int) -> None:
        self._file.write(self._separator)
        self._file.write(tokens.astype(self._dtype).tobytes())
        self._starts.append(self._starts[-1] + 1 + len(tokens))
        self._num_bytes += num_bytes

    def finish(self) -> dict[str, Any]:
        """Completes the files; what `_open_stream` needs to know of them."""
        self._file.write(self._separator)
        np.save(self._path.with_suffix('.starts.npy'), np.array(self._starts, np.int64))
        return {
            'dtype': self._dtype.name,
            'num_tokens': self._starts[-1] + 1,
            'num_documents': len(self._starts) - 1,
            'num_bytes': self._num_bytes,
        }

    def close(self) -> None:
        self._file.close()


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in groups of about GROUP_BYTES."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.content)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


@contextlib.contextmanager
def _locked(cache: Path, key: str) -> Iterator[None]:
    """Only one process at a time is in here; the lock of one that dies is free."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = (cache / f'{key}.lock').open('w')
    except OSError as error:
        raise ConfigError(
            f'the cache of token indices {cache} cannot be written: {error.strerror}. Name another '
            'as cache_dir'
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_count(index: TokenIndex, records: int) -> None:
    held = index.training.num_documents + index.held_out.num_documents
    if held != records:
        raise ConfigError(
            f'token index {index.directory} has {held} documents, but there are {records} '
            'records now: another version needs another cache_key'
        )


def _name(source: Source) -> str:
    pattern = getattr(source, 'pattern', None)
    of = '' if pattern is None else f' {pattern}'
    return f'{type(source).__name__}{of}'
