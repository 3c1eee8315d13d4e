"""The token index of a source: built once, kept in a cache, read at any place."""

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

from train.data.text.sources import Document, Listing, Records, Source
from train.data.text.stream import Stream, StreamWriter, open_stream, writing
from train.data.text.tokenizers import Tokenizer
from train.errors import ConfigError, first_line

FORMAT = 1
# Documents are tokenized together, about so many bytes at a time.
GROUP_BYTES = 4 << 20
PARTS = ('training', 'held_out')

# Told how much of a source has been read: (name, done, total).
Progress = Callable[[str, int, int], None]


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
        try:
            _build(source, listing, tokenizer, directory, {}, progress)
        except BaseException:
            temporary.cleanup()
            raise
        return _open(directory, {}, keep=temporary)
    described = {'format': FORMAT, 'tokenizer': tokenizer.identity, 'source': listing.signature}
    settings = json.loads(json.dumps(described, default=str))  # as it comes back from the file
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
    try:
        with writing(unfinished):
            unfinished.mkdir(parents=True)
        meta = {'settings': settings, **_write(source, listing, tokenizer, unfinished, progress)}
        with writing(unfinished):
            (unfinished / 'index.json').write_text(json.dumps(meta, indent=1))
            unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write(
    source: Source, listing: Listing, tokenizer: Tokenizer, directory: Path, progress: Progress
) -> dict[str, Any]:
    """Writes the streams of an index; what they hold, as JSON."""
    content, name, done = hashlib.blake2b(digest_size=16), _name(source), 0
    with contextlib.ExitStack() as stack:
        writers = {
            part: stack.enter_context(contextlib.closing(StreamWriter(directory / part, tokenizer)))
            for part in PARTS
        }
        for group in _groups(listing.documents):
            encoded = tokenizer.encode([d.place for d in group], [d.content for d in group])
            for document, tokens in zip(group, encoded, strict=True):
                part = PARTS[source.is_held_out(document.name)]
                writers[part].add(document.place, tokens, len(document.content))
                content.update(f'{part} {len(document.content)} '.encode())
                content.update(document.content)
            done = group[-1].done
            progress(name, done, listing.size)
        if done < listing.size:
            progress(name, listing.size, listing.size)
        parts = {part: writer.finish() for part, writer in writers.items()}
    if not any(part['num_bytes'] for part in parts.values()):
        documents = sum(part['num_documents'] for part in parts.values())
        what = f'only empty documents, {documents} of them' if documents else 'no documents'
        raise ConfigError(f'empty corpus: {name} has {what}')
    return {'content_hash': content.hexdigest(), 'parts': parts}


def _open(directory: Path, settings: Any, keep: Any = None) -> TokenIndex:
    try:
        meta = json.loads((directory / 'index.json').read_text())
        if meta['settings'] != settings:
            raise ConfigError(
                f'token index {directory} is of other settings than its name says: delete it'
            )
        streams = {part: open_stream(directory / part, meta['parts'][part]) for part in PARTS}
        return TokenIndex(
            **streams, content_hash=meta['content_hash'], directory=directory, keep=keep
        )
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise ConfigError(
            f'token index {directory} is damaged: delete it, and the next run builds it again '
            f'({first_line(error)})'
        ) from error


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
    with writing(cache / key):
        cache.mkdir(parents=True, exist_ok=True)
        file = (cache / f'{key}.lock').open('w')
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
