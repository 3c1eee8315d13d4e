"""The cache of token indices: its keys, and the progress of building."""

import gzip
import json
import os
import random
import tempfile
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings, strategies as st
from listed_sources import Counted, files_in, listed, quiet, refusal

from train.data import ByteTokenizer, JsonLines, ParquetFiles, Records, TextFiles, open_index
from train.data.text import token_index

pytestmark = pytest.mark.core

# The cache.


def test_an_index_is_built_once(tmp_path):
    source, told = listed(), []
    indices = [
        open_index(source, ByteTokenizer(), str(tmp_path), lambda *p: told.append(p))
        for _ in range(3)
    ]
    assert len(source.reads) == 1
    assert len(told) == 1
    assert {i.directory for i in indices} == {indices[0].directory}
    assert {i.content_hash for i in indices} == {indices[0].content_hash}
    assert indices[0].directory.parent == tmp_path


def test_opening_a_ready_index_writes_nothing(tmp_path):
    # Hosts may share a cache that is read-only for them.
    def state():
        paths = [tmp_path, *tmp_path.rglob('*')]
        return {(str(p), p.stat().st_mtime_ns) for p in paths}

    open_index(listed(), ByteTokenizer(), str(tmp_path), quiet)
    for lock in tmp_path.glob('*.lock'):
        lock.unlink()
    before = state()
    assert open_index(listed(), ByteTokenizer(), str(tmp_path), quiet).training.num_bytes == 18
    assert state() == before


def write_lines(root):
    (root / 'a.jsonl').write_text('{"text": "one", "body": "two"}\n')
    return {'pattern': '*.jsonl', 'root': str(root)}


def test_every_setting_that_changes_the_tokens_makes_another_index(tmp_path):
    root, cache = tmp_path / 'data', tmp_path / 'cache'
    root.mkdir()
    where = write_lines(root)

    def directory(tokenizer=None, **settings):
        source = JsonLines(**(where | settings))
        return open_index(source, tokenizer or ByteTokenizer(), str(cache), quiet).directory

    first = directory()
    assert directory() == directory(pattern=['a.*']) == directory(pattern=f'{root}/*') == first
    seen = [first, directory(field='body'), directory(holdout_percent=100), directory(Counted())]
    seen.append(directory(Counted(identity='other')))
    stat = (root / 'a.jsonl').stat()
    os.utime(root / 'a.jsonl', ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    seen.append(directory())
    (root / 'a.jsonl').write_text('{"text": "one", "body": "two"}\n\n')
    os.utime(root / 'a.jsonl', ns=(stat.st_atime_ns, stat.st_mtime_ns))
    seen.append(directory())
    (root / 'b.jsonl').write_text('{"text": "three"}')
    seen.append(directory())
    (root / 'a.jsonl').unlink()
    seen.append(directory())
    assert len(set(seen)) == len(seen)
    assert directory(exclude='/c') == seen[-1]


def test_a_signature_cannot_overwrite_settings_of_the_index(tmp_path, monkeypatch):
    # A source may use these names for its own settings.
    def directory(tokenizer):
        source = listed(signature={'tokenizer': 'mine', 'format': 1})
        return open_index(source, tokenizer, str(tmp_path), quiet).directory

    found = [directory(ByteTokenizer()), directory(Counted())]
    monkeypatch.setattr(token_index, 'FORMAT', token_index.FORMAT + 1)
    found.append(directory(Counted()))
    assert len(set(found)) == 3


def test_records_without_a_key_are_not_cached(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    index = open_index(Records(records=['a']), ByteTokenizer(), str(tmp_path / 'cache'), quiet)
    assert index.directory.is_relative_to(tmp_path)
    assert (index.training.num_bytes, index.held_out.num_bytes) in ((0, 1), (1, 0))
    assert list(tmp_path.iterdir()) == [], 'nothing stays, however the process ends'
    [part] = [p for p in (index.training, index.held_out) if p.num_documents]
    assert len(part.document(0)) == 1


def test_the_default_directory_is_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    index = open_index(listed(), ByteTokenizer(), None, quiet)
    assert index.directory.parent == tmp_path / 'meshwright' / 'tokens'


# Progress.


@pytest.mark.parametrize('kind', ['text', 'lines', 'blank', 'gz', 'zst', 'parquet', 'records'])
def test_progress_increases_to_the_total(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(token_index, 'GROUP_BYTES', 500)
    texts = [f'document {i} {random.Random(i).random()}' for i in range(300)]
    lines = ''.join(json.dumps({'text': text}) + '\n' for text in texts).encode()
    root = tmp_path / 'data'
    root.mkdir()
    for part in 'ab':
        if kind == 'parquet':
            pyarrow.parquet.write_table(pyarrow.table({'text': texts}), root / f'{part}.parquet')
        elif kind == 'text':
            for text in texts:
                (root / f'{part} {text}').write_text(text)
        else:
            compress = {'gz': gzip.compress, 'zst': zstandard.ZstdCompressor().compress}
            content = compress.get(kind, bytes)(lines + b'\n' * 99 * (kind == 'blank'))
            (root / f'{part}.jsonl.{kind}').write_bytes(content)
    front = {'text': TextFiles, 'parquet': ParquetFiles}.get(kind, JsonLines)
    source = front(pattern='*', root=str(root))
    total = sum(path.stat().st_size for path in root.iterdir())
    if kind == 'records':
        source, total = Records(records=texts), 300
    told = []
    open_index(source, ByteTokenizer(), str(tmp_path / 'c'), lambda *p: told.append(p))
    assert len({name for name, _, _ in told}) == 1
    assert type(source).__name__ in told[0][0]
    assert {whole for _, _, whole in told} == {total}
    done = [d for _, d, _ in told]
    assert len(done) > 10
    assert done == sorted(done)
    assert 0 <= done[0] < total / 2 or kind in ('gz', 'zst'), (
        'compressed files are read in large blocks'
    )
    assert done[-1] == total


# Token streams: written to files, mapped into memory, and cut.


@given(st.lists(st.binary(max_size=30), max_size=12), st.integers(1, 40), st.integers(0, 100))
@settings(max_examples=40)
def test_documents_keep_their_order(contents, group_bytes, percent):
    source = Records(records=contents, holdout_percent=percent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_index, 'GROUP_BYTES', group_bytes)
        if not any(contents):
            assert 'empty' in refusal('', source)
            return
        index = open_index(source, ByteTokenizer(), None, quiet)
    names = map(str, range(len(contents)))
    parts = {False: [], True: []}
    for name, content in zip(names, contents, strict=True):
        parts[source.is_held_out(name)].append(content)
    for stream, expected in ((index.training, parts[False]), (index.held_out, parts[True])):
        assert stream.tokens.tolist() == [256] + [t for c in expected for t in [*c, 256]]
        assert (stream.tokens[stream.starts] == 256).all()
        assert np.diff(stream.starts).tolist() == [len(c) + 1 for c in expected]
        assert stream.num_bytes == sum(map(len, expected))


@pytest.mark.parametrize(('num_tokens', 'dtype'), [(65536, np.uint16), (65537, np.uint32)])
def test_the_dtype_fits_the_vocabulary(tmp_path, num_tokens, dtype):
    tokenizer = Counted(num_tokens=num_tokens, offset=num_tokens - 300)
    tokens = open_index(listed([b'a']), tokenizer, str(tmp_path), quiet).training.tokens
    assert tokens.dtype == dtype
    assert tokens.tolist() == [num_tokens - 1, *[num_tokens - 300 + 97] * 2, num_tokens - 1]


@pytest.mark.parametrize('offset', [65536, 1000, -200])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path, offset):
    message = refusal(tmp_path, listed([b'a']), Counted(num_tokens=1000, offset=offset))
    assert str(97 + offset) in message
    assert files_in(tmp_path) == []


def test_the_head_of_a_stream_counts_its_bytes(tmp_path):
    contents = [b'abc', b'', b'de']
    whole = open_index(listed(contents), ByteTokenizer(), str(tmp_path), quiet).training
    for count in range(1, whole.num_targets + 3):
        head = whole.head(count, ByteTokenizer())
        tokens = whole.tokens.tolist()[: count + 1]
        assert head.tokens.tolist() == tokens
        assert head.num_targets == min(count, whole.num_targets)
        assert head.num_bytes == sum(token < 256 for token in tokens), count
        inner = [i for i, token in enumerate(tokens[:-1]) if token == 256]
        assert head.starts.tolist() == [*inner, len(tokens) - 1]


@pytest.mark.parametrize('group_bytes', [1, 7, 10, 1 << 20])
def test_groups_have_about_the_given_size_and_change_nothing(tmp_path, monkeypatch, group_bytes):
    contents = [b'x' * n for n in (3, 0, 30, 4, 4, 4, 0, 9)]
    monkeypatch.setattr(token_index, 'GROUP_BYTES', group_bytes)
    tokenizer = Counted()
    index = open_index(listed(contents), tokenizer, str(tmp_path), quiet)
    assert [n for group in tokenizer.groups for n in group] == [len(c) for c in contents]
    for group in tokenizer.groups:
        assert sum(group[:-1]) < group_bytes, 'a group ends with the document that fills it'
    assert all(sum(group) >= group_bytes for group in tokenizer.groups[:-1])
    assert np.diff(index.training.starts).tolist() == [1 + 2 * len(c) for c in contents]


def test_an_open_index_is_memory_mapped_and_read_only(tmp_path):
    source = Records(records=[b'x' * 8_000_000], holdout_percent=0, cache_key='large')
    open_index(source, ByteTokenizer(), str(tmp_path), quiet)
    tracemalloc.start()
    index = open_index(source, ByteTokenizer(), str(tmp_path), quiet)
    assert int(index.training.tokens[4_000_000]) == ord('x')
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.training.tokens.nbytes > 16_000_000
    assert peak < 1_000_000
    for array in (index.training.tokens, index.training.starts, index.held_out.tokens):
        base = array
        while base is not None and not isinstance(base, np.memmap):
            base = base.base
        assert isinstance(base, np.memmap)
        with pytest.raises(ValueError, match='read-only'):
            array[0] = 0
