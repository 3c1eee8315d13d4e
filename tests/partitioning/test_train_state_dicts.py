"""TrainState: state_dict and restore_state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from train_states import arrays, assert_same, each_way, made

from partitioning import unbox

pytestmark = pytest.mark.core


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
@pytest.mark.parametrize('bytes_between', [False, True])
def test_restored(way, bytes_between):
    saved = trained(way)
    held = saved.state_dict()
    if bytes_between:
        held = serialization.msgpack_restore(serialization.to_bytes(held))
    restored = unbox(made(way)).restore_state(held)
    assert_same(restored, saved)
    assert_same(restored.state_dict(), saved.state_dict())


def test_restored_from_bytes_of_flax():
    saved = trained('collections')
    data = serialization.to_bytes(saved.state_dict())
    held = serialization.from_bytes(made('collections').state_dict(), data)
    assert_same(made('collections').restore_state(held), saved)


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
    'no step': lambda: state_dict(['step']),
    'no mutables': lambda: state_dict(['flax_mutables']),
    'one more collection': lambda: state_dict(other=jnp.zeros(3)),
    'an array for a dict': lambda: state_dict(params=jnp.zeros(3)),
    'another optimizer': lambda: state_dict(
        opt_state=made('collections', optax.sgd(0.1, momentum=0.9)).state_dict()['opt_state']
    ),
    'no kernel': lambda: with_parameters(['kernel']),
    'one more parameter': lambda: with_parameters(new=jnp.zeros(3)),
    'a dict for an array': lambda: with_parameters(kernel={'value': jnp.zeros((8, 4))}),
    'nothing for an array': lambda: with_parameters(kernel=None),
    'another shape': lambda: with_parameters(kernel=jnp.zeros((4, 8))),
    'nothing': lambda: {},
}


def test_the_unchanged_state_dict_can_be_restored():
    assert_same(made('collections').restore_state(state_dict()), trained('collections'))
    assert_same(made('collections').restore_state(with_parameters()), trained('collections'))


@pytest.mark.parametrize('wrong', WRONG)
def test_a_wrong_state_dict(wrong):
    with pytest.raises(ValueError, match=r'in the state_dict, but .* in this state'):
        made('collections').restore_state(WRONG[wrong]())
