"""Each setting of T5X is honoured or refused by name; and what this trainer has got for them."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from refusals import TakesText
from small import batch, model
from test_t5x_gin import _own_registry, files, load  # noqa: F401  # fixtures

from partitioning import (
    PjitPartitioner,
    TrainState,
    fsdp_logical_axis_rules,
    standard_logical_axis_rules,
    unbox,
)
from partitioning.plan import ResolvedPlan
from train.checkpoints import CheckpointConfig, RestoreConfig
from train.data import ByteTokenizer, CausalLM, Mixture, TextFiles
from train.errors import ConfigError
from train.optimizers import Optimizer
from train.steps import LossConfig, loss_sums, make_train_step
from train.t5x import configs, models, network
from train.t5x.adafactor import Adafactor

pytestmark = pytest.mark.core

# What is refused: a binding, and what the message says beside the setting and its value.

REFUSED = {
    'train_script.train': [
        ('relative_steps=10', 'total_steps says the end'),
        ('use_hardware_rng=True', 'same on every mesh'),
        ('get_dataset_fn=@gin_utils.summarize_gin_config', 'tasks of train.data'),
        ('train_eval_get_dataset_fn=@gin_utils.summarize_gin_config', 'tasks of train.data'),
        ('prepare_train_iter_fn=@gin_utils.summarize_gin_config', 'tasks of train.data'),
        ('run_eval_before_training=True', 'eval_script.evaluate'),
        ('train_state_initializer_cls=@trainer.Trainer', 'born on their devices'),
        ('verify_matching_vocabs_fn=@gin_utils.summarize_gin_config', 'compared anyway'),
        ('gc_period=100', 'leave it out'),
        ('use_orbax=False', 'write train_script.train.use_orbax = True'),
        ('use_gda=False', 'write train_script.train.use_gda = True'),
        ('use_jax_array=False', 'write train_script.train.use_jax_array = True'),
        ('concurrent_metrics=3', 'write train_script.train.concurrent_metrics = True'),
        ('summarize_config_fn=@partitioning.standard_logical_axis_rules', 'summarize_gin_config'),
        ("actions={'TRAIN': [@trainer.EarlyStoppingAction()]}", 'TerminateOnNanAction'),
        ("actions='TRAIN'", 'TerminateOnNanAction'),
        ('inference_evaluator_cls=@trainer.Trainer', 'write @seqio.Evaluator, without brackets'),
        ('trainer_cls=@trainer.WeightMetricsComputer', 'write @trainer.Trainer, without brackets'),
        ('trainer_cls=@trainer.Trainer()', 'write @trainer.Trainer, without brackets'),
        ('model=@models.DecoderOnlyModel', 'write @models.DecoderOnlyModel(), with the brackets'),
        ('train_dataset_cfg=None', 'write @utils.DatasetConfig(), with the brackets'),
        ('train_dataset_cfg=@utils.DatasetConfig', 'with the brackets'),
        ('train_eval_dataset_cfg=@utils.DatasetConfig', 'with the brackets'),
        ('infer_eval_dataset_cfg=@utils.DatasetConfig', 'with the brackets'),
        ('checkpoint_cfg=None', 'write @utils.CheckpointConfig(), with the brackets'),
        ("actions={'TRAIN': @trainer.TerminateOnNanAction()}", 'it must be a list'),
        ('eval_period=-1', '>= 0'),
        ('eval_steps=0', 'at least 1'),
        ('stats_period=0', 'at least 1'),
    ],
    'train/utils.DatasetConfig': [
        ("mixture_or_task_name='count'", "Did you mean 'counts'?"),
        ('mixture_or_task_name=@data.CausalLM', 'of which there is no task'),
        ('task_feature_lengths=None', "write {'targets': tokens of a row}"),
        ("task_feature_lengths={'inputs': 8}", "write {'targets': tokens of a row}"),
        ("task_feature_lengths={'inputs': 8, 'targets': 16}", "write {'targets': 16}"),
        ("task_feature_lengths={'targets': 0}", 'at least 1'),
        ("split='validation'", "write train/utils.DatasetConfig.split = 'train'"),
        ('batch_size=0', 'at least 1'),
        ('shuffle=False', 'write train/utils.DatasetConfig.shuffle = True'),
        ('seed=-1', '>= 0'),
        ('use_custom_packing_ops=True', 'leave it out'),
        ('trim_output_features=False', 'write utils.DatasetConfig.trim_output_features = True'),
        ("module='my.tasks'", '--gin_allow'),
    ],
    'train_eval/utils.DatasetConfig': [
        ("split='train'", "write train_eval/utils.DatasetConfig.split = 'validation'"),
        ("split='dev'", "write train_eval/utils.DatasetConfig.split = 'validation'"),
        ('shuffle=True', 'write train_eval/utils.DatasetConfig.shuffle = False'),
        ("task_feature_lengths={'targets': 8}", "write {'targets': 16}"),
        ("mixture_or_task_name='other'", 'of which there is no task'),
    ],
    'infer_eval/utils.DatasetConfig': [
        ("mixture_or_task_name='other'", 'there is no task'),
        ("split='train'", "write infer_eval/utils.DatasetConfig.split = 'validation'"),
    ],
    'utils.SaveCheckpointConfig': [
        ("dtype='bfloat16'", "write utils.SaveCheckpointConfig.dtype = 'float32'"),
        ('checkpointer_cls=@trainer.Trainer', 'by Orbax'),
        ('state_transformation_fns=[@trainer.Trainer]', 'leave it out'),
        ('period=-1', '>= 0'),
        ('keep=0', 'at least 1'),
        ('checkpoint_steps=[0]', 'at least 1'),
    ],
    'utils.RestoreCheckpointConfig': [
        ("path=['a', 'b']", 'give one path'),
        ("mode='all'", "write utils.RestoreCheckpointConfig.mode = 'latest'"),
        ("assignment_map=[('a', 'b')]", 'restored whole'),
        ('strict=False', 'write utils.RestoreCheckpointConfig.strict = True'),
        ('fallback_to_scratch=True', 'restored whole'),
        ("dtype='bfloat16'", 'write utils.RestoreCheckpointConfig.dtype = None'),
        ('checkpointer_cls=@trainer.Trainer', 'by Orbax'),
        ('state_transformation_fns=[@trainer.Trainer]', 'leave it out'),
    ],
    'utils.CheckpointConfig': [
        ('save=None', 'write @utils.SaveCheckpointConfig()'),
        ('save=@utils.SaveCheckpointConfig', 'with the brackets'),
        ('restore=@utils.RestoreCheckpointConfig', 'with the brackets'),
    ],
    'trainer.Trainer': [
        ('learning_rate_fn=0.1', '@utils.create_learning_rate_scheduler()'),
        ('weight_metrics_computer=@trainer.WeightMetricsComputer', 'with the brackets'),
    ],
    'seqio.Evaluator': [
        ('num_examples=10', 'eval_steps'),
        ('logger_cls=[@trainer.Trainer]', '@seqio.JSONLogger'),
    ],
    'seqio.JSONLogger': [('write_n_results=3', 'no text is decoded')],
    'seqio.ByteVocabulary': [('extra_ids=100', 'SpanCorruption')],
    'models.DecoderOnlyModel': [
        ('module=@network.DecoderWrapper', 'with the brackets'),
        ("vocabulary='bytes'", 'write @seqio.SentencePieceVocabulary(), with the brackets'),
        ('optimizer_def=None', 'write @adafactor.Adafactor(), with the brackets'),
        ('inputs_bidirectional_attention=True', 'leave it out'),
        ('feature_converter_cls=@trainer.Trainer', 'leave it out'),
        ("loss_normalizing_factor='AVERAGE_PER_SEQUENCE'", 'NUM_REAL_TARGET_TOKENS'),
        ('loss_normalizing_factor=0', 'divisor'),
        ('z_loss=-1', 'z_loss'),
        ('label_smoothing=1.0', 'label_smoothing'),
    ],
    'network.DecoderWrapper': [('config=@network.TransformerConfig', 'with the brackets')],
    'network.TransformerConfig': [
        ("mlp_activations=('gelu',)", "('silu', 'linear')"),
        ('mlp_activations=()', "('silu', 'linear')"),
        ('mlp_activations=3', "('silu', 'linear')"),
        ("mlp_activations=('gelu', 'linear', 'linear')", "('silu', 'linear')"),
        ("dtype='float16'", "'bfloat16'"),
        ('dropout_rate=1.0', 'dropout_rate'),
        ('head_dim=7', 'head_dim'),
    ],
    'adafactor.Adafactor': [
        ('learning_rate=0.1', 'trainer.Trainer.learning_rate_fn'),
        ('multiply_by_parameter_scale=3', 'for all parameters or for none'),
        ('epsilon2=0.01', 'write adafactor.Adafactor.epsilon2 = 0.001'),
        ('beta1=1.0', 'a number in [0, 1) or None'),
        ("beta1='0.9'", 'a number in [0, 1) or None'),
        ('decay_rate=0', 'a number in (0, 1]'),
        ('decay_rate=None', 'a number in (0, 1]'),
        ('clipping_threshold=0.0', 'a number in (0, inf) or None'),
        ('clipping_threshold=True', 'a number in (0, inf) or None'),
        ('weight_decay_rate=-0.1', 'a number in [0, inf) or None'),
        ('epsilon1=-1e-30', 'a number in (0, inf)'),
        ('global_norm_clip_threshold=0', 'a number in (0, inf) or None'),
        ('step_offset=1.5', '>= 0'),
        ('min_dim_size_to_factor=0', 'at least 1'),
        ("factored='yes'", 'write adafactor.Adafactor.factored = True'),
        ("dtype_momentum='int8'", "write 'float32'"),
        ("dtype_momentum='float33'", "write 'float32'"),
        ("factor_map={'a': 1}", 'leave it out'),
        ("logical_factor_rules={'embed': 'row'}", 'leave it out'),
        ('weight_decay_rate_lr_exponent=1.0', 'leave it out'),
        ('max_parameter_scale=2.0', 'leave it out'),
        ('skip_nan_updates=True', 'leave it out'),
    ],
    'partitioning.PjitPartitioner': [
        ('params_on_devices=False', 'so leave it out'),
        ("backend='quark'", 'has no mesh: Unknown backend'),
    ],
    'adafactor.standard_logical_factor_rules': [("rules={'embed': 'row'}", 'leave it out')],
}
ALL = [(key, *pair) for key, pairs in REFUSED.items() for pair in pairs]


@pytest.mark.parametrize('key, setting, said', ALL, ids=[f'{k}.{s}' for k, s, _ in ALL])
def test_what_cannot_be_honoured_is_refused_by_name(load, tmp_path, key, setting, said):  # noqa: F811
    where = [f"MODEL_DIR='{tmp_path}/model'", f"INITIAL_CHECKPOINT_PATH='{tmp_path}/none'"]
    entry = load('finetune', *where, 'TRAIN_STEPS=1', 'BATCH_SIZE=8', f'{key}.{setting}')
    with pytest.raises(ValueError) as error:
        entry()
    [message] = str(error.value).split('\n  In call to configurable')[:1]
    assert len(message.splitlines()) == 1
    assert re.split(r'=|\[', setting)[0] in message or 'LossConfig.divisor' in message
    assert said in message
    assert not (tmp_path / 'model').exists()


@pytest.mark.parametrize(
    'setting, said',
    [
        ('eval_script.evaluate.fallback_init_rng=1', 'leave it out'),
        ('eval_script.evaluate.model=@models.DecoderOnlyModel', 'with the brackets'),
        ('eval_script.evaluate.dataset_cfg=None', 'write @utils.DatasetConfig()'),
        ('eval_script.evaluate.restore_checkpoint_cfg=None', '@utils.RestoreCheckpointConfig()'),
        ('utils.RestoreCheckpointConfig.path=[]', 'name a checkpoint'),
        ('utils.DatasetConfig.shuffle=True', 'write utils.DatasetConfig.shuffle = False'),
        ("utils.DatasetConfig.split='train'", "write utils.DatasetConfig.split = 'validation'"),
        ('utils.DatasetConfig.task_feature_lengths=None', "{'targets': tokens of a row}"),
    ],
)
def test_what_an_evaluation_refuses(load, tmp_path, setting, said):  # noqa: F811
    (tmp_path / 'checkpoints/7').mkdir(parents=True)
    (tmp_path / 'checkpoints/7/_CHECKPOINT_METADATA').write_text('{}')
    where = [f"CHECKPOINT_PATH='{tmp_path}/checkpoints/7'", f"EVAL_OUTPUT_DIR='{tmp_path}/scores'"]
    with pytest.raises(ConfigError) as error:
        load('eval', *where, setting)()
    assert said in str(error.value)
    assert not (tmp_path / 'scores').exists()


def test_encoder_decoders_are_refused_with_the_reason():
    for make in (
        lambda: network.T5Config(vocab_size=32, num_encoder_layers=8),
        network.Transformer,
    ):
        with pytest.raises(ConfigError, match=r'has a decoder-only model: use models\.DecoderOnly'):
            make()


def test_seeds_that_differ_are_refused(load, tmp_path):  # noqa: F811
    where = [f"MODEL_DIR='{tmp_path}/model'", 'TRAIN_STEPS=1', 'RANDOM_SEED=1']
    entry = load('pretrain', *where, 'train/utils.DatasetConfig.seed=2')
    with pytest.raises(ConfigError, match=r'random_seed is 1 and .*seed 2: a run has one seed'):
        entry()


def test_another_vocabulary_than_that_of_the_task_is_refused(texts):
    given = models.DecoderOnlyModel(
        module=network.DecoderWrapper(config=network.TransformerConfig(vocab_size=264)),
        vocabulary=ByteTokenizer(),
        optimizer_def=Adafactor(),
    )
    source = TextFiles(pattern='*.txt', root=str(texts))
    same, other = CausalLM(source=source), CausalLM(source=source, tokenizer=TakesText())
    given.check_vocabulary(same)
    for task in (other, Mixture(tasks=[same, other], weights=[1, 1])):
        with pytest.raises(ConfigError, match=r'vocabulary is \S+, but the task has text'):
            given.check_vocabulary(task)


def test_packed_rows_are_asked_for(texts):
    """Held-out rows score the same either way."""
    packs = CausalLM(source=TextFiles(pattern='*.txt', root=str(texts)), packing='pack')
    settings = {'mixture_or_task_name': packs, 'task_feature_lengths': {'targets': 8}}
    settings |= {'batch_size': 8, 'shuffle': True}
    for split, pack in (('train', True), ('validation', False)):
        assert configs.DatasetConfig(split=split, pack=pack, **settings).task is packs
    with pytest.raises(ConfigError, match='write pack = True'):
        _ = configs.DatasetConfig(split='train', pack=False, **settings).task


# Rules.


def test_kv_heads_follow_the_heads():
    for rules in (standard_logical_axis_rules(2, 2), [('heads', ('data', 'model'))]):
        given = PjitPartitioner(
            num_partitions=2,
            logical_axis_rules=rules,
            optimizer_axis_rules=fsdp_logical_axis_rules([('heads', 'model'), ('embed', None)]),
            on_unmatched='replicate',
        )
        made = network.with_kv_heads(given)
        axes = dict(rules)['heads']
        assert tuple(made.logical_axis_rules) == (*rules, ('kv_heads', axes))
        assert made.logical_axis_rules.on_unmatched == 'replicate'
        assert made.mesh is given.mesh
        assert made.rule_set.optimizer_rules == given.rule_set.optimizer_rules
        assert made.data_partition_spec == given.data_partition_spec
        assert network.with_kv_heads(made) is made


class _Named(PjitPartitioner):
    """A user's own, with a state of its own and something of its own that the rules decide."""

    name = 'none'

    @functools.cached_property
    def names(self):
        return [name for name, _ in self.logical_axis_rules]


def test_a_partitioner_with_other_rules_is_the_same_otherwise():
    """Its class, what it has been given since, its mesh, its policies and its plan."""
    given = _Named(num_partitions=2, logical_axis_rules=[('heads', 'model'), ('batch', 'data')])
    given.name, given.params_on_devices = 'mine', False
    assert given.names == ['heads', 'batch'] and given.data_mesh_size == 4
    other = given.with_rules([('batch', ('data', 'model')), ('kv', None)])
    assert type(other) is _Named and other.name == 'mine' and not other.params_on_devices
    assert other.mesh is given.mesh
    assert other.names == ['batch', 'kv'] and other.data_mesh_size == 8
    assert [name for name, _ in other.rule_set.rules] == ['batch', 'kv']
    assert given.names == ['heads', 'batch'] and given.data_mesh_size == 4
    with pytest.raises(ValueError, match='is no rule'):
        given.with_rules([('a', 'b', 'c')])


def test_kv_heads_keep_a_plan():
    params = {'w': jax.ShapeDtypeStruct((8, 8), np.float32)}
    rules = [('heads', 'model'), ('batch', 'data')]
    named = PjitPartitioner(
        num_partitions=2,
        logical_axis_rules=rules,
        params_axes_names_override=[('w', ('heads', 'batch'))],
    )
    plan = ResolvedPlan.of(named.resolve(params))
    other = [('heads', None), ('batch', 'data')]
    made = network.with_kv_heads(
        PjitPartitioner(mesh=named.mesh, logical_axis_rules=other, plan=plan)
    )
    assert ('kv_heads', None) in tuple(made.logical_axis_rules)
    assert made.get_mesh_axes(params)['w'] == jax.sharding.PartitionSpec('model', 'data')


def test_one_path_may_be_a_list_of_one():
    for path in ('/one/path', ['/one/path'], ('/one/path',)):
        restore = configs.RestoreCheckpointConfig(path=path).translated()
        assert restore.path == '/one/path'
        assert restore.setting == 'utils.RestoreCheckpointConfig.path'
    for none in (None, '', [], ['']):
        assert configs.RestoreCheckpointConfig(path=none).translated() is None


# What training minimizes.

DATA = batch(3)
WEIGHTS = DATA['decoder_loss_weights']


@pytest.fixture(name='net', scope='module')
def _net():
    """A model, its parameters, and its logits of `DATA` in float64."""
    net = model(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=16)
    inputs = DATA['decoder_input_tokens']
    params = unbox(jax.jit(net.init)(jax.random.key(0), inputs))['params']
    logits = jax.jit(net.apply)({'params': params}, inputs)
    return net, params, np.asarray(logits, np.float64)


def cross_entropy(logits, smoothing):
    """The sum of it over the targets that count, against what they are spread to."""
    vocabulary = logits.shape[-1]
    targets = np.eye(vocabulary)[DATA['decoder_target_tokens']]
    soft = np.where(targets == 1, 1 - smoothing, smoothing / (vocabulary - 1))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return (-(soft * log_p).sum(-1) * WEIGHTS).sum()


@pytest.mark.parametrize('smoothing', [0.0, 0.1])
@pytest.mark.parametrize('z_loss', [0.0, 0.01])
def test_the_loss_with_a_z_loss_and_smoothed_labels(net, smoothing, z_loss):
    module, params, logits = net
    config = LossConfig(z_loss=z_loss, label_smoothing=smoothing)
    loss, sums = jax.jit(lambda p: loss_sums(module, p, DATA, loss=config))(params)
    added = z_loss * (np.log(np.exp(logits).sum(-1)) ** 2 * WEIGHTS).sum()
    assert float(loss) == pytest.approx(cross_entropy(logits, smoothing) + added, rel=1e-5)
    assert float(sums['nats']) == pytest.approx(cross_entropy(logits, 0.0), rel=1e-5)
    assert float(sums.get('z_loss', 0.0)) == pytest.approx(added, rel=1e-5)


@pytest.mark.parametrize(
    'divisor, by, microbatches',
    [('weights', 120.0, 1), ('targets', 128.0, 2), (10.0, 10.0, 1)],
)
def test_what_divides_the_gradients(net, divisor, by, microbatches):
    """And the metrics of every parameter, which are those of the gradients that are used."""
    module, params, logits = net
    optimizer = Optimizer(transform=optax.sgd, learning_rate=1.0, clip_norm=None)
    step = make_train_step(
        module,
        optimizer,
        seed=0,
        num_microbatches=microbatches,
        data_spec=jax.sharding.PartitionSpec(),
        loss=LossConfig(divisor=divisor),
        weight_metrics=True,
    )
    state, metrics = jax.jit(step)(TrainState.create(params, optimizer.build()), DATA)
    grads = jax.jit(jax.grad(lambda p: loss_sums(module, p, DATA)[0]))(params)
    name, before = 'final_norm/scale', np.asarray(params['final_norm']['scale'], np.float64)
    gradient = np.asarray(grads['final_norm']['scale'], np.float64) / by
    after = before - gradient
    np.testing.assert_allclose(state.params['final_norm']['scale'], after, rtol=1e-4)
    expected = {
        'weight_rms': np.sqrt((after**2).mean()),
        'weight_gradient_rms': np.sqrt((gradient**2).mean()),
        'weight_update_rms': np.sqrt((gradient**2).mean()),
        'weight_max': np.abs(after).max(),
    }
    for metric, value in expected.items():
        assert float(metrics[f'{metric}/{name}']) == pytest.approx(value, rel=1e-3)
    assert len(metrics) == 5 + 4 * len(jax.tree.leaves(params))
    assert float(metrics['loss']) == pytest.approx(cross_entropy(logits, 0.0) / 120, rel=1e-5)


@pytest.mark.parametrize(
    'settings',
    [
        {'z_loss': -0.1},
        {'z_loss': '1'},
        {'label_smoothing': 1.0},
        {'label_smoothing': True},
        {'divisor': 0},
        {'divisor': 'weight'},
        {'divisor': float('nan')},
    ],
    ids=str,
)
def test_losses_that_are_none(settings):
    with pytest.raises(ConfigError, match=f'LossConfig.{next(iter(settings))} is '):
        LossConfig(**settings)


@pytest.mark.parametrize(
    'make, said',
    [
        (lambda: CheckpointConfig(steps=[2, 0]), r'steps\[1\] is 0'),
        (lambda: CheckpointConfig(steps='2'), "steps is '2': it must be a list"),
        (lambda: CheckpointConfig(keep=0), 'keep is 0'),
        (lambda: RestoreConfig(path=''), "path is ''"),
        (lambda: RestoreConfig(path='x', mode='all'), "mode is 'all'"),
    ],
)
def test_settings_of_checkpoints_that_are_none(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
