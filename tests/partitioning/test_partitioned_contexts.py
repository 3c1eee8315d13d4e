"""Partitioned functions set the mesh and the rules while they run, and only then."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from test_partitioned import RULES, rows

from partitioning import BasePjitPartitioner, PjitPartitioner, PjittedFnWithContext

pytestmark = pytest.mark.core


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)


def contexts():
    return jax.sharding.get_abstract_mesh().axis_names, tuple(nn.get_logical_axis_rules())


@pytest.mark.parametrize('method', ['__call__', 'lower', 'trace', 'eval_shape', 'keywords'])
def test_contexts_are_set_only_inside(partitioner, method):
    seen = []

    def fn(x):
        seen.append(contexts())
        return x

    call = partitioner.partition(fn, (P('data'),), P('data'))
    before = contexts()
    if method == 'keywords':
        call(x=rows(8))
    else:
        (call if method == '__call__' else getattr(call, method))(rows(8))
    assert seen == [(('data', 'model'), RULES)]
    assert contexts() == before == ((), ())


def test_contexts_end_with_an_error(partitioner):
    def fail(x):
        raise RuntimeError('inside')

    with pytest.raises(RuntimeError, match='inside'):
        partitioner.partition(fail, None, None)(1.0)
    assert contexts() == ((), ())


def test_each_partitioner_has_its_own_contexts(partitioner):
    """A partitioned function ignores the rules of the context in which it is called."""
    other = PjitPartitioner(num_partitions=4, logical_axis_rules=[('batch', 'model')])
    call = other.partition(lambda x: nn.with_logical_constraint(x, ('batch',)), None, None)
    with nn.logical_axis_rules(RULES):
        assert "'model'" in str(call.trace(rows(8)).jaxpr)
        assert tuple(nn.get_logical_axis_rules()) == RULES


def test_constraints_inside(partitioner):
    seen = {}

    def fn(x):
        a = nn.with_logical_constraint(x + 1, ('batch', 'embed'))
        b = jax.lax.with_sharding_constraint(x + 2, P('model', 'data'))
        jax.debug.inspect_array_sharding(a, callback=lambda s: seen.update(a=s))
        jax.debug.inspect_array_sharding(b, callback=lambda s: seen.update(b=s))
        return a, b

    partitioner.partition(fn, None, None)(rows(8, 8))
    jax.effects_barrier()  # the callbacks may run after the call returns
    mesh = partitioner.mesh
    assert seen['a'].is_equivalent_to(NamedSharding(mesh, P('data', 'model')), 2)
    assert seen['b'].is_equivalent_to(NamedSharding(mesh, P('model', 'data')), 2)


def test_around_a_jitted_function(partitioner):
    seen = []

    def fn(x):
        seen.append(contexts())
        return jax.lax.with_sharding_constraint(x * 2, P('data'))

    call = PjittedFnWithContext(jax.jit(fn), partitioner.mesh, RULES)
    y = call(rows(8))
    np.testing.assert_array_equal(y, rows(8) * 2)
    assert y.sharding == NamedSharding(partitioner.mesh, P('data'))
    assert seen[0] == (('data', 'model'), RULES)
    assert contexts() == ((), ())
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    assert call.eval_shape(x).shape == call.lower(x).out_info.shape == (8,)
    np.testing.assert_array_equal(call.lower_and_compile(x)(rows(8)), rows(8) * 2)


def test_without_rules():
    """The base partitioner has no rules; methods that need them name PjitPartitioner."""
    partitioner = BasePjitPartitioner(num_partitions=2)
    seen = []

    def fn(x):
        seen.append(contexts())
        return x.sum()

    total = partitioner.partition(fn, (P('data', 'model'),), None)(rows(8, 4))
    assert float(total) == rows(8, 4).sum()
    assert seen == [(('data', 'model'), ())]
    with pytest.raises(ValueError, match='PjitPartitioner'):
        partitioner.get_mesh_axes({'w': rows(4)})
