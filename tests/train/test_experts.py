"""Layers of experts: routing next to loops over tokens, and experts on a mesh."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning import MoePjitPartitioner
from train.errors import ConfigError
from train.models.experts import ExpertMlp, ExpertsConfig, routing
from train.models.experts.dropless import multiply_groups

pytestmark = pytest.mark.core

ROWS, LENGTH, WIDTH, HIDDEN, EXPERTS = 8, 12, 16, 24, 8
ACTIVATIONS = (nn.gelu, lambda x: x)


def layer(**settings):
    settings = {'num_experts': EXPERTS, 'router_z_loss_factor': 0.1} | settings
    return ExpertMlp(ExpertsConfig(**settings), HIDDEN, ACTIVATIONS)


def tokens():
    """Rows whose last tokens are padding, except in the first row; the last row is padding."""
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    ends = np.array([LENGTH, 3, 5, 7, 9, 11, 1, 0])
    return x, np.arange(LENGTH) < ends[:, None]


def init(module, key=1):
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.float32)
    shapes = nn.unbox(jax.eval_shape(module.init, jax.random.key(0), x)['params'])
    rng = np.random.default_rng(key)
    return jax.tree.map(lambda p: rng.normal(0, 0.2, p.shape).astype(p.dtype), shapes)


def run(module, is_token, **arguments):
    """Returns a jitted function: (params, x) -> (gradients, (outputs, loss, metrics))."""

    def error(params, x):
        y, sown = module.apply({'params': params}, x, is_token, mutable=True, **arguments)
        metrics = {k.removeprefix('experts/'): v for k, (v,) in sown['metrics'].items()}
        total = sum(jax.tree.leaves(sown['losses']))
        return jnp.sum(jnp.square(y - x)), (y, total, metrics)

    return jax.jit(jax.grad(error, argnums=(0, 1), has_aux=True))


# Loops over tokens.


def loops(probabilities, is_token, config, size, capacity):
    """What each group of `size` tokens does, one token after another.

    Returns which experts each token chooses and which of them take it, the number of dropped
    choices, the share of tokens left behind, and the load-balance loss.
    """
    chosen, taken = np.zeros((2, *probabilities.shape), bool)
    losses = []
    for first in range(0, len(probabilities), size):
        group = [t for t in range(first, first + size) if is_token[t]]
        order = {t: sorted(range(EXPERTS), key=lambda e, t=t: -probabilities[t, e]) for t in group}
        for choice in range(config.num_selected_experts):
            for t in group:
                expert = order[t][choice]
                chosen[t, expert] = True
                if taken[first : first + size, expert].sum() < capacity:
                    taken[t, expert] = True
        if group:
            shares, means = chosen[group].mean(0), probabilities[group].mean(0)
            losses.append(EXPERTS * sum(shares[e] * means[e] for e in range(EXPERTS)))
    behind = [not taken[t].any() for t in range(len(taken)) if is_token[t]]
    return chosen, taken, (chosen & ~taken).sum(), np.mean(behind), np.mean(losses)


def dense(params, x, chosen, taken, normalize):
    """The output of every expert for every token, times its weight."""
    logits = x @ params['router']['router_weights']['w']['kernel']
    up, gate, down = (params['expert'][k]['kernel'] for k in ('wi_0', 'wi_1', 'wo'))
    hidden = nn.gelu(jnp.einsum('tm,emf->tef', x, up)) * jnp.einsum('tm,emf->tef', x, gate)
    y = jnp.einsum('tef,efm->tem', hidden, down)
    weights = jax.nn.softmax(logits)
    if normalize:
        weights /= jnp.maximum(jnp.sum(weights * chosen, axis=1, keepdims=True), 1e-9)
    return jnp.einsum('tem,te->tm', y, weights * taken)


# The settings, and the capacity that follows from them.
CASES = {
    'top-1': ({'train_capacity_factor': 0.8, 'min_expert_capacity': 1}, 1),
    'top-2': ({'num_selected_experts': 2, 'normalize_weights': True}, 4),
    'top-3': ({'num_selected_experts': 3, 'tokens_per_group': 32, 'train_capacity_factor': 2.0}, 8),
    'dropless': ({'num_selected_experts': 2, 'dropless': True, 'tokens_per_group': 6}, 6),
}


@pytest.mark.parametrize('case', CASES)
def test_loops_over_tokens(case):
    settings, capacity = CASES[case]
    module, (x, is_token) = layer(**settings), tokens()
    config, params = module.config, init(module)
    logits = x.reshape(-1, WIDTH) @ params['router']['router_weights']['w']['kernel']
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    size, mask = config.tokens_per_group or LENGTH, np.ravel(is_token)
    chosen, taken, dropped, behind, balance = loops(probabilities, mask, config, size, capacity)
    z_loss = (np.log(np.exp(logits[mask]).sum(1)) ** 2).mean()

    def error(params, x):
        rows = x.reshape(-1, WIDTH)
        y = dense(params, rows, chosen, taken, config.normalize_weights).reshape(x.shape)
        return jnp.sum(jnp.square(y - x)), y

    expected = jax.jit(jax.grad(error, argnums=(0, 1), has_aux=True))(params, x)
    grads, (y, loss, metrics) = run(module, is_token, deterministic=False)(params, x)
    same = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(same, (grads, y), expected)
    assert (dropped > 0) == (case != 'dropless')
    assert metrics['dropped_tokens'] == dropped
    assert float(metrics['fraction_tokens_left_behind']) == pytest.approx(behind)
    assert float(metrics['auxiliary_loss']) == pytest.approx(balance, rel=1e-5)
    assert float(metrics['router_z_loss']) == pytest.approx(z_loss, rel=1e-5)
    assert float(loss) == pytest.approx(0.01 * balance + 0.1 * z_loss, rel=1e-5)


# Hand counts.


def test_the_load_balance_loss_of_switch_transformers():
    """f = (3/4, 1/4) and P = (0.6, 0.4), so it is 2 * (0.45 + 0.1); padding does not count."""
    first = np.array([[0.9, 0.7, 0.6, 0.2, 0.0]])
    probabilities = jnp.asarray(np.stack([first, 1 - first], axis=-1), jnp.float32)
    is_token = jnp.array([[True, True, True, True, False]])
    routed = routing.route(probabilities, is_token, num_selected=1, capacity=2)
    assert float(routing.load_balance_loss(probabilities, routed)) == pytest.approx(1.1)
    assert routed.slots_GTK[0, :, 0].tolist() == [0, 1, 4, 2, 4]
    assert routed.choices_GS.tolist() == [[0, 1, 3, 5]]
    assert int(routed.num_dropped) == 1


@pytest.mark.parametrize(
    'settings, training, capacity',
    [
        ({'train_capacity_factor': 1.0}, True, 16),
        ({'train_capacity_factor': 1.0, 'eval_capacity_factor': 2.0}, False, 32),
        ({'train_capacity_factor': 0.1}, True, 4),
        ({'train_capacity_factor': 100.0}, True, 128),
        ({'dropless': True}, True, 128),
    ],
)
def test_capacity(settings, training, capacity):
    config = ExpertsConfig(num_experts=8, **settings)
    assert config.capacity(128, training=training) == capacity


def test_experts_of_training_and_evaluation_and_decoding():
    """All tokens of a row choose expert 0, which takes 4 of 12 in training and 6 in evaluation."""
    module = layer(train_capacity_factor=1.0, eval_capacity_factor=4.0, jitter_noise=0.1)
    params, x = init(module), np.ones((2, LENGTH, WIDTH), np.float32)
    params['router']['router_weights']['w']['kernel'] = np.eye(1, EXPERTS) * np.ones((WIDTH, 1))
    modes = {
        'train': {'deterministic': False, 'rngs': {'dropout': jax.random.key(0)}},
        'evaluate': {},
        'decode': {'decode': True},
    }
    found = {name: run(module, None, **mode)(params, x)[1] for name, mode in modes.items()}
    metrics = {name: metrics for name, (_, _, metrics) in found.items()}
    dropped = {name: int(m['dropped_tokens']) for name, m in metrics.items()}
    assert dropped == {'train': 16, 'evaluate': 12, 'decode': 0}
    assert float(metrics['train']['fraction_tokens_left_behind']) == pytest.approx(8 / 12)
    assert float(metrics['evaluate']['expert_usage']) == pytest.approx(1 / 8)
    assert float(metrics['evaluate']['largest_load']) == pytest.approx(8)
    confidence = np.exp(WIDTH) / (np.exp(WIDTH) + EXPERTS - 1)
    assert float(metrics['evaluate']['router_confidence']) == pytest.approx(confidence)
    y = np.asarray(found['train'][0])
    assert y[:, :4].any(-1).all() and not y[:, 4:].any()
    assert np.ptp(y[0, :4], axis=0).max() > 0, 'jitter changes the weights'
    assert not np.ptp(np.asarray(found['decode'][0]), axis=(0, 1)).any()


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'num_experts': 0}, 'num_experts is 0: it must be an integer >= 1'),
        (
            {'num_selected_experts': 9},
            'selected_experts is 9, but there are 8 .*: select at most 8',
        ),
        ({'jitter_noise': 1}, 'jitter_noise is 1: it must be a number >= 0 and < 1'),
        ({'eval_capacity_factor': 0}, 'eval_capacity_factor is 0: it must be a number > 0'),
    ],
)
def test_settings_that_are_malformed(settings, message):
    with pytest.raises(ConfigError, match=message):
        ExpertsConfig(**{'num_experts': 8} | settings)


def test_groups_that_do_not_divide_the_batch():
    with pytest.raises(ConfigError, match=r'per_group is 40, .* 8 x 12 = 96 tokens .*: use 32, or'):
        init(layer(tokens_per_group=40))


# On a mesh.


def collectives(text):
    """The collectives of a compiled program."""
    kinds = 'all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute'
    return re.findall(rf' ({kinds})(?:-start)?\(', text)


@pytest.mark.parametrize('dropless, expert, model', [(False, 4, 1), (True, 2, 2)])
def test_experts_on_a_mesh(dropless, expert, model):
    module = layer(num_selected_experts=2, dropless=dropless, jitter_noise=0.1)
    module, (x, is_token) = module.clone(dropout_rate=0.3), tokens()
    step = run(module, is_token, deterministic=False, rngs={'dropout': jax.random.key(0)})
    partitioner = MoePjitPartitioner(num_expert_partitions=expert, num_partitions=model)
    assert dict(partitioner.mesh.shape) == {'data': 2, 'expert': expert, 'model': model}
    plan = partitioner.plan(lambda key: module.init(key, x)['params'], jax.random.key(0))
    params = plan.init(jax.random.key(0))
    for name in ('wi_0', 'wi_1', 'wo'):
        kernel = params['expert'][name]['kernel']
        assert kernel.addressable_shards[0].data.size == kernel.size / 4
    batch = partitioner.data_partition_spec
    program = partitioner.partition(
        step, (plan.specs, batch), ((plan.specs, batch), (batch, None, None))
    )
    one = jax.device_put(jax.device_get(params), jax.devices()[0])
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    compiled = program.lower(params, x).compile()
    jax.tree.map(same, jax.device_get(compiled(params, x)), jax.device_get(step(one, x)))
    kinds = collectives(compiled.as_text())
    assert kinds.count('all-to-all') >= 4, 'there and back, forward and backward'
    assert {*kinds} == {'all-to-all', 'all-reduce'}, 'nothing is gathered'


def test_metrics_of_more_slots_than_an_int32_can_count():
    """8,192 rows of 4,096 tokens for 128 experts have 2**32 slots."""

    def metrics(probabilities, is_token):
        routed = routing.route(probabilities, is_token, num_selected=8, capacity=4096)
        return routing.routing_metrics(probabilities, routed)

    shape = (8192, 4096, 128)
    found = jax.eval_shape(
        metrics, jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:2], bool)
    )
    assert found['expert_usage'].shape == ()


def test_gradients_of_groups_do_not_contract_the_last_dimension_of_matrices():
    """The compiler of TPUs runs out of vector memory otherwise, with wide matrices."""
    rows, kernels, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 5)), jnp.array([4, 2])
    gradients = jax.grad(lambda *given: multiply_groups(*given, sizes).sum(), (0, 1))
    jaxpr = jax.make_jaxpr(gradients)(rows, kernels)
    products = [
        equation.params['ragged_dot_dimension_numbers']
        for equation in jaxpr.eqns
        if equation.primitive.name == 'ragged_dot_general'
    ]
    of_matrices = [n for n in products if n.rhs_group_dimensions]
    assert of_matrices and all(n.dot_dimension_numbers[0][1] == (1,) for n in of_matrices)
    assert len(products) == 3, 'one forward, and one for each factor'
