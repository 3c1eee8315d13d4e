"""Messages about a batch or an axis without a rule propose rules that lay out the state."""

import logging
import re

import flax.linen as nn
import jax
import numpy as np
import pytest
from one_line_errors import error_of

from partitioning import MeshConfig, PjitPartitioner, standard_logical_axis_rules

pytestmark = pytest.mark.core
MESH = MeshConfig(axes={'fsdp': 4, 'tensor': 2})
OTHER = MeshConfig(axes={'data': 4, 'tensor': 2})
X = np.ones((8, 16), np.float32)


def init_of(*names, kind=nn.Partitioned):
    return lambda key: {'params': {'w': kind(jax.random.normal(key, (16, 32)), names)}}


OF_AXES = init_of('fsdp', 'tensor')
OF_NAMES = init_of('embed', 'mlp', kind=nn.LogicallyPartitioned)


def step(state, x):
    return state, (x @ state['params']['w']).mean()


def proposed(message):
    return eval(re.search(r'layout=(\[.*?\)\])', message)[1])


def rows_per_device(init, mesh, rules):
    """The rows of a batch of 8 that a device holds, in a step that runs."""
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    state, call, _ = partitioner.setup(init, step, jax.random.key(0))
    assert not state['params']['w'].is_fully_replicated
    state, mean = call(state, X)
    np.testing.assert_allclose(mean, (X @ np.asarray(state['params']['w'])).mean(), rtol=1e-5)
    assert not [f for f in partitioner.lint(partitioner.plan(state)) if f.kind == 'idle axis']
    return partitioner.to_global(X).addressable_shards[0].data.shape[0]


@pytest.mark.parametrize(
    'init, mesh, expected',
    [
        (OF_AXES, MESH, [('batch', 'fsdp')]),
        (OF_NAMES, OTHER, [('batch', 'data'), ('mlp', 'tensor'), ('embed', None)]),
        (OF_NAMES, MESH, [('batch', 'fsdp'), ('mlp', 'tensor'), ('embed', 'fsdp')]),
    ],
    ids=['axes', 'names', 'names and fsdp'],
)
def test_without_rules(init, mesh, expected):
    """The default rules know no axis 'tensor'; the proposal is for the names of this state."""
    message, _ = error_of(PjitPartitioner(mesh=mesh).plan, init, jax.random.key(0))
    assert "mesh axis 'tensor'" in message
    assert sorted(proposed(message), key=str) == sorted(expected, key=str)
    assert rows_per_device(init, mesh, proposed(message)) == 2


def test_names_for_which_nothing_is_known():
    init = init_of('left', 'right', kind=nn.LogicallyPartitioned)
    message, _ = error_of(PjitPartitioner(mesh=MESH).plan, init, jax.random.key(0))
    assert "'tensor'" in message and 'For the names of this state' not in message


def test_a_batch_without_a_rule(caplog):
    partitioner = PjitPartitioner(mesh=MESH, logical_axis_rules=[('mlp', 'tensor')])
    for call, args in (
        (partitioner.setup, (OF_AXES, step, jax.random.key(0))),
        (partitioner.to_global, (X,)),
    ):
        message, _ = error_of(call, *args)
        assert '8 devices of fsdp 4 x tensor 2' in message and "('batch', None)" in message
        assert proposed(message) == [('batch', 'fsdp'), ('mlp', 'tensor')]
    whole = [('batch', None), ('mlp', 'tensor')]
    assert rows_per_device(OF_AXES, MESH, whole) == 8  # as the user has said
    with caplog.at_level(logging.WARNING):  # T5X leaves such a batch whole
        assert partitioner.data_mesh_size == 1
    assert "('batch', 'fsdp')" in caplog.text


def test_a_batch_over_an_absent_axis():
    rules = standard_logical_axis_rules(additional_rules=[('mlp', 'tensor')])
    partitioner = PjitPartitioner(mesh=MESH, logical_axis_rules=rules)
    message, _ = error_of(partitioner.setup, OF_AXES, step, jax.random.key(0))
    assert "'data' does not exist" in message and "Write ('batch', 'fsdp')" in message


def test_the_rule_of_the_batch_is_used():
    partitioner = PjitPartitioner(mesh=MESH, logical_axis_rules=[('batch', 'fsdp')])
    assert partitioner.plan(OF_AXES, jax.random.key(0)).lint() == ()
