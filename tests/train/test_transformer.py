"""The model: the masks of attention, rotary positions, and decoding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import model

from partitioning import unbox
from train.models.decoding import decode
from train.models.transformer import rotary

pytestmark = pytest.mark.core


@pytest.fixture(scope='module')
def net_and_params():
    net = model(num_kv_heads=2)
    return net, unbox(jax.jit(net.init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))['params']


@functools.partial(jax.jit, static_argnums=0)
def logits_of(net, params, tokens, **arguments):
    return net.apply({'params': params}, tokens, **arguments)


def test_a_token_changes_only_later_logits(net_and_params):
    net, params = net_and_params
    tokens = np.arange(12)[None] % 7
    changed = tokens.copy()
    changed[0, 6] = 99
    a, b = (np.asarray(logits_of(net, params, t)) for t in (tokens, changed))
    np.testing.assert_allclose(a[0, :6], b[0, :6], atol=1e-6)
    assert (np.abs(a[0, 6:] - b[0, 6:]).max(-1) > 1e-4).all()


def test_rotary_products_depend_only_on_distance():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def product(i, j):
        a = rotary(q, jnp.array([[i]]), 10_000.0)
        b = rotary(k, jnp.array([[j]]), 10_000.0)
        return float(jnp.sum(a * b))

    assert product(3, 1) == pytest.approx(product(103, 101), abs=1e-4)
    assert abs(product(3, 1) - product(4, 1)) > 1e-3
    assert product(5, 5) == pytest.approx(float((q * k).sum()), abs=1e-5)


def test_grouped_heads_equal_all_heads_with_repeated_keys(net_and_params):
    net, params = net_and_params
    repeated = jax.tree.map(lambda x: x, params)
    for name in ('key', 'value'):
        w = params['layers']['attention'][name]
        repeated['layers']['attention'][name] = jnp.repeat(w, 4, axis=2)
    tokens = np.arange(10)[None]
    grouped, full = logits_of(net, params, tokens), logits_of(model(), repeated, tokens)
    np.testing.assert_allclose(grouped, full, rtol=1e-4, atol=1e-5)


def test_greedy_decoding_equals_repeated_forward_passes(net_and_params):
    net, params = net_and_params
    prompt = np.array([[5, 6, 7], [1, 2, 3]], np.int32)
    decoded = np.asarray(
        decode(net, params, prompt, jax.random.key(0), length=9, temperature=0.0, num_tokens=256)
    )
    expected = np.zeros((2, 9), np.int32)  # Later tokens do not change the logits of earlier ones.
    expected[:, :3] = prompt
    for position in range(3, 9):
        logits = logits_of(net, params, expected)[:, position - 1, :256]
        expected[:, position] = np.argmax(logits, -1)
    np.testing.assert_array_equal(decoded, expected)


def test_sampling_keeps_the_prompt_and_the_vocabulary(net_and_params):
    net, params = net_and_params
    prompt = np.array([[5, 6, 7]], np.int32)
    decoded = decode(
        net, params, prompt, jax.random.key(1), length=20, temperature=5.0, num_tokens=10
    )
    np.testing.assert_array_equal(decoded[:, :3], prompt)
    assert len(set(np.asarray(decoded)[0, 3:])) > 3
    assert np.asarray(decoded)[0, 3:].max() < 10


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'num_kv_heads': 3}, r'num_heads \(8\) .* multiple of num_kv_heads \(3\)'),
        ({'head_dim': 7}, r'head_dim \(7\) must be even'),
        ({'remat': 'some'}, "remat is 'some'.*'dots'"),
        ({'num_layers': '4'}, "num_layers is '4'.*integer"),
        ({'mlp_dim': 0}, 'mlp_dim is 0'),
        ({'dtype': 'bf16'}, "dtype is 'bf16'.*'bfloat16'"),
    ],
)
def test_impossible_sizes_are_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        model(**changes)


def test_packed_documents_attend_only_to_themselves(net_and_params):
    """Documents that share a row have the same logits as alone."""
    net, params = net_and_params
    lengths = (5, 1, 4)
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
