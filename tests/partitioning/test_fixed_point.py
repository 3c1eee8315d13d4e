"""check_fixed_point and check_compiled_once: what they find, and what they take."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import PjitPartitioner, check_compiled_once, check_fixed_point

pytestmark = pytest.mark.core

AXES = [('embed', 'data'), ('mlp', 'model')]


def wide():
    return nn.LogicallyPartitioned(jnp.zeros((16, 40)), ('embed', 'mlp'))


def tall():
    return nn.LogicallyPartitioned(jnp.zeros((40, 16)), ('mlp', 'embed'))


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=AXES)


@pytest.fixture(name='state', scope='module')
def _state(partitioner):
    return partitioner.init(
        lambda: {'a': wide(), 'b': {'c': tall(), 'd': wide()}, 'e': jnp.int32(0)}
    )


LAYOUT = {'a': P('data', 'model'), 'b': {'c': P('model', 'data'), 'd': P('data', 'model')}}


@pytest.mark.parametrize('moved, first', [('ac', 'a'), ('cd', 'b/c'), ('d', 'b/d'), ('e', 'e')])
def test_the_first_array_that_moved(partitioner, state, moved, first):
    other = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    after = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x, other) if path[-1].key in moved else x, state
    )
    for layout in (state, {**LAYOUT, 'e': P()}):
        with pytest.raises(ValueError, match=rf'^{first} of shape .*was expected'):
            check_fixed_point(after, layout, partitioner.mesh)


def test_a_move_within_the_mesh_says_from_where_to_where(partitioner, state):
    after = {**state, 'a': jax.device_put(state['a'], NamedSharding(partitioner.mesh, P('model')))}
    message = r"^a of shape \(16, 40\) .*P\('model'.*data 4 x model 2.*P\('data', 'model'\)"
    with pytest.raises(ValueError, match=message):
        check_fixed_point(after, state, partitioner.mesh)


def test_layouts_that_a_check_takes(partitioner, state):
    mesh = partitioner.mesh
    half = {'a': state['a'], 'b': {'d': state['b']['d']}}
    for layout in (state, {**LAYOUT, 'e': None}, {**LAYOUT, 'e': state['e'].sharding}):
        check_fixed_point(state, layout, mesh)
    for prefix in (P('data', 'model'), NamedSharding(mesh, P('data', 'model'))):
        check_fixed_point(half, prefix, mesh)
        check_fixed_point(half, {'a': prefix, 'b': prefix}, mesh)
    with pytest.raises(ValueError, match=r'^b/c of shape'):
        check_fixed_point(
            state, {'a': P('data', 'model'), 'b': P('data', 'model'), 'e': None}, mesh
        )
    with pytest.raises(ValueError, match=r'^a of shape .*P\(\) over .* was expected'):
        check_fixed_point(state, None, mesh)


@pytest.mark.parametrize('layout', [{'a': P()}, {**LAYOUT, 'e': P(), 'f': P()}])
def test_layouts_of_another_structure(partitioner, state, layout):
    with pytest.raises(ValueError):
        check_fixed_point(state, layout, partitioner.mesh)


@pytest.mark.parametrize('leaf', [np.zeros(3), 3])
def test_what_is_on_no_device(partitioner, leaf):
    with pytest.raises(ValueError, match=r'^n '):
        check_fixed_point({'n': leaf}, P(), partitioner.mesh)


def test_specs_of_the_same_layout_are_equal(partitioner):
    array = jax.device_put(jnp.zeros((8, 4)), NamedSharding(partitioner.mesh, P('data')))
    check_fixed_point({'x': array}, {'x': P('data', None)}, partitioner.mesh)
    check_fixed_point({'x': array}, {'x': P(('data',), ())}, partitioner.mesh)


def scaled(x, scale=1.0):
    return x * scale


def rows(*shape):
    return np.ones(shape, 'float32')


def test_never_compiled(partitioner):
    function = partitioner.partition(scaled, P('data'), P('data'))
    with pytest.raises(ValueError, match=r'scaled.*0 times.*not been called'):
        check_compiled_once(function)
    function.lower(rows(8, 4)).compile()  # ahead of time counts as well
    check_compiled_once(function)
    function(rows(8, 4))
    check_compiled_once(function)


ONE, TWO_LAID_OUT = (P('data'),), (P('data'), None)


@pytest.mark.parametrize(
    'resources, calls, count',
    [
        (ONE, [((rows(8, 4),), {}), ((2 * rows(8, 4),), {})], 1),
        (ONE, [((rows(8, 4),), {}), ((rows(16, 4),), {})], 2),
        (ONE, [((rows(8, 4),), {}), ((rows(8, 4).astype('int32'),), {})], 2),
        (ONE, [((rows(8, 4),), {'scale': 2.0}), ((rows(8, 4),), {'scale': 3.0})], 1),
        (TWO_LAID_OUT, [((rows(8, 4), 2.0), {}), ((), {'scale': 3.0, 'x': rows(8, 4)})], 1),
        (ONE, [((rows(8, 4),), {}), ((rows(8, 4),), {'scale': 3.0})], 2),
    ],
    ids=['values', 'shapes', 'types', 'keywords', 'by position and by keyword', 'with and without'],
)
def test_compilations(partitioner, resources, calls, count):
    function = partitioner.partition(scaled, resources, P('data'))
    for args, kwargs in calls:
        function(*args, **kwargs)
    if count == 1:
        check_compiled_once(function)
    else:
        with pytest.raises(ValueError, match=f'scaled was compiled {count} times, not once'):
            check_compiled_once(function)


def test_one_layout_in_two_words_is_compiled_once(partitioner, caplog):
    function = partitioner.partition(scaled, P('data'), P('data'))
    with jax.log_compiles():
        for spec in (P('data'), P('data', None)):
            function(jax.device_put(rows(8, 4), NamedSharding(partitioner.mesh, spec)))
    logged = [m for m in caplog.messages if 'Finished XLA' in m and 'scaled' in m]
    assert len(logged) == 1, 'jax itself compiles twice'
    check_compiled_once(function)
