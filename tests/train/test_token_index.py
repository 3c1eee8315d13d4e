"""The token index: its streams, its cache, the processes that share it, and what may befall it."""

import dataclasses
import gzip
import json
import os
import random
import resource
import runpy
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data import (
    ByteTokenizer,
    Document,
    JsonLines,
    ParquetFiles,
    Records,
    Source,
    TextFiles,
    TokenIndex,
    Tokenizer,
    open_index,
)
from train.data.text import token_index
from train.data.text.sources import Listing
from train.errors import ConfigError

pytestmark = pytest.mark.core

CONTENTS = [b'one', b'', b'two three', b'\x00\xff', b'four']

# A source that tells how often it is read, slowly. Other processes run it, and so does this one.
SLOW = """
import dataclasses, pathlib, sys, time
from train.data import ByteTokenizer, Document, Source, open_index
from train.data.text import token_index
from train.data.text.sources import Listing

@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(Source):
    log: str
    seconds: float = 0.1

    def listing(self):
        return Listing({'source': 'slow'}, 10, self.documents())

    def documents(self):
        for i in range(10):
            with open(self.log, 'a') as log:
                log.write(f'{i} ')
            yield Document(f'{i}', b'document %d' % i, i + 1)
            time.sleep(self.seconds)

if __name__ == '__main__':
    log, cache, start = sys.argv[1:]
    token_index.GROUP_BYTES = 1  # so that each document is written at once
    pathlib.Path(f'{log}.{start}.ready').touch()
    while not pathlib.Path(f'{log}.start').exists():
        time.sleep(0.01)
    index = open_index(Slow(log=log), ByteTokenizer(), cache, lambda *progress: None)
    print(index.content_hash, index.training.tokens.tolist(), index.held_out.tokens.tolist())
"""


def quiet(*progress):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Listed(Source):
    """Documents with a signature, and a count of how often they are read."""

    contents: list
    signature: object = 'listed'
    holdout_percent: float = 0
    reads: list = dataclasses.field(default_factory=list)

    def listing(self):
        return Listing(self.signature, len(self.contents), self._documents())

    def _documents(self):
        self.reads.append(1)
        for i, content in enumerate(self.contents):
            if isinstance(content, BaseException):
                raise content
            yield Document(f'{i}', content, i + 1)


@dataclasses.dataclass
class Counted(Tokenizer):
    """Two tokens a byte, of a vocabulary as large as one likes."""

    num_tokens: int = 1000
    identity: str = 'counted'
    offset: int = 0
    groups: list = dataclasses.field(default_factory=list)

    @property
    def separator(self):
        return self.num_tokens - 1

    def encode(self, names, contents):
        self.groups.append([len(content) for content in contents])
        return [
            np.repeat(np.frombuffer(c, np.uint8), 2).astype(int) + self.offset for c in contents
        ]

    def decode(self, tokens):
        tokens = np.asarray(tokens)
        return tokens[tokens < 256].astype(np.uint8).tobytes()[::2]


def listed(contents=CONTENTS, signature=None, **settings):
    return Listed(contents=list(contents), signature=signature or {'v': 1}, **settings)


def refusal(cache, source, tokenizer=None):
    with pytest.raises(ConfigError) as caught:
        open_index(source, tokenizer or ByteTokenizer(), str(cache), quiet)
    assert '\n' not in str(caught.value)
    return str(caught.value)


def left_in(cache):
    return [path.name for path in cache.iterdir() if path.suffix != '.lock']


# Streams.


def test_a_separator_before_each_document_and_one_at_the_end(tmp_path):
    stream = open_index(listed(), ByteTokenizer(), str(tmp_path), quiet).training
    s = 256
    expected = [s, *b'one', s, s, *b'two three', s, 0, 255, s, *b'four', s]
    assert stream.tokens.tolist() == expected
    assert stream.starts.tolist() == [0, 4, 5, 15, 18, 23]
    assert stream.starts.dtype == np.int64
    assert (stream.num_documents, stream.num_bytes) == (5, 18)
    assert stream.num_targets == len(expected) - 1


def test_tokens_are_those_of_the_tokenizer(tmp_path):
    stream = open_index(listed([b'ab', b'c']), Counted(), str(tmp_path), quiet).training
    assert stream.tokens.tolist() == [999, 97, 97, 98, 98, 999, 99, 99, 999]
    assert stream.num_bytes == 3


@given(st.lists(st.binary(max_size=30), max_size=12), st.integers(1, 40), st.integers(0, 100))
@settings(deadline=None, max_examples=40)
def test_any_documents_come_back_in_order(contents, group_bytes, percent):
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
def test_the_type_holds_every_token(tmp_path, num_tokens, dtype):
    tokenizer = Counted(num_tokens=num_tokens, offset=num_tokens - 300)
    tokens = open_index(listed([b'a']), tokenizer, str(tmp_path), quiet).training.tokens
    assert tokens.dtype == dtype
    assert tokens.tolist() == [num_tokens - 1, *[num_tokens - 300 + 97] * 2, num_tokens - 1]


@pytest.mark.parametrize('offset', [65536, 1000, -200])
def test_a_token_outside_the_vocabulary_is_not_written_as_another(tmp_path, offset):
    message = refusal(tmp_path, listed([b'a']), Counted(num_tokens=1000, offset=offset))
    assert str(97 + offset) in message
    assert left_in(tmp_path) == []


def test_the_head_of_a_stream_is_cut_and_counts_its_bytes(tmp_path):
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
def test_groups_hold_about_so_many_bytes_and_change_nothing(tmp_path, monkeypatch, group_bytes):
    contents = [b'x' * n for n in (3, 0, 30, 4, 4, 4, 0, 9)]
    monkeypatch.setattr(token_index, 'GROUP_BYTES', group_bytes)
    tokenizer = Counted()
    index = open_index(listed(contents), tokenizer, str(tmp_path), quiet)
    assert [n for group in tokenizer.groups for n in group] == [len(c) for c in contents]
    for group in tokenizer.groups:
        assert sum(group[:-1]) < group_bytes, 'a group ends with the document that fills it'
    assert all(sum(group) >= group_bytes for group in tokenizer.groups[:-1])
    assert np.diff(index.training.starts).tolist() == [1 + 2 * len(c) for c in contents]


def test_an_open_index_is_a_map_of_the_file(tmp_path):
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
    # Many hosts share a cache that they may only read.
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


def test_whatever_changes_the_tokens_makes_another_index(tmp_path):
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


def test_numbers_that_are_equal_make_one_index(tmp_path):
    (tmp_path / 'data').mkdir()
    where = write_lines(tmp_path / 'data')
    sources = [JsonLines(holdout_percent=p, **where) for p in (2, 2.0)]
    cache = str(tmp_path / 'cache')
    assert len({open_index(s, ByteTokenizer(), cache, quiet).directory for s in sources}) == 1


@pytest.mark.parametrize(
    'signature', [{'v': 1}, {'files': ('a', 2)}, ['a', 2], 'version 1', 7], ids=repr
)
def test_any_json_is_a_signature(tmp_path, signature):
    sources = [listed(signature=signature) for _ in range(2)]
    for source in sources:
        index = open_index(source, ByteTokenizer(), str(tmp_path), quiet)
        assert index.training.num_bytes == 18
    assert [len(source.reads) for source in sources] == [1, 0]


def test_a_signature_hides_no_setting_of_the_index(tmp_path, monkeypatch):
    # Names that a source may well use for settings of its own.
    def directory(tokenizer):
        source = listed(signature={'tokenizer': 'mine', 'format': 1})
        return open_index(source, tokenizer, str(tmp_path), quiet).directory

    found = [directory(ByteTokenizer()), directory(Counted())]
    monkeypatch.setattr(token_index, 'FORMAT', token_index.FORMAT + 1)
    found.append(directory(Counted()))
    assert len(set(found)) == 3


def test_records_without_a_key_are_built_each_time_and_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(token_index.tempfile, 'tempdir', str(tmp_path))
    index = open_index(Records(records=['a']), ByteTokenizer(), str(tmp_path / 'cache'), quiet)
    assert index.directory.is_relative_to(tmp_path)
    assert (index.training.num_bytes, index.held_out.num_bytes) in ((0, 1), (1, 0))
    index.keep.cleanup()
    assert list(tmp_path.iterdir()) == []


def test_the_default_place_is_in_the_cache_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    index = open_index(listed(), ByteTokenizer(), None, quiet)
    assert index.directory.parent == tmp_path / 'meshwright' / 'tokens'


# How far it is.


@pytest.mark.parametrize('kind', ['text', 'lines', 'blank', 'gz', 'zst', 'parquet', 'records'])
def test_progress_rises_to_the_whole(tmp_path, monkeypatch, kind):
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
    assert 0 <= done[0] < total / 2 or kind in ('gz', 'zst'), 'these are read in large blocks'
    assert done[-1] == total


# Several processes, and those that die.


def start(tmp_path, count):
    (tmp_path / 'slow.py').write_text(SLOW)
    log, environment = tmp_path / 'log', os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, tmp_path / 'slow.py', log, tmp_path / 'cache', f'{i}'],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(count)
    ]
    wait(lambda: len(list(tmp_path.glob('log.*.ready'))) == count)
    (tmp_path / 'log.start').touch()
    return processes, log


def wait(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, 'waited for too long'
        time.sleep(0.01)


def test_processes_that_build_at_the_same_time_build_once_and_agree(tmp_path):
    processes, log = start(tmp_path, 2)
    answers = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0] == answers[1] != ''
    assert log.read_text().split() == [f'{i}' for i in range(10)], 'read once'
    assert len(left_in(tmp_path / 'cache')) == 1


def test_a_process_that_is_killed_leaves_a_cache_to_build_in(tmp_path):
    (process,), log = start(tmp_path, 1)
    wait(lambda: log.exists() and len(log.read_text().split()) >= 4)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    (half,) = left_in(tmp_path / 'cache')
    assert not (tmp_path / 'cache' / half / 'index.json').exists()
    log.unlink()
    slow = runpy.run_path(str(tmp_path / 'slow.py'))['Slow'](log=str(log), seconds=0)
    index = open_index(slow, ByteTokenizer(), str(tmp_path / 'cache'), quiet)
    assert log.read_text().split() == [f'{i}' for i in range(10)]
    assert index.training.num_bytes + index.held_out.num_bytes == 10 * len('document 0')
    assert left_in(tmp_path / 'cache') == [index.directory.name]


@pytest.mark.parametrize('where', ['source', 'tokenizer', 'progress'])
@pytest.mark.parametrize('error', [KeyboardInterrupt, MemoryError])
def test_an_interrupted_build_leaves_nothing(tmp_path, monkeypatch, where, error):
    monkeypatch.setattr(token_index, 'GROUP_BYTES', 1)

    def stop(*args):
        raise error

    tokenizer, contents = Counted(), list(CONTENTS)
    if where == 'source':
        contents[3] = error()
    elif where == 'tokenizer':
        tokenizer.encode = stop
    source = listed(contents)
    with pytest.raises(error):
        open_index(source, tokenizer, str(tmp_path), stop if where == 'progress' else quiet)
    assert left_in(tmp_path) == []
    index = open_index(listed(), Counted(), str(tmp_path), quiet)
    assert index.training.num_bytes == 18


# A cache that is damaged, or cannot be written.


@pytest.mark.parametrize('place', ['file', 'file/below', '/proc/none/below'])
def test_a_cache_that_cannot_be_made(tmp_path, place):
    (tmp_path / 'file').write_text('a file')
    message = refusal(tmp_path / place, listed())
    assert str(tmp_path / place) in message
    assert 'cache_dir' in message


@pytest.mark.skipif(os.geteuid() == 0, reason='root writes everywhere')
@pytest.mark.parametrize('mode', [0, 0o500])
def test_a_cache_without_permission(tmp_path, mode):
    (tmp_path / 'cache').mkdir(mode)
    assert 'cache_dir' in refusal(tmp_path / 'cache', listed())


def test_a_full_disk(tmp_path):
    # A limit on the size of files fails as a full disk does, with an OSError while writing.
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        message = refusal(tmp_path, listed([b'x' * 500_000]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert str(tmp_path) in message
    assert left_in(tmp_path) == []


def edit(index, **changes):
    meta = json.loads((index / 'index.json').read_text())
    (index / 'index.json').write_text(json.dumps(meta | changes))


DAMAGE = {
    'no index.json': lambda d: (d / 'index.json').unlink(),
    'empty index.json': lambda d: (d / 'index.json').write_bytes(b''),
    'garbage': lambda d: (d / 'index.json').write_bytes(b'\xff garbage'),
    'a list': lambda d: (d / 'index.json').write_text('[]'),
    'no hash': lambda d: (d / 'index.json').write_text(
        (d / 'index.json').read_text().replace('content_hash', 'other')
    ),
    'other settings': lambda d: edit(d, settings={'format': 1}),
    'other parts': lambda d: edit(d, parts={}),
    'no tokens': lambda d: (d / 'training.tokens').unlink(),
    'empty tokens': lambda d: os.truncate(d / 'training.tokens', 0),
    'fewer tokens': lambda d: os.truncate(d / 'training.tokens', 8),
    'half a token': lambda d: os.truncate(d / 'training.tokens', 9),
    'no starts': lambda d: (d / 'training.starts.npy').unlink(),
    'empty starts': lambda d: os.truncate(d / 'training.starts.npy', 0),
    'fewer starts': lambda d: os.truncate(d / 'training.starts.npy', 136),
    'other starts': lambda d: np.save(d / 'training.starts.npy', np.arange(3)),
    'nothing': lambda d: [path.unlink() for path in d.iterdir()],
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_a_damaged_index_is_to_be_deleted(tmp_path, damage):
    index = open_index(listed(), ByteTokenizer(), str(tmp_path), quiet)
    assert isinstance(index, TokenIndex)
    DAMAGE[damage](index.directory)
    message = refusal(tmp_path, listed())
    assert str(index.directory) in message
    assert 'delete it' in message


@pytest.mark.parametrize('count', [1, 3])
def test_records_of_another_number_need_another_key(tmp_path, count):
    open_index(Records(records=['a', 'b'], cache_key='k'), ByteTokenizer(), str(tmp_path), quiet)
    message = refusal(tmp_path, Records(records=['a'] * count, cache_key='k'))
    assert '2 documents' in message
    assert str(count) in message
    assert 'cache_key' in message
    same = Records(records=['a', 'b'], cache_key='k')
    assert open_index(same, ByteTokenizer(), str(tmp_path), quiet).content_hash
