"""Attention over rows that are divided over devices gives what attention on one device gives."""

import functools

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from small import RULES
from test_attention import (
    BLOCKS,
    SCALE,
    assert_as_defined,
    assert_close,
    inputs,
    plain,
    with_gradients,
)

from partitioning import MeshConfig, PjitPartitioner
from train.attention import AttentionSettings, Sight, attend
from train.attention.parts import add_parts, attend_part, part_gradients
from train.errors import ConfigError

pytestmark = pytest.mark.core

CONTEXT_RULES = [('length', 'context'), *RULES]


def context_partitioner(rules=CONTEXT_RULES, **axes):
    return PjitPartitioner(mesh=MeshConfig(axes=axes), logical_axis_rules=rules)


# kind, exchange of keys, axes of the mesh, length, kv_heads, soft_cap, window, whether an array
# says that the window applies, segments. For the ring with splash, see the test of parts.
CASES = [
    ('dot', 'gather', {'data': 2, 'context': 4, 'model': 1}, 64, 2, None, None, None, True),
    ('dot', 'gather', {'data': 2, 'context': 2, 'model': 2}, 64, 2, 5.0, 20, True, False),
    ('dot', 'ring', {'data': 1, 'context': 8, 'model': 1}, 64, 2, None, None, None, True),
    ('dot', 'ring', {'data': 2, 'context': 2, 'model': 2}, 64, 8, 5.0, 20, True, False),
    ('splash', 'gather', {'data': 4, 'context': 2, 'model': 1}, 512, 2, None, None, None, True),
    ('splash', 'gather', {'data': 2, 'context': 2, 'model': 2}, 512, 4, 5.0, 150, True, False),
]


@pytest.mark.parametrize('case', CASES)
def test_attention_over_context_agrees_with_its_definition(case):
    kind, context, axes, *rest = case
    settings = AttentionSettings(kind=kind, splash_blocks=BLOCKS, context=context)
    assert_as_defined(settings, context_partitioner(**axes), P('data', 'context'), *rest)


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
