"""The loss that training minimizes: z-loss, smoothed labels, divisors, metrics of parameters."""

import jax
import numpy as np
import optax
import pytest
from small import batch, model

from partitioning import TrainState, unbox
from train.errors import ConfigError
from train.optimizers import Optimizer
from train.steps import LossConfig, loss_sums, make_train_step

pytestmark = pytest.mark.core

DATA = batch(3)
WEIGHTS = DATA['decoder_loss_weights']


@pytest.fixture(name='net', scope='module')
def _net():
    """A model, its parameters, its logits of `DATA`, and the gradients of the summed loss."""
    net = model(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=16)
    inputs = DATA['decoder_input_tokens']
    params = unbox(jax.jit(net.init)(jax.random.key(0), inputs))['params']
    logits = jax.jit(net.apply)({'params': params}, inputs)
    grads = jax.jit(jax.grad(lambda p: loss_sums(net, p, DATA)[0]))(params)
    return net, params, np.asarray(logits, np.float64), grads


def cross_entropy(logits, smoothing):
    """The cross-entropy with smoothed labels, summed over the targets with weight."""
    vocabulary = logits.shape[-1]
    targets = np.eye(vocabulary)[DATA['decoder_target_tokens']]
    soft = np.where(targets == 1, 1 - smoothing, smoothing / (vocabulary - 1))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return (-(soft * log_p).sum(-1) * WEIGHTS).sum()


@pytest.mark.parametrize(('smoothing', 'z_loss'), [(0.1, 0.0), (0.0, 0.01), (0.1, 0.01)])
def test_the_loss_with_a_z_loss_and_smoothed_labels(net, smoothing, z_loss):
    module, params, logits, _ = net
    config = LossConfig(z_loss=z_loss, label_smoothing=smoothing)
    loss, sums = jax.jit(lambda p: loss_sums(module, p, DATA, loss=config))(params)
    added = z_loss * (np.log(np.exp(logits).sum(-1)) ** 2 * WEIGHTS).sum()
    assert float(loss) == pytest.approx(cross_entropy(logits, smoothing) + added, rel=1e-5)
    assert float(sums['nats']) == pytest.approx(cross_entropy(logits, 0.0), rel=1e-5)
    assert float(sums.get('z_loss', 0.0)) == pytest.approx(added, rel=1e-5)


@pytest.mark.parametrize(
    'divisor, expected_divisor, microbatches',
    [('weights', 120.0, 1), ('targets', 128.0, 2), (10.0, 10.0, 1)],
)
def test_the_divisor_of_gradients_and_the_metrics_of_parameters(
    net, divisor, expected_divisor, microbatches
):
    module, params, logits, grads = net
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
def test_invalid_losses(settings):
    with pytest.raises(ConfigError, match=f'LossConfig.{next(iter(settings))} is '):
        LossConfig(**settings)
