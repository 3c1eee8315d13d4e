"""Rows of inputs and targets, compared with the arrays that seqio's converters made for T5X."""

import gzip
import io
import json

import numpy as np
import pytest
import sentencepiece
import t5x_reference

from train.data import (
    ByT5Tokenizer,
    ByteTokenizer,
    InputsToTargets,
    JsonLines,
    Mixture,
    ParquetFiles,
    PrefixLM,
    SentencePieceTokenizer,
    Subset,
    TextFiles,
    TokenIds,
    TsvFiles,
)
from train.data.rows.pairs import pack_in_order
from train.data.text.sources import Records
from train.errors import ConfigError

pytestmark = pytest.mark.core

PAIRS = [('translate: one', 'eins'), ('translate: two', 'zwei'), ('translate: three', 'drei')]


def in_order(task, lengths=None):
    [rows] = task.open(lengths).training_rows
    return rows.in_order()


def text_of(tokens):
    return ByT5Tokenizer().decode(tokens).decode()


BATCHES = [(model, batch) for model in ('t5_1_1', 'decoder_only')
           for batch in ('padded', 'packed', 'long')]  # fmt: skip
BATCHES += [('decoder_only', 'targets_only'), ('decoder_only', 'targets_only_packed')]


@pytest.mark.parametrize(('model', 'batch'), BATCHES)
def test_rows_are_those_of_seqios_converters(model, batch):
    raw = t5x_reference.facts(model)['raw_examples']
    examples = raw['long' if batch == 'long' else 'padded_and_packed']
    expected = t5x_reference.batch(model, batch)
    task = InputsToTargets(
        source=[(e['inputs'], e['targets']) for e in examples],
        inputs=None if batch.startswith('targets_only') else 'inputs',
        tokenizer=TokenIds(num_tokens=200),
        add_end=(),  # the examples have theirs
        architecture='decoder_only' if model == 'decoder_only' else 'encoder_decoder',
        pack=batch.endswith('packed'),
    )
    rows = in_order(task, raw['lengths'].get(batch, {'targets': 14}))
    count = len(expected['decoder_target_tokens'])
    found = {name: np.stack([rows[i][name] for i in range(count)]) for name in rows[0]}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
        assert found[name].dtype == (np.float32 if name.endswith('weights') else np.int32)


def test_without_lengths_rows_are_as_long_as_the_longest_text():
    row = in_order(InputsToTargets(source=PAIRS))[1]
    assert row['encoder_input_tokens'].tolist() == [*(b + 3 for b in b'translate: two'), 1, 0, 0]
    assert row['decoder_target_tokens'].tolist() == [*(b + 3 for b in b'zwei'), 1]


@pytest.mark.parametrize(
    ('settings', 'inputs', 'targets'),
    [
        ({}, 'tran', [*(b + 3 for b in b'ei'), 1]),
        ({'keep_end': False}, 'trans', [b + 3 for b in b'ein']),
        ({'add_end': ['targets']}, 'trans', [*(b + 3 for b in b'ei'), 1]),
        ({'add_end': []}, 'trans', [b + 3 for b in b'ein']),
    ],
)
def test_texts_are_cut_to_their_lengths(settings, inputs, targets):
    row = in_order(InputsToTargets(source=PAIRS, **settings), {'inputs': 5, 'targets': 3})[0]
    assert text_of(row['encoder_input_tokens']) == inputs
    assert row['encoder_input_tokens'].shape == (5,)
    assert row['decoder_target_tokens'].tolist() == targets


def written(folder, kind):
    """A source of PAIRS in files of a kind, and the names of its fields."""
    lines = [{'question': x, 'answer': y, 'other': 7} for x, y in PAIRS]
    if kind == 'json':
        (folder / 'a.jsonl').write_text('\n'.join(map(json.dumps, lines)))
        return JsonLines(pattern='*.jsonl', root=str(folder)), 'question', 'answer'
    if kind == 'parquet':
        arrow = pytest.importorskip('pyarrow')
        table = arrow.Table.from_pylist(lines)
        pytest.importorskip('pyarrow.parquet').write_table(table, folder / 'a.parquet')
        return ParquetFiles(pattern='*.parquet', root=str(folder)), 'question', 'answer'
    header = 'id\tquestion\tanswer\r\n' if kind == 'tsv with names' else ''
    text = header + ''.join(f'7\t{x}\t{y}\r\n' for x, y in PAIRS)
    (folder / 'a.tsv.gz').write_bytes(gzip.compress(text.encode()))
    source = TsvFiles(pattern='*.tsv.gz', root=str(folder))
    return (source, 'question', 'answer') if header else (source, 1, 2)


@pytest.mark.parametrize('kind', ['json', 'parquet', 'tsv', 'tsv with names'])
def test_files_and_lists_give_the_same_rows(tmp_path, kind):
    source, inputs, targets = written(tmp_path, kind)
    source = source.__class__(pattern=source.pattern, root=source.root, holdout_percent=0)
    task = InputsToTargets(
        source=source, inputs=inputs, targets=targets, cache_dir=str(tmp_path / 'cache')
    )
    expected = in_order(InputsToTargets(source=PAIRS))
    for rows in (in_order(task), in_order(task)):  # the second time from the cache
        assert len(rows) == len(PAIRS)
        for i, row in enumerate(rows):
            for name, array in row.items():
                np.testing.assert_array_equal(array, expected[i][name])


def test_held_out_examples():
    opened = InputsToTargets(source=PAIRS[:2], held_out=PAIRS[2:], pack=True).open()
    evaluation = opened.evaluation()
    assert evaluation.num_documents == 1
    assert text_of(evaluation.rows[0]['decoder_target_tokens']) == 'drei'
    assert opened.rows_per_epoch == 2, 'each text is as long as a row'
    names = [f'{i:02d}' for i in range(400)]
    source = Records(records=[{'inputs': n, 'targets': n} for n in names], holdout_percent=25)
    opened = InputsToTargets(source=source).open()
    parts = [in_order(InputsToTargets(source=source)), opened.evaluation().rows]
    found = [[text_of(row['encoder_input_tokens']) for row in rows] for rows in parts]
    for rows in parts:
        for row in rows:
            targets = text_of(row['decoder_target_tokens'])
            assert targets == text_of(row['encoder_input_tokens'])
    assert sorted(found[0] + found[1]) == sorted(names)
    assert 60 < len(found[1]) < 140


def test_packed_rows_are_a_function_of_the_seed_and_their_number():
    pairs = [(f'{i}' * (i % 7 + 1), f'{i}' * (i % 5 + 1)) for i in range(100)]
    lengths = {'inputs': 40, 'targets': 30}
    task = InputsToTargets(source=pairs, pack=True)
    one, two = (task.open(lengths).training(seed=4) for _ in range(2))
    count = task.open(lengths).rows_per_epoch
    seen = []
    for i in reversed(range(count)):
        for name, array in one[i].items():
            np.testing.assert_array_equal(array, two[i][name])
        segments = two[i]['encoder_segment_ids']
        for k in range(1, segments.max() + 1):
            x = text_of(two[i]['encoder_input_tokens'][segments == k])
            y = text_of(two[i]['decoder_target_tokens'][two[i]['decoder_segment_ids'] == k])
            seen.append((x, y))
    assert sorted(seen) == sorted(pairs)


def test_packing_in_order_by_hand():
    one = [np.array([4, 3, 4, 1, 9, 1]), 9]
    assert pack_in_order([one]).tolist() == [0, 2, 4, 5, 6]
    assert pack_in_order([one, (np.array([1, 1, 1, 1, 1, 1]), 1)]).tolist() == [*range(7)]


def test_a_mixture_by_weights():
    tasks = [InputsToTargets(source=[('a', name)] * 3) for name in 'xy']
    rows = Mixture(tasks=tasks, weights=[3, 1]).open({'inputs': 4, 'targets': 4}).training(0)
    targets = [text_of(rows[i]['decoder_target_tokens']) for i in range(40)]
    assert targets.count('x') == 30


NUMBERS = [(f'{i}', f'{i}') for i in range(40)]


def numbers_of(rows, count):
    return [int(text_of(rows[i]['decoder_target_tokens'])) for i in range(count)]


@pytest.mark.parametrize(
    ('training', 'held_out', 'expected', 'evaluated'),
    [
        ('train', 'validation', range(40), range(40, 50)),
        ('train[:25%]', 'train[25%:30%]', range(10), range(10, 12)),
        ('train[30:]', 'test[:3]', range(30, 40), range(40, 43)),
        ('train[:-35]', 'validation[-1:]', range(5), range(49, 50)),
        ('validation', 'train', range(40, 50), range(40)),
    ],
)
def test_a_subset_in_order_and_shuffled(training, held_out, expected, evaluated):
    task = InputsToTargets(source=NUMBERS, held_out=[(f'{i}', f'{i}') for i in range(40, 50)])
    lengths, count = {'inputs': 4, 'targets': 4}, len(expected)
    settings = {'task': task, 'training': training, 'held_out': held_out}
    opened = Subset(**settings, shuffle=False).open(lengths)
    assert numbers_of(opened.training(5), 2 * count) == [*expected, *expected]
    assert opened.rows_per_epoch == count
    assert numbers_of(opened.evaluation().rows, len(evaluated)) == list(evaluated)
    assert opened.evaluation().num_documents == len(evaluated)
    shuffled, again = (
        Subset(**settings, seed=7, shuffle_held_out=True).open(lengths) for _ in range(2)
    )
    found = numbers_of(shuffled.training(5), count)
    assert sorted(found) == list(expected) != found
    assert numbers_of(again.training(6), count) == found, 'its own seed counts'
    found = numbers_of(shuffled.evaluation().rows, len(evaluated))
    assert sorted(found) == list(evaluated)
    assert len(evaluated) < 9 or found != list(evaluated)


def test_a_subset_is_part_of_the_record():
    task = InputsToTargets(source=NUMBERS)
    [whole] = Subset(task=task).open().record()
    [part] = Subset(task=task, training='train[:10]', seed=3).open().record()
    assert part['rows'] == {**whole['rows'], 'training': 'train[:10]', 'seed': 3}
    assert (whole['documents'], part['documents']) == (40, 10)


@pytest.mark.parametrize('architecture', ['decoder_only', 'encoder_decoder'])
def test_a_prefix_and_its_continuation(architecture):
    text = (bytes(range(32, 127)) * 4)[:-3]
    task = PrefixLM(source=Records(records=[text], holdout_percent=0), architecture=architecture)
    lengths, pieces, cuts = {'inputs': 20, 'targets': 20}, [], set()
    for row in in_order(task, lengths):
        if architecture == 'decoder_only':
            tokens, weights = row['decoder_target_tokens'], row['decoder_loss_weights'] > 0
            inputs, targets = tokens[~weights & (tokens > 0)], tokens[weights]
            assert row['decoder_causal_attention'].sum() == len(inputs) + 1
            assert len(tokens) == 40
        else:
            inputs, targets = row['encoder_input_tokens'], row['decoder_target_tokens']
            inputs, targets = inputs[inputs > 0], targets[targets > 0]
        assert targets[-1] == 1
        assert len(inputs) and len(targets) > 1
        pieces.append(text_of(inputs) + text_of(targets))
        cuts.add(len(inputs))
    assert ''.join(pieces).encode() == text
    assert len(cuts) > 4, 'texts are cut at different places'


def test_byt5_and_its_sentinels():
    assert ByT5Tokenizer(extra_ids=100).num_tokens == 359
    assert ByT5Tokenizer().encode([''], [b'ab\xff'])[0].tolist() == [100, 101, 258]
    assert ByT5Tokenizer(extra_ids=1).decode(np.array([100, 0, 1, 2, 101, 259])) == b'ab'


def test_sentencepiece_with_sentinels(tmp_path):
    """As in seqio: <extra_id_0> is the last token, and text may contain sentinels."""
    path, model = tmp_path / 'model', io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(['the quick brown fox jumps over the lazy dog'] * 9),
        model_writer=model, minloglevel=2, vocab_size=30,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
    )  # fmt: skip
    path.write_bytes(model.getvalue())
    plain = SentencePieceTokenizer(path=str(path))
    tokenizer = SentencePieceTokenizer(path=str(path), extra_ids=100)
    assert (plain.num_tokens, tokenizer.num_tokens) == (30, 130)
    assert tokenizer.separator == 1
    assert tokenizer.identity != plain.identity
    text = 'the <extra_id_0> fox <extra_id_1> dog'
    [tokens] = tokenizer.encode([''], [text.encode()])
    words = [plain.encode([''], [word])[0].tolist() for word in (b'the', b'fox', b'dog')]
    assert tokens.tolist() == [*words[0], 129, *words[1], 128, *words[2]]
    assert tokenizer.decode(tokens).decode() == text


@pytest.mark.parametrize(
    ('task', 'lengths', 'message'),
    [
        (lambda: InputsToTargets(source=PAIRS), 16, 'sequence_length is 16'),
        (lambda: InputsToTargets(source=PAIRS), {'input': 16}, "'inputs': 512, 'targets': 114"),
        (lambda: InputsToTargets(source=PAIRS), {'inputs': 0}, r"\['inputs'\] is 0"),
        (lambda: InputsToTargets(source=PAIRS, tokenizer=ByteTokenizer()), None, 'ByT5Tokenizer'),
        (lambda: InputsToTargets(source='a.tsv'), None, 'source is a.tsv'),
        (lambda: InputsToTargets(source=PAIRS, add_end='inputs'), None, "add_end is 'inputs'"),
        (lambda: InputsToTargets(source=PAIRS, architecture='decoder'), None, 'encoder_decoder'),
        (lambda: InputsToTargets(source=PAIRS, inputs=None), None, 'encoder needs inputs'),
        (lambda: InputsToTargets(source=TextFiles(pattern='*')), None, 'TextFiles has no fields'),
        (lambda: InputsToTargets(source=PAIRS, tokenizer=TokenIds(num_tokens=9)), None,
         "'inputs' is 'translate: one', not the numbers"),
        (lambda: InputsToTargets(source=[([1, 700], [1])]), None, 'token 700'),
        (lambda: Subset(task=InputsToTargets(source=PAIRS), training='dev'), None, "'dev': write"),
        (lambda: Subset(task=InputsToTargets(source=PAIRS), training='train[2:2]'), None,
         r"'train\[2:2\]' is empty: there are 3 documents"),
        (lambda: PrefixLM(source=Records(records=['ab'])), None, 'PrefixLM needs the number'),
    ],
)  # fmt: skip
def test_errors(task, lengths, message):
    with pytest.raises(ConfigError, match=message):
        task().open(lengths)
