"""T5's networks and their losses, against what T5X computed from its own checkpoints."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import t5x_reference
from flax.traverse_util import flatten_dict
from t5x_reference import batch, net, params

from partitioning import TrainState
from train.errors import ConfigError
from train.models.t5.layers import buckets
from train.objectives import EncoderDecoder, PrefixLanguageModel, compute_loss
from train.running.steps import make_train_step
from train.t5x import models, network

pytestmark = pytest.mark.core

DIVISORS = {
    None: 1.0,
    'NUM_REAL_TARGET_TOKENS': 'weights',
    'NUM_TOTAL_TARGET_TOKENS': 'targets',
    'AVERAGE_PER_SEQUENCE': 'sequences',
}


def objective(name, model=None, **settings):
    kind = PrefixLanguageModel if name == 'decoder_only' else EncoderDecoder
    return kind(model=model or net(name), **settings)


CHECKPOINTS = {'t5_1_1': 't5_1_1-orbax-10', 'decoder_only': 'decoder_only-legacy-10'}


@pytest.mark.parametrize(
    'name, kind, result, changes, settings',
    [
        ('t5_1_1', 'packed', 'logits', {}, {}),
        ('t5_1_1', 'padded', 'logits_dropout0.1_key7', {'dropout_rate': 0.1}, {}),
        ('decoder_only', 'packed', 'logits', {}, {}),
        ('decoder_only', 'padded', 'logits_causal_only', {}, {'bidirectional_prefix': False}),
    ],
)
def test_logits_and_encoder_outputs_equal_those_of_t5x(name, kind, result, changes, settings):
    model, given = net(name, **changes), params(CHECKPOINTS[name])
    _, inputs = objective(name, model, **settings).model_inputs(batch(name, kind))
    fixed, expected = not changes, t5x_reference.arrays(name)
    rngs = None if fixed else {'dropout': jax.random.PRNGKey(7)}

    @jax.jit
    def run(given, inputs):
        logits = model.apply({'params': given}, **inputs, deterministic=fixed, rngs=rngs)
        if name == 'decoder_only' or not fixed:
            return logits, None
        encoder = inputs['encoder_input_tokens'], inputs.get('encoder_segment_ids')
        options = {'deterministic': True, 'method': 'encode'}
        return logits, model.apply({'params': given}, *encoder, **options)

    logits, encoded = run(given, inputs)
    np.testing.assert_allclose(logits, expected[f'{kind}/step10/{result}'], rtol=0, atol=1e-5)
    if encoded is not None:
        np.testing.assert_allclose(encoded, expected[f'{kind}/step10/encoded'], rtol=0, atol=1e-5)


class Given(nn.Module):
    """Returns the logits that are its parameter."""

    def __call__(self, **inputs):
        return self.get_variable('params', 'logits')


@pytest.mark.parametrize(
    'name, kind', [('t5_1_1', 'padded'), ('t5_1_1', 'packed'), ('decoder_only', 'packed')]
)
def test_losses_and_scores_equal_those_of_t5x(name, kind):
    arrays, data = t5x_reference.arrays(name), batch(name, kind)
    given = {'logits': arrays[f'{kind}/step10/logits']}
    table = t5x_reference.facts(name)['losses'][f'{kind}/step10']
    assert len(table) == 20 and {row[0] for row in table} == {*DIVISORS, 233472.0}
    for divisor, smoothing, z, loss, z_loss, weights in table:
        made = objective(
            name,
            Given(),
            z_loss=z,
            label_smoothing=smoothing,
            loss_divisor=DIVISORS.get(divisor, divisor),
        )
        total, sums, _ = compute_loss(made, given, data, None, {})
        assert float(total / made.divisor(sums, data)) == pytest.approx(loss, rel=1e-6)
        assert float(sums['weight']) == pytest.approx(weights, rel=1e-6)
        found = float(sums.get('z_loss', 0.0) / made.divisor(sums, data))
        assert found == pytest.approx(z_loss, rel=1e-6)
    np.testing.assert_allclose(made.score(given, data), arrays[f'{kind}/step10/score'], rtol=1e-6)


def test_gradients_have_the_sums_of_those_of_t5x():
    facts, data = t5x_reference.facts('t5_1_1'), batch('t5_1_1', 'padded')
    made = objective('t5_1_1', z_loss=1e-4)

    def loss(given):
        total, sums, _ = compute_loss(made, given, data, None, {})
        return total / sums['weight']

    found = flatten_dict(jax.jit(jax.grad(loss))(params('t5_1_1-orbax-0')), sep='/')
    assert found.keys() == facts['grad_step0_padded'].keys()
    for path, (shape, _, total, squares) in facts['grad_step0_padded'].items():
        value = np.asarray(found[path], np.float64)
        assert list(value.shape) == shape
        assert value.sum() == pytest.approx(total, abs=1e-5)
        assert np.square(value).sum() == pytest.approx(squares, rel=1e-5)


def test_parameters_have_the_names_axes_and_initial_values_of_t5x():
    made = t5x_reference.facts('t5_1_1')['model']
    shapes = made['init_input_shapes']
    inputs = {k: jnp.ones(s, jnp.int32) for k, s in shapes.items() if 'weights' not in k}
    key = jax.random.PRNGKey(made['init_prng_seed'])
    variables = jax.jit(lambda: net('t5_1_1').init(key, **inputs, deterministic=True))()
    specs = flatten_dict(nn.get_partition_spec(variables['params']), sep='/')
    facts = t5x_reference.facts('t5_1_1')['params']
    assert {k: list(spec) for k, spec in specs.items()} == {k: v['axes'] for k, v in facts.items()}
    expected = params('t5_1_1-orbax-0')
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6),
        nn.unbox(variables['params']),
        expected,
    )


def test_relative_positions_have_the_buckets_of_t5x():
    arrays = t5x_reference.arrays('t5_1_1')
    distances = arrays['relpos/relative_position']
    for name, bidirectional in (('bidirectional', True), ('unidirectional', False)):
        expected = arrays[f'relpos/bucket_{name}_32_128']
        assert np.asarray(buckets(distances, bidirectional)).tolist() == expected.tolist()


class Lookup(nn.Module):
    """Predicts each token from the one before it."""

    @nn.compact
    def __call__(self, decoder_input_tokens, **others):
        return nn.Embed(160, 160)(decoder_input_tokens)


@pytest.mark.parametrize('divisor', ['weights', 'sequences'])
def test_microbatches_do_not_change_a_step(divisor):
    data, tx = batch('t5_1_1', 'padded'), optax.sgd(1.0)
    made = objective('t5_1_1', Lookup(), loss_divisor=divisor, label_smoothing=0.1)
    given = made.init(jax.random.key(0), data)['params']
    spec = jax.sharding.PartitionSpec()
    states = []
    for parts in (1, 2):
        step = make_train_step(
            made, tx, key=jax.random.key(0), num_microbatches=parts, data_spec=spec
        )
        states.append(jax.jit(step)(TrainState.create(given, tx), data)[0])
    one, two = (state.params['Embed_0']['embedding'] for state in states)
    assert np.abs(one - given['Embed_0']['embedding']).max() > 1e-7
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-7)


def test_scaled_attention_divides_queries():
    settings = {'vocab_size': 16, 'emb_dim': 8, 'num_heads': 2, 'head_dim': 4, 'mlp_dim': 8}
    settings |= {'num_encoder_layers': 1, 'num_decoder_layers': 1}
    plain = network.Transformer(config=network.T5Config(**settings))
    config = network.GpuT5Config(**settings, scale_attn_logits=True)
    scaled = network.GpuTransformer(config=config)
    tokens = [jnp.arange(1, 7).reshape(2, 3)] * 3

    @jax.jit
    def run():
        variables = nn.unbox(plain.init(jax.random.key(0), *tokens, deterministic=True))
        divided = jax.tree_util.tree_map_with_path(
            lambda path, x: x / 2.0 if 'query' in jax.tree_util.keystr(path) else x, variables
        )
        pairs = ((scaled, variables), (plain, divided), (plain, variables))
        return [net.apply(given, *tokens, deterministic=True) for net, given in pairs]

    found, expected, other = run()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(found - other).max() > 1e-3


COMMON = 'vocab_size dtype emb_dim num_heads num_encoder_layers num_decoder_layers head_dim mlp_dim'
COMMON += ' mlp_activations dropout_rate logits_via_embedding'
MODEL = 'optimizer_def decode_fn {} feature_converter_cls label_smoothing z_loss'
MODEL += ' loss_normalizing_factor'


@pytest.mark.parametrize(
    'made, names',
    [
        (network.T5Config, f'{COMMON} float32_attention_logits'),
        (network.GpuT5Config, f'{COMMON} float32_attention_logits scale_attn_logits'),
        (network.ScalableT5Config, f'{COMMON} remat_policy scan_layers param_scan_axis'),
        (
            network.TransformerConfig,
            COMMON.replace('num_encoder_layers num_decoder_layers', 'num_layers'),
        ),
        (
            models.EncoderDecoderModel,
            f'module input_vocabulary output_vocabulary {MODEL.format("")} default_decoder_params',
        ),
        (
            models.DecoderOnlyModel,
            f'module vocabulary {MODEL.format("inputs_bidirectional_attention")}',
        ),
    ],
    ids=lambda x: getattr(x, '__module__', ''),
)
def test_settings_have_the_order_of_t5x(made, names):
    parameters = [name for name in inspect.signature(made).parameters if name != 'experts']
    assert parameters == names.split()


def test_the_defaults_of_t5x():
    config = network.ScalableT5Config(32)
    assert (config.remat_policy, config.scan_layers, config.param_scan_axis) == ('none', True, 1)
    config = network.TransformerConfig(32)
    sizes = (config.emb_dim, config.num_heads, config.num_layers, config.head_dim, config.mlp_dim)
    assert sizes == (512, 8, 6, 64, 2048)
    assert (config.mlp_activations, config.dropout_rate) == (('relu',), 0.1)


@pytest.mark.parametrize(
    'settings, expected',
    [
        ({'remat_policy': 'some'}, "use 'none', 'minimal', 'full', a Remat"),
        ({'param_scan_axis': 2}, 'use 0 or 1'),
        ({'mlp_activations': 'relu'}, r"sequence of names, such as \('relu',\)"),
        ({'num_heads': 0}, '>= 1'),
        ({'dtype': 'float'}, None),
        ({'dtype': 'floaty'}, "use 'float32' or 'bfloat16'"),
    ],
    ids=str,
)
def test_impossible_networks(settings, expected):
    if expected is None:
        assert network.ScalableT5Config(32, **settings).dtype == jnp.dtype(float)
        return
    with pytest.raises(ConfigError, match=f'{next(iter(settings))} .*{expected}'):
        network.ScalableT5Config(32, **settings)
