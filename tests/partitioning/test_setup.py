"""partitioner.setup: from an init function and a step to a training that compiles once."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, PartitionSpec as P

from partitioning import PjitPartitioner, check_compiled_once, unbox

pytestmark = [pytest.mark.core, pytest.mark.smoke]

KEY = np.zeros(2, 'uint32')  # jax.random.PRNGKey(0) in host memory
BATCH = np.linspace(-1, 1, 8 * 6, dtype='float32').reshape(8, 6)
RULES = [('batch', 'data'), ('embed', 'data'), ('mlp', 'model')]
PATHS = [('(.*/)?w', ('embed', 'mlp')), ('(.*/)?b', ('mlp',))]
AXIS_TYPES = pytest.mark.parametrize(
    'axis_type', [AxisType.Auto, AxisType.Explicit], ids=['Auto', 'Explicit']
)


def partitioner_over(axis_type=AxisType.Auto, sizes=(2, 4), **settings):
    mesh = jax.make_mesh(sizes, ('data', 'model'), axis_types=(axis_type,) * 2)
    return PjitPartitioner(mesh=mesh, logical_axis_rules=RULES, **settings)


def counted(function):
    """The function, and a list with one entry for each of its traces."""
    calls = []

    @functools.wraps(function)
    def counting(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return counting, calls


def leaves_of(tree):
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator='/'): x for path, x in flat}


def assert_close(found, expected):
    found, expected = leaves_of(found), leaves_of(expected)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, rtol=1e-4, atol=1e-6, err_msg=str(path))


# Programs of each kind: init, step and settings. jax alone runs the same functions.


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        names = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ('embed', 'mlp'))
        return nn.Dense(8, kernel_init=names, use_bias=False)(x)


def flax_init(key):
    """All that a trace makes anew is made here: the optimizer and the bound method."""
    model = Model()
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    params = model.init(key, BATCH)['params']
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def flax_step(state, batch):
    def loss(params):
        return jnp.mean((state.apply_fn({'params': params}, batch) - 1) ** 2)

    value, grads = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=grads), {'loss': value}


ADAM = optax.adam(1e-2)


def tree_init(key):
    params = {'w': jax.random.normal(key, (6, 8)), 'b': jnp.zeros(8)}
    return {'params': params, 'opt_state': ADAM.init(params), 'step': 0, 'scale': 1.0}


def tree_step(state, batch):
    def loss(params):
        return jnp.mean((batch @ params['w'] + params['b'] - state['scale']) ** 2)

    grads = jax.grad(loss)(state['params'])
    updates, opt_state = ADAM.update(grads, state['opt_state'])
    params = optax.apply_updates(state['params'], updates)
    # Python numbers are weakly typed.
    return {'params': params, 'opt_state': opt_state, 'step': state['step'] + 1, 'scale': 1.0}


def nnx_init(key):
    names = {'kernel_metadata': {'out_sharding': ('embed', 'mlp')}}
    linear = nnx.Linear(6, 8, use_bias=False, rngs=nnx.Rngs(jax.random.wrap_key_data(key)), **names)
    graph['nnx'], state = nnx.split((linear, nnx.Optimizer(linear, ADAM, wrt=nnx.Param)))
    return state


def nnx_step(state, batch):
    model, optimizer = nnx.merge(graph['nnx'], state)
    grads = nnx.grad(lambda model: jnp.mean((model(batch) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return nnx.state((model, optimizer)), jnp.float32(0), 1.5


graph = {}


PROGRAMS = {  # init, step, settings, the path and the shard of one array
    'flax': (flax_init, flax_step, {}, 'kernel', (3, 2)),
    'paths': (tree_init, tree_step, {'params_axes_names_override': PATHS}, '/w', (3, 2)),
    'nnx': (nnx_init, nnx_step, {}, 'kernel', (3, 2)),
}


def state_of(result, state):
    return result if jax.tree.structure(result) == jax.tree.structure(state) else result[0]


@AXIS_TYPES
@pytest.mark.parametrize('program', PROGRAMS)
def test_one_call_is_enough(program, axis_type):
    init, step, settings, name, shard = PROGRAMS[program]
    init, inits = counted(init)
    step, steps = counted(step)
    partitioner = partitioner_over(axis_type, **settings)
    state, partitioned, data_spec = partitioner.setup(init, step, KEY)
    assert data_spec == partitioner.data_partition_spec == P('data')
    for _ in range(3):
        before, result = state, partitioned(state, BATCH)
        state = state_of(result, state)
        assert all(x.is_deleted() for x in jax.tree.leaves(before) if x.ndim)
        partitioner.resolve(state).check(state)
    assert (len(inits), len(steps)) == (1, 1)
    check_compiled_once(partitioned)
    arrays = [x for path, x in leaves_of(state).items() if name in path]
    assert len(arrays) == 3 and {x.addressable_shards[0].data.shape for x in arrays} == {shard}
    assert all(x.sharding.mesh == partitioner.mesh for x in jax.tree.leaves(result))
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    plain_init, plain_step = (jax.jit(f) for f in PROGRAMS[program][:2])
    with nnx.use_eager_sharding(False):  # there is no mesh
        plain = unbox(plain_init(KEY))
        for _ in range(3):
            plain = state_of(plain_step(plain, BATCH), plain)
    assert_close(state, plain)
