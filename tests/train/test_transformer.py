"""The built-in transformer: its settings, packed rows, and its linen and nnx forms."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import batch, model, partitioner

from partitioning import PjitPartitioner, unbox
from train.errors import ConfigError
from train.models.nnx_form import CreateNnxTransformer
from train.models.nnx_transformer import NnxTransformer
from train.models.transformer import RopeScaling
from train.objectives import NextToken

pytestmark = pytest.mark.core


@functools.partial(jax.jit, static_argnums=0)
def logits_of(net, params, tokens, **arguments):
    return net.apply({'params': params}, tokens, **arguments)


def parameters(net, seed=0):
    made = jax.jit(lambda key: net.init(key, method='get_parameters'))(jax.random.key(seed))
    return unbox(made)['params']


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'num_kv_heads': 3}, r'num_heads \(8\) .* multiple of num_kv_heads \(3\)'),
        ({'vocab_size': 2**31}, r'vocab_size is 2,147,483,648: .* below 2\*\*31'),
        ({'head_dim': 7}, r'head_dim \(7\) must be even'),
        ({'remat': 'some'}, "remat is 'some'.*'dots'"),
        ({'num_layers': '4'}, "num_layers is '4'.*integer"),
        ({'mlp_dim': 0}, 'mlp_dim is 0'),
        ({'window': 0}, 'window is 0'),
        ({'dtype': 'bf16'}, "dtype is 'bf16'.*'bfloat16'"),
        ({'activation': 'swish'}, "activation is 'swish'.*'silu'"),
        ({'gated_mlp': 'yes'}, "gated_mlp is 'yes'.*True"),
        ({'dropout_rate': 1.0}, r'dropout_rate is 1\.0.* < 1'),
        ({'logit_soft_cap': 0.0}, r'logit_soft_cap is 0\.0.* > 0'),
        ({'attention_scale': math.nan}, 'attention_scale is nan.* > 0'),
        ({'biases': ('query',)}, r"biases is \('query',\).*'qkv'"),
        ({'biases': 'qkv'}, "biases is 'qkv': use a tuple"),
        ({'biases': ('norm',)}, "norm is 'rms'.*norm = 'layer'"),
        ({'positions': 'learned'}, "'learned' and max_positions is 0"),
        ({'max_positions': 8}, "'rotary' and max_positions is 8"),
        (
            {'positions': 'learned', 'max_positions': 8, 'local_rope_max_wavelength': 9.0},
            'remove rope_scaling and local_rope',
        ),
        ({'rope_scaling': 8.0}, r'rope_scaling is 8\.0.*RopeScaling'),
        ({'global_every': 2}, 'global_every is 2 .* set window'),
    ],
)
def test_impossible_settings_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        model(**changes)


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'factor': 0}, r'RopeScaling\.factor is 0: it must be a number > 0'),
        ({'factor': 2.0, 'low_frequency_factor': 5.0}, 'factor 5.0 and .* 4.0: use low < high'),
    ],
)
def test_impossible_scalings_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**changes)


def test_packed_documents_attend_only_to_themselves():
    """Documents that share a row have the same logits as alone."""
    net = model(num_kv_heads=2)
    params, lengths = parameters(net), (5, 1, 4)
    documents = [np.arange(n)[None] * 3 % 11 + 20 * i for i, n in enumerate(lengths)]
    packed = logits_of(
        net,
        params,
        np.concatenate([*documents, np.zeros((1, 2), int)], axis=1),
        positions_BL=np.concatenate([*map(np.arange, lengths), np.zeros(2, int)])[None],
        segments_BL=np.repeat([1, 2, 3, 0], [*lengths, 2])[None],
    )
    alone = [logits_of(net, params, document) for document in documents]
    expected = np.concatenate(alone, axis=1)
    np.testing.assert_allclose(packed[:, :10], expected, atol=2e-6)
    together = logits_of(net, params, np.concatenate(documents, axis=1))
    assert np.abs(together[:, 5:] - expected[:, 5:]).max() > 1e-3, 'segments matter'
    assert np.isfinite(packed).all()


def test_scanned_layers_compute_what_single_layers_compute():
    changes = {'num_layers': 3, 'window': 2, 'global_every': 2, 'local_rope_max_wavelength': 9.0}
    params, tokens = parameters(model(**changes)), np.arange(12).reshape(2, 6)
    single = {name: value for name, value in params.items() if name != 'layers'}
    for i in range(3):
        single[f'layer_{i}'] = jax.tree.map(lambda x, i=i: x[i], params['layers'])
    expected = logits_of(model(**changes, scan_layers=False, remat='full'), single, tokens)
    np.testing.assert_allclose(logits_of(model(**changes), params, tokens), expected, atol=1e-6)


@pytest.mark.long
def test_the_linen_and_nnx_forms_have_the_same_parameters_specs_and_loss():
    net = model(num_kv_heads=4, norm='layer', biases=('qkv', 'norm'), qk_norm=True)
    forms = {'linen': net, 'nnx': CreateNnxTransformer(net.config)}
    pjit, rows, arrays, losses = partitioner(4, 2), {}, {}, {}
    for form, chosen in forms.items():
        objective = NextToken(model=chosen)
        # nnx gives a stream of random numbers to each kind of variable, and linen uses the key.
        key = jax.random.key(1) if form == 'nnx' else nnx.Rngs(jax.random.key(1)).params()
        plan = pjit.plan(lambda key, o=objective: o.init(key, batch(0))['params'], key)
        rows[form] = [(row.path, row.shape, row.dtype, row.spec) for row in plan.rows]
        params = plan.init(key)
        arrays[form] = params if form == 'linen' else nnx.to_pure_dict(params)
        loss = pjit.partition(
            lambda params, batch, o=objective: o.loss(params, batch, None, {}).total,
            (plan.specs, pjit.data_partition_spec),
            None,
        )
        losses[form] = float(loss(params, batch(0)))
    assert sorted(rows['linen'], key=str) == sorted(rows['nnx'], key=str)
    assert len(rows['nnx']) == 22
    jax.tree.map(np.testing.assert_array_equal, unbox(arrays['linen']), arrays['nnx'])
    assert losses['nnx'] == pytest.approx(losses['linen'], rel=1e-6)
    assert losses['nnx'] > 100


def test_train_and_eval_turn_dropout_of_the_nnx_form_on_and_off():
    net = NnxTransformer(model(dropout_rate=0.5).config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(6)[None]
    one, two = net(tokens), net(tokens)
    np.testing.assert_array_equal(one, two)
    net.train()
    one, two = net(tokens), net(tokens)
    assert np.abs(one - two).max() > 0.01


@pytest.mark.parametrize('kv_heads', [8, 4])
def test_rules_without_kv_heads_cover_a_model_whose_heads_are_not_shared(kv_heads):
    """These are T5X's rules, the default of a partitioner."""
    net, plain = model(num_kv_heads=kv_heads), PjitPartitioner(num_partitions=2)

    def init(key):
        return net.init(key, np.zeros((4, 8), np.int32))

    if kv_heads < 8:
        with pytest.raises(ValueError, match="no rule for logical axis 'kv_heads'"):
            plain.plan(init, jax.random.key(0))
        return
    specs = plain.plan(init, jax.random.key(0)).specs['params']['layers']['attention']
    assert specs['key'] == specs['query'] == jax.sharding.PartitionSpec(None, None, 'model', None)


@pytest.mark.parametrize('gradient_dtype', [None, 'float32'])
def test_gradients_of_matrices_have_the_dtype_of_the_setting(gradient_dtype):
    """Values that bfloat16 cannot hold tell float32 gradients of a bfloat16 model."""
    objective = NextToken(model=model(dtype='bfloat16', gradient_dtype=gradient_dtype))
    params = unbox(objective.init(jax.random.key(0), batch(0))['params'])
    loss = lambda params: objective.loss(params, batch(0), None, {}).total  # noqa: E731
    down = jax.jit(jax.grad(loss))(params)['layers']['mlp']['down']
    rounded = down.astype(jnp.bfloat16).astype(jnp.float32)
    assert down.dtype == jnp.float32
    assert bool(jnp.all(down == rounded)) == (gradient_dtype is None)
    with pytest.raises(ConfigError, match="gradient_dtype is 'half': use None or 'float32'"):
        model(gradient_dtype='half')
