"""Policies in programs: padded arrays inside them, activations, Explicit axes."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxed_states import abstract_box as box, padded
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import (
    AxisRules,
    MeshConfig,
    PjitPartitioner,
    constrain,
    unbox,
)

pytestmark = pytest.mark.core

RULES = [('embed', 'data'), ('mlp', 'model'), ('both', ('data', 'model')), ('late', 'model')]


def partitioner_of(rules=RULES, policy=None, on_unmatched=None, **settings):
    """A partitioner for a mesh of data 4 x model 2."""
    settings.setdefault('mesh', MeshConfig.from_t5x(num_partitions=2))
    rules = AxisRules(rules, on_unmatched, policy)
    return PjitPartitioner(layout=rules, **settings)


EXPLICIT = MeshConfig.from_t5x(num_partitions=2, axis_types='explicit')


# Programs. With a width of 7 over 2 devices, each device computes 4 columns.

MODEL_RULES = [('batch', 'data'), ('embed', None), ('mlp', 'model')]
PADDED = padded([None, None], [None, 'model'])
TX = optax.adamw(1e-2)
KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(jax.random.key(1), (8, 16)))
W = np.asarray(jax.random.normal(jax.random.key(2), (16, 7)))


def init(key):
    for_up, for_down = jax.random.split(key)
    up, down = jax.random.normal(for_up, (16, 7)), jax.random.normal(for_down, (7, 16))
    params = {
        'up': nn.LogicallyPartitioned(up, ('embed', 'mlp')),
        'down': nn.LogicallyPartitioned(down, ('mlp', 'embed')),
    }
    return {'params': params, 'opt_state': TX.init(unbox(params))}


def train_step(state, x):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(x @ params['up']) @ params['down'] - x) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state['params'])
    updates, opt_state = TX.update(grads, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'opt_state': opt_state}, loss


def partitioned_step(partitioner):
    axes = partitioner.get_mesh_axes(jax.eval_shape(init, KEY))
    return partitioner.partition(train_step, (axes, partitioner.data_partition_spec), (axes, None))


def dot_shapes(lowered):
    """The shapes of the matrix products that one device computes."""
    found = re.findall(r'= f32\[([\d,]+)\]\S* dot\(', lowered.compile().as_text())
    return {tuple(map(int, shape.split(','))) for shape in found}


def test_padded_training_equals_training_on_one_device():
    partitioner = partitioner_of(MODEL_RULES, 'pad')
    step, plain_step = partitioned_step(partitioner), jax.jit(train_step)
    state, plain = partitioner.init(init, KEY), unbox(jax.jit(init)(KEY))
    shapes = jax.tree.map(jnp.shape, plain)
    for _ in range(3):
        state, loss = step(state, X)
        plain, plain_loss = plain_step(plain, X)
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, plain)
    assert jax.tree.map(jnp.shape, state) == shapes
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state))
    assert step.num_traces() == 1


@pytest.mark.parametrize('policy, width, never', [('pad', 4, 7), ('replicate', 7, 4)])
def test_the_part_of_a_product_that_a_device_computes(policy, width, never):
    """8 rows over 4 devices are 2 rows each; the policy decides about 7 columns over 2 devices."""
    step = partitioned_step(partitioner_of(MODEL_RULES, policy))
    found = dot_shapes(step.lower(unbox(jax.eval_shape(init, KEY)), X))
    assert (2, width) in found and not any(never in shape for shape in found)


def project(w, x, negate=False, scale=1.0):
    y = (x @ w['w']) * scale
    return -y if negate else y


@pytest.mark.parametrize(
    'args, kwargs',
    [
        (({'w': W}, X, False), {}),
        (({'w': W}, X), {}),
        (({'w': W}, X), {'scale': 2.0}),
        (({'w': W},), {'x': X, 'scale': 2.0}),
        ((), {'w': {'w': W}, 'x': X, 'negate': True}),
    ],
    ids=['static', 'static left out', 'keyword', 'keywords', 'keywords only'],
)
def test_static_and_keyword_arguments_next_to_padded_ones(args, kwargs):
    partitioner = partitioner_of(MODEL_RULES, 'pad')
    resources = ({'w': PADDED}, partitioner.data_partition_spec)
    fn = partitioner.partition(project, resources, None, static_argnums=2)
    result = fn(*args, **kwargs)
    np.testing.assert_allclose(result, project(*args, **kwargs), rtol=1e-5, atol=1e-5)
    assert dot_shapes(fn.lower(*args, **kwargs)) == {(2, 4)}


def test_chunks_of_a_padded_array_are_those_of_its_outside():
    """Checkpoints contain the array without padding."""
    partitioner = partitioner_of(MODEL_RULES, 'pad')
    whole = partitioner.get_local_chunk_info((16, 7), P(None, None))
    assert partitioner.get_local_chunk_info((16, 7), PADDED) == whole


# Explicit axes.


def test_pad_needs_auto_axes():
    partitioner = partitioner_of(policy='pad', mesh=EXPLICIT)
    assert partitioner.get_mesh_axes({'w': box((8,), 'mlp')}) == {'w': P('model')}
    with pytest.raises(ValueError, match=r"params/w.*'pad'.*Explicit.*'drop_axis'"):
        partitioner.get_mesh_axes({'params': {'w': box((7,), 'mlp')}})


# Activations: `constrain` follows the policy of the rules in its context.

WIDE = [('rows', None), ('width', ('data', 'model'))]
INSIDE = {  # of 8 x 6, with the 6 over data 4 x model 2
    'replicate': P(None, None),
    'drop_axis': P(None, 'model'),
    'pad': P(None, ('data', 'model')),
}


def assert_laid_out_inside(partitioner, spec, lay_out):
    """Checks how `lay_out` shards an 8 x 6 activation inside a partitioned function."""
    seen = []

    def fn(x):
        y = lay_out(jnp.tanh(x))
        jax.debug.inspect_array_sharding(y, callback=seen.append)
        return y * 2

    x = np.arange(48, dtype=np.float32).reshape(8, 6) / 48
    y = partitioner.partition(fn, None, None)(x)
    jax.effects_barrier()  # the callback may run after the call returns
    np.testing.assert_allclose(y, np.tanh(x) * 2, rtol=1e-5)
    (found,) = seen
    assert found.is_equivalent_to(NamedSharding(partitioner.mesh, spec), 2)


@pytest.mark.parametrize('policy', INSIDE)
def test_constrain_follows_the_policy_around_it(policy):
    partitioner = partitioner_of(WIDE, policy, on_unmatched='replicate')
    for names in [('rows', 'width'), ('new', 'width')]:
        lay_out = lambda x, names=names: constrain(x, names)  # noqa: E731
        assert_laid_out_inside(partitioner, INSIDE[policy], lay_out)


@pytest.mark.parametrize(
    'names, message',
    [(('rows', 'width'), r'6 is not divisible by 8.*8, '), (('new', 'rows'), "no rule .*'new'")],
)
def test_constrain_raises_an_error_by_default(names, message):
    fn = partitioner_of(WIDE).partition(lambda x: constrain(x, names), None, None)
    with pytest.raises(ValueError, match=message):
        fn(np.ones((8, 6), np.float32))
