"""Building a token index: processes that share it, processes that are killed, and damage."""

import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from listed_sources import CONTENTS, Counted, files_in, listed, quiet, refusal
from small import text_task

from train.data import ByteTokenizer, Records, TokenIndex, open_index
from train.data.text import token_index
from train.errors import ConfigError

pytestmark = pytest.mark.core

# A program with a source that logs which documents it reads. It pauses after four documents,
# reports this, and continues when its parent writes to it.
BUILDER = """
import dataclasses, sys
from train.data import ByteTokenizer, Document, Source, open_index
from train.data.text import token_index
from train.data.text.sources import Listing

@dataclasses.dataclass(frozen=True, kw_only=True)
class Logged(Source):
    log: str
    stop: bool = False

    def listing(self):
        return Listing({'source': 'logged'}, 10, self.documents())

    def documents(self):
        for i in range(10):
            with open(self.log, 'a') as log:
                log.write(f'{i} ')
            if self.stop and i == 4:
                print('stopped', flush=True)
                sys.stdin.readline()
            yield Document(f'{i}', b'document %d' % i, i + 1)

if __name__ == '__main__':
    log, cache = sys.argv[1:]
    token_index.GROUP_BYTES = 1  # so that each document is written at once
    index = open_index(Logged(log=log, stop=True), ByteTokenizer(), cache, lambda *progress: None)
    print(index.content_hash, index.training.tokens.tolist(), index.held_out.tokens.tolist())
"""
EVERY_DOCUMENT = [f'{i}' for i in range(10)]


# Several processes, and processes that are killed.


class Builder:
    """Another process that has stopped in the middle of building an index."""

    def __init__(self, folder):
        self.log, self.cache = folder / 'log', folder / 'cache'
        (folder / 'builder.py').write_text(BUILDER)
        self.source = runpy.run_path(str(folder / 'builder.py'))['Logged'](log=str(self.log))
        self.process = subprocess.Popen(
            [sys.executable, folder / 'builder.py', self.log, self.cache],
            env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == 'stopped\n'

    def read(self):
        return self.log.read_text().split()

    def open(self):
        return open_index(self.source, ByteTokenizer(), str(self.cache), quiet)


@pytest.fixture
def builder(tmp_path):
    builder = Builder(tmp_path)
    yield builder
    builder.process.kill()
    builder.process.communicate()


def test_processes_that_build_at_the_same_time_build_once_and_agree(builder, monkeypatch):
    locking, opened = threading.Event(), []
    flock = token_index.fcntl.flock

    def signalled(*args):
        locking.set()
        flock(*args)

    monkeypatch.setattr(token_index.fcntl, 'flock', signalled)
    thread = threading.Thread(target=lambda: opened.append(builder.open()))
    thread.start()
    assert locking.wait(60), 'the index was built without the lock'
    assert not opened
    theirs, _ = builder.process.communicate('continue\n')
    thread.join(60)
    [index] = opened
    streams = (index.training.tokens.tolist(), index.held_out.tokens.tolist())
    assert theirs.strip() == ' '.join(map(str, (index.content_hash, *streams)))
    assert builder.read() == EVERY_DOCUMENT, 'the documents are read once'
    assert len(files_in(builder.cache)) == 1


def test_an_index_can_be_built_after_a_process_was_killed(builder):
    builder.process.send_signal(signal.SIGKILL)
    builder.process.wait()
    (half,) = files_in(builder.cache)
    assert not (builder.cache / half / 'index.json').exists()
    assert builder.read() == EVERY_DOCUMENT[:5]
    builder.log.unlink()
    index = builder.open()
    assert builder.read() == EVERY_DOCUMENT
    assert index.training.num_bytes + index.held_out.num_bytes == 10 * len('document 0')
    assert files_in(builder.cache) == [index.directory.name]


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
    assert files_in(tmp_path) == []
    index = open_index(listed(), Counted(), str(tmp_path), quiet)
    assert index.training.num_bytes == 18


# A cache that is damaged or cannot be written.


@pytest.mark.parametrize('place', ['file', 'file/below', '/proc/none/below'])
def test_a_cache_directory_that_cannot_be_created(tmp_path, place):
    (tmp_path / 'file').write_text('a file')
    message = refusal(tmp_path / place, listed())
    assert str(tmp_path / place) in message
    assert 'cache_dir' in message


@pytest.mark.skipif(os.geteuid() == 0, reason='root writes everywhere')
@pytest.mark.parametrize('mode', [0, 0o500])
def test_a_cache_without_permission(tmp_path, mode):
    (tmp_path / 'cache').mkdir(mode)
    assert 'cache_dir' in refusal(tmp_path / 'cache', listed())


def test_a_full_disk(tmp_path, limit_files):
    limit_files(100_000)
    message = refusal(tmp_path, listed([b'x' * 500_000]))
    limit_files()
    assert str(tmp_path) in message
    assert files_in(tmp_path) == []


def edit(index, **changes):
    meta = json.loads((index / 'index.json').read_text())
    (index / 'index.json').write_text(json.dumps(meta | changes))


def edit_dtype(index):
    """Says that tokens have no bytes, with the right checksum."""
    meta = json.loads((index / 'index.json').read_text())
    del meta['checksum']
    meta['parts']['training']['dtype'] = 'V0'
    meta['checksum'] = token_index._checksum(meta)
    (index / 'index.json').write_text(json.dumps(meta))


DAMAGE = {
    'tokens of no bytes': edit_dtype,
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
def test_a_damaged_index_is_reported(tmp_path, damage):
    index = open_index(listed(), ByteTokenizer(), str(tmp_path), quiet)
    assert isinstance(index, TokenIndex)
    DAMAGE[damage](index.directory)
    message = refusal(tmp_path, listed())
    assert str(index.directory) in message
    assert 'delete it' in message


def test_a_flipped_bit_anywhere_in_an_index_is_reported(tmp_path):
    made = random.Random(0)
    source = Records(
        records=[made.randbytes(made.randrange(9000)) for _ in range(60)],
        holdout_percent=30,
        cache_key='flipped',
    )

    def read_all():
        index = open_index(source, ByteTokenizer(), str(tmp_path), quiet)
        for stream in (index.training, index.held_out):
            for number in range(stream.num_documents):
                stream.document(number)
            stream.read(stream.num_targets, stream.num_targets + 1)  # the last separator
        return index.directory

    directory = read_all()
    files = sorted(directory.iterdir())
    assert len(files) == 9  # the index, and for each part tokens, starts, sizes and checksums
    for file in files:
        content = file.read_bytes()
        for place in {0, len(content) - 1, *(made.randrange(len(content)) for _ in range(8))}:
            damaged = bytearray(content)
            damaged[place] ^= 1 << made.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(ConfigError, match=re.escape(str(directory))) as caught:
                read_all()
            assert 'elete' in str(caught.value)
        file.write_bytes(content)
    assert read_all() == directory


def test_only_damaged_tokens_that_are_read_stop_a_run(tmp_path):
    # 16 blocks of 65,536 bytes, with two bytes per token.
    source = Records(records=[b'x' * 500_000], holdout_percent=0, cache_key='large')
    index = open_index(source, ByteTokenizer(), str(tmp_path), quiet)
    file = index.directory / 'training.tokens'
    content = bytearray(file.read_bytes())
    content[3 * 65_536 + 17] ^= 1
    file.write_bytes(content)
    stream = open_index(source, ByteTokenizer(), str(tmp_path), quiet).training
    first = 3 * 32_768
    assert len(stream.read(0, first)) == first
    assert len(stream.read(first + 32_768, 10**9)) == 500_002 - first - 32_768
    for start, stop in ((first, first + 1), (first + 32_767, first + 32_768), (0, 10**9)):
        with pytest.raises(ConfigError, match='65,536 bytes from byte 196,608'):
            stream.read(start, stop)
    cut = stream.documents(0, 1).head(first - 10, ByteTokenizer())
    assert len(cut.read(0, first)) == first - 9


def test_a_run_with_damaged_tokens_stops_with_one_line(tmp_path, texts, run):
    task = text_task(texts, cache_dir=str(tmp_path / 'cache'))
    task.open(16)
    [file] = tmp_path.glob('cache/*/training.tokens')
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r'training\.tokens is damaged.*Delete'):
        run(tmp_path / 'model', total_steps=1, task=task)


@pytest.mark.parametrize('count', [1, 3])
def test_another_number_of_records_needs_another_key(tmp_path, count):
    open_index(Records(records=['a', 'b'], cache_key='k'), ByteTokenizer(), str(tmp_path), quiet)
    message = refusal(tmp_path, Records(records=['a'] * count, cache_key='k'))
    assert '2 documents' in message
    assert str(count) in message
    assert 'cache_key' in message
    same = Records(records=['a', 'b'], cache_key='k')
    assert open_index(same, ByteTokenizer(), str(tmp_path), quiet).content_hash
