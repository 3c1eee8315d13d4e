"""partitioner.setup: from an init function and a step to a training that compiles once."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxed_states import by_path
from flax import nnx
from flax.training import train_state
from jax.sharding import AxisType, PartitionSpec as P

from partitioning import AxisRules, PjitPartitioner, check_compiled_once, unbox

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
    return PjitPartitioner(mesh, AxisRules(RULES, **settings))


def counted(function):
    """The function, and a list with one entry for each of its traces."""
    calls = []

    @functools.wraps(function)
    def counting(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return counting, calls


def assert_close(found, expected):
    found, expected = by_path(found), by_path(expected)
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            continue  # a count next to each key says how often it was used
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


class Layers(nnx.Module):
    """A module whose state changes in other places than its parameters."""

    def __init__(self, rngs):
        names = {'kernel_metadata': {'out_sharding': ('embed', 'mlp')}}
        self.linear = nnx.Linear(6, 8, use_bias=False, rngs=rngs, **names)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.activation = jax.nn.relu

    def __call__(self, x):
        return self.dropout(self.activation(self.linear(x)))


def modules_init(key):
    layers = Layers(nnx.Rngs(jax.random.wrap_key_data(key)))
    return layers, nnx.Optimizer(layers, ADAM, wrt=nnx.Param)


def modules_step(modules, batch):
    layers, optimizer = modules
    loss, grads = nnx.value_and_grad(lambda layers: jnp.mean((layers(batch) - 1) ** 2))(layers)
    optimizer.update(layers, grads)
    return modules, loss


PROGRAMS = {  # init, step, settings, the path and the shard of three arrays
    'boxes': (flax_init, flax_step, {}, 'kernel', (3, 2)),
    'paths': (tree_init, tree_step, {'names': PATHS}, '/w', (3, 2)),
    'nnx': (nnx_init, nnx_step, {}, 'kernel', (3, 2)),
    'nnx modules': (modules_init, modules_step, {}, 'kernel', (3, 2)),
}


def state_of(result, state):
    return result if jax.tree.structure(result) == jax.tree.structure(state) else result[0]


def layouts(state):
    return [x.sharding for x in jax.tree.leaves(state)]


def assert_fixed_point(partitioner, step, state, *others):
    """Runs two steps, after which every sharding is what it was before, and returns the result."""
    born = layouts(state)
    for _ in range(2):
        result = step(state, BATCH, *others)
        state = state_of(result, state)
        assert layouts(state) == born
        partitioner.plan(state).check(state)
    check_compiled_once(step)
    return result


@pytest.mark.parametrize(
    'program, axis_type',
    [
        *((program, AxisType.Auto) for program in PROGRAMS if program != 'nnx'),
        # The other front-ends train by the same code; test_conformance.py trains with nnx, too.
        pytest.param('nnx', AxisType.Auto, marks=pytest.mark.long),
        *((program, AxisType.Explicit) for program in ('boxes', 'nnx modules')),
    ],
)
def test_one_call_is_enough(program, axis_type, caplog):
    init, step, settings, name, shard = PROGRAMS[program]
    init, inits = counted(init)
    step, steps = counted(step)
    partitioner = partitioner_over(axis_type, **settings)
    state, partitioned, data_spec = partitioner.setup(init, step, KEY)
    assert data_spec == partitioner.data_partition_spec == P('data')
    result = assert_fixed_point(partitioner, partitioned, state)
    # Where jax refuses an operation over Explicit axes, the step is read again over Auto axes.
    attempts = 2 if 'over the Explicit axes' in caplog.text else 1
    assert (len(inits), len(steps)) == (1, attempts)
    assert all(x.is_deleted() for x in jax.tree.leaves(state) if x.ndim)  # it was donated
    after = state_of(result, state)
    arrays = [x for path, x in by_path(after).items() if name in path]
    assert [x.addressable_shards[0].data.shape for x in arrays] == [shard] * 3
    assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(after))
    assert all(x.sharding.mesh == partitioner.mesh for x in jax.tree.leaves(result))
    plain_init, plain_step = (jax.jit(f) for f in PROGRAMS[program][:2])
    with nnx.use_eager_sharding(False):  # there is no mesh
        plain = unbox(plain_init(KEY))
        for _ in range(2):
            plain = state_of(plain_step(plain, BATCH), plain)
    assert_close(after, plain)


# The result may have any form, and the state may be padded.


class Result(NamedTuple):
    state: Any
    rows: Any
    loss: Any


WAVES = np.sin(np.arange(42, dtype='float32')).reshape(6, 7)


def small_init(key):
    return {'w': jnp.asarray(WAVES), 'key': jax.random.key(3), 'none': None, 'n': 0}


def small_step(state, batch):
    key = jax.random.split(state['key'])[0]
    return {**state, 'w': state['w'] + batch.mean(), 'key': key, 'n': state['n'] + 1}


def small_partitioner(axis_type=AxisType.Auto, **settings):
    return partitioner_over(axis_type, (4, 2), names=[('w', ('embed', 'mlp'))], **settings)


FORMS = {
    'state': lambda state, rows: state,
    'tuple': lambda state, rows: (state, rows, 2.0),
    'list': lambda state, rows: [state, {'rows': rows}],
    'named tuple': lambda state, rows: Result(state, rows, None),
}


@pytest.mark.parametrize('form', FORMS)
def test_any_form_of_a_padded_state(form):
    make = FORMS[form]

    def step(state, batch):
        return make(small_step(state, batch), batch[:, 0])

    partitioner = small_partitioner(on_indivisible='pad')
    state, partitioned, _ = partitioner.setup(small_init, step, KEY)
    result = assert_fixed_point(partitioner, partitioned, state)
    expected = make({'w': 0, 'key': 0, 'none': None, 'n': 0}, BATCH[:, 0])
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    assert type(result) is type(expected)
    after = state_of(result, state)
    w = WAVES + 2 * BATCH.mean()
    np.testing.assert_allclose(after['w'], w, rtol=1e-5, atol=1e-6)
    assert after['n'] == 2
    for other in jax.tree.leaves(result)[3:]:  # after the state: replicated
        assert other.sharding.is_fully_replicated
        np.testing.assert_allclose(other, BATCH[:, 0] if other.ndim else 2.0)


@AXIS_TYPES
def test_further_arguments(axis_type):
    def step(state, batch, rows, scale=1.0, *, bias):
        return small_step(state, scale * batch + bias), rows + 1

    partitioner = small_partitioner(axis_type, on_indivisible='drop_axis')
    state, partitioned, _ = partitioner.setup(small_init, step, KEY)
    rows = np.arange(3.0)
    state, after = partitioned(state, BATCH, rows, bias=np.float32(2))
    state, after = partitioned(state, BATCH, rows, 2.0, bias=np.float32(0))
    state, after = partitioned(state, BATCH, rows=rows, scale=3.0, bias=np.float32(0))
    w = WAVES + 2 + 6 * BATCH.mean()
    np.testing.assert_allclose(state['w'], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(after, rows + 1)
    partitioner.plan(state).check(state)


def test_the_step_is_a_partitioned_function():
    partitioner = small_partitioner(on_indivisible='drop_axis')
    state, step, _ = partitioner.setup(small_init, lambda *args: (small_step(*args), 1), KEY)
    compiled = partitioner.compile(step, state, BATCH)
    aliased = compiled.memory_analysis().alias_size_in_bytes
    assert aliased >= sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)[1:])
    state, one = compiled(state, BATCH)
    assert (int(state['n']), int(one), step.num_traces()) == (1, 1, 1)


@pytest.mark.parametrize(
    'change, said',
    [
        (lambda s: None, 'None.*return'),
        (lambda s: {'loss': 1.0}, r'a dict, .*\(state, metrics\).*3 of 3 arrays.* key'),
        (lambda s: (1.0, s), r'a tuple of \(float32\[\], a dict\).*\(state, metrics\)'),
        (lambda s: ({'w': s['w']}, 1), 'lacks 2 of 3 arrays.*key'),
        (lambda s: {**s, 'ema': s['w']}, 'no ema.*init'),
        (lambda s: {**s, 'w': s['w'].astype('bfloat16')}, r'w as bfloat16\[6, 7\].*float32\[6'),
        (lambda s: {**s, 'w': s['w'][:2]}, r'w as float32\[2, 7\].*float32\[6, 7\]'),
        (lambda s: {**s, 'n': s['n'] + 0.5}, r'n as float32\[\].*int32\[\]'),
        (lambda s: (s, {'name': 'loss'}), "'loss' at 1/name"),
    ],
)
def test_results_that_are_not_states(change, said, small_setup):
    partitioner, state = small_setup

    def train_step(state, batch):
        return change(state)

    _, step, _ = partitioner.setup(small_init, train_step, KEY)
    with pytest.raises(ValueError, match=f'^train_step returned .*{said}'):
        step.eval_shape(state, BATCH)


@pytest.fixture(name='small_setup', scope='module')
def _small_setup():
    partitioner = small_partitioner(on_indivisible='drop_axis')
    return partitioner, partitioner.plan(small_init, KEY).abstract_state


def test_static_fields_that_a_step_changes():
    def step(state, batch):
        return state.replace(tx=ADAM), 1

    state, step, _ = partitioner_over().setup(flax_init, step, KEY)
    with pytest.raises(ValueError, match=r'TrainState.* static fields differ.*state.replace'):
        step(state, BATCH)
