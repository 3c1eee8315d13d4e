"""plan.check and check_compiled_once: what they find, and what they accept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boxed_states import box
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

from partitioning import PjitPartitioner, check_compiled_once
from partitioning.plan.audit import check_fixed_point

pytestmark = [pytest.mark.core, pytest.mark.smoke]

RULES = [('embed', 'data'), ('mlp', 'model')]


def wide():
    return box((16, 40), 'embed', 'mlp')


def tall():
    return box((40, 16), 'mlp', 'embed')


def init():
    return {'a': wide(), 'b': {'c': tall(), 'd': wide()}, 'e': jnp.int32(0)}


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)


@pytest.fixture(name='plan', scope='module')
def _plan(partitioner):
    return partitioner.plan(init)


@pytest.fixture(name='state', scope='module')
def _state(partitioner):
    """The state, laid out by hand."""
    specs = {'a': P('data', 'model'), 'b': {'c': P('model', 'data'), 'd': P('data', 'model')}}
    shardings = jax.tree.map(
        lambda spec: NamedSharding(partitioner.mesh, spec), {**specs, 'e': P()}
    )
    arrays = {'a': (16, 40), 'b': {'c': (40, 16), 'd': (16, 40)}, 'e': ()}
    zeros = jax.tree.map(np.zeros, arrays, is_leaf=lambda x: isinstance(x, tuple))
    return jax.device_put(zeros, shardings)


@pytest.mark.parametrize('moved, first', [('ac', 'a'), ('cd', 'b/c'), ('d', 'b/d'), ('e', 'e')])
def test_the_first_array_that_moved(plan, state, moved, first):
    other = SingleDeviceSharding(jax.devices()[3])
    after = jax.tree_util.tree_map_with_path(
        lambda path, x: jax.device_put(x, other) if path[-1].key in moved else x, state
    )
    plan.check(state)
    with pytest.raises(ValueError, match=rf'^{first} of shape .*SingleDeviceSharding.*plan'):
        plan.check(after)


def test_a_move_within_the_mesh_names_both_specs(plan, state):
    after = {**state, 'a': jax.device_put(state['a'], NamedSharding(plan.mesh, P('model')))}
    message = r"^a of shape \(16, 40\) .*P\('model'.*data 4 x model 2.*P\('data', 'model'\)"
    with pytest.raises(ValueError, match=message):
        plan.check(after)


def test_shardings_may_be_a_prefix(plan, state):
    same = NamedSharding(plan.mesh, P('data', 'model'))
    half = {'a': state['a'], 'b': {'d': state['b']['d']}}
    check_fixed_point(half, same)
    check_fixed_point(half, {'a': same, 'b': same})
    with pytest.raises(ValueError, match=r'^b/c of shape'):
        check_fixed_point({**half, 'b': state['b']}, {'a': same, 'b': same})


@pytest.mark.parametrize(
    ('change', 'words'),
    [
        (lambda s: {'a': s['a']}, '^the state lacks 3 of 4 arrays, first b/c: pass the state'),
        (lambda s: {**s, 'f': s['e']}, '^the state has f, which the plan lacks: '),
    ],
)
def test_states_of_another_structure(plan, state, change, words):
    with pytest.raises(ValueError, match=words):
        plan.check(change(state))


def test_specs_instead_of_a_state(plan):
    for given, shown in ((plan.specs, r'P\(.*\)'), (plan.shardings, 'NamedSharding')):
        with pytest.raises(ValueError, match=rf'^a is the layout {shown}.* pass the state, not'):
            plan.check(given)
    with pytest.raises(ValueError, match=r'^1000000\.0 is not a state.*budget=1000000\.0$'):
        plan.audit(1e6)


@pytest.mark.parametrize('leaf', [np.zeros(3), 3])
def test_arrays_that_are_not_on_devices(plan, state, leaf):
    with pytest.raises(ValueError, match=rf'^e .*{type(leaf).__name__}.*move_params_to_devices'):
        plan.check({**state, 'e': leaf})


def test_equivalent_specs_are_equal(partitioner):
    array = jax.device_put(jnp.zeros((8, 4)), NamedSharding(partitioner.mesh, P('data')))
    for spec in (P('data', None), P(('data',), ())):
        check_fixed_point({'x': array}, {'x': NamedSharding(partitioner.mesh, spec)})


def scaled(x, scale=1.0):
    return x * scale


def rows(*shape):
    return np.ones(shape, 'float32')


def test_a_layout_written_in_two_ways_is_compiled_once(partitioner, caplog):
    function = partitioner.partition(scaled, P('data'), P('data'))
    with jax.log_compiles():
        for spec in (P('data'), P('data', None)):
            function(jax.device_put(rows(8, 4), NamedSharding(partitioner.mesh, spec)))
    logged = [m for m in caplog.messages if 'Finished XLA' in m and 'scaled' in m]
    assert len(logged) == 1
    check_compiled_once(function)


def test_compilations_of_another_function():
    with pytest.raises(ValueError, match=r'PjitPartitioner.partition'):
        check_compiled_once(jax.jit(scaled))
