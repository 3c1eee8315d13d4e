"""Token streams: written to files, mapped into memory, and cut."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from listed_sources import Counted, files_in, listed, quiet, refusal

from train.data import ByteTokenizer, Records, open_index
from train.data.text import token_index

pytestmark = pytest.mark.core


def test_a_separator_before_each_document_and_one_at_the_end(tmp_path):
    stream = open_index(listed(), ByteTokenizer(), str(tmp_path), quiet).training
    s = 256
    expected = [s, *b'one', s, s, *b'two three', s, 0, 255, s, *b'four', s]
    assert stream.tokens.tolist() == expected
    assert stream.starts.tolist() == [0, 4, 5, 15, 18, 23]
    assert stream.starts.dtype == np.int64
    assert (stream.num_documents, stream.num_bytes) == (5, 18)
    assert stream.num_targets == len(expected) - 1


def test_tokens_come_from_the_tokenizer(tmp_path):
    stream = open_index(listed([b'ab', b'c']), Counted(), str(tmp_path), quiet).training
    assert stream.tokens.tolist() == [999, 97, 97, 98, 98, 999, 99, 99, 999]
    assert stream.num_bytes == 3


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
