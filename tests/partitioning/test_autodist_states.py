"""Train states and gradients laid out by AutoDist's configurations, strategies and planners."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import PaddedSpec, PjitPartitioner, TrainState, create_mesh
from partitioning.compat.autodist import (
    AllReduce,
    PartitionedPS,
    PartitionerConfig,
    UnevenPartitionedPS,
    Variable,
    VariablePartitioner,
    compress_gradients,
    shard_gradients,
)
from partitioning.compat.pytorch import ShardingPlan

pytestmark = pytest.mark.core

PARAMS = {'fc1': {'kernel': jnp.ones((8, 16)), 'bias': jnp.ones(16)}, 'emb': jnp.ones((32, 8))}


def mesh_of(*shape, names=('data', 'model'), **settings):
    devices = jax.devices()[: int(np.prod(shape))]
    return create_mesh(shape, names[: len(shape)], devices=devices, **settings)


def with_adam(params=PARAMS):
    """An abstract state, of which nothing needs to be computed."""
    make = optax.adam(1e-3).init
    return jax.eval_shape(lambda: {'params': params, 'opt_state': make(params), 'step': 0})


STATES = {
    'dict': lambda: {'params': PARAMS, 'opt_state': optax.adam(1e-3).init(PARAMS), 'step': 0},
    'ours': lambda: TrainState.create({'params': PARAMS}, optax.adam(1e-3)),
    'flax': lambda: train_state.TrainState.create(
        apply_fn=None, params=PARAMS, tx=optax.adam(1e-3)
    ),
    'params': lambda: PARAMS,
}


@pytest.mark.parametrize('abstract', [False, True], ids=['arrays', 'abstract'])
@pytest.mark.parametrize('kind', STATES)
def test_parameters_and_moments_together(kind, abstract):
    config = {'emb': PartitionerConfig([4, 1]), 'fc1/kernel': '1, 2', 'fc1/bias': ''}
    state = jax.eval_shape(STATES[kind]) if abstract else STATES[kind]()
    laid_out, plan = VariablePartitioner(mesh_of(2, 4)).apply(state, config)
    wanted = {'emb': (8, 8), 'kernel': (8, 8), 'bias': (16,)}
    seen = []
    leaves = jax.tree_util.tree_leaves_with_path(laid_out)
    for (path, x), planned in zip(leaves, jax.tree.leaves(plan.shardings), strict=True):
        assert isinstance(x, jax.ShapeDtypeStruct) == abstract
        name = jax.tree_util.keystr(path[-1:], simple=True)
        shape = wanted.get(name, ())
        assert x.sharding.shard_shape(x.shape) == shape, path
        assert x.sharding.is_equivalent_to(planned, x.ndim), path
        seen.append(name)
    assert seen.count('emb') == (1 if kind == 'params' else 3)


def test_nnx_and_linen_states():
    mesh = mesh_of(2, 4)
    module = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    variables = jax.eval_shape(nn.Dense(16).init, jax.random.key(0), jnp.ones((1, 8)))
    plans = [PartitionedPS().build_plan(x, mesh).plan for x in (module, variables)]
    assert plans[0] == plans[1] == {'kernel': P('data'), 'bias': P('data')}
    optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
    state = nnx.state((module, optimizer))
    laid_out, plan = VariablePartitioner(mesh).apply(state, PartitionedPS())
    kernels = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(laid_out)
        if "'kernel'" in jax.tree_util.keystr(path)
    ]
    assert len(kernels) == 3
    assert {x.sharding.shard_shape(x.shape) for x in kernels} == {(4, 16)}
    grads = jax.jit(lambda grads: shard_gradients(grads, plan))(nnx.state(module, nnx.Param))
    assert grads['kernel'][...].sharding.spec == P('data')


# Gradients.


def test_gradients_that_are_not_of_the_plan():
    _, plan = VariablePartitioner(mesh_of(2, 4)).apply(with_adam(), PartitionedPS())
    with pytest.raises(ValueError, match=r"embd .*Did you mean 'emb'"):
        shard_gradients({'embd': jnp.ones(3)}, plan)
    with pytest.raises(ValueError, match=r'emb: .*\(3,\).*\(32, 8\)'):
        shard_gradients({'emb': jnp.ones(3)}, plan)


def test_gradients_of_one_of_several_trees():
    params = (
        {'kernel': jnp.ones((8, 4)), 'sub': {'kernel': jnp.ones((4, 8))}},
        {'rest': jnp.ones(8)},
    )
    config = {'0/kernel': P('data'), '0/sub/kernel': P('model')}
    _, plan = VariablePartitioner(mesh_of(2, 4)).apply(params, config)
    found = jax.jit(lambda grads: shard_gradients(grads, plan))(params[0])
    assert found['kernel'].sharding.spec == P('data')
    assert found['sub']['kernel'].sharding.spec == P('model')


def test_gradients_of_any_of_several_parameters():
    params = {name: {'kernel': jnp.ones((8, 4))} for name in ('down', 'up')}
    _, plan = VariablePartitioner(mesh_of(2, 4)).apply(params, PartitionedPS())
    with pytest.raises(ValueError, match=r'kernel .*down/kernel, up/kernel'):
        shard_gradients({'kernel': jnp.ones((8, 4))}, plan)


# Who decides.


@pytest.mark.parametrize('decided', ['plan', 'resolved', 'strategy'])
def test_whoever_decides(decided):
    mesh = mesh_of(2, 4)
    config = {
        'plan': ShardingPlan({'emb': P('model'), 'fc1/kernel': P(None, 'model'), 'fc1/bias': P()}),
        'resolved': PartitionedPS().build_plan(PARAMS, mesh).resolve(PARAMS, mesh),
        'strategy': PartitionedPS().build(PARAMS, ['A']),
    }[decided]
    axis = 'model' if decided == 'strategy' else None
    state, _ = VariablePartitioner(mesh, mesh_axis=axis).apply(with_adam(), config)
    mu = state['opt_state'][0].mu['emb']
    assert mu.sharding.shard_shape(mu.shape) == (16 if decided == 'resolved' else 8, 8)


@pytest.mark.parametrize(
    'config, error, message',
    [
        ({'embd': '2,1'}, ValueError, "Did you mean 'emb'"),
        ({'emb': '2,2'}, ValueError, r'emb: .*\[2, 2\] cuts 2 dimensions'),
        ({'emb': '8,1'}, ValueError, 'no axis of size 8'),
        ({'emb': 3}, TypeError, "'emb'"),
        (PartitionedPS, TypeError, 'PartitionedPS'),
    ],
)
def test_invalid_configs(config, error, message):
    with pytest.raises(error, match=message):
        VariablePartitioner(mesh_of(2, 4)).apply(with_adam(), config)


@pytest.mark.parametrize(
    'config, settings, message',
    [
        (PartitionedPS(), {'mesh_axis': 'model'}, r"'model'.*PartitionedPS\(mesh_axis="),
        ({'emb': '2,1'}, {'mesh_axis': 'model'}, "mesh_axis='model'.*dict"),
        (ShardingPlan({}), {'mesh_axis': 'model'}, "mesh_axis='model'.*ShardingPlan"),
        ('resolved', {'mesh_axis': 'model'}, "mesh_axis='model'.* Plan"),
        ('resolved', {'on_unmatched': 'replicate'}, "on_unmatched='replicate'.*resolve"),
        ('resolved', {'on_indivisible': 'pad'}, "on_indivisible='pad'.*resolve"),
    ],
)
def test_settings_that_would_be_ignored(config, settings, message):
    mesh = mesh_of(2, 4)
    if config == 'resolved':
        config = PartitionedPS().build_plan(PARAMS, mesh).resolve(PARAMS, mesh)
    with pytest.raises(ValueError, match=message):
        VariablePartitioner(mesh, **settings).apply(with_adam(), config)


@pytest.mark.parametrize('mesh', [None, {'data': 8}])
def test_invalid_meshes(mesh):
    with pytest.raises(TypeError, match=r'mesh=.*create_mesh'):
        VariablePartitioner(mesh)


@pytest.mark.parametrize(
    'variables, message',
    [
        ({**PARAMS, 'emb': jnp.ones((16, 8))}, r'emb .*\(32, 8\).*\(16, 8\)'),
        ({'fc1': PARAMS['fc1']}, 'lacks emb'),
        ([Variable('fc1', (8, 16)), Variable('emb', (32, 8))], 'fc1 is a module'),
        ({**PARAMS, 'embd': jnp.ones(3)}, "'embd'.*Did you mean 'emb'"),
    ],
)
def test_strategies_for_other_parameters(variables, message):
    strategy = PartitionedPS().build(variables, ['A'])
    with pytest.raises(ValueError, match=message):
        VariablePartitioner(mesh_of(2, 4)).apply(with_adam(), strategy)


def test_strategies_of_names_with_dots():
    shapes = {'params.fc1.kernel': (8, 16), 'fc1.bias': (16,), 'emb': (32, 8)}
    strategy = PartitionedPS().build([Variable(*item) for item in shapes.items()], ['A'])
    state, _ = VariablePartitioner(mesh_of(2, 4)).apply(with_adam(), strategy)
    assert state['params']['fc1']['kernel'].sharding.spec[0] == 'data'


# Rows that the axis does not divide, and the rounding errors of workers.

ODD = {'emb': jnp.arange(20.0).reshape(10, 2)}


def test_rows_that_do_not_divide():
    mesh = mesh_of(4, 2)
    with pytest.raises(ValueError, match=r'emb: .*dimension 0 .*10 .*divisible by 4'):
        VariablePartitioner(mesh).apply(ODD, UnevenPartitionedPS())
    state, _ = VariablePartitioner(mesh, on_indivisible='replicate').apply(
        ODD, UnevenPartitionedPS()
    )
    assert state['emb'].sharding.is_fully_replicated


def test_rows_that_do_not_divide_are_padded():
    mesh, tx = mesh_of(4, 2), optax.sgd(0.1, 0.9)
    state = {'params': ODD, 'opt_state': tx.init(ODD)}
    partitioner = VariablePartitioner(mesh, on_indivisible='pad')
    state, plan = partitioner.apply(state, UnevenPartitionedPS())
    assert plan.specs['params']['emb'] == PaddedSpec(P(None, None), P('data', None))

    def step(state):
        grads = jax.grad(lambda p: (p['emb'] ** 2).sum())(state['params'])
        updates, opt_state = tx.update(shard_gradients(grads, plan), state['opt_state'])
        return {'params': optax.apply_updates(state['params'], updates), 'opt_state': opt_state}

    run = PjitPartitioner(mesh=mesh).partition(step, (plan.specs,), plan.specs)
    assert 'f32[3,2]' in run.lower(state).compile().as_text()  # of 10 rows over 4
    np.testing.assert_allclose(run(state)['params']['emb'], ODD['emb'] * 0.8, rtol=1e-6)


def test_errors_of_workers_are_laid_out_by_worker():
    mesh = mesh_of(4, 2)
    compressed = compress_gradients(error_feedback=True, axis_name='data', mesh=mesh)
    params = {**PARAMS, 'scale': jnp.float32(1), 'four': jnp.ones(4)}
    tx = optax.chain(compressed, optax.adam(1e-3))
    state = jax.eval_shape(lambda: {'params': params, 'opt_state': tx.init(params)})
    laid_out, plan = VariablePartitioner(mesh).apply(state, PartitionedPS(mesh_axis='model'))
    error = laid_out['opt_state'][0].error['emb']
    assert error.shape == (4, 32, 8)
    assert error.sharding == NamedSharding(mesh, P('data', 'model', None))
    row = plan['opt_state/0/error/emb']
    assert row.shard_shape == (1, 16, 8) and row.bytes_per_device == 1 * 16 * 8 * 4
    errors = plan.specs['opt_state'][0].error
    assert (errors['scale'], errors['four']) == (P('data'), P('data', 'model'))
    assert laid_out['opt_state'][1][0].mu['emb'].sharding.spec == P('model', None)
    # Where parameters are split over the axis of the workers, errors keep only the workers.
    _, plan = VariablePartitioner(mesh).apply(state, PartitionedPS(mesh_axis='data'))
    assert plan.specs['opt_state'][0].error['emb'] == P('data', None, None)
    with pytest.raises(ValueError, match=r"4 workers.*'model'.*model 2"):
        VariablePartitioner(mesh, mesh_axis='model').apply(state, AllReduce())


def test_errors_of_padded_parameters_are_padded():
    """They have the layout of the parameter, except along the axis of the workers."""
    mesh = mesh_of(4, 2)
    tx = compress_gradients(error_feedback=True, axis_name='data', mesh=mesh)
    params = {'emb': jnp.arange(18.0).reshape(9, 2), 'even': jnp.ones((8, 2))}
    state = {'params': params, 'opt_state': tx.init(params)}
    partitioner = VariablePartitioner(mesh, on_indivisible='pad')
    _, plan = partitioner.apply(state, PartitionedPS(mesh_axis='data'))
    assert plan['opt_state/error/emb'].spec == P('data', None, None)
    state, plan = partitioner.apply(state, PartitionedPS(mesh_axis='model'))
    assert plan['opt_state/error/emb'].spec == PaddedSpec(
        P('data', None, None), P('data', 'model', None)
    )
    assert plan['opt_state/error/even'].spec == P('data', 'model', None)
    assert plan['opt_state/error/emb'].shard_shape == (1, 9, 2)
    run = PjitPartitioner(mesh=mesh).partition(
        lambda state: jax.tree.map(lambda x: x + 1, state), (plan.specs,), plan.specs
    )
    assert 'f32[1,5,2]' in run.lower(state).compile().as_text()  # of 9 rows over 2
    np.testing.assert_array_equal(run(state)['opt_state'].error['emb'], np.ones((4, 9, 2)))
