"""Ordinary lines of T5X's gin files and of optax work without a flag; the list is complete."""

import copy
import importlib
import inspect
import operator

import gin
import jax
import jax.numpy as jnp
import optax
import pytest

from train.gin.configurables import BY_MODULE

pytestmark = pytest.mark.core

DYNAMIC = 'from __gin__ import dynamic_registration\n'
IMPORTED = ('adafactor', 'checkpoint_configs as utils', 'datasets', 'decoding', 'gin_utils')
IMPORTED += ('models', 'network', 'optimizers', 'schedules', 'seqio', 'train_script', 'trainer')
T5X_IMPORTS = DYNAMIC + 'import optax\nimport partitioning\n'
T5X_IMPORTS += 'from partitioning.partitioner import moe as moe_partitioning\n'
T5X_IMPORTS += ''.join(f'from train.t5x import {name}\n' for name in IMPORTED)

SCHEDULE = """optax.warmup_cosine_decay_schedule:
  init_value = 0.0
  peak_value = 0.0001
  warmup_steps = 1000
  decay_steps = 2000
"""
# Each text sets the macro A; the function checks its value.
ORDINARY = {
    'chain': (
        'A = @optimizers.chain()\noptax.clip.max_delta = 1.0\noptax.adamw.learning_rate = 0.1\n'
        'optimizers.chain.transformations = [@optax.clip(), @optax.adamw()]',
        lambda a: isinstance(a, optax.GradientTransformation),
    ),
    'adamw': (
        'A = @optax.adamw()\noptax.adamw.weight_decay = 0.01\n'
        'optax.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()\n' + SCHEDULE,
        lambda a: isinstance(a, optax.GradientTransformation),
    ),
    'warmup and cosine': (
        'A = @optax.warmup_cosine_decay_schedule()\n' + SCHEDULE,
        lambda a: float(a(1000)) == pytest.approx(0.0001),
    ),
    'lion': (
        'A = [@optax.clip_by_global_norm(), @optax.lion()]\noptax.lion.learning_rate = 0.1\n'
        'optax.clip_by_global_norm.max_norm = 1.0',
        lambda a: len(a) == 2,
    ),
    'factors': (
        'A = @schedules.create_learning_rate_scheduler()\n'
        'schedules.create_learning_rate_scheduler:\n'
        "  factors = 'constant'\n  base_learning_rate = 0.001\n  warmup_steps = 1000",
        lambda a: float(a(7)) == pytest.approx(0.001),
    ),
    'adafactor': (
        'A = @adafactor.Adafactor()\nadafactor.Adafactor:\n  decay_rate = 0.8\n  step_offset = 0\n'
        '  logical_factor_rules = @adafactor.standard_logical_factor_rules()',
        lambda a: a.decay_rate == 0.8,
    ),
    'partitioner': (
        'A = @partitioning.PjitPartitioner()\npartitioning.PjitPartitioner:\n'
        '  num_partitions = 2\n  model_parallel_submesh = None\n'
        '  logical_axis_rules = @partitioning.standard_logical_axis_rules()\n'
        'partitioning.standard_logical_axis_rules:\n  activation_partitioning_dims = 1\n'
        '  parameter_partitioning_dims = 2',
        lambda a: a.mesh.shape == {'data': 4, 'model': 2},
    ),
    'mixture of experts': (
        'A = @moe_partitioning.MoePjitPartitioner()\nmoe_partitioning.MoePjitPartitioner:\n'
        '  num_expert_partitions = 2\n  num_partitions = 1\n  params_on_devices = True',
        lambda a: a.mesh.shape['expert'] == 2,
    ),
    'scoped data': (
        'A = @train/datasets.DatasetConfig()\ntrain/datasets.DatasetConfig:\n'
        "  mixture_or_task_name = 'c4'\n  task_feature_lengths = {'targets': 16}\n"
        "  split = 'train'\n  batch_size = 8\n  shuffle = False\n  seed = 42",
        lambda a: a.seed == 42,
    ),
    'checkpoints': (
        'A = @utils.CheckpointConfig()\nutils.CheckpointConfig:\n'
        '  restore = @utils.RestoreCheckpointConfig()\n  save = @utils.SaveCheckpointConfig()\n'
        'utils.RestoreCheckpointConfig.path = []\nutils.SaveCheckpointConfig.period = 1000',
        lambda a: a.save.period == 1000,
    ),
    'bytes': ('A = @seqio.ByteVocabulary()', lambda a: a.num_tokens >= 256),
    'evaluator': (
        'A = @seqio.Evaluator\nseqio.Evaluator:\n  num_examples = None\n'
        '  logger_cls = [@seqio.PyLoggingLogger, @seqio.TensorBoardLogger, @seqio.JSONLogger]',
        lambda a: len(a().logger_cls) == 3,
    ),
    'network': (
        'A = @network.Transformer()\nnetwork.Transformer.config = @network.T5Config()\n'
        "network.T5Config:\n  vocab_size = 32\n  mlp_activations = ('gelu', 'linear')",
        lambda a: a.config.vocab_size == 32,
    ),
    'decoder-only network': (
        'A = @network.DecoderWrapper()\nnetwork.DecoderWrapper.config = '
        '@network.TransformerConfig()\n'
        'network.TransformerConfig.vocab_size = 32',
        lambda a: a.config.num_layers == 6,
    ),
    'a method': (
        'A = @models.DecoderOnlyModel\n'
        'models.DecoderOnlyModel.predict_batch_with_aux.num_decodes = 8',
        lambda a: a.__name__ == 'DecoderOnlyModel',
    ),
    'sampling': (
        'A = @decoding.temperature_sample\ndecoding.temperature_sample.topk = 40',
        callable,
    ),
    'actions': (
        "A = {'TRAIN': [@trainer.TerminateOnNanAction()]}\n"
        "train_script.train.actions = %A\ntrainer.TerminateOnNanAction.task = 'train'",
        lambda a: a['TRAIN'][0].task == 'train',
    ),
    'muon': (
        'A = @one/optax.contrib.muon()\none/optax.contrib.muon.learning_rate = 0.02',
        lambda a: isinstance(a, optax.GradientTransformation),
    ),
    'a singleton': (
        'A = [@s/gin.singleton(), @s/gin.singleton()]\n'
        's/gin.singleton.constructor = @optax.zero_nans',
        lambda a: a[0] is a[1],
    ),
    'jax and flax': (
        'import jax.nn\nimport flax.linen as nn\nfrom flax import nnx\n'
        'A = [@jax.nn.gelu, @nn.gelu, @nn.initializers.normal(), @nn.LayerNorm, @nnx.Linear, '
        '@nnx.initializers.zeros]\nnn.initializers.normal.stddev = 0.0',
        lambda a: a[0](1.0) == a[1](1.0) and not a[2](jax.random.key(0), (2,)).any(),
    ),
    'dtypes': (
        'import jax.numpy as jnp\nA = @jnp.bfloat16',
        lambda a: jnp.zeros(1, a).dtype == 'bfloat16',
    ),
}


@pytest.mark.parametrize('name', ORDINARY)
def test_ordinary_lines_need_no_flag(load, name):
    text, check = ORDINARY[name]
    load(T5X_IMPORTS + text + '\n')
    assert check(copy.deepcopy(gin.query_parameter('A/gin.macro.value')))


@pytest.mark.parametrize(
    'text',
    [
        'A = @optax.contrib.schedule_free_adamw()',
        'A = @contrib.muon()',
        'A = @flax.linen.LayerNorm',
        'A = @jax.nn.initializers.normal()',
        'A = [@flax.nnx.Linear, @jax.numpy.float32]',
        'A = @one/gin.singleton()\none/gin.singleton.constructor = @Optimizer',
        'Optimizer.transform = @optax.lion\noptax.lion.b1 = 0.5',
        'import optax\nimport train.optimizers\nA = @adamw',
    ],
)
def test_listed_names_need_no_import(load, text):
    load(text + '\n')


def test_bindings_with_dynamic_registration_have_an_effect(load):
    load(
        f"""
        {DYNAMIC}
        import optax
        import train.optimizers
        train.optimizers.Optimizer.transform = @optax.sgd
        train.optimizers.Optimizer.learning_rate = 0.5
        train.optimizers.Optimizer.clip_norm = None
        optax.sgd.nesterov = True
        optax.sgd.momentum = 0.0
        """
    )
    tx = gin.get_configurable('Optimizer')().build()
    params = {'w': jnp.ones(2)}
    updates, _ = tx.update(params, tx.init(params))
    assert updates['w'].tolist() == [-0.5, -0.5]


# The list itself.

# They configure other functions, take `*args`, or need more than gradients and parameters.
OTHERS = {
    'hutchinson_estimator_diag_hessian',
    'inject_hyperparams',
    'inject_stateful_hyperparams',
    'lbfgs',
    'schedule_free_eval_params',
}


def functions(module):
    return {n: f for n, f in vars(module).items() if inspect.isfunction(f) and n[0] != '_'}


@pytest.mark.parametrize('module', [optax, optax.schedules, optax.contrib])
def test_the_list_has_every_schedule_and_optimizer_of_optax(module):
    wanted = set(functions(module)) - OTHERS
    if module is optax:  # all others are transformations, losses and helpers
        first = {n: [*inspect.signature(getattr(optax, n)).parameters][:1] for n in wanted}
        wanted = {n for n in wanted if n.endswith('schedule') or first[n] == ['learning_rate']}
    assert len(wanted) > 10
    assert wanted <= set(BY_MODULE[module.__name__])


@pytest.mark.parametrize('module', BY_MODULE)
def test_every_listed_name_is_a_public_function_or_class(module):
    home = importlib.import_module(module)
    for name in BY_MODULE[module]:
        assert not any(part.startswith('_') for part in f'{module}.{name}'.split('.'))
        found = operator.attrgetter(name)(home) if hasattr(home, name.split('.')[0]) else None
        # Older versions of the libraries lack some names.
        assert callable(found) or (found is None and module.startswith(('optax', 'flax', 'jax')))
