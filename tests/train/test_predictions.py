"""Files with predictions and scores: their lines, shards, parts and settings."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from partitioning import PjitPartitioner
from partitioning.mesh import MeshConfig
from train import TrainConfig
from train.data import InputsToTargets
from train.decoding import Predictions
from train.errors import ConfigError
from train.evaluators.evaluator import prepare_evaluators
from train.evaluators.files import PartFiles
from train.evaluators.predictions import PredictionFiles
from train.objectives import Objective
from train.running.run import prepare

pytestmark = pytest.mark.core
# Rows of 8 tokens: 10 examples in batches of 4.
PAIRS = [('abc'[: n % 3 + 1] + str(n), 'xyz'[n % 3] * (n % 4 + 1)) for n in range(10)]


class Shift(Objective):
    """Predicts the inputs, with tokens increased by its parameter."""

    def init(self, key, batch):
        return {'params': {'by': jnp.int32(1)}}

    def loss(self, params, batch, rng, variables):
        raise NotImplementedError

    def start_decoding(self, variables, batch, *, prompt_with_targets, end_token):
        raise NotImplementedError

    def score(self, params, batch, variables=None):
        return -jnp.sum(batch['decoder_target_tokens'], axis=1) * params['by'] / 2


def shift(objective, params, batch, key, *, variables, end_token):
    tokens = batch['encoder_input_tokens']
    is_text = (tokens > 0) & (tokens != end_token)
    return Predictions(jnp.where(is_text, tokens + params['by'], tokens), jnp.sum(tokens, axis=1))


def shift_two(objective, params, batch, key, **options):
    tokens, scores = shift(objective, params, batch, key, **options)
    both = jnp.stack([batch['encoder_input_tokens'], tokens], axis=1)
    return Predictions(both, jnp.stack([scores - 1, scores], axis=1))


def next_letters(text):
    return ''.join(chr(ord(c) + 1) for c in text)


def write(folder, **settings):
    settings = {'predict': shift, 'output_dir': str(folder), 'batches_per_part': 1} | settings
    two_devices = MeshConfig(axes={'data': 2}, devices=jax.devices()[:2])
    run = prepare(
        TrainConfig(
            model_dir=str(folder),
            objective=Shift(),
            partitioner=PjitPartitioner(layout='data_parallel', mesh=two_devices),
            optimizer=optax.identity(),
            task=InputsToTargets(source=PAIRS, held_out=PAIRS, name='letters/1', pack=True),
            total_steps=1,
            batch_size=4,
            sequence_length={'inputs': 8, 'targets': 8},
            evaluators={'predictions': PredictionFiles(**settings)},
        )
    )
    [evaluator] = prepare_evaluators(run).values()
    assert evaluator.run(run.plan.init(jax.random.key(0)), 7) == {}


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def inputs(pair):
    return {'inputs_pretokenized': pair[0], 'targets_pretokenized': pair[1]}


def test_every_example_has_a_line(tmp_path, capsys):
    write(tmp_path, batch_size=6)
    file = tmp_path / 'letters_1-predict.jsonl-00000-of-00001'
    assert lines(file) == [{'inputs': inputs(p), 'prediction': next_letters(p[0])} for p in PAIRS]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert str(file) in ''.join(capsys.readouterr().out.split('\n'))


def test_scores_and_all_decodes(tmp_path):
    write(tmp_path, mode='score', output_dir=None)
    file = tmp_path / 'predictions/7/letters_1-score.jsonl-00000-of-00001'
    # ByT5's tokens are bytes + 3, and 1 ends a text.
    sums = [sum(ord(c) + 3 for c in targets) + 1 for _, targets in PAIRS]
    expected = zip(PAIRS, sums, strict=True)
    assert lines(file) == [{'inputs': inputs(p), 'score': -s / 2} for p, s in expected]

    write(tmp_path, mode='predict_with_aux', predict=shift_two)
    found = lines(tmp_path / 'letters_1-predict_with_aux.jsonl-00000-of-00001')
    assert [line['prediction'] for line in found] == [[p[0], next_letters(p[0])] for p in PAIRS]
    sums = [sum(ord(c) + 3 for c in inputs) + 1 for inputs, _ in PAIRS]
    assert [line['aux'] for line in found] == [{'scores': [s - 1, s]} for s in sums]


def test_shards_take_turns(tmp_path):
    write(tmp_path, shard_index=1, num_shards=3)
    found = lines(tmp_path / 'letters_1-predict.jsonl-00001-of-00003')
    assert [line['inputs'] for line in found] == [inputs(pair) for pair in PAIRS[1::3]]


def test_a_stopped_command_resumes_after_its_last_part(tmp_path, monkeypatch, capsys):
    def fail_after_two(files, number, text):
        if number == 2:
            raise KeyboardInterrupt
        write_part(files, number, text)

    write_part = PartFiles.write
    monkeypatch.setattr(PartFiles, 'write', fail_after_two)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path)
    monkeypatch.undo()
    folder = tmp_path / 'tmp-letters_1-predict-00000-of-00001'
    parts = sorted(folder.glob('*-chunk_*'))
    assert [len(lines(part)) for part in parts] == [4, 4]

    with pytest.raises(
        ConfigError, match=r'parts of another run: predict was shift and is shift_t'
    ):
        write(tmp_path, predict=shift_two)
    kept = (folder / 'settings.json').read_bytes()
    for damaged in (b'\xff', b'', b'[1]', b'null'):
        (folder / 'settings.json').write_bytes(damaged)
        with pytest.raises(ConfigError, match=r'settings\.json cannot be read'):
            write(tmp_path)
    (folder / 'settings.json').write_bytes(kept)
    parts[0].write_text('{"marked": 1}\n')
    write(tmp_path)
    assert 'resumes at example 8 of 10' in capsys.readouterr().out
    found = lines(tmp_path / 'letters_1-predict.jsonl-00000-of-00001')
    assert found[0] == {'marked': 1}, 'a finished part was written again'
    assert [line['inputs'] for line in found[1:]] == [inputs(pair) for pair in PAIRS[4:]]
    assert not folder.exists()


def test_parts_may_stay(tmp_path):
    write(tmp_path, merge_parts=False, batches_per_part=2)
    folder = tmp_path / 'tmp-letters_1-predict-00000-of-00001'
    assert [len(lines(part)) for part in sorted(folder.glob('*-chunk_*'))] == [8, 2]


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'mode': 'guess'}, "mode is 'guess'.*predict_with_aux"),
        ({'shard_index': 2, 'num_shards': 2}, 'shard_index is 2 of 2 shards.*0 to 1'),
        ({'batches_per_part': 0}, 'batches_per_part is 0'),
    ],
)
def test_impossible_settings_are_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        PredictionFiles(**settings)
