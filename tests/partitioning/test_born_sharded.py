"""States are born in their shards: over any mesh, in any structure, with ZeRO and FSDP."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from boxed_states import by_path
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from partitioning import (
    PjitPartitioner,
    check_compiled_once,
    fsdp_logical_axis_rules,
    unbox,
)

pytestmark = pytest.mark.core

box = nn.LogicallyPartitioned
ADAM = optax.adam(1e-3)
KEY = np.zeros(2, 'uint32')  # jax.random.PRNGKey(0) in host memory


def shard_shapes(state):
    """The shape of the shards of every array but scalars; it is the same on all devices."""
    shapes = {}
    for path, array in by_path(state).items():
        held = {shard.data.shape for shard in array.addressable_shards}
        assert len(held) == 1 and len(array.addressable_shards) == 8, path
        if array.ndim:
            shapes[path] = held.pop()
    return shapes


# Meshes with any shape, names and types of axes.

TABLE, UP, BIAS = (48, 24), (3, 24, 40), (40,)
TWO = [('embed', 'rows'), ('mlp', 'columns'), ('vocab', 'columns'), ('stack', None)]
THREE = [('embed', 'x'), ('mlp', 'y'), ('vocab', ('y', 'z')), ('stack', None)]
MESHES = {  # sizes, names, rules; shards of TABLE, UP and BIAS
    '8x1': ((8, 1), ('rows', 'columns'), TWO, (48, 3), (3, 3, 40), (40,)),
    '1x8': ((1, 8), ('rows', 'columns'), TWO, (6, 24), (3, 24, 5), (5,)),
    '4x2': ((4, 2), ('rows', 'columns'), TWO, (24, 6), (3, 6, 20), (20,)),
    '2x2x2': ((2, 2, 2), ('x', 'y', 'z'), THREE, (12, 12), (3, 12, 20), (20,)),
}
AXIS_TYPES = pytest.mark.parametrize(
    'axis_type', [AxisType.Auto, AxisType.Explicit], ids=['Auto', 'Explicit']
)
TREES = ('params', 'opt_state/0/mu', 'opt_state/0/nu')


def partitioner_over(mesh, axis_type=AxisType.Auto):
    sizes, names, rules, *_ = MESHES[mesh]
    mesh = jax.make_mesh(sizes, names, axis_types=(axis_type,) * len(sizes))
    return PjitPartitioner(mesh=mesh, logical_axis_rules=rules)


def parameters(key, look=lambda table: None):
    table = jax.random.uniform(key, TABLE)
    look(table)
    return {
        'table': box(table, ('vocab', 'embed')),
        'up': box(jnp.full(UP, 0.5), ('stack', 'embed', 'mlp')),
        'bias': box(jnp.ones(BIAS), ('mlp',)),
    }


def adam(params):
    return ADAM.init(unbox(params))


def with_adam(params):
    return {'params': params, 'opt_state': adam(params), 'step': jnp.int32(0)}


@functools.cache
def table_of_one_device():
    return np.asarray(jax.jit(lambda key: parameters(key)['table'].value)(KEY))


@AXIS_TYPES
@pytest.mark.parametrize('mesh', MESHES)
def test_no_device_ever_holds_a_whole_array(mesh, axis_type):
    """It holds neither the whole state nor, while it is made, all of the random numbers in it."""
    seen = []
    look = functools.partial(jax.debug.inspect_array_sharding, callback=seen.append)
    partitioner = partitioner_over(mesh, axis_type)
    state = partitioner.init(lambda key: with_adam(parameters(key, look)), KEY)
    jax.effects_barrier()
    one = dict(zip(('table', 'up', 'bias'), MESHES[mesh][3:], strict=True))
    assert shard_shapes(state) == {f'{tree}/{name}': one[name] for tree in TREES for name in one}
    assert all(x.sharding.mesh == partitioner.mesh for x in jax.tree.leaves(state))
    np.testing.assert_allclose(state['params']['table'], table_of_one_device(), rtol=1e-6)
    assert [sharding.shard_shape(TABLE) for sharding in seen] == [one['table']]


def test_the_program_that_makes_a_state_has_no_whole_array():
    plan = partitioner_over('2x2x2').plan(lambda key: with_adam(parameters(key)), KEY)
    compiled = jax.jit(plan.init).lower(KEY).compile()
    specs = {'table': P(('y', 'z'), 'x'), 'up': P(None, 'x', 'y'), 'bias': P('y')}
    shapes = {'table': TABLE, 'up': UP, 'bias': BIAS}
    shardings = by_path(compiled.output_shardings)
    for path, name in ((f'{tree}/{name}', name) for tree in TREES for name in specs):
        expected = NamedSharding(plan.mesh, specs[name])
        assert shardings[path].is_equivalent_to(expected, len(shapes[name])), path
    text = compiled.as_text()  # the program of one device
    assert '[12,12]' in text and '[3,12,20]' in text
    assert '[48,24]' not in text and '[3,24,40]' not in text and '[40]' not in text


def test_arguments_of_init():
    partitioner = partitioner_over('4x2')
    state = partitioner.init(
        lambda scale, shift: {'w': box(scale * jnp.ones((8, 8)) + shift['by'], ('embed', 'mlp'))},
        jnp.float32(3),
        {'by': np.arange(8.0, dtype='float32')},
    )
    np.testing.assert_array_equal(state['w'], np.tile(3 + np.arange(8.0), (8, 1)))
    assert shard_shapes(state) == {'w': (2, 4)}


# ZeRO and FSDP, over data 4 x model 2.

RULES = [('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('embed', None)]
VOCAB, EMBED, MLP = 48, 16, 40
SHARDED = fsdp_logical_axis_rules(RULES)
KINDS = {  # settings of a partitioner; shards of the parameters, and of Adam's statistics
    'tensor': ({'logical_axis_rules': RULES}, 'whole', 'whole'),
    'ZeRO': ({'logical_axis_rules': RULES, 'optimizer_axis_rules': SHARDED}, 'whole', 'split'),
    'FSDP': ({'logical_axis_rules': SHARDED}, 'split', 'split'),
}
SHARDS = {  # 'split' is over 'data' too, except the bias, which has no 'embed'
    'whole': {'table': (24, 16), 'up': (16, 20), 'bias': (20,)},
    'split': {'table': (24, 4), 'up': (4, 20), 'bias': (20,)},
}
BYTES = {'whole': 4 * (24 * 16 + 16 * 20 + 20), 'split': 4 * (24 * 4 + 4 * 20 + 20)}
TOKENS = np.arange(48, dtype=np.int32).reshape(8, 6)


def small_model(key):
    def waves(*shape):
        return jnp.sin(jnp.arange(np.prod(shape, dtype='float32'))).reshape(shape)

    return with_adam(
        {
            'table': box(waves(VOCAB, EMBED), ('vocab', 'embed')),
            'up': box(waves(EMBED, MLP) / 16, ('embed', 'mlp')),
            'bias': box(waves(MLP) / 16, ('mlp',)),
        }
    )


def step(state, tokens):
    def loss(params):
        x = params['table'][tokens] @ params['up'] + params['bias']
        # The second term keeps gradients off 0, where Adam would amplify rounding.
        return jnp.mean(x**2) + sum(jnp.sum(2 * p + jnp.cos(p)) for p in jax.tree.leaves(params))

    grads = jax.grad(loss)(state['params'])
    updates, opt_state = ADAM.update(grads, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'opt_state': opt_state, 'step': state['step'] + 1}


@functools.cache
def step_of_one_device():
    return by_path(jax.jit(step)(unbox(jax.jit(small_model)(KEY)), TOKENS))


@functools.cache
def run(kind):
    partitioner = PjitPartitioner(num_partitions=2, **KINDS[kind][0])
    plan = partitioner.plan(small_model, KEY)
    born = plan.init(KEY)
    resources = (plan.specs, partitioner.data_partition_spec)
    partitioned = partitioner.partition(step, resources, plan.specs)
    after = partitioned(born, TOKENS)
    partitioned(after, TOKENS)
    return types.SimpleNamespace(
        partitioner=partitioner, plan=plan, born=born, after=after, step=partitioned
    )


@pytest.mark.parametrize('kind', KINDS)
def test_shards_and_bytes(kind):
    _, of_params, of_optimizer = KINDS[kind]
    shapes = {f'params/{name}': shape for name, shape in SHARDS[of_params].items()}
    for tree in TREES[1:]:
        shapes |= {f'{tree}/{name}': shape for name, shape in SHARDS[of_optimizer].items()}
    held = {'parameters': BYTES[of_params], 'optimizer': 2 * BYTES[of_optimizer] + 4}
    held['other'] = 4  # the step; the optimizer has a count too
    plan = run(kind).plan
    for state in (run(kind).born, run(kind).after):
        assert shard_shapes(state) == shapes
        audit = plan.audit(state)
        assert audit.by_role == held == plan.audit().by_role
        assert audit.bytes_per_device == sum(held.values())
        on_one = [x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)]
        assert sum(on_one) == sum(held.values())


@pytest.mark.parametrize('kind', KINDS)
def test_a_step_equals_that_of_one_device(kind):
    after, plain = by_path(run(kind).after), step_of_one_device()
    assert after.keys() == plain.keys()
    for path, array in plain.items():
        largest = float(np.abs(array).max())
        np.testing.assert_allclose(after[path], array, rtol=0, atol=1e-5 * largest, err_msg=path)


@pytest.mark.parametrize('kind', KINDS)
def test_a_step_is_a_fixed_point(kind):
    result = run(kind)
    result.plan.check(result.born)
    result.plan.check(result.after)
    check_compiled_once(result.step)
