"""Text files -> tokens -> rows -> global batches."""

import itertools
import math
import zlib
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.data.batches import EvaluationBatches, Rows, TrainingBatches
from train.data.corpus import (
    NUM_TOKENS,
    SEPARATOR,
    Corpus,
    TextFiles,
    order0_bits_per_byte,
    python_library,
    zlib_bits_per_byte,
)

pytestmark = pytest.mark.core

MESH_SHAPES = [(8, 1), (4, 2), (1, 8)]


def files(root, contents):
    for name, content in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def numbered(count):
    return {f'part{i % 3}/file{i}.txt': f'<file {i}>'.encode() for i in range(count)}


def parts(corpus):
    """The files of a corpus, cut at the separators."""
    tokens = corpus.tokens.tolist()
    assert tokens[0] == tokens[-1] == SEPARATOR
    cuts = [i for i, token in enumerate(tokens) if token == SEPARATOR]
    return [bytes(tokens[a + 1 : b]) for a, b in itertools.pairwise(cuts)]


def corpus_of(num_tokens):
    """A corpus in which every token tells its place: two digits of base 251."""
    tokens = np.arange(num_tokens) % 251
    return Corpus('test', tokens.astype(np.uint16), 0)


def sharding(shape):
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ('data', 'model'))
    return NamedSharding(mesh, PartitionSpec('data'))


def as_numpy(batch):
    return {key: np.asarray(value) for key, value in batch.items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


# The corpus.


def test_whole_files_are_held_out(tmp_path):
    contents = numbered(200)
    files(tmp_path, contents)
    training, held_out = TextFiles(
        pattern='**/*.txt', root=str(tmp_path), holdout_percent=20
    ).load()
    assert Counter(parts(training)) + Counter(parts(held_out)) == Counter(contents.values())
    assert training.num_files == len(parts(training))
    assert held_out.num_files == len(parts(held_out))
    assert 10 < held_out.num_files < 80


def test_adding_a_file_moves_no_other(tmp_path):
    files(tmp_path, numbered(100))
    corpus = TextFiles(pattern='**/*.txt', root=str(tmp_path), holdout_percent=20)
    training, held_out = (set(parts(c)) for c in corpus.load())
    files(tmp_path, {f'part1/new{i}.txt': f'<new {i}>'.encode() for i in range(50)})
    training_after, held_out_after = (set(parts(c)) for c in corpus.load())
    assert training < training_after
    assert held_out < held_out_after


def test_the_folder_that_holds_the_root_does_not_matter(tmp_path):
    splits = []
    for folder in ('one', 'two/deeper'):
        files(tmp_path / folder, numbered(60))
        corpus = TextFiles(pattern='**/*.txt', root=str(tmp_path / folder), holdout_percent=20)
        splits.append([parts(c) for c in corpus.load()])
    assert splits[0] == splits[1]


def test_a_larger_share_holds_out_the_same_files_and_more(tmp_path):
    files(tmp_path, numbered(200))
    held_out = [
        set(parts(TextFiles(pattern='**/*', root=str(tmp_path), holdout_percent=p).load()[1]))
        for p in (10, 30)
    ]
    assert held_out[0] < held_out[1]


def test_a_separator_stands_before_every_file_and_at_the_end(tmp_path):
    # holdout_percent=100 holds out every file, so both parts are looked at by hand.
    files(tmp_path, {'a': b'xy', 'b': b'', 'c': b'\x00\xff'})
    split = TextFiles(pattern='*', root=str(tmp_path), holdout_percent=100)
    whole = split._read('all', tmp_path, ['a', 'b', 'c'], 'here')
    s = SEPARATOR
    assert whole.tokens.tolist() == [s, ord('x'), ord('y'), s, s, 0, 255, s]
    assert whole.tokens.dtype == np.uint16
    assert (whole.num_files, whole.num_bytes) == (3, 4)
    assert whole.text() == b'xy\x00\xff'
    assert NUM_TOKENS == SEPARATOR + 1


def test_num_bytes_is_the_size_of_the_files(tmp_path):
    contents = numbered(50)
    files(tmp_path, contents)
    training, held_out = TextFiles(
        pattern='**/*.txt', root=str(tmp_path), holdout_percent=20
    ).load()
    assert training.num_bytes == sum(map(len, parts(training)))
    assert training.num_bytes + held_out.num_bytes == sum(map(len, contents.values()))
    assert len(training.text()) == training.num_bytes


def test_the_head_of_a_corpus_counts_the_bytes_it_has(tmp_path):
    files(tmp_path, {'a': b'abc', 'b': b'', 'c': b'de'})
    whole = TextFiles(pattern='*', root=str(tmp_path))._read('all', tmp_path, ['a', 'b', 'c'], '')
    for count in range(1, len(whole.tokens) + 5):
        head = whole.head(count)
        assert head.tokens.tolist() == whole.tokens[:count].tolist()
        assert head.num_bytes == len(head.text()), f'the first {count} tokens'


def test_several_patterns_take_each_file_once(tmp_path):
    files(tmp_path, numbered(40) | {'notes.md': b'notes', 'skip/this.txt': b'no'})
    corpus = TextFiles(
        pattern=['**/*.txt', 'part0/*', '*.md'],
        exclude=['/skip/'],
        root=str(tmp_path),
        holdout_percent=30,
    )
    found = Counter(content for c in corpus.load() for content in parts(c))
    assert found == Counter([*numbered(40).values(), b'notes'])


@pytest.mark.parametrize('written', ['./**/*.txt', 'part0/../**/*.txt', '{root}/**/*.txt'])
def test_another_way_to_write_a_pattern_splits_alike(tmp_path, written):
    files(tmp_path, numbered(60))
    patterns = ['**/*.txt', written.format(root=tmp_path)]
    plain, other, both = (
        [
            Counter(parts(c))
            for c in TextFiles(pattern=p, root=str(tmp_path), holdout_percent=20).load()
        ]
        for p in (patterns[0], patterns[1], patterns)
    )
    assert other == plain
    assert both == plain, 'a file is in both parts, or twice in one'


def test_no_matching_file_is_an_error_with_the_place_searched(tmp_path):
    with pytest.raises(ValueError, match='empty corpus: no file matches') as error:
        TextFiles(pattern='*.txt', root=str(tmp_path)).load()
    assert str(tmp_path) in str(error.value)
    assert '*.txt' in str(error.value)


@pytest.mark.parametrize(('percent', 'part'), [(0, 'held out'), (100, 'training')])
def test_a_part_without_files_is_an_error(tmp_path, percent, part):
    files(tmp_path, numbered(20))
    with pytest.raises(ValueError, match=f'empty corpus: the {part} part has 0') as error:
        TextFiles(pattern='**/*.txt', root=str(tmp_path), holdout_percent=percent).load()
    assert 'holdout_percent' in str(error.value)


def test_files_without_bytes_are_an_empty_corpus(tmp_path):
    files(tmp_path, dict.fromkeys(numbered(100), b''))
    with pytest.raises(ValueError, match=r'empty corpus.*no bytes'):
        TextFiles(pattern='**/*.txt', root=str(tmp_path), holdout_percent=50).load()


def test_the_python_library_has_text_for_both_parts():
    training, held_out = python_library().load()
    assert training.num_bytes > 1_000_000
    assert held_out.num_bytes > 10_000


# The yardsticks.


def test_entropy_of_known_texts():
    assert order0_bits_per_byte(bytes(range(256))) == pytest.approx(8)
    assert order0_bits_per_byte(bytes(range(256)) * 7) == pytest.approx(8)
    assert order0_bits_per_byte(b'aaaa') == 0
    assert order0_bits_per_byte(b'ab' * 50) == pytest.approx(1)
    assert order0_bits_per_byte(b'abcc') == pytest.approx(1.5)


@given(st.binary(min_size=1, max_size=300))
@settings(deadline=None, max_examples=50)
def test_entropy_against_the_formula(text):
    expected = -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())
    assert order0_bits_per_byte(text) == pytest.approx(expected, abs=1e-9)


def test_zlib_against_its_own_stream():
    text = b'the quick brown fox ' * 100
    stream = zlib.compressobj(level=9)
    compressed = stream.compress(text) + stream.flush()
    assert zlib.decompress(compressed) == text
    assert zlib_bits_per_byte(text) == 8 * len(compressed) / len(text)
    assert zlib_bits_per_byte(text) < 0.5


def test_zlib_cannot_compress_noise():
    noise = np.random.default_rng(0).integers(0, 256, 10_000, np.uint8).tobytes()
    assert 8 <= zlib_bits_per_byte(noise) < 8.1


# Rows.


@given(st.integers(2, 200), st.integers(1, 40))
@settings(deadline=None, max_examples=100)
def test_rows_cover_every_target_once(num_tokens, length):
    corpus = corpus_of(num_tokens)
    rows = Rows(corpus, length)
    inputs, targets = [], []
    for i in range(len(rows)):
        row = rows[i]
        assert {key: value.shape for key, value in row.items()} == dict.fromkeys(
            ('decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights'), (length,)
        )
        counts = row['decoder_loss_weights'] == 1
        inputs += row['decoder_input_tokens'][counts].tolist()
        targets += row['decoder_target_tokens'][counts].tolist()
        assert set(row['decoder_loss_weights'].tolist()) <= {0.0, 1.0}
        assert (row['decoder_target_tokens'][~counts] == SEPARATOR).all()
        assert counts.any()
    assert targets == corpus.tokens[1:].tolist()
    assert inputs == corpus.tokens[:-1].tolist()


# Training batches.


def training(corpus, shape=(8, 1), batch_size=8, length=5, seed=3):
    return TrainingBatches(
        corpus, batch_size=batch_size, length=length, seed=seed, sharding=sharding(shape)
    )


def test_a_batch_is_a_function_of_seed_and_step_on_any_mesh():
    corpus = corpus_of(1000)
    batches = [training(corpus, shape) for shape in MESH_SHAPES]
    for step in (0, 1, 24, 25, 26, 1000):
        first, *others = [as_numpy(b.at(step)) for b in batches]
        for other in others:
            assert_equal(first, other)


def test_a_new_object_gives_the_batch_of_any_step_at_once():
    corpus = corpus_of(1000)
    run = training(corpus)
    steps = [as_numpy(run.at(step)) for step in range(40)]
    for step in (39, 7, 0):
        assert_equal(as_numpy(training(corpus).at(step)), steps[step])


def test_rows_of_a_batch_are_independent_of_the_batch_size():
    corpus = corpus_of(1000)
    small, large = training(corpus, batch_size=8), training(corpus, batch_size=16)
    joined = [as_numpy(small.at(step)) for step in (2, 3)]
    expected = {key: np.concatenate([b[key] for b in joined]) for key in joined[0]}
    assert_equal(as_numpy(large.at(1)), expected)


def test_another_seed_gives_another_order():
    corpus = corpus_of(1000)
    one, two = (as_numpy(training(corpus, seed=s).at(0)) for s in (3, 4))
    assert (one['decoder_input_tokens'] != two['decoder_input_tokens']).any()


def test_batches_are_sharded_over_the_data_axis():
    for shape in MESH_SHAPES:
        where = sharding(shape)
        batch = TrainingBatches(
            corpus_of(1000), batch_size=16, length=5, seed=0, sharding=where
        ).at(0)
        for key, array in batch.items():
            assert array.shape == (16, 5)
            assert array.sharding.is_equivalent_to(where, array.ndim)
            expected = np.float32 if key == 'decoder_loss_weights' else np.int32
            assert array.dtype == expected
            assert {s.data.shape for s in array.addressable_shards} == {(16 // shape[0], 5)}


@pytest.mark.parametrize('epoch', [0, 1, 2])
def test_an_epoch_visits_each_row_once(epoch):
    length = 5
    corpus = Corpus('test', np.arange(40 * length + 1).astype(np.uint16), 0)
    batches = training(corpus, length=length)
    assert batches.rows_per_epoch == 40
    steps = range(epoch * 5, (epoch + 1) * 5)
    starts = [
        row[0] // length for s in steps for row in np.asarray(batches.at(s)['decoder_input_tokens'])
    ]
    assert sorted(starts) == list(range(40))
    assert starts != list(range(40))


def test_epochs_are_shuffled_differently_and_run_into_each_other():
    length = 5
    corpus = Corpus('test', np.arange(20 * length + 1).astype(np.uint16), 0)
    batches = training(corpus, length=length)
    rows = np.concatenate([np.asarray(batches.at(s)['decoder_input_tokens']) for s in range(5)])
    starts = [int(row[0]) // length for row in rows]
    assert sorted(starts[:20]) == sorted(starts[20:]) == list(range(20))
    assert starts[:20] != starts[20:]


# Evaluation batches.


@pytest.mark.parametrize('shape', MESH_SHAPES)
@pytest.mark.parametrize('num_tokens', [2, 41, 400, 401, 402, 777])
def test_evaluation_weighs_every_target_once(num_tokens, shape):
    corpus = corpus_of(num_tokens)
    evaluation = EvaluationBatches(corpus, batch_size=8, length=5, sharding=sharding(shape))
    batches = [as_numpy(b) for b in evaluation]
    assert len(batches) == len(evaluation)
    assert sum(b['decoder_loss_weights'].sum() for b in batches) == num_tokens - 1
    targets = np.concatenate(
        [b['decoder_target_tokens'][b['decoder_loss_weights'] == 1] for b in batches]
    )
    assert targets.tolist() == corpus.tokens[1:].tolist()
    assert {b['decoder_target_tokens'].shape for b in batches} == {(8, 5)}


def test_evaluation_gives_the_same_batches_every_time():
    evaluation = EvaluationBatches(
        corpus_of(200), batch_size=8, length=5, sharding=sharding((4, 2))
    )
    for first, second in zip(evaluation, evaluation, strict=True):
        assert_equal(as_numpy(first), as_numpy(second))
