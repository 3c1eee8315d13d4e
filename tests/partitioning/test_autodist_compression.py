"""Compressed gradients in shard_map: what is sent, what is kept, and what is refused."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import create_mesh
from partitioning.compat.autodist import compress_gradients, compression_specs

pytestmark = pytest.mark.core

MESH = create_mesh((4, 2), ('data', 'model'), devices=jax.devices()[:8])
X = np.random.default_rng(0).normal(size=(16, 6)).astype('float32')
Y = X @ np.random.default_rng(1).normal(size=(6, 3)).astype('float32')
PARAMS = {'w': np.zeros((6, 3), 'float32'), 'b': np.zeros(3, 'float32')}


def loss_of(params, rows):
    x, y = rows
    return jnp.mean((x @ params['w'] + params['b'] - y) ** 2)


def trained(tx, axis, steps, own=True, **settings):
    """The parameters, the state and the step's program after some steps by workers along `axis`."""
    specs = compression_specs(jax.eval_shape(tx.init, PARAMS), axis)
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs)
    opt_state = jax.device_put(tx.init(PARAMS), shardings)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=(P(), specs, P(axis)),
        out_specs=(P(), specs),
        **settings,
    )
    def step(params, opt_state, rows):
        theirs = jax.lax.pcast(params, axis, to='varying') if own else params
        grads = jax.grad(loss_of)(theirs, rows)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state

    params = jax.device_put(PARAMS, NamedSharding(MESH, P()))
    rows = jax.device_put((X, Y), NamedSharding(MESH, P(axis)))
    text = step.lower(params, opt_state, rows).as_text()
    for _ in range(steps):
        before = opt_state
        params, opt_state = step(params, opt_state, rows)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))  # donated
    return params, opt_state, text


def all_reduced(text):
    """The dtypes of everything that a program all-reduces."""
    found = re.findall(r'stablehlo\.all_reduce.*?\}\) : \((.*?)\)', text, re.DOTALL)
    return [re.search(r'(bf16|f32)>', types)[1] for types in found]


def by_hand(steps, workers, dtype, feedback):
    """The same training in numpy, worker by worker."""
    params = PARAMS
    errors = [{k: np.zeros_like(v) for k, v in params.items()} for _ in range(workers)]
    for _ in range(steps):
        total = {k: np.zeros_like(v) for k, v in params.items()}
        for x, y, error in zip(np.split(X, workers), np.split(Y, workers), errors, strict=True):
            off = 2 * (x @ params['w'] + params['b'] - y) / y.size
            for k, gradient in {'w': x.T @ off, 'b': off.sum(0)}.items():
                wanted = gradient + error[k]
                sent = wanted.astype(dtype).astype('float32')
                error[k] = wanted - sent if feedback else error[k]
                total[k] += sent / workers
        params = {k: v - 0.5 * total[k] for k, v in params.items()}
    return params, errors


@pytest.mark.parametrize(
    'axis, workers, feedback', [('data', 4, False), (('data', 'model'), 8, True)]
)
def test_steps_of_workers(axis, workers, feedback):
    mesh = MESH if feedback else None
    compressed = compress_gradients(error_feedback=feedback, axis_name=axis, mesh=mesh)
    params, opt_state, text = trained(optax.chain(compressed, optax.sgd(0.5)), axis, 3)
    assert all_reduced(text) == ['bf16', 'bf16']
    assert text.count('optimization_barrier') == 2  # XLA may remove a rounding without one
    wanted, errors = by_hand(3, workers, jnp.bfloat16, feedback)
    for k in params:
        np.testing.assert_allclose(params[k], wanted[k], rtol=0.02, atol=0.01)
        assert not feedback or opt_state[0].error[k].shape == (workers, *params[k].shape)
    if feedback:
        error = opt_state[0].error['w']
        assert error.sharding.spec[0] == axis and not error.sharding.is_fully_replicated
        largest = max(np.abs(e['w']).max() for e in errors)
        assert 0 < np.abs(error).max() < 4 * largest


def test_float32_is_the_plain_mean_where_jax_tracks_nothing():
    tx = optax.chain(compress_gradients('float32', axis_name='data'), optax.sgd(0.5))
    params, _, text = trained(tx, 'data', 3, own=False, check_vma=False)
    assert all_reduced(text) == ['f32', 'f32']
    wanted, _ = by_hand(3, 1, 'float32', False)
    for k in params:
        np.testing.assert_allclose(params[k], wanted[k], rtol=1e-4, atol=1e-5)


def test_gradients_that_are_already_summed():
    tx = compress_gradients(axis_name='data')
    with pytest.raises(ValueError, match=r"jax.lax.pcast\(params, 'data'"):
        trained(tx, 'data', 1, own=False)


def test_outside_of_a_shard_map():
    tx = compress_gradients(axis_name='data')
    with pytest.raises(ValueError, match=r"'data'.*remove axis_name"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_errors_of_all_workers_given_to_each():
    tx = compress_gradients(error_feedback=True, axis_name='data', mesh=MESH)
    state = jax.eval_shape(tx.init, PARAMS)
    update = jax.shard_map(
        lambda g, s: tx.update(g, s)[0], mesh=MESH, in_specs=(P(), P()), out_specs=P()
    )
    with pytest.raises(ValueError, match=r'errors of shape \(4, 3\).*compression_specs\('):
        jax.eval_shape(update, PARAMS, state)


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'dtype': 'int8'}, "int8.*'bfloat16'"),
        ({'dtype': 'bf16'}, "'bf16' is not a dtype"),
        ({'error_feedback': True, 'axis_name': 'data'}, "'data'.*mesh="),
        ({'mesh': {'data': 4}}, "data 4.*axis_name='data'"),
        ({'mesh': {'data': 4}, 'axis_name': 'date'}, "Did you mean 'data'"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        compress_gradients(**settings)


def test_narrow_parameters_keep_wide_errors():
    tx = compress_gradients('float8_e4m3fn', error_feedback=True)
    state = jax.eval_shape(tx.init, {'w': jnp.zeros(2, 'bfloat16')})
    found, after = jax.eval_shape(tx.update, {'w': jnp.full(2, 1.1, 'bfloat16')}, state)
    assert found['w'].dtype == jnp.bfloat16
    assert after.error['w'].dtype == state.error['w'].dtype == jnp.float32
