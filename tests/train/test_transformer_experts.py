"""The built-in transformer with experts: numpy, meshes, decoding, and settings that exclude it."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from small import RULES, batch, model, partitioner

from partitioning.products.flops import count_jaxpr_flops
from train.errors import ConfigError
from train.models.decoding import generate
from train.models.experts import ExpertsConfig
from train.models.nnx_transformer import NnxTransformer
from train.models.parameters import list_parameters
from train.models.pipeline import Pipeline
from train.objectives import NextToken

pytestmark = pytest.mark.core

EXPERTS = ExpertsConfig(
    num_experts=8,
    num_selected_experts=2,
    dropless=True,
    normalize_weights=True,
    auxiliary_loss_factor=0.1,
    router_z_loss_factor=0.01,
)
SMALL = {'embed_dim': 16, 'head_dim': 2, 'mlp_dim': 24, 'vocab_size': 264}
NET = model(**SMALL, experts=EXPERTS)
WIDTH = 2  # of a head
KEY, SPEC = jax.random.key(0), PartitionSpec('data')


def in_float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


@pytest.fixture(scope='module')
def params():
    """Normal numbers, large enough that the experts matter."""
    rng = np.random.default_rng(0)

    def draw(parameter):
        if parameter.constant:
            return rng.uniform(0.5, 1.5, parameter.shape).astype(np.float32)
        return rng.normal(0, 0.4, parameter.shape).astype(np.float32)

    return jax.tree.map(draw, list_parameters(NET.config))


# The same model in numpy, one token and one expert after another.


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normed(x, norm):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * norm['scale']


def turned(x):
    """Rotary positions of heads of two numbers: a rotation by the position."""
    angle = np.arange(x.shape[0])[:, None]
    a, b = x[..., 0], x[..., 1]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.stack([a * cos - b * sin, a * sin + b * cos], -1)


def attended(p, x):
    q, k, v = (np.einsum('ld,dhn->lhn', x, p[name]) for name in ('query', 'key', 'value'))
    scores = np.einsum('lhn,shn->hls', turned(q), turned(k)) * WIDTH**-0.5
    scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
    return np.einsum('hls,shn,hnd->ld', softmax(scores), v, p['out'])


def mixed(p, x):
    """Each token's two experts, weighted by the softmax over their two logits."""
    out, logits = np.zeros_like(x), x @ p['router']
    for t, row in enumerate(x):
        best = np.argsort(-logits[t])[:2]
        for expert, weight in zip(best, softmax(logits[t, best]), strict=True):
            gate = row @ p['gate'][expert]
            hidden = gate / (1 + np.exp(-gate)) * (row @ p['up'][expert])
            out[t] += weight * (hidden @ p['down'][expert])
    return out, logits


def reference(params, rows):
    """The logits of each row of tokens, of any length, and the auxiliary loss."""
    logits, balances, z_losses, shares = [], [], [], []
    for row in rows:
        x = params['embedding'][row] * 4.0  # the square root of the width, 16
        for i in range(2):
            p = jax.tree.map(lambda a, i=i: a[i], params['layers'])
            x = x + attended(p['attention'], normed(x, p['attention_norm']))
            branch, routed = mixed(p['mlp'], normed(x, p['mlp_norm']))
            x = x + branch
            chosen = np.argsort(-routed)[:, :2]
            share = np.bincount(chosen.ravel(), minlength=8) / len(row)
            balances.append(8 * (share * softmax(routed).mean(0)).sum())
            z_losses += [*np.log(np.exp(routed).sum(-1)) ** 2]
            shares.append(share)
        logits.append(normed(x, params['final_norm']) @ params['output'])
    if len(rows) > 2:
        assert np.mean(shares, axis=0).min() > 0, 'an expert is not used'
    return logits, 0.1 * np.mean(balances) + 0.01 * np.mean(z_losses)


# The rows of a batch end with padding, which is segment 0.
LENGTHS = (8, 3, 5, 8)


def on_a_mesh(function, of_experts, params, *arrays):
    """The result of a function on 2x4 devices, with this rule for 'expert'."""
    rules = [('expert', of_experts), ('expert_mlp', 'model'), *RULES]
    pjit = partitioner(2, 4, logical_axis_rules=rules)
    plan = pjit.plan(lambda key: NET.init(key, method='get_parameters')['params'], KEY)
    specs = (plan.specs, *[SPEC] * len(arrays))
    return jax.device_get(pjit.partition(function, specs, None)(params, *arrays))


def padded_batch():
    given = batch(0, rows=4, length=8)
    is_token = np.arange(8) < np.array(LENGTHS)[:, None]
    given['decoder_loss_weights'] *= is_token
    return given | {'decoder_segment_ids': is_token.astype(np.int32)}


def loss_of_run(params, batch):
    """The loss per token, and what the model reports."""
    net = model(**SMALL, experts=EXPERTS, remat='full')
    found = NextToken(model=net).loss(params, batch, None, {})
    return found.total / found.sums['weight'], found.sums


def loss_by_reference(params, given):
    inputs = given['decoder_input_tokens']
    rows = [row[:length] for row, length in zip(inputs, LENGTHS, strict=True)]
    logits, auxiliary = reference(params, rows)
    nats, weights = 0.0, given['decoder_loss_weights']
    for i, row in enumerate(logits):
        scores = softmax(row)[range(len(row)), given['decoder_target_tokens'][i, : len(row)]]
        nats -= np.log(scores) @ weights[i, : len(row)]
    return nats / weights.sum() + auxiliary


def test_the_loss_and_its_gradients_are_those_of_numpy(params):
    """With experts over the axis 'data' and their hidden layers over the axis 'model'."""
    exact, given = in_float64(params), padded_batch()
    program = jax.value_and_grad(loss_of_run, has_aux=True)
    (loss, sums), gradients = on_a_mesh(program, 'data', params, given)
    assert float(loss) == pytest.approx(loss_by_reference(exact, given), rel=1e-5)
    assert sums['experts/dropped_tokens'] == 0
    assert sums['experts/router_confidence'] / sums['weight'] == pytest.approx(0.5)
    # Every kind of array is moved on its own.
    rng = np.random.default_rng(1)
    leaves, structure = jax.tree.flatten(exact)
    for i, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.normal(0, 1e-6, leaves[i].shape)
        high, low = (
            loss_by_reference(
                structure.unflatten([*leaves[:i], leaves[i] + sign * direction, *leaves[i + 1 :]]),
                given,
            )
            for sign in (1, -1)
        )
        assert np.sum(gradient * direction) == pytest.approx((high - low) / 2, rel=1e-3, abs=1e-10)
        assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-4


def test_gradients_of_kernels_whose_embed_is_sharded(params):
    """They are those of one device, and are scattered while they are summed.

    A device has 8 of the 16 numbers of a token, and 6 of the 24 of a hidden layer.
    """
    given, rules = padded_batch(), [('expert', None), ('expert_mlp', 'model'), *RULES]
    program = jax.grad(lambda *args: loss_of_run(*args)[0])
    pjit = partitioner(2, 4, logical_axis_rules=rules)
    specs = pjit.plan(lambda key: NET.init(key, method='get_parameters')['params'], KEY).specs
    compiled = pjit.partition(program, (specs, SPEC), specs).lower(params, given).compile()
    same = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=1e-5)
    jax.tree.map(same, jax.device_get(compiled(params, given)), program(params, given))
    sums = re.findall(r'= f32\[([\d,]*)\]\S* (reduce-scatter|all-reduce)\(', compiled.as_text())
    of_kernels = [kind for shape, kind in sums if re.fullmatch('8,(6,.*|.*,6)', shape)]
    assert of_kernels == ['reduce-scatter'] * 3


def test_products_whose_results_are_kept_are_not_computed_again(params):
    """Three products of groups per layer, and six for their gradients, but for the input of one."""
    given = padded_batch()

    def count(remat):
        net = model(**SMALL, experts=EXPERTS, remat=remat)
        loss = jax.grad(lambda params: NextToken(model=net).loss(params, given, None, {}).total)
        return count_jaxpr_flops(jax.make_jaxpr(loss)(params).jaxpr, dense=False)

    forward = count('full') / 4  # the forward pass twice, and two products for each of its own
    assert count('dots') == 3 * forward


def test_generation_continues_with_the_most_likely_token(params):
    """With all experts on each device, and their hidden layers over the axis of the model."""
    prompts, expected = np.array([[5, 9, 2, 7], [3, 8, 0, 0]], np.int32), [[5, 9, 2, 7], [3, 8]]

    def advance(params, prompts, lengths):
        return generate(NET, params, prompts, lengths, KEY, new_tokens=2, temperature=0.0)

    rows, _ = on_a_mesh(advance, None, params, prompts, np.array([4, 2]))
    for _ in range(2):
        for row, logits in zip(expected, reference(params, expected)[0], strict=True):
            row.append(int(np.argmax(logits[-1])))
    assert [row[: len(e)] for row, e in zip(rows.tolist(), expected, strict=True)] == expected


@pytest.mark.parametrize(
    'of_experts, settings, message',
    [
        ({'dropless': False}, {}, r'set ExpertsConfig\.dropless = True'),
        ({'jitter_noise': 0.1}, {}, r'ExpertsConfig\.jitter_noise is 0\.1.*remove it'),
        ({'mlp_dim': 8}, {}, r'ExpertsConfig\.mlp_dim is 8.*remove it'),
        ({'decoder_every': 2}, {}, r'ExpertsConfig\.decoder_every is 2.*remove it'),
        ({}, {'pipeline': Pipeline(num_microbatches=2)}, r'remove experts or pipeline'),
        ({}, {'biases': ('mlp',)}, r"experts have no biases: remove 'mlp'"),
        ({}, {'gradient_dtype': 'bfloat16'}, r"gradient_dtype is 'bfloat16'.*use 'float32'"),
        ({}, {'experts': 8}, r'experts is 8: it must be an ExpertsConfig'),
    ],
)
def test_settings_that_exclude_experts_are_errors(of_experts, settings, message):
    experts = dataclasses.replace(EXPERTS, **of_experts)
    with pytest.raises(ConfigError, match=message):
        model(**{'experts': experts} | settings)


def test_the_nnx_form_refuses_experts():
    with pytest.raises(ConfigError, match='has no experts: use Transformer'):
        NnxTransformer(NET.config, rngs=nnx.Rngs(0))
