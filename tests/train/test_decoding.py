"""Generation: with a cache on several meshes, and without one for other models."""

import contextlib
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from small import model, partitioner

from partitioning import TrainState, unbox
from train.data.text.tokenizers import ByteTokenizer
from train.errors import ConfigError
from train.evaluators.samples import Samples
from train.models.decoding import generate
from train.models.nnx_transformer import NnxTransformer
from train.objectives import NextToken

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
NEW, LENGTHS = 6, np.array([3, 7, 1, 5], np.int32)
PROMPTS = np.random.default_rng(0).integers(1, 256, (4, 7)).astype(np.int32)
# Two local layers, whose windows are shorter than the prompts, and a global one.
NET = model(
    num_layers=3,
    num_kv_heads=4,
    window=3,
    global_every=3,
    attention_soft_cap=2.0,
    logit_soft_cap=5.0,
    local_rope_max_wavelength=50.0,
    qk_norm=True,
)
LEARNED = model(positions='learned', max_positions=12)


@pytest.fixture(scope='module')
def params():
    made = jax.jit(lambda key: NET.init(key, method='get_parameters'))(jax.random.key(0))
    # The initial layers are so small that the next token would hardly depend on earlier ones.
    return jax.tree.map(lambda x: 3 * x, unbox(made)['params'])


@pytest.fixture(scope='module')
def expected(params):
    """Each prompt alone, continued by the argmax of the whole sequence, again for each token."""
    logits = jax.jit(lambda tokens: NET.apply({'params': params}, tokens))
    rows = np.zeros((4, PROMPTS.shape[1] + NEW), np.int32)
    for row, prompt, length in zip(rows, PROMPTS, LENGTHS, strict=True):
        row[:length] = prompt[:length]
        for at in range(length, length + NEW):
            # Later tokens do not change the logits of earlier ones.
            row[at] = np.argmax(logits(row[None])[0, at - 1])
    assert len(np.unique(rows[rows > 0])) > 15, 'too easy'
    return rows


def greedy(net, params, **settings):
    settings = {'new_tokens': NEW, 'temperature': 0.0} | settings
    run = jax.jit(lambda p: generate(net, p, PROMPTS, LENGTHS, jax.random.key(0), **settings))
    return jax.tree.map(np.asarray, run(params))


@pytest.mark.parametrize('data, model_axis', [(1, 1), (4, 2)])
def test_cached_decoding_equals_repeated_forward_passes(params, expected, data, model_axis):
    pjit = partitioner(data, model_axis)
    specs = pjit.plan(lambda key: NET.init(key, method='get_parameters'), jax.random.key(0)).specs

    def run(params, prompts_BP, lengths_B):
        key = jax.random.key(0)
        return generate(NET, params, prompts_BP, lengths_B, key, new_tokens=NEW, temperature=0.0)

    rows = pjit.data_partition_spec
    run = pjit.partition(run, (specs['params'], rows, rows), None)
    text = run.lower_and_compile(params, PROMPTS, LENGTHS).as_text()
    tokens, lengths = run(params, PROMPTS, LENGTHS)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(lengths, LENGTHS + NEW)
    # [layers, batch, slots, kv_heads, head_dim] of one device
    assert f'f32[3,{4 // data},13,{4 // model_axis},8]' in text
    assert data == 1 or 'f32[3,4,13' not in text, 'a device holds the keys of the whole batch'


def test_other_models_are_called_with_all_tokens(params, expected):
    apply = lambda params, tokens: NET.apply({'params': params}, tokens)  # noqa: E731
    tokens, lengths = greedy(apply, params)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(lengths, LENGTHS + NEW)


def test_an_nnx_model_generates_from_its_state(params, expected):
    made = nnx.eval_shape(lambda: NnxTransformer(NET.config, rngs=nnx.Rngs(0)))
    state = nnx.state(made, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    np.testing.assert_array_equal(greedy(made, state)[0], expected)


def test_a_stop_token_ends_its_row(params, expected):
    end = LENGTHS[1] + 2
    stop = expected[1, end]
    tokens, lengths = greedy(NET, params, stop_token=int(stop))
    for row, length, full, prompt in zip(tokens, lengths, expected, LENGTHS, strict=True):
        added = full[prompt : prompt + NEW]
        found = np.flatnonzero(added == stop)
        assert length == prompt + (found[0] if len(found) else NEW)
        np.testing.assert_array_equal(row[:length], full[:length])
        assert not row[length:].any()
    assert lengths[1] <= end


def test_only_the_most_likely_tokens_are_sampled(params, expected):
    one = greedy(NET, params, temperature=9.0, top_k=1)[0]
    np.testing.assert_array_equal(one, expected)
    tokens, _ = greedy(NET, params, temperature=9.0, num_tokens=10)
    added = [row[n : n + NEW] for row, n in zip(tokens, LENGTHS, strict=True)]
    assert np.max(added) < 10
    assert len(np.unique(added)) > 3


def test_an_infinite_temperature_samples_all_tokens_equally(params):
    hot = [greedy(NET, params, temperature=t)[0] for t in (1e30, float('inf'))]
    np.testing.assert_array_equal(*hot)


class NextByte(nn.Module):
    """Another model, which always adds its parameter."""

    @nn.compact
    def __call__(self, tokens_BL):
        boxed = nn.with_partitioning(lambda key: jnp.full((1,), 3), (None,))
        stride = self.param('stride', boxed)
        return 9.0 * jax.nn.one_hot((tokens_BL + stride) % 256, 264)


def test_samples_continue_all_prompts_in_one_batch():
    shown, pjit = {}, partitioner(4, 2)
    samples = Samples(prompts=['a', 'bcd', 'B', 'ef', 'g'], length=6, temperature=0.0)

    def init(key):
        return TrainState.create(NextByte().init(key, PROMPTS)['params'], optax.identity())

    plan = pjit.plan(init, KEY)
    run = SimpleNamespace(
        config=SimpleNamespace(objective=NextToken(model=NextByte()), partitioner=pjit, seed=0),
        data=SimpleNamespace(tokenizer=ByteTokenizer()),
        plan=plan,
        console=SimpleNamespace(
            heading=print,
            is_terminal=False,
            sample=shown.__setitem__,
            counting=lambda title, total: contextlib.nullcontext(lambda done: None),
        ),
        compiler_options=None,
    )
    samples.prepare(run, 'samples').run(plan.init(KEY), 0)
    assert shown == {'a': 'dgjmp', 'bcd': 'gjm', 'B': 'EHKNQ', 'ef': 'ilor', 'g': 'jmpsv'}


@pytest.mark.parametrize(
    'net, settings, message',
    [
        (NET, {'new_tokens': 0}, 'new_tokens is 0'),
        (NET, {'temperature': -1.0}, r'temperature is -1\.0.*>= 0'),
        (NET, {'top_k': -1}, 'top_k is -1'),
        (LEARNED, {}, '7 tokens and 6 new tokens exceed max_positions, 12'),
    ],
)
def test_impossible_generations_are_errors(net, settings, message):
    with pytest.raises(ConfigError, match=message):
        greedy(net, {}, **settings)


def test_rows_longer_than_the_learned_positions_are_an_error():
    with pytest.raises(ConfigError, match='a row has 13 tokens, but max_positions is 12'):
        jax.eval_shape(LEARNED.init, jax.random.key(0), jnp.zeros((1, 13), jnp.int32))
