"""Settings of T5X that cannot be honoured are refused by name."""

import re
import types

import pytest
from refusals import TextOnlyTokenizer

from train.data import ByteTokenizer, CausalLM, InputsToTargets, Mixture, TextFiles
from train.errors import ConfigError
from train.t5x import models, trainer
from train.t5x.adafactor import Adafactor
from train.t5x.datasets import DatasetConfig
from train.t5x.network import DecoderWrapper, TransformerConfig

pytestmark = pytest.mark.core

# For each configurable: refused bindings, and a part of the message after the setting's name.

REFUSED = {
    'train_script.train': [
        ('relative_steps=0', '>= 1'),
        ('use_hardware_rng=3', 'write train_script.train.use_hardware_rng = True'),
        ('get_dataset_fn=@gin_utils.summarize_gin_config', 'use @utils.get_dataset'),
        (
            'train_eval_get_dataset_fn=@gin_utils.summarize_gin_config',
            'use @utils.get_training_eval_datasets',
        ),
        ('prepare_train_iter_fn=@gin_utils.summarize_gin_config', 'in advance'),
        ('run_eval_before_training=1', 'write train_script.train.run_eval_before_training = True'),
        ('train_state_initializer_cls=@trainer.Trainer', 'on their own devices'),
        ('verify_matching_vocabs_fn=3', 'it must be a function or None'),
        ('gc_period=-1', '>= 0'),
        ('use_orbax=3', 'write train_script.train.use_orbax = True'),
        ('concurrent_metrics=3', 'write train_script.train.concurrent_metrics = True'),
        ('summarize_config_fn=3', 'write @gin_utils.summarize_gin_config, without parentheses'),
        ("actions={'TRAIN': [@trainer.Trainer]}", '@trainer.EarlyStoppingAction()'),
        ("actions={'TRAINING': []}", 'TRAIN, TRAIN_EVAL, INFER_EVAL'),
        ("actions='TRAIN'", 'TerminateOnNanAction'),
        ('inference_evaluator_cls=@trainer.Trainer', 'write @seqio.Evaluator, without parentheses'),
        (
            'trainer_cls=@trainer.WeightMetricsComputer',
            'write @trainer.Trainer, without parentheses',
        ),
        ('trainer_cls=@trainer.Trainer()', 'write @trainer.Trainer, without parentheses'),
        (
            'model=@models.DecoderOnlyModel',
            'write @models.EncoderDecoderModel(), with the parentheses',
        ),
        ('train_dataset_cfg=None', 'write @utils.DatasetConfig(), with the parentheses'),
        ('train_dataset_cfg=@utils.DatasetConfig', 'with the parentheses'),
        ('train_eval_dataset_cfg=@utils.DatasetConfig', 'with the parentheses'),
        ('infer_eval_dataset_cfg=@utils.DatasetConfig', 'with the parentheses'),
        ('checkpoint_cfg=None', 'write @utils.CheckpointConfig(), with the parentheses'),
        ("actions={'TRAIN': @trainer.TerminateOnNanAction()}", 'it must be a list'),
        ('eval_period=-1', '>= 0'),
        ('eval_steps=0', '>= 1'),
        ('stats_period=0', '>= 1'),
    ],
    'train/utils.DatasetConfig': [
        ("mixture_or_task_name='count'", "Did you mean 'counts'?"),
        ('mixture_or_task_name=@data.CausalLM', 'there is no task'),
        ('task_feature_lengths=None', "write {'targets': number of tokens in a row}"),
        ("task_feature_lengths={'inputs': 8}", "write {'targets': number of tokens in a row}"),
        ("task_feature_lengths={'inputs': 8, 'targets': 16}", "write {'targets': 16}"),
        ("task_feature_lengths={'targets': 0}", '>= 1'),
        ("split='dev'", "split is 'dev': write 'train', 'validation' or 'test'"),
        ('batch_size=0', '>= 1'),
        ('shuffle=1', 'write utils.DatasetConfig.shuffle = True'),
        ('seed=-1', '>= 0'),
        ('trim_output_features=1', 'write utils.DatasetConfig.trim_output_features = True'),
    ],
    'train_eval/utils.DatasetConfig': [
        ("split='dev'", "split is 'dev': write 'train', 'validation' or 'test'"),
        ("split='train[9:1]'", "'train[9:1]' is empty"),
        ("mixture_or_task_name='other'", 'there is no task'),
    ],
    'infer_eval/utils.DatasetConfig': [("mixture_or_task_name='other'", 'there is no task')],
    'utils.SaveCheckpointConfig': [
        ("dtype='float16'", "write utils.SaveCheckpointConfig.dtype = 'float32'"),
        ('checkpointer_cls=@trainer.Trainer', 'write @checkpoints.Checkpointer'),
        ('state_transformation_fns=[@trainer.Trainer]', 'leave it out'),
        ('period=-1', '>= 0'),
        ('keep=0', '>= 1'),
        ('checkpoint_steps=[0]', '>= 1'),
    ],
    'utils.RestoreCheckpointConfig': [
        ("path=['a', 'b']", 'give one path'),
        ("mode='all'", "write 'latest' or 'specific'"),
        ("assignment_map=[('a(', 'b')]", 'write a pair of a regular expression'),
        ('strict=1', 'write utils.RestoreCheckpointConfig.strict = True'),
        ("dtype='int8'", 'write utils.RestoreCheckpointConfig.dtype = None'),
        ('checkpointer_cls=@trainer.Trainer', 'write @checkpoints.Checkpointer'),
        ("state_transformation_fns=['a']", 'write a list of functions'),
    ],
    'utils.CheckpointConfig': [
        ('save=@utils.SaveCheckpointConfig', 'with the parentheses'),
        ('restore=@utils.RestoreCheckpointConfig', 'with the parentheses'),
    ],
    'trainer.Trainer': [
        ('learning_rate_fn=0.1', '@utils.create_learning_rate_scheduler()'),
        ('weight_metrics_computer=@trainer.WeightMetricsComputer', 'with the parentheses'),
    ],
    'seqio.Evaluator': [
        ('num_examples=0', '>= 1'),
        ('logger_cls=[@trainer.Trainer]', '@seqio.JSONLogger'),
    ],
    'seqio.JSONLogger': [('write_n_results=-3', '>= 0')],
    'seqio.ByteVocabulary': [('extra_ids=-1', '>= 0')],
    'models.DecoderOnlyModel': [
        ('module=@network.DecoderWrapper', 'with the parentheses'),
        ("vocabulary='bytes'", 'write @seqio.SentencePieceVocabulary(), with the parentheses'),
        ('optimizer_def=None', 'write @adafactor.Adafactor(), with the parentheses'),
        ('feature_converter_cls=@trainer.Trainer', 'leave it out'),
        ("loss_normalizing_factor='MEAN'", 'NUM_REAL_TARGET_TOKENS'),
        ('loss_normalizing_factor=0', 'a number > 0, or None'),
        ("decode_fn='sample'", '@decoding.temperature_sample'),
        ('z_loss=-1', 'z_loss'),
        ('label_smoothing=1.0', 'label_smoothing'),
    ],
    'network.DecoderWrapper': [('config=@network.TransformerConfig', 'with the parentheses')],
    'network.TransformerConfig': [
        ("mlp_activations=('geglu',)", "'relu', 'gelu' or 'silu'"),
        ('mlp_activations=()', "('relu',)"),
        ("dtype='int32'", "'bfloat16'"),
        ('dropout_rate=1.0', '>= 0 and < 1'),
        ('head_dim=0', '>= 1'),
    ],
    'adafactor.Adafactor': [
        ('learning_rate=0.1', 'trainer.Trainer.learning_rate_fn'),
        ('multiply_by_parameter_scale=3', 'a bool or an @HParamMap()'),
        ('epsilon2=-0.01', 'a number >= 0'),
        ('beta1=1.0', 'a number >= 0 and < 1, or None'),
        ("beta1='0.9'", 'it must be a number or None'),
        ('decay_rate=0', 'a number > 0 and <= 1'),
        ('decay_rate=None', 'a number > 0 and <= 1'),
        ('clipping_threshold=0.0', 'a number > 0, or None'),
        ('clipping_threshold=True', 'a number > 0, or None'),
        ('weight_decay_rate=-0.1', 'a number >= 0, or None'),
        ('epsilon1=-1e-30', 'a number > 0'),
        ('global_norm_clip_threshold=0', 'a number > 0, or None'),
        ('step_offset=1.5', 'it must be an integer'),
        ('min_dim_size_to_factor=0', '>= 1'),
        ("factored='yes'", 'it must be True or False'),
        ("dtype_momentum='int8'", "write 'float32'"),
        ("dtype_momentum='float33'", "write 'float32'"),
        ("factor_map={'a': 1}", 'write @adafactor.HParamMap()'),
        ("logical_factor_rules={'embed': 'rows'}", "write 'row', 'column', 'batch' or 'none'"),
        (
            'logical_factor_rules=@adafactor.standard_logical_factor_rules',
            'write @adafactor.standard_logical_factor_rules(), with the parentheses',
        ),
        ("weight_decay_rate_lr_exponent='2'", 'it must be a number or None'),
        ('max_parameter_scale=0', 'a number > 0, or None'),
        ('skip_nan_updates=1', 'write adafactor.Adafactor.skip_nan_updates = True'),
    ],
    'partitioning.PjitPartitioner': [
        ('params_on_devices=False', 'remove the setting'),
        ("backend='quark'", 'has no mesh: Unknown backend'),
    ],
}
ALL = [(key, *pair) for key, pairs in REFUSED.items() for pair in pairs]


@pytest.mark.parametrize('key, setting, expected', ALL, ids=[f'{k}.{s}' for k, s, _ in ALL])
def test_settings_without_equivalent_are_refused(load_t5x, tmp_path, key, setting, expected):
    where = [f"MODEL_DIR='{tmp_path}/model'", f"INITIAL_CHECKPOINT_PATH='{tmp_path}/none'"]
    settings = [*where, 'TRAIN_STEPS=1', 'BATCH_SIZE=8', f'{key}.{setting}']
    with pytest.raises(ValueError) as error:
        load_t5x('finetune', *settings)()
    [message] = str(error.value).split('\n  In call to configurable')[:1]
    assert len(message.splitlines()) == 1
    assert re.split(r'=|\[', setting)[0] in message
    assert expected in message
    assert not (tmp_path / 'model').exists()


@pytest.mark.parametrize(
    'setting, expected',
    [
        ('eval_script.evaluate.fallback_init_rng=1', 'leave it out'),
        ('eval_script.evaluate.model=@models.DecoderOnlyModel', 'with the parentheses'),
        ('eval_script.evaluate.dataset_cfg=None', 'write @utils.DatasetConfig()'),
        ('eval_script.evaluate.restore_checkpoint_cfg=None', '@utils.RestoreCheckpointConfig()'),
        ('utils.RestoreCheckpointConfig.path=[]', 'give a checkpoint'),
        ("utils.DatasetConfig.split='trein'", "write 'train', 'validation' or 'test'"),
        ('utils.DatasetConfig.task_feature_lengths=None', "{'targets': number of tokens in a row}"),
    ],
)
def test_settings_that_an_evaluation_refuses(load_t5x, tmp_path, setting, expected):
    (tmp_path / 'checkpoints/7').mkdir(parents=True)
    (tmp_path / 'checkpoints/7/_METADATA').write_text('{}')
    where = [f"CHECKPOINT_PATH='{tmp_path}/checkpoints/7'", f"EVAL_OUTPUT_DIR='{tmp_path}/scores'"]
    with pytest.raises(ConfigError) as error:
        load_t5x('eval', *where, setting)()
    assert expected in str(error.value)
    assert not (tmp_path / 'scores').exists()


def test_the_model_and_the_task_must_have_the_same_vocabulary(texts):
    given = models.DecoderOnlyModel(
        module=DecoderWrapper(config=TransformerConfig(vocab_size=264)),
        vocabulary=ByteTokenizer(),
        optimizer_def=Adafactor(),
    )
    source = TextFiles(pattern='*.txt', root=str(texts))
    same, other = CausalLM(source=source), CausalLM(source=source, tokenizer=TextOnlyTokenizer())
    given.check_vocabulary(same)
    for task in (other, Mixture(tasks=[same, other], weights=[1, 1])):
        with pytest.raises(ConfigError, match=r'vocabulary is \S+, but the task has text'):
            given.check_vocabulary(task)


def test_packed_training_rows_require_pack(texts):
    """Held-out rows do not, because packing does not change their scores."""
    packs = CausalLM(source=TextFiles(pattern='*.txt', root=str(texts)), packing='pack')
    settings = {'mixture_or_task_name': packs, 'task_feature_lengths': {'targets': 8}}
    settings |= {'batch_size': 8, 'shuffle': True, 'split': 'train'}
    reader = types.SimpleNamespace(
        architecture='decoder_only',
        output_vocabulary=ByteTokenizer(),
        input_vocabulary=ByteTokenizer(),
    )
    assert DatasetConfig(pack=True, **settings).training_task(reader) == packs
    assert DatasetConfig(pack=False, **settings).evaluated_task(reader).task == packs
    with pytest.raises(ConfigError, match='write pack = True'):
        DatasetConfig(pack=False, **settings).training_task(reader)


def test_an_action_may_name_the_task_itself():
    """A flag may replace the name of a task of seqio by a task, which actions name, too."""
    task = InputsToTargets(source=[('a', 'b')])
    actions = {'TRAIN_EVAL': [trainer.TerminateOnNanAction(task=task)]}
    [condition], _ = trainer.translate_actions('actions', actions, {'TRAIN_EVAL': {'toy': 'eval'}})
    assert condition.metric == 'eval/loss'
    two = {'TRAIN_EVAL': {'toy': 'eval/toy', 'other': 'eval/other'}}
    with pytest.raises(ConfigError, match="the tasks are 'toy', 'other'"):
        trainer.translate_actions('actions', actions, two)
