"""Errors of jax and flax while a partitioner traces, and functions that Explicit axes refuse."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boxed_states import KEY, OneArray, ones
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from partitioning import PjitPartitioner, create_mesh

pytestmark = pytest.mark.core

RULES = [('batch', 'data'), ('embed', None), ('mlp', 'model'), ('vocab', 'model')]
X = np.arange(64, dtype=np.float32).reshape(8, 8)
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
BOTH = pytest.mark.parametrize('axis_types', [AUTO, EXPLICIT])


def partitioner_of(axis_types=AUTO, rules=RULES):
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)
    return PjitPartitioner(mesh=mesh, logical_axis_rules=rules)


# A mesh axis that does not exist.


@BOTH
@pytest.mark.parametrize('method', ['plan', 'get_mesh_axes'])
def test_a_rule_with_a_wrong_mesh_axis_and_a_box(axis_types, method):
    partitioner = partitioner_of(axis_types, [('embed', None), ('mlp', 'modle')])
    init = OneArray(nn.with_logical_partitioning(ones, ('embed', 'mlp'))).init
    with pytest.raises(ValueError, match=r"params/w.*\('mlp', 'modle'\).*mean 'model'\?"):
        if method == 'plan':
            partitioner.plan(init, KEY)
        else:
            partitioner.get_mesh_axes(partitioner.eval_shape(init, KEY))


@BOTH
def test_a_rule_with_a_wrong_mesh_axis_and_an_activation(axis_types):
    """The message has the rule and the line; rules that no array uses may name other axes."""
    rules = [('batch', 'data'), ('mlp', 'modle'), ('expert', 'expert')]
    partitioner = partitioner_of(axis_types, rules)

    def constrained(*names):
        return partitioner.partition(lambda x: nn.with_logical_constraint(x, names), None, P())

    with pytest.raises(ValueError) as error:
        constrained('batch', 'mlp')(X)
    message = str(error.value)
    assert "rule ('mlp', 'modle')" in message and 'the mesh is data 4 x model 2' in message
    assert "Did you mean 'model'?" in message and 'test_trace_errors.py' in message
    assert '\n' not in message and error.value.__cause__ is None
    np.testing.assert_array_equal(constrained('batch', None)(X), X)


def test_a_spec_with_a_wrong_mesh_axis():
    def step(x):
        return jax.lax.with_sharding_constraint(x, P('dta'))

    with pytest.raises(ValueError, match=r"'dta' does not exist.*test_trace_err.*mean 'data'\?"):
        partitioner_of().partition(step, None, None)(X)


# Layers over Explicit axes.


def embedding(metadata=('vocab', 'embed')):
    with nnx.use_eager_sharding(False):
        embed = nnx.Embed(8, 4, rngs=nnx.Rngs(0), embedding_metadata={'out_sharding': metadata})
    return nnx.split(embed)


TOKENS = np.arange(8, dtype=np.int32).reshape(8, 1)


def embed_over_explicit_axes(call):
    graph, state = embedding()
    plan = partitioner_of(EXPLICIT).plan(state)
    step = partitioner_of(EXPLICIT).partition(
        lambda state, tokens: call(nnx.merge(graph, state), tokens),
        (plan.specs, P('data')),
        P('data'),
    )
    return step, jax.device_put(state, plan.shardings)


def test_a_layer_that_gives_no_out_sharding(caplog):
    """The function runs over Auto axes; the log says which layer prevents Explicit ones."""
    step, state = embed_over_explicit_axes(lambda embed, tokens: embed(tokens))
    with caplog.at_level(logging.WARNING):
        y = step(state, TOKENS)
    np.testing.assert_array_equal(y[:, 0], nnx.merge(embedding()[0], state).embedding[...])
    assert jax.typeof(y).sharding.spec == P('data', None, None)  # as the caller asked
    (record,) = caplog.records
    assert 'in Embed, called at test_trace_errors.py' in record.message
    assert 'out_sharding' in record.message and '\n' not in record.message
    step(state, TOKENS)
    assert len(caplog.records) == step.num_traces() == 1


def test_types_that_differ_by_their_shardings():
    """The carry of a scan starts without a sharding and then follows the weights."""
    w = np.eye(8, dtype=np.float32)

    def step(w, x):
        return jax.lax.scan(lambda carry, row: (carry + row @ w, None), jnp.zeros(8), x)[0]

    run = partitioner_of(EXPLICIT).partition(step, (P(None, 'model'), P()), P('model'))
    y = run(w, X)
    np.testing.assert_allclose(y, X.sum(0))
    assert jax.typeof(y).sharding.spec == P('model')


def test_a_function_that_gives_an_out_sharding_only_sometimes():
    """Neither Explicit nor Auto axes can trace it."""

    def call(embed, tokens):
        return jnp.einsum('abc,cd->abd', embed(tokens), jnp.ones((4, 4)), out_sharding=P('data'))

    step, state = embed_over_explicit_axes(call)
    with pytest.raises(ValueError) as error:
        step(state, TOKENS)
    message = str(error.value)
    assert 'in Embed, called at test_trace_errors.py' in message
    assert message.count('test_trace_errors.py:') == 2  # the layer, and the other operation
    assert error.value.__cause__ is None


def test_a_failed_attempt_leaves_nothing_behind():
    """Effects of the function run once, and its static arguments stay static."""
    printed = []

    def call(embed, tokens):
        jax.debug.callback(lambda: printed.append(1))
        return embed(tokens)

    graph, state = embedding()
    partitioner = partitioner_of(EXPLICIT)
    specs = partitioner.plan(state).specs
    step = partitioner.partition(
        lambda times, state, tokens: times * call(nnx.merge(graph, state), tokens),
        (specs, P('data')),
        P('data'),
        static_argnums=0,
    )
    placed = jax.device_put(state, partitioner.plan(state).shardings)
    y = step(2, placed, TOKENS)
    jax.effects_barrier()
    assert len(printed) == 1
    np.testing.assert_allclose(y[:, 0], 2 * np.asarray(nnx.merge(graph, state).embedding[...]))


@pytest.mark.parametrize(
    'name, call',
    [
        ('einsum', lambda x: jnp.einsum('ab,bc->ac', x, x, out_sharding=P('data'))),
        ('reshard', lambda x: jax.sharding.reshard(x, P('data'))),
    ],
)
def test_a_function_for_explicit_axes_over_auto_axes(name, call):
    with pytest.raises(ValueError) as error:
        partitioner_of().partition(call, (P('data'),), P('data'))(X)
    message = str(error.value)
    assert f"('data',) to {name}" in message and 'test_trace_errors.py' in message
    assert "axis_types='explicit'" in message
    over = partitioner_of(EXPLICIT).partition(call, (P('data'),), P('data'))
    np.testing.assert_allclose(over(X), jax.jit(lambda x: x if name == 'reshard' else x @ x)(X))
