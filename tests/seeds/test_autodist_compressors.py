"""AutoDist's compressors, against their rounding worked out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning.compat.autodist import compress_gradients

pytestmark = pytest.mark.core


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_A15_gradients_are_rounded_and_cast_back(dtype):
    grads = {'w': np.linspace(-3, 3, 8, dtype='float32'), 'half': jnp.ones(3, 'bfloat16')}
    grads['n'] = np.arange(3)
    tx = compress_gradients(dtype)
    rounded, _ = tx.update(grads, tx.init(grads))
    assert {k: x.dtype for k, x in rounded.items()} == {k: x.dtype for k, x in grads.items()}
    np.testing.assert_array_equal(
        rounded['w'], grads['w'].astype(jnp.dtype(dtype)).astype('float32')
    )
    np.testing.assert_array_equal(rounded['n'], np.arange(3))
    assert (rounded['w'] != grads['w']).any()


def test_A15_doubles_are_sent_as_floats():
    """HorovodCompressor casts float64 to float32 and back, and leaves float32 as it is."""
    with jax.enable_x64(True):
        gradients = np.random.default_rng(0).normal(size=64)
        grads = {'w': jnp.asarray(gradients), 'single': np.ones(3, 'float32') / 3}
        tx = compress_gradients('float32', error_feedback=True)
        state, error = tx.init(grads), np.zeros(64)
        for _ in range(3):
            found, state = tx.update(grads, state)
            assert (found['w'].dtype, found['single'].dtype) == ('float64', 'float32')
            sent = (gradients + error).astype('float32').astype('float64')
            error = gradients + error - sent
            np.testing.assert_array_equal(found['w'], sent)
            np.testing.assert_array_equal(state.error['w'], error[None])
            np.testing.assert_array_equal(found['single'], grads['single'])
        assert state.error['w'].dtype == 'float64' and error.any()


def test_A15_error_feedback():
    """t += err; c = cast(t); err = t - uncast(c), worked out in numpy."""
    random = np.random.default_rng(0)
    tx = compress_gradients('bfloat16', error_feedback=True)
    update = jax.jit(tx.update)
    params = {'w': np.zeros(64, 'float32'), 'n': np.arange(2)}
    state, error = tx.init(params), np.zeros(64, 'float32')
    for _ in range(4):
        gradient = random.normal(size=64).astype('float32')
        found, state = update({'w': gradient, 'n': params['n']}, state)
        wanted = gradient + error
        sent = wanted.astype(jnp.bfloat16).astype('float32')
        error = wanted - sent
        np.testing.assert_array_equal(found['w'], sent)
        np.testing.assert_array_equal(state.error['w'], error[None])
        assert state.error['n'] is None and (found['n'] == params['n']).all()
    assert error.any()


def test_A15_errors_that_are_not_finite_are_dropped():
    tx = compress_gradients('float16', error_feedback=True)
    state = tx.init({'w': np.zeros(2, 'float32')})
    update = jax.jit(tx.update)
    found, state = update({'w': np.array([1e6, 1], 'float32')}, state)
    assert np.isinf(found['w'][0]) and not state.error['w'].any()
    found, _ = update({'w': np.array([2, 1], 'float32')}, state)
    np.testing.assert_array_equal(found['w'], [2, 1])
