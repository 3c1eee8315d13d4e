"""Every kind of attention gives the results and gradients of the plain form on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small import RULES, partitioner

from partitioning import MeshConfig, PjitPartitioner
from train.attention import AttentionSettings, Sight, SplashBlocks, attend, splash
from train.attention.parts import add_parts, attend_part, part_gradients
from train.errors import ConfigError

pytestmark = pytest.mark.core

ROWS, LENGTH, HEADS, HEAD_DIM, SCALE = 8, 256, 8, 16, 0.3
BLOCKS = SplashBlocks(queries=256, keys=128, keys_compute=128, dkv_keys=128, dkv_keys_compute=128)


@functools.cache
def inputs(kv_heads, length=LENGTH):
    """Queries, keys, values, weights of a loss, and segments of different lengths."""
    keys = jax.random.split(jax.random.key(0), 5)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    arrays = [
        jax.random.normal(key, (ROWS, length, n, HEAD_DIM))
        for key, n in zip(keys, heads, strict=False)
    ]
    ends = jnp.sort(jax.random.randint(keys[4], (ROWS, 2), 0, length))
    return *arrays, jnp.sum(jnp.arange(length)[:, None] >= ends[:, None], axis=-1)


def plain(q, k, v, segments, window, soft_cap):
    """The definition of attention: a softmax over all keys that a query sees."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = SCALE * jnp.einsum('BLHN,BSHN->BHLS', q, k)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    places = np.arange(q.shape[1])
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (window or len(places)))
    if segments is not None:
        seen = seen & (segments[:, None, :, None] == segments[:, None, None, :])
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum('BHLS,BSHN->BLHN', weights, v)


def with_gradients(attention):
    """A function that returns the result of attention, and the gradients of a sum over it."""

    def loss(q, k, v, weights, *rest):
        attended = attention(q, k, v, *rest)
        return jnp.sum(attended * weights), attended

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


def assert_close(ours, expected):
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * float(np.abs(y).max()), rtol=1e-5)


def interpreted_later(cases):
    """On CPUs the kernels of splash attention are interpreted, which takes long."""
    return [
        pytest.param(case, marks=pytest.mark.long) if case[0] == 'splash' else case
        for case in cases
    ]


# kind, mesh, kv_heads, soft_cap, window, whether an array says that the window applies, segments.
# With 2 kv_heads on a model axis of 4, each device takes the ones for its own heads.
CASES = [
    ('splash', (8, 1), 8, None, None, None, False),
    ('splash', (4, 2), 2, 5.0, 100, None, True),
    ('splash', (2, 4), 2, None, 100, True, True),
    ('splash', (1, 8), 8, None, 100, False, False),
    ('dot', (2, 4), 4, 5.0, 100, True, True),
    ('blockwise', (8, 1), 8, None, None, None, True),
    ('blockwise', (4, 2), 2, 5.0, 100, True, True),
    ('blockwise', (2, 4), 2, None, 100, None, False),
]


def assert_as_defined(settings, partitioner, specs, length, kv_heads, *rest):
    """Compares attention on a mesh with its definition on one device."""
    soft_cap, window, local, segmented = rest
    *arrays, segments = inputs(kv_heads, length)
    segments = segments if segmented else None

    def ours(q, k, v, segments, local):
        local = True if local is None else local
        sight = Sight(
            window=window, local=local, segments_BL=segments, scale=SCALE, soft_cap=soft_cap
        )
        return attend(q, k, v, sight=sight, settings=settings)

    step = partitioner.partition(with_gradients(ours), (*4 * [specs], P('data'), None), None)
    window = None if local is False else window
    expected = with_gradients(functools.partial(plain, window=window, soft_cap=soft_cap))
    assert_close(step(*arrays, segments, local), expected(*arrays, segments))


@pytest.mark.parametrize('case', interpreted_later(CASES))
def test_attention_agrees_with_its_definition(case):
    kind, mesh, kv_heads, *rest = case
    blocks = dataclasses.replace(BLOCKS, fused=mesh[0] >= 4)
    settings = AttentionSettings(kind=kind, splash_blocks=blocks, block_queries=100, block_keys=64)
    rules = [('kv_heads', None), *RULES] if kv_heads < mesh[1] else RULES
    on_mesh = partitioner(*mesh, logical_axis_rules=rules)
    assert_as_defined(settings, on_mesh, P('data'), LENGTH, kv_heads, *rest)


REFUSED = [
    ('splash', 200, 200, {}, r'length is 200.*multiple of 128.*length 256'),
    ('splash', 128, 256, {}, r'128 queries for the 256 slots'),
    ('cudnn', 128, 128, {}, r"devices are 'cpu'.*NVIDIA"),
]


@pytest.mark.parametrize('kind, length, slots, settings, message', REFUSED)
def test_kernels_refuse_what_they_cannot_do(kind, length, slots, settings, message):
    q, k = jnp.zeros((1, length, 2, 8)), jnp.zeros((1, slots, 2, 8))
    with pytest.raises(ConfigError, match=f"kind is '{kind}'.*{message}.*'dot'"):
        attend(q, k, k, sight=Sight(), settings=AttentionSettings(kind=kind), **settings)


@pytest.mark.parametrize('first', [0, 70, 200])
def test_blocks_of_queries_may_begin_anywhere(first):
    """The queries of a cache are the last ones; blocks that they do not see are skipped."""
    q, k, v, weights, segments = inputs(4)
    ends = slice(first, first + 50)
    settings = AttentionSettings(kind='blockwise', block_queries=20, block_keys=64)

    def ours(q, k, v, first):
        sight = Sight(first=first, window=100, local=first > 0, segments_BL=segments[:, ends])
        sight = dataclasses.replace(sight, key_segments_BS=segments, scale=SCALE)
        return attend(q, k, v, sight=sight, settings=settings)

    def expected(q, k, v):
        window = 100 if first else None
        q = jnp.zeros((ROWS, LENGTH, HEADS, HEAD_DIM)).at[:, ends].set(q)
        return plain(q, k, v, segments, window, None)[:, ends]

    args = q[:, ends], k, v, weights[:, ends]
    assert_close(with_gradients(ours)(*args, first), with_gradients(expected)(*args))


def test_long_rows_have_no_matrix_of_scores():
    def count(length):
        q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        settings = AttentionSettings(block_queries=64, block_keys=64)

        def ours(q, k, v):
            return attend(q, k, v, sight=Sight(), settings=settings)

        return str(jax.make_jaxpr(with_gradients(ours))(q, q, q, q)).count(f'{length},{length}]')

    assert count(256) > 0
    assert count(1024) == 0


def test_block_sizes_are_multiples_of_128():
    with pytest.raises(ConfigError, match=r'SplashBlocks\.keys is 200: .* multiple of 128'):
        SplashBlocks(keys=200)


@pytest.mark.parametrize('kind', ['TPU v5', 'TPU v6 lite', 'TPU7x'])
def test_blocks_of_causal_rows_are_the_fastest_that_were_measured(kind, monkeypatch):
    """As published by tokamax 0.0.17 for heads of 128, of blocks of 1024 and 2048."""
    monkeypatch.setattr(splash, 'device_kind', lambda: kind)
    measured = {1024: 1024, 2048: 1024, 4096: 1024, 16384: 2048}
    for length, size in measured.items():
        blocks = splash.choose_blocks(AttentionSettings(), length, None)
        assert (blocks.queries, blocks.keys, blocks.dkv_keys) == (size, size, size)


@pytest.mark.parametrize(
    'length, size, window', [(768, 128, None), (768, 256, 100), (768, 128, 300)]
)
def test_blocks_that_the_mask_leaves_are_counted(length, size, window):
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (window or length))
    blocks = seen.reshape(length // size, size, length // size, size).any(axis=(1, 3))
    assert splash.count_blocks(length, size, window) == blocks.sum()


# Rows that are divided over devices.

CONTEXT_RULES = [('length', 'context'), *RULES]


def context_partitioner(rules=CONTEXT_RULES, **axes):
    return PjitPartitioner(mesh=MeshConfig(axes=axes), logical_axis_rules=rules)


# kind, exchange of keys, axes of the mesh, length, kv_heads, soft_cap, window, whether an array
# says that the window applies, segments. For the ring with splash, see the test of parts.
CONTEXT_CASES = [
    ('dot', 'gather', {'data': 2, 'context': 4, 'model': 1}, 64, 2, None, None, None, True),
    ('dot', 'gather', {'data': 2, 'context': 2, 'model': 2}, 64, 2, 5.0, 20, True, False),
    ('dot', 'ring', {'data': 2, 'context': 4, 'model': 1}, 64, 2, None, None, None, True),
    ('dot', 'ring', {'data': 2, 'context': 2, 'model': 2}, 64, 8, 5.0, 20, True, False),
    ('splash', 'gather', {'data': 4, 'context': 2, 'model': 1}, 512, 2, None, None, None, True),
    ('splash', 'gather', {'data': 2, 'context': 2, 'model': 2}, 512, 4, 5.0, 150, True, False),
]


@pytest.mark.parametrize('case', interpreted_later(CONTEXT_CASES))
def test_attention_over_context_agrees_with_its_definition(case):
    kind, context, axes, *rest = case
    settings = AttentionSettings(kind=kind, splash_blocks=BLOCKS, context=context)
    assert_as_defined(settings, context_partitioner(**axes), P('data', 'context'), *rest)


@pytest.mark.long
@pytest.mark.parametrize('window, soft_cap', [(None, None), (70, 5.0)])
def test_parts_of_splash_attention_add_up_to_the_whole(window, soft_cap):
    q, k, v, gradient, segments = (x[:1] for x in inputs(2))
    half = q.shape[1] // 2
    (_, attended), expected = with_gradients(
        functools.partial(plain, window=window, soft_cap=soft_cap)
    )(q, k, v, gradient, segments)

    def sight(number):
        # The late half of the queries, and either half of the keys.
        first, keys = (1 - number) * half, slice(number * half, (number + 1) * half)
        return keys, Sight(
            first=jnp.int32(first),
            window=window,
            segments_BL=segments[:, half:],
            key_segments_BS=segments[:, keys],
            scale=SCALE,
            soft_cap=soft_cap,
        )

    q, attended, gradient = (x[:, half:] for x in (q, attended, gradient))
    parts = [attend_part(q, k[:, s], v[:, s], seen, BLOCKS) for s, seen in map(sight, (0, 1))]
    added, log_sum = add_parts(*parts)
    assert_close(added, attended)
    dq = 0
    for number in (0, 1):
        keys, seen = sight(number)
        arrays = (q, k[:, keys], v[:, keys], added, log_sum, gradient)
        found = part_gradients(*arrays, sight=seen, blocks=BLOCKS)
        if number == 1:  # only late queries see late keys
            assert_close(found[1:], [x[:, keys] for x in expected[1:]])
        dq += found[0]
    assert_close(dq, expected[0][:, half:])


@pytest.mark.parametrize(
    'kind, length, slots, message',
    [
        ('dot', 60, 60, '60 tokens .* 4 devices .* multiple of 8'),
        ('dot', 64, 128, '64 queries and 128 keys'),
        ('splash', 64, 64, 'halves of 8 positions, .* multiple of 128'),
    ],
)
def test_lengths_that_cannot_be_divided_are_errors(kind, length, slots, message):
    q, k = jnp.zeros((8, length, 2, 8)), jnp.zeros((8, slots, 2, 8))
    settings = AttentionSettings(kind=kind)
    step = context_partitioner(data=2, context=4, model=1).partition(
        lambda q, k: attend(q, k, k, sight=Sight(), settings=settings), None, None
    )
    with pytest.raises(ConfigError, match=message):
        step.lower(q, k)
