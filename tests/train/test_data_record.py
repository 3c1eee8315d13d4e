"""The record of a run's data: the same data passes, and changes are refused or reported."""

import json

import pytest

from train.data import (
    ByteTokenizer,
    CausalLM,
    Mixture,
    SpanCorruption,
    TextFiles,
)
from train.data.record import FILE, check_same_as_before, data_record, write_record
from train.errors import ConfigError

pytestmark = pytest.mark.core

TEXTS = [f'document {i} of the corpus' for i in range(40)]
SETTINGS = {'seed': 0, 'batch_size': 8, 'length': 16}


class Shifted(ByteTokenizer):
    """A tokenizer with another identity."""

    identity = 'shifted'


class Corpus:
    """Files of text in a folder, and records of the tasks that read them."""

    def __init__(self, folder):
        self.folder = folder / 'data'
        self.cache = str(folder / 'cache')
        self.folder.mkdir()
        for i, text in enumerate(TEXTS):
            (self.folder / f'{i}.txt').write_text(text)

    def source(self, pattern='*.txt', **settings):
        return TextFiles(pattern=pattern, root=str(self.folder), **settings)

    def task(self, source=None, kind=CausalLM, **settings):
        return kind(source=source or self.source(), cache_dir=self.cache, **settings)

    def record(self, task=None):
        return data_record((task or self.task()).open(length=16), {}, **SETTINGS)


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / 'run'
    folder.mkdir()
    return folder


def refusal(run, record):
    before = (run / FILE).read_bytes()
    with pytest.raises(ConfigError) as caught:
        check_same_as_before(run, step=10, record=record)
    message = str(caught.value)
    assert '\n' not in message
    assert str(run / FILE) in message, 'the file to delete to resume'
    assert (run / FILE).read_bytes() == before
    return message


def test_the_same_data_passes(corpus, run):
    assert check_same_as_before(run, step=10, record=corpus.record()) == [], 'a new run'
    write_record(run, corpus.record())
    assert check_same_as_before(run, step=10, record=corpus.record()) == []


def test_the_record_counts_the_documents_and_bytes(corpus):
    (part,) = corpus.record()['parts']
    assert part['documents'] + part['held_out_documents'] == len(TEXTS)
    every = corpus.record(corpus.task(corpus.source(holdout_percent=0)))['parts'][0]
    assert every['bytes'] == sum(map(len, TEXTS))
    assert (every['documents'], every['held_out_documents']) == (len(TEXTS), 0)


def change_nothing(corpus):
    for path in corpus.folder.iterdir():
        path.touch()
    return corpus.task()


def move(corpus):
    return corpus.task(corpus.source(f'{corpus.folder}/*.txt'))


def several(corpus):
    return corpus.task(corpus.source(['*.txt', '[0-9].txt']))


@pytest.mark.parametrize('change', [change_nothing, move, several])
def test_the_same_documents_by_other_paths_are_the_same_data(corpus, run, change):
    # When a run resumes on other machines, its corpus is often mounted elsewhere.
    write_record(run, corpus.record())
    assert check_same_as_before(run, step=10, record=corpus.record(change(corpus))) == []


def remove(corpus):
    (corpus.folder / '7.txt').unlink()
    return corpus.task()


def add(corpus):
    (corpus.folder / 'new.txt').write_text('new')
    return corpus.task()


def edit(corpus):
    (corpus.folder / '7.txt').write_text(TEXTS[7].upper())
    return corpus.task()


def reorder(corpus):
    (corpus.folder / '7.txt').rename(corpus.folder / 'x.txt')
    return corpus.task(corpus.source(holdout_percent=2.0))


def hold_out_more(corpus):
    return corpus.task(corpus.source(holdout_percent=50))


def other_tokenizer(corpus):
    return corpus.task(tokenizer=Shifted())


@pytest.mark.parametrize(
    'change', [remove, add, edit, reorder, hold_out_more, other_tokenizer], ids=lambda c: c.__name__
)
def test_other_data_is_refused(corpus, run, change):
    write_record(run, corpus.record())
    first = corpus.record()['parts'][0]
    record = corpus.record(change(corpus))
    message = refusal(run, record)
    for part in (first, record['parts'][0]):
        assert f'{part["bytes"]:,} bytes' in message
        assert part['content_hash'][:8] in message
    if change is other_tokenizer:
        assert 'tokenizer bytes' in message
        assert 'tokenizer shifted' in message


def test_the_message_counts_the_documents_before_and_after(corpus, run):
    source = corpus.source(holdout_percent=0)
    write_record(run, corpus.record(corpus.task(source)))
    (corpus.folder / '7.txt').unlink()
    message = refusal(run, corpus.record(corpus.task(source)))
    assert f'{len(TEXTS)} training and 0 held-out documents' in message
    assert f'{len(TEXTS) - 1} training and 0 held-out documents' in message


def test_mixtures_with_other_weights_order_or_parts_are_refused(corpus, run):
    one = corpus.task(corpus.source('1*.txt', holdout_percent=0))
    two = corpus.task(corpus.source('2*.txt', holdout_percent=0))

    def mixture(tasks, weights):
        return corpus.record(Mixture(tasks=tasks, weights=weights))

    write_record(run, mixture([one, two], [1, 3]))
    assert check_same_as_before(run, step=10, record=mixture([one, two], [2, 6])) == [], (
        'the same shares'
    )
    message = refusal(run, mixture([one, two], [1, 2]))
    assert 'weight 0.25' in message
    assert 'weight 0.333' in message
    refusal(run, mixture([two, one], [3, 1]))
    refusal(run, mixture([one], [1]))
    refusal(run, mixture([one, two, two], [1, 1, 2]))


@pytest.mark.parametrize(
    ('kind', 'settings'),
    [
        (CausalLM, {'packing': 'pack'}),
        (SpanCorruption, {}),
        (SpanCorruption, {'noise_density': 0.3}),
    ],
    ids=repr,
)
def test_other_rows_from_the_same_documents_are_refused(corpus, run, kind, settings):
    write_record(run, corpus.record(corpus.task(kind=SpanCorruption, noise_density=0.2)))
    if kind is CausalLM:
        write_record(run, corpus.record())
    message = refusal(run, corpus.record(corpus.task(kind=kind, **settings)))
    for name, value in settings.items():
        assert f'{name}={value}' in message


@pytest.mark.parametrize('name', SETTINGS)
def test_changed_settings_are_reported(corpus, run, name):
    write_record(run, corpus.record())
    changed = corpus.record() | {'settings': SETTINGS | {name: 99}}
    (change,) = check_same_as_before(run, step=10, record=changed)
    assert name in change
    assert f'{SETTINGS[name]}' in change
    assert '99' in change


def test_added_or_removed_settings_are_not_changes(corpus, run):
    # Another version of the program may record more or fewer settings.
    write_record(run, corpus.record())
    fewer = {name: value for name, value in SETTINGS.items() if name != 'seed'}
    assert check_same_as_before(run, step=10, record=corpus.record() | {'settings': fewer}) == []
    assert (
        check_same_as_before(
            run, step=10, record=corpus.record() | {'settings': SETTINGS | {'new': 1}}
        )
        == []
    )


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'garbage',
        b'[' * 200_000,  # deeper than Python's stack
        b'\xff\xfe',
        b'{"tokenizer": "bytes"',
        b'[]',
        b'7',
        b'null',
        b'{}',
        b'{"settings": {}, "tokenizer": "bytes", "parts": [7]}',
        b'{"settings": {}, "tokenizer": null, "parts": [{}]}',
        b'{"settings": {}, "tokenizer": "bytes", "parts": null}',
        'settings are null',
        'settings are a list',
    ],
)
def test_an_unreadable_record_is_an_error(corpus, run, content):
    record = corpus.record()
    if isinstance(content, str):
        settings = None if content.endswith('null') else [['seed', 0]]
        content = json.dumps(record | {'settings': settings}).encode()
    (run / FILE).write_bytes(content)
    assert 'delete' in refusal(run, record)
