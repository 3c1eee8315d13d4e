"""Tasks: training rows and evaluation rows of one source or of a mixture."""

import collections
import dataclasses
import itertools

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from train.data import ByT5Tokenizer, ByteTokenizer, CausalLM, Mixture, SpanCorruption
from train.data.text.sources import Records
from train.errors import ConfigError

pytestmark = pytest.mark.core

LENGTH = 8
SEPARATOR = 256


def numbered(name, count, first=0):
    """Documents of 7 bytes, each of which fills one row of 8 targets with its separator."""
    return [f'{name}{i:06d}'.encode() for i in range(first, first + count)]


def name_of(row):
    """The document that fills a row."""
    assert row['decoder_target_tokens'][-1] == SEPARATOR
    return bytes(row['decoder_target_tokens'][:-1].tolist()).decode()


@pytest.fixture
def lm(tmp_path):
    """Makes a CausalLM task of documents."""

    def make(documents, held_out=0.0, **settings):
        source = Records(records=documents, holdout_percent=held_out)
        return CausalLM(source=source, cache_dir=str(tmp_path), **settings)

    return make


def shares_of(rows, window):
    counts = collections.Counter(name_of(rows[i])[0] for i in window)
    return {name: count / len(window) for name, count in counts.items()}


# One source.


@pytest.mark.parametrize('packing', ['split', 'pack'])
def test_each_epoch_reads_every_row_once_in_a_different_order(lm, packing):
    rows = lm(numbered('a', 40), packing=packing).open(LENGTH).training(seed=3)
    orders = [[name_of(rows[e * 40 + i]) for i in range(40)] for e in range(4)]
    expected = [f'a{i:06d}' for i in range(40)]
    assert all(sorted(order) == expected for order in orders)
    assert len(set(map(tuple, [*orders, expected]))) == 5


@pytest.mark.parametrize('index', [2**31 - 1, 2**32, 10**12, 10**15])
def test_rows_at_large_numbers_are_accessible(lm, index):
    rows = lm(numbered('a', 40)).open(LENGTH).training(seed=3)
    first = index // 40 * 40
    assert len({name_of(rows[i]) for i in range(first, first + 40)}) == 40
    assert name_of(rows[index]) == name_of(rows[index])


# Mixtures.

WEIGHTS = [(0.65, 0.35), (1, 1.009), (1, 2, 4), (5, 0.02)]


@pytest.mark.parametrize('weights', WEIGHTS, ids=str)
def test_every_window_of_a_mixture_follows_its_weights(lm, weights):
    # At least FEW_ROWS documents, because fewer are slow to shuffle.
    tasks = [lm(numbered('abc'[i], 1100)) for i in range(len(weights))]
    rows = Mixture(tasks=tasks, weights=weights).open(LENGTH).training(seed=0)
    names = [name_of(rows[i])[0] for i in range(3_000)]
    for first, last in [(0, 3_000), (0, 100), (777, 2_900), (2_000, 3_000)]:
        counts = collections.Counter(names[first:last])
        for name, weight in zip('abc', weights, strict=False):
            expected = weight / sum(weights) * (last - first)
            # The error does not grow: in a window of any length, it is at most one or two rows.
            assert abs(counts[name] - expected) <= len(weights), (first, last, name)


def test_each_part_has_its_own_epochs(lm):
    tasks = [lm(numbered('a', 30)), lm(numbered('b', 7))]
    rows = Mixture(tasks=tasks, weights=[1, 1]).open(LENGTH).training(seed=5)
    read = [name_of(rows[i]) for i in range(300)]
    for name, count in [('a', 30), ('b', 7)]:
        own = [row for row in read if row[0] == name]
        full = [tuple(own[i : i + count]) for i in range(0, len(own) - count + 1, count)]
        assert len(full) > 3
        assert all(len(set(epoch)) == count for epoch in full)
        assert len(set(full)) == len(full), 'each epoch has a different order'


def test_the_data_of_one_part_does_not_affect_the_rows_of_another(lm):
    def read(second):
        tasks = [lm(numbered('a', 30)), lm(second), lm(numbered('c', 11))]
        rows = Mixture(tasks=tasks, weights=[2, 1, 1]).open(LENGTH).training(seed=5)
        return [name_of(rows[i]) for i in range(400)]

    one, two = read(numbered('b', 7)), read(numbered('b', 19, first=50))
    assert one != two
    for a, b in zip(one, two, strict=True):
        assert a == b or a[0] == b[0] == 'b'


def test_parts_of_equal_size_have_different_orders(lm):
    tasks = [lm(numbered('a', 30)), lm(numbered('b', 30))]
    rows = Mixture(tasks=tasks, weights=[1, 1]).open(LENGTH).training(seed=5)
    read = [name_of(rows[i]) for i in range(60)]
    a, b = ([row[1:] for row in read if row[0] == name] for name in 'ab')
    assert sorted(a) == sorted(b)
    assert a != b


def test_shares_of_nested_mixtures_multiply(lm):
    a, b, c = (lm(numbered(name, 1000)) for name in 'abc')
    inner = Mixture(tasks=[a, b], weights=[3, 1])
    opened = Mixture(tasks=[c, inner], weights=[2, 6]).open(LENGTH)
    shares = shares_of(opened.training(seed=0), range(1600))
    assert shares == pytest.approx({'a': 9 / 16, 'b': 3 / 16, 'c': 1 / 4}, abs=3 / 1600)
    assert sum(part.weight for part in opened.parts) == pytest.approx(1)


@pytest.mark.parametrize(('counts', 'weights'), [((30, 7), (1, 1)), ((10, 90), (3, 1))])
def test_rows_per_epoch_cover_every_part(lm, counts, weights):
    tasks = [lm(numbered(name, count)) for name, count in zip('ab', counts, strict=True)]
    opened = Mixture(tasks=tasks, weights=weights).open(LENGTH)
    rows = opened.training(seed=0)

    def seen(number):
        return len({name_of(rows[i]) for i in range(number)})

    assert seen(opened.rows_per_epoch + 2) == sum(counts)
    assert seen(opened.rows_per_epoch - 8) < sum(counts), 'and not many more rows than necessary'


# Invalid tasks.


@pytest.mark.parametrize(
    'weights', [[], [1], [1, 2, 3], [1, 0], [1, -1], [1, float('nan')], [float('inf'), 1], ['1', 1]]
)
def test_invalid_weights(lm, weights):
    with pytest.raises(ConfigError, match=r'Mixture\.weights is .*each of the 2 tasks'):
        Mixture(tasks=[lm([b'a']), lm([b'b'])], weights=weights)


@pytest.mark.parametrize('tasks', [[], [CausalLM], ['a task']])
def test_invalid_lists_of_tasks(tasks):
    with pytest.raises(ConfigError, match=r'Mixture\.tasks'):
        Mixture(tasks=tasks, weights=[1] * len(tasks))


def test_parts_must_have_the_same_tokenizer(lm):
    @dataclasses.dataclass(frozen=True)
    class OtherBytes(ByteTokenizer):
        identity = 'other bytes'

    tasks = [lm([b'a']), lm([b'b'], tokenizer=OtherBytes())]
    with pytest.raises(ConfigError, match=r'same tokenizer.*bytes, other bytes'):
        Mixture(tasks=tasks, weights=[1, 1]).open(LENGTH)


def spans(documents, held_out=0.0, **settings):
    return SpanCorruption(source=Records(records=documents, holdout_percent=held_out), **settings)


def test_parts_must_have_the_same_arrays(lm):
    same = {'tokenizer': ByT5Tokenizer()}
    for other in (lm([b'b'], packing='pack', **same), spans([b'b'], **same)):
        with pytest.raises(ConfigError, match='same arrays'):
            Mixture(tasks=[lm([b'a'], **same), other], weights=[1, 1]).open(LENGTH).training(0)


def test_parts_must_have_arrays_of_the_same_length():
    """The message contains the array and both lengths."""
    tasks = [spans([b'text']), spans([b'text'], noise_density=0.5)]
    lengths = [task.open(24).training(0)[0]['decoder_target_tokens'].shape[0] for task in tasks]
    assert lengths[0] != lengths[1]
    with pytest.raises(ConfigError, match='same arrays, but they differ in') as error:
        Mixture(tasks=tasks, weights=[1, 1]).open(24).training(0)
    message = str(error.value)
    assert 'decoder_target_tokens' in message
    assert all(str(length) in message for length in lengths), message


def test_parts_must_have_the_same_arrays_in_evaluations(lm):
    tasks = [lm([b'a'], 100, packing='split'), lm([b'b'], 100, packing='pack')]
    with pytest.raises(ConfigError, match='same arrays'):
        Mixture(tasks=tasks, weights=[1, 1]).open(LENGTH).evaluation()


def test_a_part_without_documents_to_train_on(lm):
    held = lm([b'a', b'b'], held_out=100)
    with pytest.raises(ConfigError, match=r'no document to train on.* 2 are held out.*holdout'):
        held.open(LENGTH).training(0)
    with pytest.raises(ConfigError, match=r'no document to train on.* 2 are held out.*holdout'):
        Mixture(tasks=[lm([b'c']), held], weights=[1, 1]).open(LENGTH).training(0)


def test_invalid_settings_of_a_language_model(lm):
    with pytest.raises(ConfigError, match=r"packing is 'packed': use 'split' or 'pack'"):
        lm([b'a'], packing='packed')
    with pytest.raises(ConfigError, match=r'CausalLM\.source.*@Name\(\)'):
        CausalLM(source=Records)


# Evaluation.


def weighted_pairs(rows):
    """(input, target) of every place with weight 1. All other weights must be 0."""
    pairs = []
    for i in range(len(rows)):
        weights = rows[i]['decoder_loss_weights']
        assert set(weights.tolist()) <= {0.0, 1.0}
        arrays = (rows[i][f'decoder_{name}_tokens'][weights == 1] for name in ('input', 'target'))
        pairs += zip(*(array.tolist() for array in arrays), strict=True)
    return pairs


def pairs_of(documents):
    for document in documents:
        yield from itertools.pairwise([SEPARATOR, *document, SEPARATOR])


texts = st.lists(st.binary(max_size=30), min_size=1, max_size=10).filter(any)


@given(texts, st.integers(1, 20), st.sampled_from(['split', 'pack']))
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
def test_each_target_of_an_evaluation_has_weight_once(lm, documents, length, packing):
    held_out = lm(documents, 100, packing=packing).open(length).evaluation()
    found = weighted_pairs(held_out.rows)
    expected = list(pairs_of(documents))
    assert sorted(found) == sorted(expected)
    if packing == 'split':
        assert found == expected
    assert held_out.num_bytes == sum(map(len, documents))
    assert held_out.num_documents == len(documents)
    assert held_out.text == b''.join(documents)


@pytest.mark.parametrize('packing', ['split', 'pack'])
@pytest.mark.parametrize('most', [1, 7, 8, 9, 17, 39, 40, 41, 1000])
def test_an_evaluation_of_the_first_targets(lm, most, packing):
    documents = numbered('a', 5)
    held_out = lm(documents, 100, packing=packing).open(6).evaluation(most)
    found = weighted_pairs(held_out.rows)
    assert sorted(found) == sorted(list(pairs_of(documents))[:most])
    assert held_out.num_bytes == sum(target != SEPARATOR for _, target in found)
    assert held_out.num_documents == min(5, -(-most // 8))
    assert held_out.text == b''.join(documents)[: held_out.num_bytes]


def test_evaluation_of_a_mixture_covers_all_parts(lm):
    a, b = numbered('a', 9), numbered('b', 4)
    tasks = [lm(a, 100), lm(b, 100)]
    opened = Mixture(tasks=tasks, weights=[1, 99]).open(5)
    held_out = opened.evaluation()
    assert weighted_pairs(held_out.rows) == list(pairs_of(a + b))
    assert held_out.num_bytes == 7 * 13
    assert held_out.num_documents == 13
    some = opened.evaluation(limit=20)
    assert weighted_pairs(some.rows) == list(pairs_of(a))[:10] + list(pairs_of(b))[:10]
    assert some.num_bytes == 18


def test_an_evaluation_skips_parts_without_held_out_documents(lm):
    tasks = [lm(numbered('a', 3), 0), lm(numbered('b', 4), 100)]
    held_out = Mixture(tasks=tasks, weights=[1, 1]).open(8).evaluation()
    assert [name_of(held_out.rows[i]) for i in range(len(held_out.rows))] == [
        f'b{i:06d}' for i in range(4)
    ]


def test_held_out_documents_are_not_trained_on(lm):
    documents = numbered('a', 400)
    opened = lm(documents, held_out=25).open(LENGTH)
    training, held_out = opened.training(0), opened.evaluation()
    trained = {name_of(training[i]) for i in range(opened.rows_per_epoch)}
    evaluated = {name_of(held_out.rows[i]) for i in range(len(held_out.rows))}
    assert trained | evaluated == {document.decode() for document in documents}
    assert not trained & evaluated
    assert 60 < len(evaluated) < 140


@pytest.mark.parametrize('documents', [numbered('a', 3), [b'a', b'']])
def test_an_evaluation_needs_held_out_documents(lm, documents):
    opened = lm(documents, held_out=0).open(LENGTH)
    with pytest.raises(
        ConfigError, match=rf'{len(documents)} training documents.*nothing is held out'
    ):
        opened.evaluation()
