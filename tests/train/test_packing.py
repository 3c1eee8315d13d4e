"""Documents packed into rows: the bins, the rows, and how full they are."""

import asyncio
import collections
import email
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from train.data.rows.packing import SplitRows, best_fit, pack
from train.data.text.stream import Stream

pytestmark = pytest.mark.core

SEPARATOR = 256


def stream_of(documents):
    """The token stream of documents, built by hand from the layout that `stream.py` documents."""
    tokens, starts = [SEPARATOR], [0]
    for document in documents:
        tokens += [*document, SEPARATOR]
        starts.append(len(tokens) - 1)
    sizes = [len(document) for document in documents]
    return Stream(*map(np.array, (tokens, starts, sizes)))


def labelled(lengths):
    """Documents of these lengths whose tokens encode their document and their place in it."""
    assert all(length < 1000 for length in lengths)
    return [
        [1000 * (number + 1) + place for place in range(length)]
        for number, length in enumerate(lengths)
    ]


def all_rows(rows):
    return [rows[i] for i in range(len(rows))]


def bins_one_by_one(lengths, capacity):
    """Textbook best-fit decreasing, one item at a time: the free space of each bin."""
    left = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(left) if room >= length]
        if fitting:
            left[min(fitting, key=lambda i: left[i])] -= length
        else:
            left.append(capacity - length)
    return left


def pieces_of(documents, length):
    """(inputs, targets) of every piece of at most `length` targets of each document."""
    pieces = []
    for document in documents:
        tokens = [SEPARATOR, *document, SEPARATOR]
        pairs = list(itertools.pairwise(tokens))
        for first in range(0, len(pairs), length):
            inputs, targets = zip(*pairs[first : first + length], strict=True)
            pieces.append((inputs, targets))
    return pieces


def pieces_in(row):
    """(inputs, targets, positions) of every segment of a row."""
    segments = row['decoder_segment_ids']
    arrays = [row[f'decoder_{name}'] for name in ('input_tokens', 'target_tokens', 'positions')]
    return [
        tuple(tuple(array[segments == number].tolist()) for array in arrays)
        for number in range(1, segments.max(initial=0) + 1)
    ]


# The bins.


@st.composite
def items(draw):
    capacity = draw(st.integers(1, 60))
    # Few different lengths, because items of the same length are placed together.
    kinds = draw(st.lists(st.integers(1, capacity), min_size=1, max_size=6))
    return draw(st.lists(st.sampled_from(kinds), max_size=60)), capacity


@given(items())
@example(([18, 18, 5, 5, 4, 4, 4], 30))
@settings(max_examples=500)
def test_bins_are_those_of_textbook_best_fit_decreasing(given_items):
    lengths, capacity = given_items
    bins = best_fit(np.array(lengths, np.int64), capacity)
    filled = np.bincount(bins, weights=lengths)
    expected = bins_one_by_one(lengths, capacity)
    assert sorted((capacity - filled).astype(int).tolist()) == sorted(expected)
    assert bins.shape == (len(lengths),)
    assert sorted(set(bins.tolist())) == list(range(len(expected))), 'numbered from 0 without gaps'
    # Items are placed in the order of decreasing length, so bins are numbered in that order.
    firsts = [
        max(n for n, b in zip(lengths, bins, strict=True) if b == i) for i in range(len(expected))
    ]
    assert firsts == sorted(firsts, reverse=True)


@pytest.mark.parametrize('capacity', [64, 1024])
def test_many_items(capacity):
    lengths = np.random.default_rng(0).integers(1, capacity + 1, 100_000)
    bins = best_fit(lengths, capacity)
    filled = np.bincount(bins, weights=lengths)
    assert filled.min() > 0
    assert filled.max() <= capacity
    # Uniform lengths pair up, so the number of bins is close to its lower bound.
    assert len(filled) < 1.01 * np.ceil(lengths.sum() / capacity)


# The rows.

any_documents = st.lists(st.lists(st.integers(0, 255), max_size=40).map(tuple), max_size=12)


@given(any_documents, st.integers(1, 30))
@settings(max_examples=200)
def test_rows_are_the_pieces_of_the_documents(documents, length):
    rows = all_rows(pack(stream_of(documents), length, SEPARATOR))
    found = collections.Counter()
    for row in rows:
        for inputs, targets, positions in pieces_in(row):
            assert positions == tuple(range(len(positions)))
            found[inputs, targets] += 1
    assert found == collections.Counter(pieces_of(documents, length))
    for row in rows:
        assert {name: (a.shape, a.dtype.name) for name, a in row.items()} == {
            'decoder_input_tokens': ((length,), 'int32'),
            'decoder_target_tokens': ((length,), 'int32'),
            'decoder_loss_weights': ((length,), 'float32'),
            'decoder_segment_ids': ((length,), 'int32'),
            'decoder_positions': ((length,), 'int32'),
        }
        segments = row['decoder_segment_ids'].tolist()
        used = np.count_nonzero(segments)
        assert used > 0
        # Segments are contiguous from the first place on, and padding follows them.
        assert segments[:used] == sorted(segments[:used])
        assert sorted(set(segments[:used])) == list(range(1, max(segments) + 1))
        assert segments[used:] == [0] * (length - used)
        assert row['decoder_loss_weights'].tolist() == [1.0] * used + [0.0] * (length - used)
        assert set(row['decoder_input_tokens'][used:].tolist()) <= {SEPARATOR}
        assert set(row['decoder_target_tokens'][used:].tolist()) <= {SEPARATOR}
        assert not row['decoder_positions'][used:].any()


@pytest.mark.parametrize('length', [15, 16, 17])
def test_documents_at_the_limit_of_a_row(length):
    """A document of 15 tokens has 16 targets, because the separator after it is one."""
    rows = all_rows(pack(stream_of(labelled([15])), length, SEPARATOR))
    sizes = [len(positions) for row in rows for *_, positions in pieces_in(row)]
    assert sizes == {15: [15, 1], 16: [16], 17: [16]}[length]
    assert len(rows) == len(sizes)


def test_empty_documents_and_an_empty_stream():
    [row] = all_rows(pack(stream_of([[], [], []]), 8, SEPARATOR))
    assert row['decoder_segment_ids'].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert row['decoder_positions'].tolist() == [0] * 8
    assert row['decoder_target_tokens'].tolist() == [SEPARATOR] * 8
    assert row['decoder_loss_weights'].sum() == 3
    assert len(pack(stream_of([]), 8, SEPARATOR)) == 0


# How full the rows are.


@pytest.fixture(scope='module')
def python_sources():
    folders = [Path(module.__file__).parent for module in (json, email, asyncio)]
    return [path.read_bytes() for folder in folders for path in sorted(folder.rglob('*.py'))]


@pytest.mark.parametrize('length', [512, 1024])
def test_rows_of_source_code_are_nearly_full(python_sources, length):
    stream = stream_of(python_sources)
    rows = all_rows(pack(stream, length, SEPARATOR))
    used = sum(row['decoder_loss_weights'].sum() for row in rows)
    assert used == sum(len(source) + 1 for source in python_sources)
    assert used / (len(rows) * length) >= 0.95


# Rows that are cut from the stream.


@given(any_documents.filter(bool), st.integers(1, 30))
@settings(max_examples=200)
def test_split_rows_follow_the_stream(documents, length):
    stream = stream_of(documents)
    rows = all_rows(SplitRows(stream, length, SEPARATOR))
    joined = {
        name: np.concatenate([row[f'decoder_{name}'] for row in rows])
        for name in ('input_tokens', 'target_tokens', 'loss_weights')
    }
    count = sum(len(document) + 1 for document in documents)
    assert len(rows) == -(-count // length)
    assert joined['input_tokens'][:count].tolist() == stream.tokens[:-1].tolist()
    assert joined['target_tokens'][:count].tolist() == stream.tokens[1:].tolist()
    assert joined['loss_weights'].tolist() == [1] * count + [0] * (len(rows) * length - count)
    assert set(joined['target_tokens'][count:].tolist()) <= {SEPARATOR}


def test_row_indices_out_of_range_are_an_error():
    stream = stream_of([[1, 2, 3], [4]])
    for rows in (SplitRows(stream, 4, SEPARATOR), pack(stream, 4, SEPARATOR)):
        assert len(list(rows)) == len(rows), 'iterating ends'
        for index in (-1, len(rows)):
            with pytest.raises(IndexError, match=f'no row {index}: there are {len(rows)} rows'):
                rows[index]
