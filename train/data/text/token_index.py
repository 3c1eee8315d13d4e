"""The token index of a source: built once, stored in a cache, read with random access."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from partitioning.temporary import temporary_folder
from partitioning.untrusted_text import parse_json
from train.data.text.sources import Document, Listing, Records, Source, Tokens
from train.data.text.stream import StreamWriter, checksum, open_stream, writing
from train.data.text.tokenizers import Tokenizer
from train.errors import ConfigError, first_line
from train.paths import is_remote

FORMAT = 2
# Documents are tokenized in groups of about this many bytes.
GROUP_BYTES = 4 << 20
PARTS = ('training', 'held_out')

# A callback that reports how much of a source has been read: (name, done, total).
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class TokenIndex:
    """The tokens of a source.

    Attributes:
      training: the documents to train on: a `Stream`, or `Pairs` if examples have several texts.
      held_out: the documents that are held out for evaluation, in the same form.
      content_hash: a hash of the documents' bytes in order, and of which documents are held out.
      directory: where it is kept; an index that is not kept was there while it was built.
    """

    training: Any
    held_out: Any
    content_hash: str
    directory: Path


def default_cache_dir() -> Path:
    """`meshwright/tokens` in the user's cache directory."""
    root = os.environ.get('XDG_CACHE_HOME') or '~/.cache'
    return Path(root).expanduser() / 'meshwright' / 'tokens'


def open_index(
    source: Source, tokenizer: Tokenizer, cache_dir: str | None, progress: Progress
) -> TokenIndex:
    """The token index of a source. It is built if it is not in the cache.

    The index depends on the tokenizer and on the names, sizes and times of the files: if any of
    them changes, another index is built. If several processes share the cache, one builds the
    index and the others wait.

    Args:
      cache_dir: the directory where indices are stored; by default `default_cache_dir()`.

    Raises:
      ConfigError: if the source or the tokenizer cannot be read, the source has no bytes, or the
        cache is damaged or cannot be written. An unfinished index is removed.
    """
    if cache_dir and is_remote(cache_dir):
        raise ConfigError(
            f'cache_dir {str(cache_dir)!r} must be a local folder, because indices are mapped into '
            'memory'
        )
    listing = source.listing()
    if listing.signature is None:
        # The index stays in memory, because its files are mapped, until nothing refers to it.
        with temporary_folder('meshwright-tokens-') as cache:
            _build(source, listing, tokenizer, cache / 'index', {}, progress)
            return _open(cache / 'index', {})
    described = {'format': FORMAT, 'tokenizer': tokenizer.identity, 'source': listing.signature}
    text = json.dumps(described, default=str, sort_keys=True)
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    key = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    settings = json.loads(text)  # comparable with index.json
    directory = cache / key
    if not directory.exists():
        with _locked(cache, key):
            if not directory.exists():
                _build(source, listing, tokenizer, directory, settings, progress)
    index = _open(directory, settings)
    held = index.training.num_documents + index.held_out.num_documents
    if isinstance(source, Records) and held != listing.size:
        raise ConfigError(
            f'token index {index.directory} has {held} documents, but there are now '
            f'{listing.size} records: give the new version another cache_key'
        )
    return index


def _build(
    source: Source,
    listing: Listing,
    tokenizer: Tokenizer,
    directory: Path,
    settings: Any,
    progress: Progress,
) -> None:
    """Writes an index next to its final place, and moves it there when it is complete."""
    unfinished = directory.with_name(f'{directory.name}.unfinished')
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with writing(unfinished):
            unfinished.mkdir(parents=True)
        meta = {'settings': settings, **_write(source, listing, tokenizer, unfinished, progress)}
        with writing(unfinished):
            described = {'checksum': _checksum(meta), **meta}
            (unfinished / 'index.json').write_text(json.dumps(described, indent=1))
            unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write(
    source: Source, listing: Listing, tokenizer: Tokenizer, directory: Path, progress: Progress
) -> dict[str, Any]:
    """Writes the streams of an index, and describes them as JSON data."""
    content, done = hashlib.blake2b(digest_size=16), 0
    name = f'{type(source).__name__} {getattr(source, "pattern", "")}'.rstrip()
    with contextlib.ExitStack() as stack:
        writers = {
            part: stack.enter_context(contextlib.closing(StreamWriter(directory / part, tokenizer)))
            for part in PARTS
        }
        for group in _groups(listing.documents):
            for document, tokens, num_bytes in _encode(tokenizer, group):
                part = PARTS[source.is_held_out(document.name)]
                writers[part].add(document.place, tokens, num_bytes)
                content.update(f'{part} {len(document.content)} '.encode())
                content.update(document.content)
            done = group[-1].done
            progress(name, done, listing.size)
        if done < listing.size:
            progress(name, listing.size, listing.size)
        parts = {part: writer.finish() for part, writer in writers.items()}
    if not any(part['num_bytes'] for part in parts.values()):
        documents = sum(part['num_documents'] for part in parts.values())
        what = f'{documents} documents, all of them empty' if documents else 'no documents'
        raise ConfigError(f'empty corpus: {name} has {what}')
    return {'content_hash': content.hexdigest(), 'parts': parts}


def _encode(
    tokenizer: Tokenizer, group: Sequence[Document]
) -> Iterator[tuple[Document, np.ndarray, int]]:
    """The documents, each with its tokens and its size as text, in bytes."""
    texts = [d for d in group if not isinstance(d.content, Tokens)]
    encoded = iter(tokenizer.encode([d.place for d in texts], [d.content for d in texts]))
    for document in group:
        if isinstance(document.content, Tokens):
            tokens = np.frombuffer(document.content, np.int32)
            yield document, tokens, len(tokenizer.decode(tokens))
        else:
            yield document, next(encoded), len(document.content)


def _open(directory: Path, settings: Any) -> TokenIndex:
    try:
        meta = parse_json((directory / 'index.json').read_text())
        if meta.pop('checksum') != _checksum(meta):
            raise ValueError('index.json has changed since it was written')
        if meta['settings'] != settings:
            raise ConfigError(
                f'token index {directory} was built with other settings than the source and the '
                'tokenizer have now: delete it, and the next run builds it again'
            )
        streams = {part: open_stream(directory / part, meta['parts'][part]) for part in PARTS}
        return TokenIndex(**streams, content_hash=meta['content_hash'], directory=directory)
    except ConfigError:
        raise
    except (
        *(OSError, ValueError, KeyError, TypeError, AttributeError, EOFError),
        ZeroDivisionError,  # a type of no bytes
    ) as error:
        raise ConfigError(
            f'token index {directory} is damaged ({first_line(error)}): delete it, and the next '
            'run builds it again'
        ) from error


def _checksum(meta: dict[str, Any]) -> str:
    return checksum(json.dumps(meta, sort_keys=True).encode())


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Groups of documents of about GROUP_BYTES in total."""
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
    """Holds a lock that only one process can have. The system releases it if the process dies."""
    with writing(cache / key):
        cache.mkdir(parents=True, exist_ok=True)
        file = (cache / f'{key}.lock').open('w')
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
