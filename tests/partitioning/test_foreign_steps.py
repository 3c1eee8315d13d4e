"""Steps that were written for pmap, or for a mesh of their own: right, or told."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from one_line_errors import error_of

from partitioning import PjitPartitioner

pytestmark = pytest.mark.core
X = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)


def init(key):
    return {'w': jnp.ones((8, 8)), 'n': jnp.int32(0)}


def run(step, x=X, **settings):
    state, call, _ = PjitPartitioner(**settings or {'layout': 'fsdp'}).setup(init, step, 0)
    return call(state, x)


def update(state, x):
    return {'w': state['w'] + x.mean(), 'n': state['n'] + 1}


PMAPPED = jax.pmap(update, axis_name='data')


def test_a_pmap_object():
    partitioner = PjitPartitioner(layout='fsdp')
    for call, args in (
        (partitioner.setup, (init, PMAPPED, 0)),
        (partitioner.partition, (PMAPPED, None, None)),
        (partitioner.plan, (jax.pmap(init), X)),
    ):
        message, _ = error_of(call, *args)
        assert 'is a jax.pmap object' in message and '.__wrapped__' in message
    np.testing.assert_allclose(run(PMAPPED.__wrapped__)['w'], 1 + X.mean())
    assert run(jax.jit(update))['n'] == 1  # jit also has `.lower` and `.__wrapped__`


def test_a_step_with_pmean_as_it_is():
    @functools.partial(jax.pmap, axis_name='rows')
    def step(state, x):
        with_index = x.sum() + jax.lax.axis_index('rows')
        return {'w': state['w'] + jax.lax.psum(with_index, 'rows'), 'n': state['n'] + 1}, x

    message, _ = error_of(PjitPartitioner(layout='fsdp').setup, init, step, 0)
    assert 'jax.vmap(fn.__wrapped__, None, None, axis_name=' in message
    bound = jax.vmap(step.__wrapped__, None, None, axis_name='rows', axis_size=1)
    for fn in (step.__wrapped__, bound):  # setup binds the axis itself
        state, x = run(fn)
        np.testing.assert_allclose(state['w'], np.full((8, 8), 1 + X.sum()), atol=1e-5)
        np.testing.assert_array_equal(x, X)


def test_axes_of_pmap_are_bound_once_and_only_for_pmap(caplog):
    """Keys of each device, two axes, a bool, and what has no mean over devices."""

    def step(state, x, train):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index('rows'))
        noise = jax.random.normal(key) if train else 0.0
        mean = jax.lax.pmean(jax.lax.pmean(x.mean(), 'rows'), 'columns')
        return {'w': state['w'] + mean, 'n': state['n'] + 1}, noise

    state, call, _ = PjitPartitioner(layout='fsdp').setup(init, step, 0, static_argnums=2)
    assert 'pmap' not in caplog.text
    assert call.eval_shape(state, X, True)[1].shape == ()
    for _ in range(2):
        state, noise = call(state, X, True)
    np.testing.assert_allclose(state['w'], np.full((8, 8), 1 + 2 * X.mean()), atol=1e-6)
    key = jax.random.fold_in(jax.random.key(0), 0)
    np.testing.assert_allclose(noise, jax.random.normal(key), rtol=1e-6)
    assert call.num_compilations() == 1 and caplog.text.count('of pmap has size 1') == 2

    def mistaken(state, x):
        sums = jax.shard_map(
            lambda rows: jax.lax.all_gather(rows, 'rows'), in_specs=P('data'), out_specs=P('data')
        )
        return state, sums(x)

    with pytest.raises((ValueError, AssertionError, NameError)):
        run(mistaken)


def test_a_pmap_inside():
    def step(state, x):
        return PMAPPED(state, x)

    message, cause = error_of(run, step)
    line = step.__code__.co_firstlineno + 1
    assert f'calls jax.pmap (at test_foreign_steps.py:{line})' in message
    assert '.__wrapped__' in message and 'pmean' in message and cause is not None


OWN = Mesh(np.array(jax.devices()), ('rows',))
REVERSED = Mesh(np.array(jax.devices()[::-1]), ('rows',))


def rolled(mesh):
    def step(state, x):
        spec = P('rows' if mesh is not None else 'data')
        x = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=spec, out_specs=spec)(x)
        return state, x.sum()

    return step


def test_a_shard_map_over_a_mesh_of_the_program():
    message, cause = error_of(run, rolled(OWN))
    line = rolled(OWN).__code__.co_firstlineno + 2
    assert f'rows 8 (at test_foreign_steps.py:{line})' in message
    assert 'data 8 x model 1' in message and 'PjitPartitioner(mesh=...)' in message
    assert 'should match the mesh' in str(cause)
    for step, settings in (  # what the message says to write
        (rolled(OWN), {'layout': 'fsdp', 'mesh': OWN}),
        (rolled(None), {'layout': 'fsdp'}),
    ):
        np.testing.assert_allclose(run(step, **settings)[1], 2 * X.sum(), atol=1e-5)


def test_a_constraint_over_other_devices():
    def step(state, x):
        x = jax.lax.with_sharding_constraint(x, NamedSharding(REVERSED, P('rows')))
        return state, x.sum()

    message, cause = error_of(run, step)
    line = step.__code__.co_firstlineno + 1
    assert f'sharding_constraint at test_foreign_steps.py:{line}' in message
    assert '7, 6, 5' in message and '0, 1, 2' in message and 'mesh=' in message
    assert 'incompatible devices' in str(cause)
    settings = {'layout': 'fsdp', 'mesh': REVERSED}
    np.testing.assert_allclose(run(step, **settings)[1], X.sum(), atol=1e-5)


def test_a_partitioned_function_inside_shard_map():
    partitioner = PjitPartitioner({'data': 8})

    def twice(x):
        return x * 2

    inner = partitioner.partition(twice, (P('data'),), P('data'))
    outer = jax.shard_map(inner, mesh=partitioner.mesh, in_specs=P('data'), out_specs=P('data'))
    message, _ = error_of(outer, X)
    assert 'twice is partitioned over data 8, but it is called inside shard_map' in message
    assert 'call the twice that was given to partition' in message
