"""States are born in their shards, over any mesh."""

import functools

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
