"""The loops of docs/how-to/training_loops.md do what the same functions do on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests.code_blocks import run_blocks

pytestmark = pytest.mark.long


def close(ours, expected, tolerance=1e-4):  # Adam divides by small moments
    def check(x, y):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=tolerance, atol=tolerance)

    jax.tree.map(check, ours, expected)


@pytest.fixture(scope='module')
def names(tmp_path_factory):
    """The names of the page after all its blocks have run, in order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp('page'))
        return run_blocks('docs/how-to/training_loops.md')


@pytest.fixture(scope='module')
def plain(names):
    """The states and the losses of the plain steps on one device: the state before the first."""
    state, states, losses = names['init'](names['key']), [], []
    step = jax.jit(names['train_step'])
    states.append(state)
    for batch in names['batches']:
        state, loss = step(state, batch)
        states.append(state)
        losses.append(float(loss))
    return states, losses


def of_one_device(names, init, step, *args):
    """What a step makes of the state of an init function, without a partitioner."""
    return jax.jit(names[step])(names[init](names['key']), *args)


def test_states(names, plain):
    states, losses = plain
    close(names['state'], states[8])
    close(names['loss'], losses[7])
    close((names['existing_state'], names['existing_loss']), (states[1], losses[0]))
    assert names['moved'].params['up'].sharding.spec == P(None, 'data')
    # Saved from shards, restored whole.
    jax.tree.map(np.testing.assert_array_equal, names['restored'], names['state'])
    assert {x.sharding.is_fully_replicated for x in jax.tree.leaves(names['restored'])} == {True}


def test_steps(names, plain):
    states, losses = plain
    close((names['scanned'], names['losses']), (states[8], losses))
    close((names['accumulated'], names['accumulated_loss']), (states[1], losses[0]))
    average = jax.tree.map(lambda x, y: 0.999 * x + 0.001 * y, states[0].params, states[1].params)
    close(names['averaging']['average'], average)
    assert names['averaging']['average']['up'].sharding.spec == P(None, 'data')
    assert [step for step, _ in names['seen']] == [1, 2, 3]
    close([loss for _, loss in names['seen']], losses[:3])


def test_modules_of_equinox(names):
    import equinox as eqx

    state, loss = names['module_step'](names['init_module'](names['key']), names['batches'][0])
    close((names['arrays'], names['module_loss']), (eqx.filter(state, eqx.is_array), loss))
    specs = [x.sharding.spec for x in jax.tree.leaves(names['arrays'][0]) if x.ndim == 2]
    assert specs == [P('data', None), P(None, 'data')]


def test_keys_of_dropout(names):
    batch, key = names['batches'][0], names['key']
    expected = of_one_device(names, 'init', 'dropout_step', batch, key)
    close((names['dropped'], names['dropped_loss']), expected)
    kept = [
        jnp.where(jax.random.bernoulli(jax.random.fold_in(key, n), 0.9, part.shape), part / 0.9, 0)
        for n, part in enumerate(jnp.split(batch, 8))
    ]
    expected = of_one_device(names, 'init', 'train_step', jnp.concatenate(kept))
    close((names['local'], names['local_loss']), expected)


def test_models_and_graphs(names):
    batch = names['batches'][0]
    expected = of_one_device(names, 'init_both', 'adversarial_step', batch)
    close((names['both'], names['value']), expected)
    graphs = names['graphs']
    expected = of_one_device(names, 'init', 'graph_step', graphs)
    close((names['packed'], names['packed_loss']), expected)


def test_frozen_parameters_stay(names):
    base = jax.jit(names['init_params'])(names['key'])
    jax.tree.map(np.testing.assert_array_equal, names['lora']['base'], base)
    assert np.abs(names['lora']['lora'].params['b']).max() > 0
    assert (
        len(jax.tree.leaves(names['lora']['lora'].opt_state)) == 5
    )  # a count, and two moments of two


def test_a_loss_scale_is_halved_until_gradients_are_finite(names, plain):
    """float16 ends at 65,504, so the scales 2^17 and 2^16 leave their steps out."""
    assert names['scaled']['scale'] == 2.0**15
    assert int(names['scaled']['train'].step) == 6
    state, step = plain[0][0], jax.jit(names['train_step'])
    for batch in names['batches'][2:]:
        state, loss = step(state, batch)
    close(names['scaled_loss'], loss, 1e-2)
