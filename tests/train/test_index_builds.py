"""Building a token index: processes that share it, those that die, and damage."""

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from listed_sources import CONTENTS, Counted, left_in, listed, quiet, refusal

from train.data import (
    ByteTokenizer,
    Records,
    TokenIndex,
    open_index,
)
from train.data.text import token_index

pytestmark = pytest.mark.core

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
