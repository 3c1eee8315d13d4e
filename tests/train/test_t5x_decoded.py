"""Metrics of decoded text, and the evaluator that predicts held-out examples."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small import records

from partitioning import PjitPartitioner
from train import Objective, TrainConfig, train
from train.checkpoints import CheckpointConfig
from train.data import InputsToTargets, Mixture
from train.errors import ConfigError
from train.evaluators.decoded import DecodedText
from train.evaluators.text_metrics import (
    bleu,
    exact_match,
    rouge,
    sequence_accuracy,
    squad,
    token_accuracy,
)
from train.reporting.writers import JsonWriter

pytestmark = pytest.mark.core

# The metrics, by hand and by the examples in the documentation of the libraries.


def test_exact_matches_and_tokens():
    assert exact_match(['a', 'b', ['c', 'd'], 'e'], ['a', 'B', 'd', '']) == {'exact_match': 50.0}
    targets, predictions = [[5, 6, 7], [8], [9]], [[5, 9, 7, 7], [], [9]]
    assert token_accuracy(targets, predictions) == {'token_accuracy': 60.0}
    assert sequence_accuracy(targets, predictions)['sequence_accuracy'] == pytest.approx(100 / 3)


def test_bleu_by_the_example_of_sacrebleu():
    pytest.importorskip('sacrebleu', reason='BLEU needs sacrebleu')
    predictions = ['The dog bit the man.', "It wasn't surprising.", 'The man had just bitten him.']
    references = [
        ['The dog bit the man.', 'It was not unexpected.', 'The man bit him first.'],
        ['The dog had bit the man.', 'No one was surprised.', 'The man had bitten the dog.'],
    ]
    targets = [list(pair) for pair in zip(*references, strict=True)]
    # The number is for tokens of '13a', which split these texts like 'intl', except for "wasn't".
    changed = [text.replace("wasn't", 'was not') for text in predictions]
    assert bleu(references[0], references[0])['bleu'] == pytest.approx(100)
    assert 48.53 < bleu(targets, changed)['bleu'] < 100
    one = bleu(['the cat sat on the mat'], ['the cat sat on a mat'])['bleu']
    # 5 of 6 words, 3 of 5 pairs, 2 of 4 triples and 1 of 3 quadruples match; no brevity penalty.
    assert one == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_rouge_by_the_example_of_rouge_score():
    pytest.importorskip('rouge_score', reason='ROUGE needs rouge_score')
    target = 'The quick brown fox jumps over the lazy dog'
    found = rouge([target], ['The quick brown dog jumps on the log.'])
    # 6 of 9 and of 8 words, 2 pairs of 8 and of 7, and a longest common subsequence of 5.
    assert found['rouge1'] == pytest.approx(100 * 2 * 6 / (9 + 8))
    assert found['rouge2'] == pytest.approx(100 * 2 * 2 / (8 + 7))
    assert found['rougeLsum'] == pytest.approx(100 * 2 * 5 / (9 + 8))


def test_squad_by_hand():
    targets = [['The Cat!', 'a dog'], 'blue  sky', 'an apple', '']
    predictions = ['dog', 'the blue sea', 'pear', 'the']
    assert squad(targets, predictions) == {'em': 50.0, 'f1': pytest.approx(100 * 2.5 / 4)}


def test_a_metric_needs_pairs():
    with pytest.raises(ConfigError, match='2 targets and 1 predictions'):
        exact_match(['a', 'b'], ['a'])


# The evaluator.


class Nothing(Objective):
    """A model with one parameter that learns nothing from the rows."""

    def init(self, key, batch):
        return {'params': {'w': jnp.ones(())}}

    def loss(self, params, batch, rng, variables):
        return params['w'] ** 2 * batch['decoder_loss_weights'].sum()


def repeat_inputs(objective, params, batch, key, *, variables, end_token):
    """Predicts the inputs, followed by the end token, and by tokens that do not count."""
    length = batch['decoder_target_tokens'].shape[1]
    tokens = jnp.pad(batch['encoder_input_tokens'], ((0, 0), (0, length)))[:, :length]
    ended = jnp.cumsum(tokens == end_token, axis=1) > 0
    return jnp.where(ended & (tokens != end_token), 50, tokens)


# 11 examples: inputs are repeated correctly in the first 4, and 2 more differ in one of 2 letters.
HELD_OUT = [(f'{c}{c}', f'{c}{c}') for c in 'abcd'] + [('ef', 'eg'), ('hi', 'ji')]
HELD_OUT += [(c, 'zzz') for c in 'klmno']
TRAINING = [('x', 'y')] * 8


def run(model_dir, task, **changes):
    evaluator = DecodedText(predict=repeat_inputs, every=2, **changes)
    config = TrainConfig(
        model_dir=model_dir,
        objective=Nothing(),
        partitioner=PjitPartitioner(layout='fsdp'),
        optimizer=optax.sgd(0.1),
        task=task,
        total_steps=3,
        batch_size=8,
        sequence_length={'inputs': 8, 'targets': 8},
        evaluators={'text': evaluator},
        checkpoints=CheckpointConfig(period=0),
        writers=(JsonWriter,),
        log_every=3,
    )
    train(config)
    return [r for r in records(model_dir) if any(name.startswith('text/') for name in r)]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def lengths(targets, predictions):
    return {'letters': sum(map(len, predictions)), 'examples': len(targets)}


def test_held_out_examples_are_predicted_once_and_scored(tmp_path):
    task = InputsToTargets(
        source=TRAINING,
        held_out=HELD_OUT,
        pack=True,  # predictions need one example per row
        name='repeat',
        metrics=(exact_match, token_accuracy, lengths),
    )
    room = {'inputs': 8, 'targets': 8}  # for two examples
    scored = run(tmp_path / 'run', task, write_n_results=5, sequence_length=room)
    expected = {
        'exact_match': 100 * 4 / 11,
        'token_accuracy': 100 * (4 * 2 + 2) / (6 * 2 + 5 * 3),
        'letters': 6 * 2 + 5,
        'examples': 11,
    }
    assert [r['step'] for r in scored] == [2, 3]
    for record in scored:
        assert {k: v for k, v in record.items() if k != 'step'} == pytest.approx(
            {f'text/{name}': value for name, value in expected.items()}
        )
    folder = tmp_path / 'run/inference_eval'
    assert lines_of(folder / 'repeat-metrics.jsonl') == [
        {'step': step, **{k: pytest.approx(v) for k, v in expected.items()}} for step in (2, 3)
    ]
    results = lines_of(folder / 'repeat-000003.jsonl')
    assert len(results) == 5
    assert results[4] == {
        'input': {'inputs_pretokenized': 'ef', 'targets_pretokenized': 'eg'},
        'target': 'eg',
        'output': 'ef',
        'prediction': 'ef',
    }


def test_a_batch_that_the_devices_cannot_divide_is_refused_before_the_first_step(tmp_path):
    task = InputsToTargets(source=TRAINING, held_out=HELD_OUT, metrics=(exact_match,))
    with pytest.raises(ValueError, match='12'):
        run(tmp_path / 'run', task, batch_size=12)
    assert not (tmp_path / 'run/metrics.jsonl').exists()


def test_the_tasks_of_a_mixture_are_scored_one_by_one(tmp_path):
    def first_letter(text, *, example, is_target):
        assert text in (example['targets_pretokenized'], example['inputs_pretokenized'])
        return text[:1]

    one = InputsToTargets(source=TRAINING, held_out=HELD_OUT, name='one', metrics=(exact_match,))
    two = dataclasses.replace(one, name='two', postprocess=first_letter)
    scored = run(tmp_path / 'run', Mixture(tasks=[one, two], weights=[1, 1]), num_examples=6)
    assert scored[-1]['text/one/exact_match'] == pytest.approx(100 * 4 / 6)
    assert scored[-1]['text/two/exact_match'] == pytest.approx(100 * 5 / 6)
    results = lines_of(tmp_path / 'run/inference_eval/two-000003.jsonl')
    assert len(results) == 6
    assert all(r['prediction'] == r['output'][:1] != r['output'] for r in results)


def test_targets_are_not_cut_to_the_length_of_rows(tmp_path):
    task = InputsToTargets(source=TRAINING, held_out=[('abc', 'abcdefgh')], metrics=(exact_match,))
    cut = {'inputs': 8, 'targets': 5}
    run(tmp_path / 'run', task, sequence_length=cut)
    [result] = lines_of(tmp_path / 'run/inference_eval/Records-000003.jsonl')
    assert result['target'] == 'abcdefgh'
    assert result['prediction'] == 'abc'


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'predict': None}, 'predict is None'),
        ({'num_examples': 0}, 'num_examples is 0'),
        ({'write_n_results': -1}, 'write_n_results is -1'),
        ({'sequence_length': {'words': 3}}, "'inputs': 512"),
    ],
)
def test_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        DecodedText(**settings)


def test_a_task_without_metrics(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluator 'text' has no metrics: set DecodedText"):
        run(tmp_path / 'run', InputsToTargets(source=TRAINING, held_out=HELD_OUT))
    assert not np.any([p.name == 'inference_eval' for p in (tmp_path / 'run').glob('*')])
