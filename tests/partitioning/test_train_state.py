"""TrainState: created in several ways, named, updated, used as a pytree, saved and restored."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.core import unfreeze
from jax.sharding import NamedSharding, PartitionSpec as P
from train_states import (
    KERNEL,
    NAMES,
    SCALE,
    WAYS,
    arrays,
    assert_same,
    each_way,
    made,
    variables,
)

from partitioning import AxisNames, PjitPartitioner, TrainState, unbox

pytestmark = pytest.mark.core

RULES = [('embed', 'data'), ('mlp', 'model')]


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)


# Created.


@each_way
def test_created(way):
    state = made(way)
    assert state.step.shape == () and state.step.dtype == jnp.int32 and int(state.step) == 0
    assert_same(unfreeze(unbox(state.params)), arrays())
    assert_same(unfreeze(state.opt_state[0].mu), jax.tree.map(jnp.zeros_like, arrays()))
    given = WAYS[way]()
    assert_same(state.params, given.get('params', given))
    if 'collections' in way:
        assert_same(state.params_axes, given['params_axes'])
        assert_same(state.flax_mutables, {'batch_stats': given['batch_stats']})
        assert_same(state.flax_mutables_axes, {'batch_stats': given['batch_stats_axes']})
    else:
        assert state.params_axes is state.flax_mutables is state.flax_mutables_axes is None


# Named.


@pytest.mark.parametrize('way', ['collections', 'frozen collections', 'boxes', 'boxes alone'])
def test_logical_axes(way):
    axes = made(way).as_logical_axes()
    assert isinstance(axes, TrainState)
    named = {'dense': {k: AxisNames(*names) for k, names in NAMES.items()}}
    for tree in (axes.params, axes.opt_state[0].mu, axes.opt_state[0].nu):
        leaves = jax.tree.leaves(tree)
        assert leaves == [named['dense']['kernel'], named['dense']['scale']]
        assert all(isinstance(leaf, AxisNames) for leaf in leaves)
    assert axes.step == axes.opt_state[0].count == AxisNames()
    if 'collections' in way:
        assert axes.flax_mutables['batch_stats']['norm']['mean'] == AxisNames('mlp')


def test_logical_axes_need_names():
    with pytest.raises(ValueError, match='Missing axis names'):
        made('arrays alone').as_logical_axes()


# Updated.


def gradient(params):
    return jax.tree.map(lambda p: 0.5 * p + 1.0, params)


CLOSE = {'rtol': 1e-5, 'atol': 1e-5}  # for float32 and steps of size 0.1


def by_hand(steps, rate=0.1, b1=0.9, b2=0.999, eps=1e-8):
    """Adam as in its paper, on the gradients above."""
    found = {}
    for name, array in (('kernel', KERNEL), ('scale', SCALE)):
        p, m, v = array.astype(np.float64), 0.0, 0.0
        for t in range(1, steps + 1):
            g = 0.5 * p + 1.0
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            p = p - rate * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        found[name] = (p, m, v)
    return found


@each_way
def test_updates_are_those_of_adam(way):
    tx = optax.adam(0.1)
    state = made(way, tx)
    for _ in range(3):
        state = state.apply_gradients(gradient(state.params), tx)
    assert int(state.step) == int(state.opt_state[0].count) == 3
    assert jax.tree.structure(state) == jax.tree.structure(made(way, tx))
    for name, (p, m, v) in by_hand(3).items():
        np.testing.assert_allclose(unbox(state.params)['dense'][name], p, **CLOSE)
        np.testing.assert_allclose(state.opt_state[0].mu['dense'][name], m, **CLOSE)
        np.testing.assert_allclose(state.opt_state[0].nu['dense'][name], v, **CLOSE)


def test_mutables_are_replaced_if_given():
    tx = optax.sgd(0.1)
    state = made('collections', tx)
    grads = gradient(state.params)
    assert_same(state.apply_gradients(grads, tx).flax_mutables, state.flax_mutables)
    changed = {'batch_stats': {'norm': {'mean': jnp.ones(4)}}}
    updated = state.apply_gradients(grads, tx, flax_mutables=changed)
    assert_same(updated.flax_mutables, changed)
    assert jax.tree.structure(updated) == jax.tree.structure(state)


def test_replaced():
    state = made('collections')
    other = jax.tree.map(lambda p: p + 1, state.params)
    assert_same(state.replace_params(other), state.replace(params=other))
    assert_same(state.replace_params(other).params, other)
    assert int(state.replace_step(jnp.int32(7)).step) == 7
    assert_same(state.replace_step(jnp.int32(7)).opt_state, state.opt_state)
    assert_same(state, made('collections'))  # unchanged
    with pytest.raises(TypeError, match='nothing'):
        state.replace(nothing=1)


# A pytree.


def test_a_donated_state_is_updated_by_one_compiled_step(partitioner):
    tx = optax.adam(0.1)
    plan = partitioner.plan(lambda: TrainState.create(variables(), tx))
    state = plan.init()
    step = partitioner.partition(
        lambda s: s.apply_gradients(gradient(s.params), tx),
        (plan.specs,),
        plan.specs,
        donate_argnums=0,
    )
    before = jax.tree.map(lambda x: x.sharding, state)
    given = jax.tree.leaves(state.params)
    for _ in range(3):
        state = step(state)
    assert all(leaf.is_deleted() for leaf in given)
    assert step.num_traces() == 1
    assert jax.tree.map(lambda x: x.sharding, state) == before
    kernel = state.params['dense']['kernel']
    assert kernel.sharding == NamedSharding(partitioner.mesh, P('data', 'model'))
    np.testing.assert_allclose(kernel, by_hand(3)['kernel'][0], **CLOSE)


# state_dict and restore_state.


def changed(x):
    """Another array, whose elements all differ."""
    return x + 1 + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)


def trained(way):
    """A state in which every array differs from its value in a new state."""
    return jax.tree.map(changed, unbox(made(way)))


@each_way
def test_a_state_dict_is_nested_dicts_of_its_arrays(way):
    held = trained(way).state_dict()
    mutables = {'flax_mutables'} if 'collections' in way else set()
    assert held.keys() == {'step', 'params', 'opt_state'} | mutables
    zeros = jax.tree.map(jnp.zeros_like, arrays())
    assert_same(held['params'], jax.tree.map(changed, arrays()))
    assert_same(held['opt_state']['0']['mu'], jax.tree.map(changed, zeros))
    if mutables:
        mean = held['flax_mutables']['batch_stats']['norm']['mean']
        np.testing.assert_array_equal(mean, [1, 2, 3, 4])


@each_way
def test_restored(way):
    """With bytes in between, as in a checkpoint."""
    saved = trained(way)
    held = serialization.msgpack_restore(serialization.to_bytes(saved.state_dict()))
    restored = unbox(made(way)).restore_state(held)
    assert_same(restored, saved)
    assert_same(restored.state_dict(), saved.state_dict())


@pytest.mark.parametrize('way', ['collections', 'boxes'])
def test_a_restored_state_keeps_its_names(way):
    state = made(way)
    restored = state.restore_state(trained(way).state_dict())
    assert_same(unbox(restored), trained(way))
    assert restored.as_logical_axes() == state.as_logical_axes()


def state_dict(leave_out=(), **changes):
    """The state_dict of a trained state, with changed entries and without some."""
    held = trained('collections').state_dict() | changes
    return {k: v for k, v in held.items() if k not in leave_out}


def with_parameters(leave_out=(), **changes):
    held = state_dict()
    dense = held['params']['dense'] | changes
    return held | {'params': {'dense': {k: v for k, v in dense.items() if k not in leave_out}}}


WRONG = {
    'no mutables': lambda: state_dict(['flax_mutables']),
    'one more parameter': lambda: with_parameters(new=jnp.zeros(3)),
    'another shape': lambda: with_parameters(kernel=jnp.zeros((4, 8))),
    'nothing': lambda: {},
}


@pytest.mark.parametrize('wrong', WRONG)
def test_a_wrong_state_dict(wrong):
    with pytest.raises(ValueError, match=r'in the state_dict, but .* in this state'):
        made('collections').restore_state(WRONG[wrong]())


ADAM, W = optax.adam(1e-3), {'w': jnp.ones(3), 'b': jnp.ones(2)}


@pytest.mark.parametrize(
    'call, error, said',
    [
        (
            lambda s: TrainState.create(ADAM, W),
            TypeError,
            r'and a dict of 2 in this order: write Tr',
        ),
        (
            lambda s: TrainState.create(params=W, tx=ADAM, apply_fn=None),
            TypeError,
            r'params= and apply_fn=: write TrainState.create\(params, tx\), .* without other',
        ),
        (
            lambda s: s.apply_gradients(grads=W),
            TypeError,
            r'got a dict of 2 and no tx: .*\(grads, tx\)$',
        ),
        (lambda s: s.apply_gradients(ADAM, W), TypeError, r'in this order: .*\(grads, tx\)$'),
        (
            lambda s: s.apply_gradients({'w': W['w']}, ADAM),
            ValueError,
            '^the gradients lack 1 of 2 parameters, first b: ',
        ),
        (
            lambda s: s.apply_gradients({**W, 'c': W['b']}, ADAM),
            ValueError,
            '^the gradients have c,',
        ),
        (
            lambda s: s.apply_gradients(W, optax.sgd(1e-3, momentum=0.9)),
            ValueError,
            'another transformation, of ScaleByAdamState, but tx makes TraceState: pass the tx',
        ),
    ],
)
def test_calls_that_do_not_fit_a_state(call, error, said):
    with pytest.raises(error, match=said) as caught:
        call(TrainState.create(W, ADAM))
    assert '\n' not in str(caught.value)
