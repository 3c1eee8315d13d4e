"""T5's networks on meshes, and with scanned layers: they compute the same as on one device."""

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P

from partitioning import PjitPartitioner
from train.objectives import EncoderDecoder, compute_loss
from train.t5x import models, network

pytestmark = pytest.mark.core

SIZES = {'vocab_size': 32, 'emb_dim': 16, 'num_heads': 4, 'head_dim': 4, 'mlp_dim': 24}
SIZES |= {'dropout_rate': 0.0, 'num_encoder_layers': 2, 'num_decoder_layers': 2}


def scalable(**changes):
    config = network.ScalableT5Config(**SIZES, **changes)
    return network.ScalableTransformer(config=config)


NETS = {'t5': network.Transformer(config=network.T5Config(**SIZES)), 'scanned': scalable()}


def batch():
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(1, 32, (8, 6)), rng.integers(1, 32, (8, 5))
    inputs[0, 4:], targets[1, 2:] = 0, 0
    shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    arrays = {'encoder_input_tokens': inputs, 'decoder_input_tokens': shifted}
    arrays |= {'decoder_target_tokens': targets, 'decoder_loss_weights': targets > 0}
    return {name: jnp.asarray(x, jnp.int32) for name, x in arrays.items()}


def random_params(made):
    """Parameters of an objective, without compiling its initialization."""
    shapes = nn.unbox(jax.eval_shape(made.init, jax.random.key(0), batch())['params'])
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)


# By T5X's rules: the mesh axes of some parameters.
SPECS = {
    't5': {
        'token_embedder/embedding': P('model', None),
        'encoder/relpos_bias/rel_embedding': P('model', None),
        'encoder/layers_1/attention/key/kernel': P(None, 'model'),
        'decoder/layers_0/encoder_decoder_attention/out/kernel': P('model', None),
        'decoder/layers_1/mlp/wi/kernel': P(None, 'model'),
        'decoder/layers_1/mlp/wo/kernel': P('model', None),
        'decoder/decoder_norm/scale': P(None),
        'decoder/logits_dense/kernel': P(None, 'model'),
    },
    'scanned': {
        'encoder/encoder/relpos_bias/rel_embedding': P('model', None, None),
        'encoder/encoder/attention/query/kernel': P(None, None, 'model', None),
        'decoder/decoder/self_attention/out/kernel': P('model', None, None, None),
        'decoder/decoder/mlp/wi/kernel': P(None, None, 'model'),
        'decoder/decoder/mlp/wo/kernel': P('model', None, None),
        'decoder/decoder/pre_mlp_layer_norm/scale': P(None, None),
    },
}


@pytest.mark.parametrize('name, num_partitions', [('t5', 4), ('scanned', 2)])
def test_losses_are_those_of_one_device_and_parameters_lie_as_the_rules_say(name, num_partitions):
    made, data = EncoderDecoder(model=NETS[name]), batch()
    params = random_params(made)

    def init(key):
        return made.init(key, data)['params']

    def loss(params, data):
        total, sums, _ = compute_loss(made, params, data, None, {})
        return total / sums['weight']

    expected = float(jax.jit(loss)(params, data))
    partitioner = PjitPartitioner(num_partitions=num_partitions)
    assert partitioner.mesh.shape == {'data': 8 // num_partitions, 'model': num_partitions}
    specs = partitioner.plan(init, jax.random.key(0)).specs
    flat = flatten_dict(specs, sep='/')
    assert {path: flat[path] for path in SPECS[name]} == SPECS[name]
    run = partitioner.partition(loss, (specs, partitioner.data_partition_spec), None)
    assert float(run(params, data)) == pytest.approx(expected, rel=1e-5)


def stack(tree, axis):
    """The arrays of all layers as one array, which is what scanned layers have."""
    stacked = {path: x for path, x in tree.items() if '/layers_' not in path}
    for path, x in tree.items():
        first, _, rest = path.partition('/layers_0/')
        if rest:
            both = [x, tree[f'{first}/layers_1/{rest}']]
            stacked[f'{first}/{first}/{rest}'] = jnp.stack(both, axis)
    return stacked


def loss_and_gradients(made, params):
    def loss(params):
        return compute_loss(made, params, batch(), None, {}).total

    loss, gradients = jax.jit(jax.value_and_grad(loss))(unflatten_dict(params, sep='/'))
    return float(loss), flatten_dict(gradients, sep='/')


@pytest.fixture(name='separate', scope='module')
def _separate():
    """Parameters of separate layers, their loss and gradients."""
    made = EncoderDecoder(model=scalable(scan_layers=False))
    params = flatten_dict(random_params(made), sep='/')
    return params, *loss_and_gradients(made, params)


@pytest.mark.parametrize('remat_policy, axis', [('minimal', 1), ('full', 0)])
def test_scanned_layers_compute_the_same_as_separate_ones(separate, remat_policy, axis):
    params, expected, gradients = separate
    made = EncoderDecoder(model=scalable(remat_policy=remat_policy, param_scan_axis=axis))
    found, of_scanned = loss_and_gradients(made, stack(params, axis))
    assert found == pytest.approx(expected, rel=1e-6)
    gradients = stack(gradients, axis)
    assert of_scanned.keys() == gradients.keys()
    for path, value in gradients.items():
        np.testing.assert_allclose(of_scanned[path], value, rtol=1e-4, atol=1e-5, err_msg=path)


def test_scanned_layers_decode_step_by_step():
    """The cache gives the logits of the whole row."""
    data, net = batch(), NETS['scanned']
    variables = {'params': random_params(EncoderDecoder(model=net))}
    inputs, tokens = data['encoder_input_tokens'], data['decoder_input_tokens']
    ones, length = jnp.ones_like(tokens), tokens.shape[1]
    options = {'deterministic': True, 'decode': True, 'method': 'decode', 'mutable': ['cache']}

    @jax.jit
    def start():
        expected = net.apply(variables, inputs, tokens, ones, deterministic=True)
        encoded = net.apply(variables, inputs, deterministic=True, method='encode')
        return expected, encoded, net.apply(variables, encoded, inputs, ones, ones, **options)[1]

    @jax.jit
    def step(cache, encoded, token):
        given = (encoded, inputs, token, token)
        return net.apply({**variables, **cache}, *given, max_decode_length=length, **options)

    expected, encoded, cache = start()
    attention = cache['cache']['decoder']['decoder']['self_attention']
    key_shape = (2, 8, 4, 4, length)  # layers, batch, heads, head_dim, length
    assert {name: x.shape for name, x in attention.items()} == {
        'cached_key': key_shape,
        'cached_value': key_shape,
        'cache_index': (2,),
    }
    for i in range(length):
        logits, cache = step(cache, encoded, tokens[:, i : i + 1])
        np.testing.assert_allclose(logits[:, 0], expected[:, i], rtol=0, atol=1e-5)


GIN = """
from __gin__ import dynamic_registration
import seqio
from t5x import adafactor
from t5x import models
from t5x.examples.t5 import network

MODEL = @models.EncoderDecoderModel()
models.EncoderDecoderModel:
  module = @network.Transformer()
  input_vocabulary = @seqio.ByteVocabulary()
  output_vocabulary = @seqio.ByteVocabulary()
  optimizer_def = @adafactor.Adafactor()
  loss_normalizing_factor = 'AVERAGE_PER_SEQUENCE'
models.EncoderDecoderModel.predict_batch_with_aux:
  num_decodes = 3
  return_all_decodes = True
network.Transformer.config = @network.T5Config()
network.T5Config:
  vocab_size = 384
  mlp_activations = ['gelu', 'linear']

# As in T5X's files for exports.
VOCABULARY = @models.get_input_vocabulary()
models.get_input_vocabulary.model = %MODEL
"""


def test_gin_files_set_what_predictions_are(load, monkeypatch):
    """`predict` is what evaluators call."""
    other = '@models.get_input_vocabulary()'
    load(
        GIN.replace(other, '@seqio.ByteVocabulary()') + '\nAGAIN = @models.get_input_vocabulary()\n'
        'models.get_input_vocabulary.model = %MODEL\n'
    )
    model = gin.query_parameter('%MODEL').scoped_configurable_fn()
    assert isinstance(model, models.BaseTransformerModel)
    assert model.objective().loss_divisor == 'sequences'
    assert models.get_input_vocabulary(model) == model.input_vocabulary
    seen = {}

    def predict_batch(objective, params, batch, rng, **options):
        seen.update(options, objective=objective)
        return models.Predictions('tokens', 'scores')

    monkeypatch.setattr(models, 'predict', predict_batch)
    found = model.predict(None, {}, {}, None, variables={}, end_token=None)
    assert (found.tokens, found.scores) == ('tokens', 'scores')
    assert (seen['num_decodes'], seen['return_all_decodes']) == (3, True)
    assert seen['end_token'] == model.output_vocabulary.separator
    assert seen['objective'] == model.objective()
    assert model.module.config.mlp_activations == ('gelu', 'linear')
