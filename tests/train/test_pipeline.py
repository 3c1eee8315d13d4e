"""Pipelines: they compute what the layers compute one after another, and send only activations."""

import math
import re

import gin
import jax
import numpy as np
import pytest
from gin_fixtures import load_config
from small import batch, model

from partitioning import PjitPartitioner, unbox
from partitioning.mesh import MeshConfig
from train.errors import ConfigError
from train.models.forward import compute_logits
from train.models.pipeline import Pipeline
from train.objectives import NextToken

pytestmark = pytest.mark.core

RULES = [
    ('layers', 'stage'),
    ('batch', ('stage', 'data')),
    ('vocab', 'model'),
    ('heads', 'model'),
    ('kv_heads', 'model'),
    ('mlp', 'model'),
    ('embed', ('stage', 'data')),
    ('embed', 'data'),
    ('kv', None),
    ('length', None),
]
# Local and global layers, which depend on the number of a layer.
LOCAL = {'window': 4, 'global_every': 2, 'local_rope_max_wavelength': 9.0}
SIZES = {'num_layers': 8, 'embed_dim': 32, 'num_heads': 4, 'num_kv_heads': 2, 'mlp_dim': 48}
SIZES |= {'gated_mlp': False}


def packed(rows=16, length=16):
    """A batch in which each row has two documents of its own lengths."""
    ends = 3 + np.arange(rows)[:, None] % 9
    places = np.arange(length)[None]
    arrays = {
        'decoder_segment_ids': 1 + (places >= ends),
        'decoder_positions': np.where(places < ends, places, places - ends),
    }
    return batch(0, rows, length) | {k: v.astype(np.int32) for k, v in arrays.items()}


def partition(net, axes, rules=RULES, rows=16):
    """The partitioned loss with its gradients, its arguments, and the layout of the parameters."""
    devices = jax.devices()[: math.prod(axes.values())]
    mesh = MeshConfig(axes=axes, devices=devices)
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    objective, arrays = NextToken(model=net), packed(rows)
    plan = partitioner.plan(lambda key: objective.init(key, arrays)['params'], jax.random.key(0))

    def loss(params, arrays):
        return objective.loss(params, arrays, None, {}).total

    step = partitioner.partition(
        jax.value_and_grad(loss), (plan.specs, partitioner.data_partition_spec), (None, plan.specs)
    )
    return step, plan, arrays


def run(net, axes):
    """The loss and its gradients, and the text of the compiled program."""
    step, plan, arrays = partition(net, axes)
    compiled = step.lower_and_compile(plan.abstract_state, arrays)
    loss, gradients = compiled(plan.init(jax.random.key(0)), arrays)
    return *jax.device_get((loss, unbox(gradients))), compiled.as_text()


@pytest.fixture(scope='module')
def expected():
    """The loss and the gradients of the layers one after another, on one device."""
    return run(model(**SIZES, **LOCAL), {'stage': 1, 'data': 1, 'model': 1})[:2]


@pytest.mark.long
@pytest.mark.parametrize(
    'sizes, settings',
    [((4, 1, 1), {'num_microbatches': 8}), ((2, 2, 2), {'num_microbatches': 4, 'repeats': 2})],
    ids=str,
)
def test_pipelines_have_the_loss_and_gradients_of_one_device(expected, sizes, settings):
    net = model(**SIZES, **LOCAL, remat='full', pipeline=Pipeline(**settings))
    loss, gradients, program = run(net, dict(zip(('stage', 'data', 'model'), sizes, strict=True)))
    assert loss == pytest.approx(expected[0], rel=1e-5)

    def compare(x, y):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())

    jax.tree.map(compare, gradients, expected[1])
    # The backward pass keeps no weights of the 11 and 9 steps, whose layers a device has 2 of.
    assert re.search(r'f32\[(11|9),2,\d,16,', program), 'the inputs of layers are kept'
    assert not re.search(r'f32\[(11|9),2,32,', program)
    if sizes == (4, 1, 1):
        sent = re.findall(r'= \w+\[([\d,]*)\]\S* (all-\w+|collective-permute)\(', program)
        # Of one microbatch: rows that wait, pass and are done, and their gradients.
        assert [x for x, kind in sent if kind == 'collective-permute'] == ['2,16,32'] * 6
        weights = ('32,4,8', '32,2,8', '4,8,32', '32,48', '48,32')  # of one layer
        assert not [x for x, _ in sent if x.endswith(weights)]
        assert ('32,264', 'all-gather') in sent  # the weights of the output layer are found


@pytest.mark.long
def test_each_microbatch_has_its_own_dropout():
    """Each microbatch has on each device the logits of the plain model with a key of its own."""
    sizes = SIZES | {'num_layers': 2, 'dropout_rate': 0.5}
    net, plain = model(**sizes, pipeline=Pipeline(num_microbatches=4)), model(**sizes)
    tokens, key = batch(0, 16)['decoder_input_tokens'], jax.random.key(1)
    mesh = MeshConfig(axes={'stage': 2, 'data': 2, 'model': 1}, devices=jax.devices()[:4])
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES)
    params = unbox(plain.init(jax.random.key(0), method='get_parameters')['params'])

    def logits(net, tokens, key):
        return compute_logits(net.config, params, tokens, dropout_key=key)[0]

    step = partitioner.partition(
        lambda *arguments: logits(net, *arguments), (partitioner.data_partition_spec, None), None
    )
    got = np.asarray(step(tokens, key))
    rows = np.arange(16).reshape(2, 2, 2, 2)  # [stages, data, rows of a microbatch, groups]
    expected = jax.jit(lambda *arguments: logits(plain, *arguments))
    for stage, data, group in np.ndindex(2, 2, 2):
        chosen = rows[stage, data, :, group]
        own = jax.random.fold_in(jax.random.fold_in(key, data), group * 2 + stage)
        np.testing.assert_allclose(got[chosen], expected(tokens[chosen], own), atol=1e-4)


@pytest.mark.parametrize(
    'axes, changes, message',
    [
        ({'stage': 4}, {'num_layers': 6}, r'6 layers .* 4 stages'),
        (
            {'stage': 2},
            {'pipeline': {'repeats': 3}},
            r"8 layers .* 2 stages of 'stage' x 3 repeats",
        ),
        ({'stage': 4}, {'pipeline': {'num_microbatches': 6}}, r'is 6: .* multiple of the 4 stages'),
        (
            {'stage': 2, 'data': 4},
            {},
            r'16 rows .* 8 microbatches .* each over 4 .* multiple of 32',
        ),
        (
            {'stage': 2},
            {'pipeline': None},
            r"shard 'layers' over \('stage',\).* all 8 layers.*@Pipeline",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_an_error_with_the_numbers(axes, changes, message):
    given = changes.get('pipeline', {})
    pipeline = None if given is None else Pipeline(**{'num_microbatches': 8} | given)
    net = model(**SIZES | changes | {'pipeline': pipeline, 'remat': 'full'})
    axes = {'stage': 1, 'data': 1, 'model': 1} | axes
    with pytest.raises(ValueError, match=message):
        step, plan, arrays = partition(net, axes)
        step.lower(plan.abstract_state, arrays)


def test_rules_and_settings_must_agree():
    rules = [('layers', None), *RULES[1:]]
    net = model(**SIZES, pipeline=Pipeline(num_microbatches=8))
    with pytest.raises(ConfigError, match=r"'layers' over None.*'layers', 'stage'"):
        partition(net, {'stage': 2, 'data': 1, 'model': 1}, rules)
    with pytest.raises(ConfigError, match="2 repeats and remat is 'none'"):
        model(**SIZES, pipeline=Pipeline(num_microbatches=8, repeats=2))
    with pytest.raises(ConfigError, match='set scan_layers = True'):
        model(**SIZES, scan_layers=False, pipeline=Pipeline(num_microbatches=8))


def test_the_preset_runs_a_pipeline():
    files = ['configs/runs/pretrain.gin', 'configs/partitioning/pipeline.gin']
    load_config(files, ["MODEL_DIR='nowhere'", "TEXT='x'", 'STAGES=4', 'REPEATS=3'])
    settings = gin.get_bindings('TrainConfig')
    assert settings['objective'].model.config.pipeline == Pipeline(num_microbatches=8, repeats=3)
    assert dict(settings['partitioner'].mesh.shape) == {'data': 2, 'stage': 4, 'model': 1}
