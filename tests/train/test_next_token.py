"""The objective of language models: cross-entropy, z-loss, smoothed labels and divisors."""

import dataclasses
import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
import scipy.special
from small import Bigram, batch, model

from partitioning import TrainState, unbox
from train import NextToken
from train.data import CausalLM, Records
from train.errors import ConfigError
from train.objectives import compute_loss
from train.running.run import check_vocabulary
from train.running.steps import make_train_step

pytestmark = pytest.mark.core

DATA = {name: x % 16 if x.dtype == np.int32 else x for name, x in batch(3).items()}
WEIGHTS = DATA['decoder_loss_weights']
SMALL = {'vocab_size': 16, 'num_layers': 1, 'embed_dim': 16, 'num_heads': 2, 'num_kv_heads': 2}
SMALL |= {'mlp_dim': 16}


@functools.partial(jax.jit, static_argnums=0)
def loss_of(objective, params, rng=None):
    return compute_loss(objective, params, DATA, rng, {})


@pytest.fixture(name='net', scope='module')
def _net():
    """A model, its parameters, its logits of `DATA`, and the gradients of the summed loss."""
    net = model(**SMALL)
    inputs = DATA['decoder_input_tokens']
    params = unbox(jax.jit(net.init)(jax.random.key(0), inputs))['params']
    logits = jax.jit(net.apply)({'params': params}, inputs)
    grads = jax.grad(lambda p: loss_of(NextToken(model=net), p).total)(params)
    return net, params, np.asarray(logits, np.float64), grads


def cross_entropy(logits, smoothing=0.0):
    """The divergence from smoothed labels, summed over the targets with weight."""
    vocabulary = logits.shape[-1]
    targets = np.eye(vocabulary)[DATA['decoder_target_tokens']]
    soft = np.where(targets == 1, 1 - smoothing, smoothing / (vocabulary - 1))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    negative_entropy = scipy.special.xlogy(soft, soft)
    return ((negative_entropy - soft * log_p).sum(-1) * WEIGHTS).sum()


@pytest.mark.parametrize(('smoothing', 'z_loss'), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.01)])
def test_the_loss_with_a_z_loss_and_smoothed_labels(net, smoothing, z_loss):
    module, params, logits, _ = net
    objective = NextToken(model=module, z_loss=z_loss, label_smoothing=smoothing)
    total, sums, _ = loss_of(objective, params)
    added = z_loss * (np.log(np.exp(logits).sum(-1)) ** 2 * WEIGHTS).sum()
    assert float(total) == pytest.approx(cross_entropy(logits, smoothing) + added, rel=1e-5)
    assert float(sums['loss']) == pytest.approx(cross_entropy(logits), rel=1e-5)
    assert float(sums.get('z_loss', 0.0)) == pytest.approx(added, rel=1e-5)
    correct = (logits.argmax(-1) == DATA['decoder_target_tokens']) * WEIGHTS
    assert (float(sums['accuracy']), float(sums['weight'])) == (correct.sum(), WEIGHTS.sum())


@pytest.mark.parametrize(
    'divisor, expected_divisor, microbatches',
    [('weights', 120.0, 1), ('targets', 128.0, 2), (10.0, 10.0, 1)],
)
def test_the_divisor_of_gradients_and_the_metrics_of_parameters(
    net, divisor, expected_divisor, microbatches
):
    module, params, logits, grads = net
    tx = optax.sgd(1.0)
    step = make_train_step(
        NextToken(model=module, loss_divisor=divisor),
        tx,
        key=jax.random.key(0),
        num_microbatches=microbatches,
        data_spec=jax.sharding.PartitionSpec(),
        weight_metrics=True,
    )
    state, metrics = jax.jit(step)(TrainState.create(params, tx), DATA)
    name, before = 'final_norm/scale', np.asarray(params['final_norm']['scale'], np.float64)
    gradient = np.asarray(grads['final_norm']['scale'], np.float64) / expected_divisor
    after = before - gradient
    np.testing.assert_allclose(state.params['final_norm']['scale'], after, rtol=1e-4)
    expected = {
        'weight_rms': np.sqrt((after**2).mean()),
        'weight_gradient_rms': np.sqrt((gradient**2).mean()),
        'weight_update_rms': np.sqrt((gradient**2).mean()),
        'weight_max': np.abs(after).max(),
    }
    for metric, value in expected.items():
        assert float(metrics.pop(f'{metric}/{name}')) == pytest.approx(value, rel=1e-3)
    norms = [np.sum(np.square(g, dtype=np.float64)) for g in jax.tree.leaves(grads)]
    gradient_norm = np.sqrt(sum(norms)) / expected_divisor
    assert float(metrics['gradient_norm']) == pytest.approx(gradient_norm, rel=1e-4)
    assert float(metrics['loss']) == pytest.approx(cross_entropy(logits) / 120, rel=1e-5)
    assert len(metrics) == 4 + 4 * (len(jax.tree.leaves(params)) - 1)


def test_dropout_is_off_in_evaluation(net):
    _, params, logits, _ = net
    dropped = NextToken(model=model(**SMALL, dropout_rate=0.3))
    assert float(loss_of(dropped, params).total) == pytest.approx(cross_entropy(logits), rel=1e-5)
    one, again, two = (float(loss_of(dropped, params, jax.random.key(i)).total) for i in (1, 1, 2))
    assert one == again and abs(one - two) > 1e-3


def test_rows_with_other_arrays_are_refused():
    row = {**DATA, 'encoder_input_tokens': DATA['decoder_input_tokens']}
    del row['decoder_loss_weights']
    with pytest.raises(ConfigError, match=r'needs .*decoder_loss_weights, but .* encoder_input'):
        NextToken(model=Bigram()).loss({}, row, None, {})


def test_the_vocabulary_must_have_every_token():
    task = CausalLM(source=Records(records=['text']))  # 256 bytes and a separator
    check_vocabulary(NextToken(model=model(vocab_size=257)), task.num_tokens)
    check_vocabulary(NextToken(model=Bigram()), task.num_tokens)  # a run counts its logits
    with pytest.raises(ConfigError, match='vocab_size 256 is smaller than the 257 tokens'):
        check_vocabulary(NextToken(model=model(vocab_size=256)), task.num_tokens)


@pytest.mark.parametrize(
    'outputs, shown',
    [(lambda x: (x, x), 'a tuple'), (lambda x: x[0], r'an array of shape \(16,\)')],
)
def test_outputs_that_are_not_logits(outputs, shown):
    class Net(nn.Module):
        def __call__(self, tokens):
            return outputs(tokens)

    expected = rf'the model returns {shown} for tokens of shape \(8, 16\): .*logits'
    with pytest.raises(ConfigError, match=expected):
        NextToken(model=Net()).loss({}, DATA, None, {})


@pytest.mark.parametrize(
    'settings, instead',
    [
        ({'z_loss': -0.1}, 'a number >= 0'),
        ({'z_loss': '1'}, 'a number >= 0'),
        ({'label_smoothing': 1.0}, 'a number >= 0 and < 1'),
        ({'label_smoothing': True}, 'a number >= 0 and < 1'),
        ({'loss_divisor': 0}, "'weights', 'targets', 'sequences' or a number > 0"),
        ({'loss_divisor': 'weight'}, "'weights', 'targets', 'sequences' or a number > 0"),
        ({'loss_divisor': float('nan')}, "'weights', 'targets', 'sequences' or a number > 0"),
    ],
    ids=str,
)
def test_invalid_losses(settings, instead):
    with pytest.raises(ConfigError, match=f'NextToken.{next(iter(settings))} is .*: .*{instead}$'):
        NextToken(model=Bigram(), **settings)


def test_a_subclass_may_have_any_fields():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Shifted(NextToken):
        by: int = 0
        rate: float = -1.0
        note: 'NotImported' = None  # noqa: F821, like a name that only type checkers import

    assert Shifted(model=Bigram(), by=-1).by == -1
    with pytest.raises(ConfigError, match=r'Shifted\.z_loss is -1'):
        Shifted(model=Bigram(), z_loss=-1)
