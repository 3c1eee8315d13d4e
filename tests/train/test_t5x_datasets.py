"""T5X's dataset settings: tasks by name, splits, vocabularies, and runs that score decoded text."""

import dataclasses
import json
import sys
import types
from typing import ClassVar

import gin
import numpy as np
import pytest
from gin_fixtures import load_config
from small import records

from train.data import ByT5Tokenizer, ByteTokenizer, CausalLM, InputsToTargets, Mixture, Subset
from train.data.text.sources import Records
from train.errors import ConfigError
from train.gin.load import find_entry
from train.gin.parsing import allow_packages
from train.t5x import seqio
from train.t5x.datasets import DatasetConfig

pytestmark = pytest.mark.core

PAIRS = [(f'in {i}', f'out {i}') for i in range(10)]
BYTES = ByT5Tokenizer()
READER = types.SimpleNamespace(  # a model, as far as rows depend on it
    architecture='encoder_decoder',
    output_vocabulary=BYTES,
    input_vocabulary=ByT5Tokenizer(extra_ids=9),
)
LENGTHS = {'inputs': 16, 'targets': 8}


def settings(task, **changes):
    given = {
        'mixture_or_task_name': task,
        'task_feature_lengths': LENGTHS,
        'split': 'train',
        'batch_size': 8,
        'shuffle': True,
    }
    return DatasetConfig(**given | changes)


def targets_of(rows, count):
    arrays = [rows[i]['decoder_target_tokens'] for i in range(count)]
    return [BYTES.decode(a).decode() for a in arrays]


# Settings.


def test_the_model_decides_how_a_task_becomes_rows():
    task = InputsToTargets(source=PAIRS)
    found = settings(task, pack=True).training_task(READER)
    assert (found.architecture, found.pack) == ('encoder_decoder', True)
    assert found.tokenizer == BYTES
    assert found.inputs_tokenizer == READER.input_vocabulary
    changes = {'architecture': 'decoder_only', 'input_vocabulary': BYTES}
    decoder = types.SimpleNamespace(**{**vars(READER), **changes})
    mixture = settings(Mixture(tasks=[task, task], weights=[1, 2])).training_task(decoder)
    for part in mixture.tasks:
        assert (part.architecture, part.pack) == ('decoder_only', False)
        assert part.inputs_tokenizer is None
    own = CausalLM(source=Records(records=['a']), tokenizer=ByT5Tokenizer(extra_ids=7))
    assert settings(own).training_task(READER) == own, 'it has a tokenizer of its own'
    plain = dataclasses.replace(own, tokenizer=ByteTokenizer())
    assert settings(plain).training_task(READER).tokenizer == BYTES


def test_splits_and_orders():
    task = InputsToTargets(source=PAIRS, held_out=[('held out', 'held out')])
    numbers = [f'out {i}' for i in range(10)]
    config = settings(task, split='train[2:5]', shuffle=False)
    rows = config.training_task(READER).open(LENGTHS).training(0)
    assert targets_of(rows, 6) == numbers[2:5] * 2
    config = settings(task, split='train[:40%]', shuffle=False)
    rows = config.evaluated_task(READER).open(LENGTHS).evaluation().rows
    assert targets_of(rows, len(rows)) == numbers[:4]
    for split in ('test', 'validation_matched'):
        config = settings(task, split=split, shuffle=False)
        assert not isinstance(config.evaluated_task(READER), Subset)
        rows = config.evaluated_task(READER).open(LENGTHS).evaluation().rows
        assert targets_of(rows, 1) == ['held out'[:7]]
    with pytest.raises(ConfigError, match="split is 'trains'"):
        settings(task, split='trains').training_task(READER)


def test_lengths():
    pairs = InputsToTargets(source=PAIRS)
    text = CausalLM(source=Records(records=['a']))
    assert settings(pairs).lengths(pairs) == LENGTHS
    assert settings(pairs, task_feature_lengths=None).lengths(pairs) == {
        'inputs': None,
        'targets': None,
    }
    assert settings(text, task_feature_lengths={'targets': 9}).lengths(text) == 9
    for task, lengths, message in [
        (text, LENGTHS, "only targets, not inputs; write {'targets': 8}"),
        (text, None, "write {'targets'"),
        (pairs, {'inputs': 4}, "write {'targets'"),
        (pairs, LENGTHS | {'scores': 3}, "not scores; write {'inputs': 16, 'targets': 8}"),
    ]:
        with pytest.raises(ConfigError) as error:
            settings(task, task_feature_lengths=lengths).lengths(task)
        assert message in str(error.value)
    uncut = settings(pairs, trim_output_features=False).training_task(READER)
    assert uncut.open({'inputs': 5, 'targets': 6}).rows_per_epoch == 10
    with pytest.raises(ConfigError, match='longest targets have 6 tokens, but rows have 5: use 6'):
        uncut.open({'inputs': 5, 'targets': 5})


# Tasks by name.


@dataclasses.dataclass(frozen=True)
class Feature:
    vocabulary: object


class ByteVocabulary:
    """seqio's class of this name, by its documentation."""

    extra_ids = 100


@dataclasses.dataclass
class SeqioTask:
    """What this trainer uses of seqio.Task, by its documentation."""

    name: str
    examples: list
    reads: list = dataclasses.field(default_factory=list)
    source: object = dataclasses.field(default_factory=types.SimpleNamespace)
    metric_fns: tuple = ()
    postprocess_fn: object = None
    output_features: ClassVar = dict.fromkeys(('inputs', 'targets'), Feature(ByteVocabulary()))

    def get_dataset(self, sequence_length=None, split='train', use_cached=False, shuffle=True,
                    seed=None, num_epochs=1, trim_output_features=True):  # fmt: skip
        assert not shuffle and num_epochs == 1 and not trim_output_features
        self.reads.append((split, sequence_length, use_cached))
        given = [{k: np.array(v) for k, v in example.items()} for example in self.examples]
        return types.SimpleNamespace(as_numpy_iterator=lambda: iter(given))


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """A package seqio with two tasks and a mixture of them."""
    examples = [{'inputs': [i + 3, 1], 'targets': [i + 4, i + 5, 1]} for i in range(20)]
    one, two = SeqioTask('one', examples[:15]), SeqioTask('two', examples[15:])
    mixture = types.SimpleNamespace(
        name='both', tasks=[one, two], get_rate={'one': 3.0, 'two': 1.0}.get
    )
    mixture.get_rate = lambda task: {'one': 3.0, 'two': 1.0}[task.name]
    known = {'one': one, 'two': two, 'both': mixture}

    def get_mixture_or_task(name):
        if name not in known:
            raise ValueError(f'no task {name}')
        return known[name]

    module = types.ModuleType('seqio')
    module.get_mixture_or_task = get_mixture_or_task
    module.__spec__ = types.SimpleNamespace(name='seqio')
    monkeypatch.setitem(sys.modules, 'seqio', module)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    return known


def test_a_task_of_seqio_is_read_once(installed):
    config = settings('one', split='train[:15]', use_cached=True)
    for _ in range(2):
        task = config.training_task(READER)
        assert task.tokenizer == ByT5Tokenizer(extra_ids=100)
        rows = task.open(LENGTHS).training_rows[0].in_order()
        assert len(rows) == 15
        assert rows[2]['encoder_input_tokens'].tolist() == [5, 1, *[0] * 14]
        assert rows[2]['decoder_target_tokens'].tolist() == [6, 7, 1, 0, 0, 0, 0, 0]
    # Once for each feature.
    assert installed['one'].reads == [('train[:15]', LENGTHS, True)] * 2
    # seqio selects splits and slices, whatever their names.
    evaluated = settings('one', split='dev[5:]', shuffle=False).evaluated_task(READER)
    assert evaluated.open(LENGTHS).evaluation().num_documents == 15
    assert installed['one'].reads[2:] == [('dev[5:]', LENGTHS, False)] * 2
    in_order = settings('one', split='dev[5:]', shuffle=False).training_task(READER)
    first = in_order.open(LENGTHS).training(0)[0]
    assert first['decoder_target_tokens'].tolist() == [4, 5, 1, 0, 0, 0, 0, 0]


def test_a_mixture_of_seqio_has_its_rates(installed):
    task = settings('both').training_task(READER)
    assert task.weights == [3.0, 1.0]
    rows = task.open(LENGTHS).training(0)
    first = np.array([rows[i]['encoder_input_tokens'][0] - 3 for i in range(80)])
    assert np.count_nonzero(first >= 15) == 20


def test_names_that_no_task_has(installed, monkeypatch, tmp_path):
    config = settings('three', module='my_t5x_tasks')
    with pytest.raises(ConfigError) as error:
        _ = config.task
    assert "'three': there is no task" in str(error.value)
    assert '--gin_allow=my_t5x_tasks' in str(error.value)
    assert '--gin.MIXTURE_OR_TASK_NAME=@InputsToTargets()' in str(error.value)
    (tmp_path / 'my_t5x_tasks.py').write_text(
        'from train.t5x import seqio\n'
        'from train.data import InputsToTargets\n'
        "seqio.TaskRegistry.add('three', InputsToTargets(source=[('a', 'b')]))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    allow_packages(['my_t5x_tasks'])
    try:
        assert config.task.source == [('a', 'b')]
    finally:
        allow_packages([])
        seqio.TaskRegistry.remove('three')


def test_vocabularies():
    assert seqio.ByteVocabulary(extra_ids=100).num_tokens == 359
    assert seqio.ByteVocabulary().num_tokens == 259
    assert seqio.PassThroughVocabulary(size=50, eos_id=2).separator == 2
    assert seqio.SentencePieceVocabulary('a.model', 300).extra_ids == 300
    assert seqio.Feature(BYTES, add_eos=False).vocabulary is BYTES
    for make, message in [
        (lambda: seqio.Feature(None), 'seqio.Feature.vocabulary'),
        (lambda: seqio.Feature(BYTES, rank=2), 'write seqio.Feature.rank = 1'),
        (lambda: seqio.SentencePieceVocabulary('a', reverse_extra_ids=False), 'from the end'),
    ]:
        with pytest.raises(ConfigError, match=message):
            make()


# A run.

FILE = """
from __gin__ import dynamic_registration
import __main__ as train_script
import seqio
from t5.data import mixtures
from t5x import adafactor
from t5x import models
from t5x import partitioning
from t5x import trainer
from t5x import utils
from t5x.examples.t5 import network

MIXTURE_OR_TASK_NAME = %gin.REQUIRED
MIXTURE_OR_TASK_MODULE = 't5.data.mixtures'
MODEL_DIR = %gin.REQUIRED
VOCABULARY = @seqio.ByteVocabulary()

train_script.train:
  model = @models.EncoderDecoderModel()
  model_dir = %MODEL_DIR
  train_dataset_cfg = @train/utils.DatasetConfig()
  train_eval_dataset_cfg = @train_eval/utils.DatasetConfig()
  infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()
  checkpoint_cfg = @utils.CheckpointConfig()
  partitioner = @partitioning.PjitPartitioner()
  trainer_cls = @trainer.Trainer
  total_steps = 2
  eval_steps = 1
  eval_period = 2
  random_seed = 0
  inference_evaluator_cls = @seqio.Evaluator

partitioning.PjitPartitioner.num_partitions = 1
trainer.Trainer.learning_rate_fn = @utils.create_learning_rate_scheduler()
utils.create_learning_rate_scheduler.factors = 'constant'
utils.CheckpointConfig.save = @utils.SaveCheckpointConfig()
seqio.Evaluator:
  logger_cls = [@seqio.PyLoggingLogger, @seqio.TensorBoardLogger, @seqio.JSONLogger]
  num_examples = 4
seqio.JSONLogger.write_n_results = 3

utils.DatasetConfig.module = %MIXTURE_OR_TASK_MODULE
train/utils.DatasetConfig:
  mixture_or_task_name = %MIXTURE_OR_TASK_NAME
  task_feature_lengths = {'inputs': 24, 'targets': 16}
  split = 'train'
  batch_size = 8
  shuffle = True
  seed = 42
  pack = True
train_eval/utils.DatasetConfig:
  mixture_or_task_name = %MIXTURE_OR_TASK_NAME
  task_feature_lengths = {'inputs': 20, 'targets': 12}
  split = 'validation'
  batch_size = 8
  shuffle = False
  pack = False
infer_eval/utils.DatasetConfig:
  mixture_or_task_name = %MIXTURE_OR_TASK_NAME
  task_feature_lengths = None
  split = 'train[:5]'
  batch_size = 8
  shuffle = False

models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = %VOCABULARY
  output_vocabulary = %VOCABULARY
  optimizer_def = @adafactor.Adafactor()
models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 2
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 384
  emb_dim = 16
  num_heads = 2
  num_encoder_layers = 1
  num_decoder_layers = 1
  head_dim = 8
  mlp_dim = 32
  mlp_activations = ('gelu', 'linear')
  dropout_rate = 0.0
"""


@pytest.mark.long
def test_a_run_trains_evaluates_and_scores_decoded_text(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    lines = [json.dumps({'question': x, 'answer': y}) for x, y in PAIRS * 4]
    (tmp_path / 'pairs.jsonl').write_text('\n'.join(lines))
    (tmp_path / 'run.gin').write_text(FILE)
    flags = [
        'MIXTURE_OR_TASK_NAME=@InputsToTargets()',
        'InputsToTargets.source=@JsonLines()',
        f"JsonLines.pattern='{tmp_path}/*.jsonl'",
        'JsonLines.holdout_percent=30',
        "InputsToTargets.inputs='question'",
        "InputsToTargets.targets='answer'",
        "InputsToTargets.name='numbers'",
        'InputsToTargets.metrics=[@exact_match, @token_accuracy]',
        f"MODEL_DIR='{tmp_path}/run'",
    ]
    gin.clear_config()
    load_config([str(tmp_path / 'run.gin')], flags)
    find_entry()()
    [_, last] = [r for r in records(tmp_path / 'run') if r['step'] == 2]
    assert {'eval/numbers/loss', 'eval/numbers/accuracy'} <= last.keys()
    decoded = {k: v for k, v in last.items() if k.startswith('inference_eval/')}
    assert set(decoded) == {'inference_eval/exact_match', 'inference_eval/token_accuracy'}
    folder = tmp_path / 'run/inference_eval'
    results = [json.loads(x) for x in (folder / 'numbers-000002.jsonl').read_text().splitlines()]
    assert len(results) == 3
    texts = [result['input'] for result in results]
    assert all(t['inputs_pretokenized'].replace('in', 'out') == t['targets_pretokenized']
               for t in texts)  # fmt: skip
    [scores] = (folder / 'numbers-metrics.jsonl').read_text().splitlines()
    assert json.loads(scores)['exact_match'] == decoded['inference_eval/exact_match']
