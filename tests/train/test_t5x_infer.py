"""T5X's infer and evaluate scripts on a checkpoint of T5X: files and scores."""

import json

import gin
import numpy as np
import pytest
import t5x_reference
from gin_fixtures import load_config
from tensorboardX.record_writer import RecordWriter
from test_tf_records import example

from train.errors import ConfigError
from train.gin.load import find_entry

pytestmark = pytest.mark.core

MODEL = """
from __gin__ import dynamic_registration
import __main__ as {script}
import seqio
from t5x import decoding
from t5x import models
from t5x import adafactor
from t5x import partitioning
from t5x import utils
from t5x.examples.t5 import network
from train import data
from train.evaluators import text_metrics

MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = @data.TokenIds()
  output_vocabulary = @data.TokenIds()
  optimizer_def = @adafactor.Adafactor()
  decode_fn = @decoding.beam_search
data.TokenIds.num_tokens = 160
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 160
  emb_dim = 32
  num_heads = 4
  head_dim = 8
  mlp_dim = 64
  num_encoder_layers = 2
  num_decoder_layers = 2
  dropout_rate = 0.0
  mlp_activations = ('gelu', 'linear')

utils.DatasetConfig:
  task_feature_lengths = {{'inputs': 16, 'targets': 14}}
  batch_size = 4
  shuffle = False
utils.RestoreCheckpointConfig:
  path = '{checkpoint}'
  mode = 'specific'
partitioning.PjitPartitioner.num_partitions = 2
{script}.{function}:
  model = %MODEL
  dataset_cfg = @utils.DatasetConfig()
  restore_checkpoint_cfg = @utils.RestoreCheckpointConfig()
  partitioner = @partitioning.PjitPartitioner()
  output_dir = '{folder}'
"""
TASK = """
seqio.get_mixture_or_task.tasks = {{'numbers': @data.InputsToTargets()}}
data.InputsToTargets:
  source = @data.JsonLines()
  tokenizer = @data.TokenIds()
  name = 'numbers'
  cache_dir = '{folder}/cache'
  metrics = [@text_metrics.sequence_accuracy]
data.JsonLines:
  pattern = '{folder}/examples.jsonl'
  holdout_percent = 100.0
utils.DatasetConfig:
  mixture_or_task_name = 'numbers'
  split = 'validation'
"""
INFER = """
infer_script.infer:
  mode = 'predict_with_aux'
  checkpoint_period = 1
models.EncoderDecoderModel.predict_batch_with_aux:
  num_decodes = 4
  return_all_decodes = True
"""


def as_text(tokens):
    return ' '.join(str(t) for t in tokens if t > 1)


@pytest.fixture
def examples():
    """The texts of the batch 'padded', which T5X decoded."""
    arrays = t5x_reference.arrays('t5_1_1')
    batch = [arrays[f'padded/in/{n}_tokens'] for n in ('encoder_input', 'decoder_target')]
    return [(as_text(x), as_text(y)) for x, y in zip(*batch, strict=True)]


@pytest.fixture
def run(tmp_path, examples):
    """Runs a script with more settings."""
    lines = [json.dumps({'inputs': x, 'targets': y}) for x, y in examples]
    (tmp_path / 'examples.jsonl').write_text('\n'.join(lines))

    def run(script, function, *texts):
        checkpoint = t5x_reference.checkpoint('t5_1_1-orbax-10')
        file = tmp_path / 'run.gin'
        values = {'script': script, 'function': function, 'folder': tmp_path}
        text = MODEL.format(checkpoint=checkpoint, **values) + ''.join(texts)
        file.write_text(text)
        load_config([str(file)])
        return find_entry()()

    yield run
    gin.clear_config()


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_infer_writes_the_beams_of_t5x(run, tmp_path, examples):
    run('infer_script', 'infer', TASK.format(folder=tmp_path), INFER)
    lines = read(tmp_path / 'numbers-predict_with_aux.jsonl-00000-of-00001')
    expected = t5x_reference.arrays('t5_1_1')
    decodes = [[as_text(x) for x in row] for row in expected['decode/step10/beam4/tokens']]
    assert [line['prediction'] for line in lines] == decodes
    scores = [line['aux']['scores'] for line in lines]
    np.testing.assert_allclose(scores, expected['decode/step10/beam4/scores'], atol=1e-4)
    texts = [tuple(line['inputs'].values()) for line in lines]
    assert texts == examples


def test_infer_scores_targets_as_t5x(run, tmp_path):
    run(
        'infer_script',
        'infer',
        TASK.format(folder=tmp_path),
        INFER,
        "infer_script.infer.mode = 'score'",
    )
    scores = [x['score'] for x in read(tmp_path / 'numbers-score.jsonl-00000-of-00001')]
    expected = t5x_reference.arrays('t5_1_1')['padded/step10/score']
    np.testing.assert_allclose(scores, expected, rtol=1e-5)


TF_RECORDS = """
utils.DatasetConfig:
  mixture_or_task_name = @infer_script.create_task_from_tfexample_file()
  split = 'infer'
infer_script.create_task_from_tfexample_file:
  paths = ['{folder}/*.tfrecord']
  file_type = 'tfrecord'
  inputs_key = 'inputs'
  targets_key = None
  features = {{'inputs': @inputs/seqio.Feature(), 'targets': @outputs/seqio.Feature()}}
inputs/seqio.Feature.vocabulary = @models.get_input_vocabulary()
outputs/seqio.Feature.vocabulary = @models.get_output_vocabulary()
models.get_input_vocabulary.model = %MODEL
models.get_output_vocabulary.model = %MODEL
infer_script.infer:
  mode = 'predict'
  checkpoint_period = 100
"""


def test_tf_records_need_no_targets(run, tmp_path, examples):
    writer = RecordWriter(str(tmp_path / 'a.tfrecord'))
    for inputs, _ in examples:
        writer.write(example({'inputs': [inputs.encode()]}))
    writer.close()
    run('infer_script', 'infer', TF_RECORDS.format(folder=tmp_path))
    [path] = tmp_path.glob('*.jsonl-00000-of-00001')
    # One beam equals the greedy search, except where that ends early.
    predictions = [line['prediction'] for line in read(path)]
    assert len(predictions) == 4 and all(predictions)


def test_evaluate_scores_the_decoded_text(run, tmp_path):
    evaluator = 'eval_script.evaluate.inference_evaluator_cls = @seqio.Evaluator\n'
    beams = 'models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4\n'
    scores = run('eval_script', 'evaluate', TASK.format(folder=tmp_path), evaluator, beams)
    arrays = t5x_reference.arrays('t5_1_1')
    targets = arrays['padded/in/decoder_target_tokens']
    best = arrays['decode/step10/beam4/tokens'][:, -1]
    right = [as_text(x) == as_text(y) for x, y in zip(best, targets, strict=True)]
    assert scores['inference_eval/sequence_accuracy'] == 100 * np.mean(right)
    loss = -arrays['padded/step10/score'].sum() / (targets > 0).sum()
    assert scores['eval/loss_per_nonpadding_target_token'] == pytest.approx(loss, rel=1e-5)
    assert scores['eval/loss'] == pytest.approx(loss * (targets > 0).sum(), rel=1e-5)


@pytest.mark.parametrize(
    'setting, message',
    [
        ("infer_script.infer.mode = 'guess'", "infer.mode is 'guess'"),
        ('infer_script.infer.checkpoint_period = 0', 'infer_script.infer: batches_per_part is 0'),
        ('infer_script.infer.fallback_init_rng = 3', 'fallback_init_rng is 3.*complete checkpoint'),
        ("utils.RestoreCheckpointConfig.path = ''", 'path is empty: give a checkpoint'),
    ],
)
def test_settings_that_cannot_be_honoured_are_errors(run, tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        run('infer_script', 'infer', TASK.format(folder=tmp_path), INFER, setting)
