"""The configurations that come with the project: sizes of models, and layouts of the presets."""

import functools
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gin_fixtures import load_config
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from small import model

from partitioning import TrainState, unbox
from train import NextToken
from train.errors import ConfigError
from train.gin.parsing import find_config_root
from train.models.transformer import TransformerConfig

pytestmark = pytest.mark.core

REPOSITORY = find_config_root()
MODELS = sorted(p.stem for p in (REPOSITORY / 'configs/models').glob('*.gin'))
PARTITIONING = REPOSITORY / 'configs/partitioning'
PRESETS = sorted(p.stem for p in PARTITIONING.glob('*.gin') if p.stem != 'rules')
TENSOR = ('tensor', 'tensor_sequence')  # these shard parameters over the model axis only
RUN = ("MODEL_DIR='nowhere'", "TEXT='nowhere/*.txt'")

# The least and the largest number of parameters; exact for Llama 3.
SIZES = {
    'tiny': (350_000, 400_000),
    '125m': (100e6, 140e6),
    '1b': (1.0e9, 1.4e9),
    '8b': (8_030_261_248, 8_030_261_248),
    '70b': (70_553_706_496, 70_553_706_496),
}

_states = {}


def pretrain(*files, bindings=()):
    """The settings of train() from pretrain.gin and further files."""
    load_config(['configs/runs/pretrain.gin', *files], [*RUN, *bindings])
    settings = gin.get_bindings('TrainConfig')
    return settings | {'model': settings['objective'].model}


def named_state(model, settings):
    """The abstract state of a model that train() makes, with logical axes."""
    if model not in _states:
        tx = settings['optimizer'].build()
        tokens = jax.ShapeDtypeStruct((8, 16), jnp.int32)
        _states[model] = jax.eval_shape(
            lambda key, tokens: TrainState.create(
                settings['model'].init(key, tokens)['params'], tx
            ),
            jax.random.key(0),
            tokens,
        )
    return _states[model]


@pytest.mark.parametrize('model', MODELS)
def test_a_model_has_the_size_in_its_name(model):
    settings = pretrain(f'configs/models/{model}.gin')
    params = unbox(named_state(model, settings).params)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    least, most = SIZES[model]
    assert least <= count <= most


@pytest.mark.parametrize('model', MODELS)
def test_a_model_file_sets_every_size(model):
    # pretrain.gin includes one model. If another is chosen, it must replace every setting.
    chosen = pretrain(f'configs/models/{model}.gin')['model'].config
    gin.clear_config()
    load_config([f'configs/models/{model}.gin'])
    assert chosen == gin.get_configurable(TransformerConfig)()


def partitions(preset, settings):
    """Bindings for a preset on 8 devices. The partitions of TENSOR must divide num_kv_heads."""
    others = {
        'three_d': ['FSDP_PARTITIONS=4', 'NUM_PARTITIONS=2'],
        'fsdp_tensor': ['NUM_PARTITIONS=2'],
        'few_kv_heads': ['NUM_PARTITIONS=2', 'HEAD_GROUPS=2'],
    }
    if preset not in TENSOR:
        return others.get(preset, [])
    return [f'NUM_PARTITIONS={math.gcd(8, settings["model"].config.num_kv_heads)}']


@pytest.mark.parametrize('preset', PRESETS)
@pytest.mark.parametrize('model', MODELS)
def test_every_preset_lays_out_every_model(model, preset):
    files = [f'configs/models/{model}.gin', f'configs/partitioning/{preset}.gin']
    settings = pretrain(*files)
    if bindings := partitions(preset, settings):
        gin.clear_config()
        settings = pretrain(*files, bindings=bindings)
    partitioner = settings['partitioner']
    state = named_state(model, settings)
    specs = partitioner.get_mesh_axes(state)
    assert partitioner.mesh.size == 8

    arrays = jax.tree_util.tree_leaves_with_path(unbox(state))
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    replicated, per_device, total = {}, 0, 0
    for (path, array), spec in zip(arrays, leaves, strict=True):
        shard = NamedSharding(partitioner.mesh, spec).shard_shape(array.shape)
        size = math.prod(array.shape) * array.dtype.itemsize
        total += size
        per_device += math.prod(shard) * array.dtype.itemsize
        if shard == array.shape and size > 4096:
            replicated[jax.tree_util.keystr(path)] = size
    if preset == 'data_parallel':
        assert per_device == total
    elif preset == 'zero':
        parameters = sum(math.prod(x.shape) * 4 for x in jax.tree.leaves(unbox(state.params)))
        assert all(path.startswith('.params') for path in replicated)
        assert (
            per_device == parameters + (total - parameters - 12) / 8 + 12
        )  # plus three step counters
    elif preset in TENSOR:
        # The scales of norms only have the dimension 'embed', which this preset replicates.
        assert all('scale' in path for path in replicated), replicated
        assert sum(replicated.values()) < total / 500
    else:
        assert not replicated
        assert per_device < total / 7


@pytest.mark.parametrize(
    ('model', 'preset', 'axes'),
    [
        ('8b', 'fsdp', {'data': 64, 'model': 1}),
        ('8b', 'fsdp', {'data': 16, 'model': 4}),
        ('8b', 'fsdp_tensor', {'data': 8, 'model': 8}),
        ('70b', 'fsdp_tensor', {'data': 64, 'model': 8}),
        ('70b', 'fsdp_tensor', {'data': 32, 'model': 8}),
        ('70b', 'few_kv_heads', {'data': 16, 'model': 8, 'group': 2}),
        ('8b', 'context', {'data': 4, 'context': 16, 'model': 1}),
    ],
)
def test_large_models_are_fully_sharded_over_whole_machines(model, preset, axes):
    settings = pretrain(f'configs/models/{model}.gin', f'configs/partitioning/{preset}.gin')
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    audit = settings['partitioner'].with_mesh(mesh).plan(named_state(model, settings)).audit()
    # 12 bytes per parameter; only norms are not sharded over all devices.
    even = 12 * SIZES[model][0] / mesh.size
    assert even <= audit.bytes_per_device < 1.001 * even


@pytest.mark.parametrize('preset', PRESETS)
def test_a_preset_replaces_every_other_preset(preset):
    # pretrain.gin includes one preset, and a command may add several more.
    def settings(*presets):
        gin.clear_config()
        pretrain(*(f'configs/partitioning/{name}.gin' for name in presets))
        model = gin.get_bindings('transformer.TransformerConfig')
        return gin.get_bindings('PjitPartitioner'), model.get('pipeline')

    others = [other for other in PRESETS if other != preset]
    assert settings(*others, preset) == settings(preset) != settings(*others[:1])


@pytest.mark.parametrize('macro', ['MODEL', 'PARTITIONER'])
def test_a_run_without_a_model_or_partitioner_is_told_which_macro_to_set(tmp_path, macro):
    own, pretrain_gin = tmp_path / 'own.gin', REPOSITORY / 'configs/runs/pretrain.gin'
    dropped = {'MODEL': 'configs/models', 'PARTITIONER': 'configs/partitioning'}[macro]
    lines = pretrain_gin.read_text().splitlines()
    own.write_text('\n'.join(line for line in lines if f"include '{dropped}" not in line))
    with pytest.raises(ConfigError, match=rf'base\.gin:\d+: %{macro} has no value. .*{macro} = '):
        load_config([str(own)], RUN)


def test_pretraining_requires_the_users_text():
    with pytest.raises(ConfigError, match='%TEXT has no value'):
        load_config(['configs/runs/pretrain.gin'])


@pytest.mark.parametrize(
    ('run', 'warmup', 'steps', 'peak'),
    [('quickstart', 9, 450, 0.05), ('pretrain', 2000, 100_000, 0.0006)],
)
def test_the_learning_rate_rises_to_its_peak_and_falls_to_0(run, warmup, steps, peak):
    load_config([f'configs/runs/{run}.gin'], ["TEXT='x'"] if run == 'pretrain' else [])
    settings = gin.get_bindings('TrainConfig')
    rates = [float(settings['optimizer'].rate(s)) for s in (0, warmup // 2, warmup, steps)]
    np.testing.assert_allclose(
        rates, [0, peak * (warmup // 2) / warmup, peak, 0], rtol=1e-5, atol=1e-9
    )
    assert settings['total_steps'] == steps


def test_every_shipped_file_is_tested():
    assert set(SIZES) == set(MODELS)
    assert set(PRESETS) == {
        *('data_parallel', 'fsdp', 'fsdp_any_model', 'zero', *TENSOR, 'two_d', 'three_d'),
        *('fsdp_tensor', 'few_kv_heads', 'context', 'pipeline'),
    }
    assert (REPOSITORY / 'configs/runs/pretrain.gin').is_file()


# Every preset gives the loss and the gradients of the same model on one device, in float32. The
# whole model is here as a run has it: the embedding, attention with fewer heads of keys, a gated
# MLP, the output layer and the loss, on packed rows. `MESHWRIGHT_ALL_LAYOUTS=1` tests every preset
# on every mesh.

ROWS, LENGTH, VOCAB = 16, 32, 264
THREE = ('three_d', 'few_kv_heads', 'context')  # presets with three mesh axes
TWO = [name for name in PRESETS if name not in (*THREE, 'pipeline')]  # pipelines have own tests
# Presets with the sizes of their axes, where each shows something that the others do not.
CHOSEN = [
    ('fsdp', 'NUM_PARTITIONS=1'),
    ('fsdp', 'NUM_PARTITIONS=4'),
    ('fsdp_tensor', 'NUM_PARTITIONS=2'),
    ('tensor_sequence', 'NUM_PARTITIONS=8'),
    ('few_kv_heads', 'NUM_PARTITIONS=2', 'HEAD_GROUPS=2'),
    ('context', 'NUM_PARTITIONS=1', 'CONTEXT_PARTITIONS=4'),
    ('context', 'NUM_PARTITIONS=2', 'CONTEXT_PARTITIONS=2'),
]
# Every preset that divides the 8 devices over two axes, on 8x1, 4x2, 2x4 and 1x8.
ALL = [
    *((name, f'NUM_PARTITIONS={n}') for name in TWO for n in (1, 2, 4, 8)),
    *(('three_d', f'NUM_PARTITIONS={n}') for n in (1, 2, 4)),
    *(('few_kv_heads', f'NUM_PARTITIONS={n}', f'HEAD_GROUPS={8 // n}') for n in (1, 2, 4, 8)),
    *(('context', f'NUM_PARTITIONS={n}', f'CONTEXT_PARTITIONS={8 // n}') for n in (1, 2, 4, 8)),
]


def batch():
    """Rows of three packed documents, and targets without a weight at the end of a row."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    ends = np.sort(rng.integers(1, LENGTH, (ROWS, 2, 1)), axis=1)
    place = np.arange(LENGTH)
    starts = np.concatenate([np.zeros((ROWS, 1, 1), int), ends], axis=1)
    begun = place >= starts
    return {
        'decoder_input_tokens': tokens[:, :-1],
        'decoder_target_tokens': tokens[:, 1:],
        'decoder_loss_weights': np.broadcast_to(place < LENGTH - 3, (ROWS, LENGTH)).astype(
            'float32'
        ),
        'decoder_segment_ids': begun.sum(axis=1, dtype=np.int32),
        'decoder_positions': (place - (begun * starts).max(axis=1)).astype(np.int32),
    }


@functools.cache
def reference():
    """An objective, its parameters, and their loss and gradients on one device."""
    objective = NextToken(model=model(num_heads=16, num_kv_heads=8, scale_embeddings=False))
    init = functools.partial(objective.init, batch=batch())
    params = unbox(jax.jit(init)(jax.random.key(0))['params'])
    return objective, init, params, jax.jit(gradient(objective))(params, batch())


def gradient(objective):
    return jax.value_and_grad(lambda params, batch: objective.loss(params, batch, None, {}).total)


@pytest.mark.long
@pytest.mark.parametrize('layout', ALL if os.environ.get('MESHWRIGHT_ALL_LAYOUTS') else CHOSEN)
def test_a_preset_gives_the_loss_and_gradients_of_one_device(layout):
    preset, *bindings = layout
    objective, init, params, (loss, gradients) = reference()
    load_config(
        ['configs/runs/pretrain.gin', f'configs/partitioning/{preset}.gin'], [*RUN, *bindings]
    )
    partitioner = gin.get_bindings('TrainConfig')['partitioner']
    plan = partitioner.plan(lambda key: init(key)['params'], jax.random.key(0))
    step = partitioner.partition(
        gradient(objective), (plan.specs, partitioner.data_partition_spec), (None, plan.specs)
    )
    got_loss, got = step(params, batch())
    np.testing.assert_allclose(got_loss, loss, rtol=1e-5)
    assert jax.tree.structure(got) == jax.tree.structure(gradients)
    for (path, expected), found in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(got), strict=True
    ):
        error = np.max(np.abs(expected - found)) / np.max(np.abs(expected))
        assert error < 1e-5, jax.tree_util.keystr(path)


# The compiler has no objections to the models and layouts.


@pytest.mark.long
def test_no_shipped_config_and_preset_makes_the_compiler_warn():
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name('compile_shipped.py')],
        env=os.environ
        | {'PYTHONPATH': str(REPOSITORY), 'JAX_NUM_CPU_DEVICES': '8', 'TF_CPP_MIN_LOG_LEVEL': '0'},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    _, *sections = re.split(r'^# ', ran.stderr, flags=re.MULTILINE)
    logs = dict(section.split('\n', 1) for section in sections)
    assert len(logs) == len(MODELS) * len(PRESETS) + 3
    gathered = logs.pop('gathered')
    # The compiler also reports that it is slow, on a busy machine.
    warning = re.compile('^[WE][0-9]{4} (?!.*slow_operation_alarm)', re.MULTILINE)
    assert not {name: log for name, log in logs.items() if warning.search(log)}
    if jax.__version_info__ >= (0, 12):
        assert 'Involuntary full rematerialization' in gathered, 'the log is not captured'
