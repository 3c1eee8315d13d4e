"""Span corruption: which spans are removed, which sentinels replace them, and nothing is lost."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from train.data import ByT5Tokenizer, ByteTokenizer, SpanCorruption
from train.data.rows.text_pairs import Corruption, CorruptSpans
from train.data.text.sources import Records
from train.errors import ConfigError

pytestmark = pytest.mark.core

SEPARATOR = 256
LAST = 358  # the last of 100 sentinels after ByT5's 3 special tokens and 256 bytes
FIRST = 1256  # the first sentinel in these tests, far above the bytes, so that no text contains one


def maker(corruption):
    return CorruptSpans(corruption, end=SEPARATOR, first_sentinel=FIRST)


def parts_of(pair):
    """The tokens of the encoder and of the decoder, without the separator at the end."""
    encoder, decoder = (tokens.tolist() for tokens in pair)
    assert encoder.pop() == decoder.pop() == SEPARATOR
    return encoder, decoder


def pair_of(row):
    """The pair in a row of ByT5's tokens: bytes and sentinels stay, and 1 becomes the separator."""
    pair = [row[name] for name in ('encoder_input_tokens', 'decoder_target_tokens')]
    pair = [tokens[tokens > 0] for tokens in pair]
    return [np.select([t == 1, t < 259], [SEPARATOR, t - 3], t) for t in pair]


def put_back(encoder, decoder):
    """The text, with the decoder's spans in place of the sentinels, and the spans."""
    spans, text = {}, []
    for token in decoder:
        if token > SEPARATOR:
            assert token not in spans, 'each sentinel stands for one span'
            spans[token] = []
            last = token
        else:
            spans[last].append(token)
    for token in encoder:
        text += spans[token] if token > SEPARATOR else [token]
    assert [token for token in encoder if token > SEPARATOR] == list(spans)
    return text, spans


def lengths_of_t5(inputs_length, density, mean_span):
    """The longest text and its number of targets, by T5's preprocessor `random_spans_helper`."""

    def lengths(tokens):
        noise = round(tokens * density)
        spans = round(noise / mean_span)
        return tokens - noise + spans + 1, noise + spans + 1

    tokens = inputs_length
    while lengths(tokens + 1)[0] <= inputs_length:
        tokens += 1
    return tokens, lengths(tokens)[1]


def opened(documents, length, **settings):
    # Records without a cache_key are not cached.
    task = SpanCorruption(source=Records(records=documents, holdout_percent=0), **settings)
    return task.open(length)


# The lengths.


def test_the_lengths_of_t5():
    corruption = Corruption(0.15, 3.0)
    assert corruption.longest_text(512) == 568
    assert corruption.lengths(568) == (512, 114)


@pytest.mark.parametrize('length', [64, 114, 512, 1024])
@pytest.mark.parametrize(('density', 'mean_span'), [(0.15, 3.0), (0.5, 3.0), (0.3, 8), (0.15, 64)])
def test_lengths_are_those_of_t5s_preprocessor(length, density, mean_span):
    corruption = Corruption(density, mean_span)
    text_length = corruption.longest_text(length)
    tokens, targets = lengths_of_t5(length, density, mean_span)
    if round(tokens * density) / mean_span > 0.5:  # T5 does not handle texts without a span
        assert text_length == tokens
        assert corruption.lengths(text_length)[1] == targets


densities = st.floats(0.01, 0.95)
mean_spans = st.floats(1, 20)


@given(st.integers(3, 200), densities, mean_spans)
@settings(max_examples=100)
def test_shorter_texts_fit_into_the_row_of_the_longest(encoder_length, density, mean_span):
    corruption = Corruption(density, mean_span)
    longest = corruption.longest_text(encoder_length)
    fits = [n for n in range(2, 25 * encoder_length) if corruption.lengths(n)[0] <= encoder_length]
    assert longest == max(fits, default=0)
    decoder_length = corruption.lengths(longest)[1]
    for length in range(1, longest):
        encoder, decoder = corruption.lengths(length)
        assert encoder <= encoder_length
        assert decoder <= decoder_length


# The rows.


@given(st.integers(1, 300), densities, mean_spans, st.integers(0, 2**32 - 1))
@settings(max_examples=300)
def test_putting_the_spans_back_gives_the_text(length, density, mean_span, seed):
    corruption = Corruption(density, mean_span)
    rng = np.random.default_rng(seed)
    # Texts may contain separators, because they run across the ends of documents.
    text = rng.integers(0, SEPARATOR + 1, length).astype(np.int32)
    encoder, decoder = parts_of(maker(corruption)(text, rng))
    found, spans = put_back(encoder, decoder)
    assert found == text.tolist()
    assert list(spans) == list(range(FIRST, FIRST - len(spans), -1))
    assert all(spans.values()), 'no span is empty'
    assert (len(encoder) + 1, len(decoder) + 1) == corruption.lengths(length)
    if length > 1:
        cut = sum(map(len, spans.values()))
        assert 1 <= cut <= length - 1
        assert abs(cut - density * length) <= 1
        # There are fewer spans if there are too few tokens to remove or to keep.
        asked = min(max(1, cut / mean_span), cut, length - cut)
        assert abs(len(spans) - asked) <= 0.5
        first = encoder.index(FIRST)
        assert first > 0, 'a text begins with tokens that stay'
        gaps = [encoder.index(FIRST - i) for i in range(len(spans))]
        assert all(b - a > 1 for a, b in itertools.pairwise(gaps)), 'spans do not touch'
    else:
        assert not spans


@pytest.mark.parametrize('pack', [False, True])
def test_the_arrays_of_a_row(pack):
    """T5's numbers: 568 tokens become 512 inputs and 114 targets, here with room for 120."""
    task = opened([b'a' * 1000], {'inputs': 512, 'targets': 120}, pack=pack)
    rows = task.training_rows[0].in_order()
    full, last = rows[0], rows[1]
    targets = full['decoder_target_tokens']
    assert full['encoder_input_tokens'].shape == (512,)
    assert full['encoder_input_tokens'][-1] == 1
    assert targets.tolist().index(1) == 113
    assert targets[114:].tolist() == [0] * 6
    assert full['decoder_loss_weights'].tolist() == [1.0] * 114 + [0.0] * 6
    shifted = [0, *targets.tolist()[:-1]]
    shifted[114] = 0 if pack else 1
    assert full['decoder_input_tokens'].tolist() == shifted
    ids = {'encoder_segment_ids', 'encoder_positions', 'decoder_segment_ids', 'decoder_positions'}
    assert ids & full.keys() == (ids if pack else set())
    assert len(full) == (8 if pack else 4)
    assert {name: array.dtype.name for name, array in last.items() if array.dtype != np.int32} == {
        'decoder_loss_weights': 'float32'
    }
    if pack:
        inputs = last['encoder_input_tokens']
        assert last['encoder_segment_ids'].tolist() == (inputs > 0).astype(int).tolist()
        assert last['encoder_positions'].max() == np.count_nonzero(inputs) - 1


def test_a_decoder_reads_the_inputs_and_then_the_targets():
    task = opened([b'a' * 568], {'inputs': 512, 'targets': 114}, architecture='decoder_only')
    row = task.training_rows[0].in_order()[0]
    assert row['decoder_target_tokens'].shape == (626,)
    assert row['decoder_loss_weights'].tolist() == [0.0] * 512 + [1.0] * 114
    assert row['decoder_causal_attention'].tolist() == [1] * 513 + [0] * 113


def test_the_tokens_of_the_tokenizer_stand_for_spans():
    """T5's vocabularies end with their sentinels: the last token stands for the first span."""
    tokenizer = ByT5Tokenizer(extra_ids=100)
    task = opened([b'a' * 1000], 512, num_sentinels=0, tokenizer=tokenizer)
    encoder = task.training_rows[0].in_order()[0]['encoder_input_tokens']
    assert [t for t in encoder.tolist() if t >= 259] == list(range(358, 358 - 28, -1))


def test_a_text_of_one_token_loses_nothing():
    pair = maker(Corruption(0.15, 3.0))(np.array([7], np.int32), np.random.default_rng(0))
    assert parts_of(pair) == ([7], [])


def test_every_choice_of_spans_is_equally_likely():
    """4 of 8 tokens are removed in 2 spans: there are 3 ways to split each half of the tokens."""
    corruption, rng = Corruption(0.5, 2.0), np.random.default_rng(0)
    drawn = 9000
    counts = collections.Counter(tuple(corruption.spans(8, rng).tolist()) for _ in range(drawn))
    assert set(counts) == {(a, b, 4 - a, 4 - b) for a in (1, 2, 3) for b in (1, 2, 3)}
    expected, deviation = drawn / 9, np.sqrt(drawn * 1 / 9 * 8 / 9)
    assert all(abs(count - expected) < 5 * deviation for count in counts.values()), counts


# The task.


def test_rows_of_a_task_contain_the_whole_stream():
    documents = [bytes([i]) * 5 for i in range(200)] + [b'']
    task = opened(documents, 64)
    stream = b''.join(document + b'\x00' for document in documents)  # 0 for the separators
    stream = [SEPARATOR if i % 6 == 5 else byte for i, byte in enumerate(stream[:1200])]
    stream.append(SEPARATOR)  # of the empty document
    text_length = lengths_of_t5(64, 0.15, 3.0)[0]
    count = -(-len(stream) // text_length)
    assert len(stream) % text_length, 'the last text is shorter'
    assert task.rows_per_epoch == count
    rows = task.training(seed=3)
    found = sorted(put_back(*parts_of(pair_of(rows[i])))[0] for i in range(count))
    assert found == sorted(
        stream[first : first + text_length] for first in range(0, len(stream), text_length)
    )
    tokens = np.concatenate([rows[i]['encoder_input_tokens'] for i in range(count)])
    assert tokens.max() == SpanCorruption(source=Records(records=documents)).num_tokens - 1 == LAST


def test_noise_depends_only_on_the_seed_and_the_row():
    documents = [np.random.default_rng(0).bytes(4000)]

    def masks(seed, epoch):
        """The encoder tokens of each text, by the text."""
        task = opened(documents, 64)
        rows, count = task.training(seed), task.rows_per_epoch
        made = {}
        for i in range(epoch * count, (epoch + 1) * count):
            encoder, decoder = parts_of(pair_of(rows[i]))
            made[tuple(put_back(encoder, decoder)[0])] = encoder
        assert len(made) == count
        return made

    first = masks(0, 0)
    assert masks(0, 0) == first
    for seed, epoch in [(0, 1), (0, 7), (1, 0)]:
        other = masks(seed, epoch)
        assert other.keys() == first.keys()
        same = sum(other[text] == first[text] for text in first)
        assert same < len(first) / 10, (seed, epoch)


def test_the_shares_of_a_long_text():
    task = opened([np.random.default_rng(0).bytes(200_000)], 512)
    rows = task.training(seed=0)
    cut = spans = total = 0
    for i in range(task.rows_per_epoch):
        text, cuts = put_back(*parts_of(pair_of(rows[i])))
        total += len(text)
        cut += sum(map(len, cuts.values()))
        spans += len(cuts)
    assert total == 200_001
    assert abs(cut / total - 0.15) < 0.002
    assert abs(cut / spans - 3.0) < 0.05


def test_an_evaluation_removes_the_same_spans_every_time():
    task = SpanCorruption(source=Records(records=[b'a text of some length'], holdout_percent=100))
    one, two = (task.open(12).evaluation() for _ in range(2))
    assert one.num_bytes is None, 'its targets are not the bytes of the text'
    assert len(one.rows) > 1
    for i in range(len(one.rows)):
        for name, array in one.rows[i].items():
            np.testing.assert_array_equal(array, two.rows[i][name])


# Settings.


@pytest.mark.parametrize(
    ('wrong', 'message'),
    [
        ({'noise_density': 0}, 'noise_density is 0'),
        ({'noise_density': 1.0}, 'noise_density is 1.0'),
        ({'noise_density': -0.15}, 'noise_density'),
        ({'noise_density': float('nan')}, 'noise_density'),
        ({'noise_density': '0.15'}, 'noise_density'),
        ({'mean_noise_span_length': 0.5}, 'mean_noise_span_length is 0.5'),
        ({'mean_noise_span_length': float('nan')}, 'mean_noise_span_length'),
        ({'mean_noise_span_length': '3'}, 'mean_noise_span_length'),
        ({'source': b'text'}, 'source'),
        ({'tokenizer': ByteTokenizer}, r'tokenizer.*parentheses'),
    ],
)
def test_invalid_settings(wrong, message):
    with pytest.raises(ConfigError, match=message):
        SpanCorruption(**{'source': Records(records=[b'text']), **wrong})


def test_too_few_sentinels_and_too_short_an_encoder():
    with pytest.raises(ConfigError, match=r'568 tokens has 28 spans.*num_sentinels \(27\)'):
        opened([b'text'], 512, num_sentinels=27)
    assert opened([b'text'], 512, num_sentinels=28).rows_per_epoch == 1
    for length in (1, 2):
        with pytest.raises(ConfigError, match=f'no text fits into {length} encoder tokens'):
            opened([b'text'], length)
    assert opened([b'text'], 4).rows_per_epoch >= 1
