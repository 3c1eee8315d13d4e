"""Partitioned functions: calls, layouts, keywords, methods, and the contexts that they set."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import BasePjitPartitioner, MeshConfig, PjitPartitioner, PjittedFnWithContext

pytestmark = pytest.mark.core

RULES = (('batch', 'data'), ('embed', 'model'))


@pytest.fixture(name='partitioner', scope='module')
def _partitioner():
    return PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)


def rows(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


# Calls and layouts.


def test_result_and_layouts(partitioner):
    x, w = rows(8, 4), rows(4, 6)
    matmul = partitioner.partition(jnp.matmul, (P('data'), P(None, 'model')), P('data', 'model'))
    y = matmul(x, w)
    np.testing.assert_allclose(y, x @ w)
    assert y.sharding == NamedSharding(partitioner.mesh, P('data', 'model'))
    assert {s.data.shape for s in y.addressable_shards} == {(2, 3)}


def test_trees_and_prefixes_of_resources(partitioner):
    specs = {'w': P('model'), 'rest': P('data')}
    state = {'w': rows(4), 'rest': {'a': rows(8), 'b': rows(4, 4)}}
    out = partitioner.partition(lambda s: jax.tree.map(lambda a: a + 1, s), (specs,), specs)(state)
    assert out['w'].sharding.spec == P('model')
    assert out['rest']['a'].sharding.spec == out['rest']['b'].sharding.spec == P('data')
    np.testing.assert_array_equal(out['rest']['b'], state['rest']['b'] + 1)


def test_shardings_are_valid_resources(partitioner):
    sharding = NamedSharding(partitioner.mesh, P('model'))
    assert partitioner.partition(lambda x: x, (sharding,), sharding)(rows(4)).sharding == sharding


@pytest.mark.parametrize('wrong', ['data', 3, ('data', 'model')])
def test_wrong_resource(partitioner, wrong):
    with pytest.raises(ValueError, match=r'in_shardings\[0\] \(x\) must be a P'):
        partitioner.partition(lambda x: x, (wrong,), None)
    with pytest.raises(ValueError, match=r'out_shardings.* must be a PartitionSpec'):
        partitioner.partition(lambda x: x, (None,), wrong)


def test_donated_input_is_deleted(partitioner):
    sharding = NamedSharding(partitioner.mesh, P('data'))
    kept, given = (jax.device_put(rows(8, 2), sharding) for _ in range(2))
    add = partitioner.partition(
        lambda a, b: (a + b, b.sum()), (P('data'), P('data')), (P('data'), None), donate_argnums=1
    )
    add(kept, given)
    assert given.is_deleted() and not kept.is_deleted()


def test_traced_once(partitioner):
    traces = []

    def fn(x, y):
        traces.append(None)
        return x + y

    call = partitioner.partition(fn, (P('data'), None), P('data'))
    call(rows(8), rows(8))
    call(rows(8) + 1, rows(8))
    assert len(traces) == 1
    call(rows(8), y=rows(8))
    call(x=rows(8), y=rows(8))
    assert len(traces) == 1  # the same call with keywords
    call.clear_cache()
    call(rows(8), rows(8))
    assert len(traces) == 2


def test_traced_once_with_keywords(partitioner):
    traces = []

    def fn(x, *, scale):
        traces.append(None)
        return x * scale

    call = partitioner.partition(fn, (P('data'),), P('data'))
    for scale in (2.0, 3.0):
        np.testing.assert_array_equal(call(rows(8), scale=scale), rows(8) * scale)
    assert len(traces) == 1
    call.clear_cache()
    call(rows(8), scale=2.0)
    assert len(traces) == 2


# Keywords.


def affine(x, w=2.0, b=1.0, *, scale=1.0):
    return (x * w + b) * scale


@pytest.mark.parametrize('resources', [(P('data'),), P('data'), None, [P('data')]])
@pytest.mark.parametrize(
    'args, kwargs',
    [
        ((), {'x': rows(8)}),
        ((rows(8),), {'w': rows(8)}),
        ((rows(8), rows(8)), {'b': rows(8)}),
        ((rows(8),), {'b': rows(8)}),
        ((rows(8),), {'scale': rows(8)}),
        ((), {'scale': rows(8), 'w': rows(8), 'x': rows(8)}),
        ((rows(8), rows(8), rows(8)), {'scale': rows(8)}),
    ],
)
def test_keywords(partitioner, resources, args, kwargs):
    """Resources for the first argument, or one for all; other arguments keep their layout."""
    if not isinstance(resources, P) and resources is not None and len(args) > len(resources):
        resources = resources * len(args)
    call = partitioner.partition(affine, resources, P('data'))
    out = call(*args, **kwargs)
    np.testing.assert_allclose(out, affine(*args, **kwargs))
    assert out.sharding.spec == P('data')
    np.testing.assert_allclose(call(*args, **kwargs), out)


def test_resources_follow_a_keyword(partitioner):
    """An argument passed by name gets the resource of its position."""
    seen = {}

    def fn(x, w):
        jax.debug.inspect_array_sharding(w, callback=lambda s: seen.update(w=s))
        return x + w

    call = partitioner.partition(fn, (P('data'), P('model')), P('data'))
    call(w=rows(8), x=rows(8))
    jax.effects_barrier()  # the callback may run after the call returns
    assert seen['w'].is_equivalent_to(NamedSharding(partitioner.mesh, P('model')), 1)


def test_a_static_argument_that_is_left_out_over_explicit_axes():
    mesh = MeshConfig(axes={'data': 8}, axis_types='explicit').build()
    scale = PjitPartitioner(mesh=mesh).partition(
        lambda x, factor=2: x * factor, (P('data'),), P('data'), static_argnums=1
    )
    np.testing.assert_array_equal(scale(np.arange(8)), 2 * np.arange(8))
    np.testing.assert_array_equal(scale(np.arange(8), 3), 3 * np.arange(8))


def test_keywords_with_static_and_donated_arguments(partitioner):
    def fn(state, n, x, *, shift):
        assert isinstance(n, int)
        return state * n + x + shift

    call = partitioner.partition(
        fn, (P('data'), P('data')), P('data'), static_argnums=1, donate_argnums=0
    )
    sharding = NamedSharding(partitioner.mesh, P('data'))
    for args, kwargs in [
        ((), {'n': 3, 'x': rows(8)}),
        ((3,), {'x': rows(8)}),
        ((3, rows(8)), {}),
    ]:
        state = jax.device_put(rows(8), sharding)
        names = {'state': state} | kwargs if not args else kwargs
        out = call(*((state, *args) if args else ()), **names, shift=1.0)
        np.testing.assert_allclose(out, rows(8) * 4 + 1)
        assert state.is_deleted()


def test_a_static_argument_passed_only_by_name(partitioner):
    call = partitioner.partition(lambda x, n=2: x**n, (P('data'),), P('data'), static_argnums=(1,))
    np.testing.assert_array_equal(call(rows(8), n=3), rows(8) ** 3)
    np.testing.assert_array_equal(call(rows(8)), rows(8) ** 2)


# Methods.


def test_methods(partitioner):
    call = partitioner.partition(affine, (P('data'),), P('data', 'model'))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    expected = affine(rows(8, 4))
    assert call.eval_shape(x).shape == (8, 4)
    assert 'func.func public @main' in call.lower(x).as_text()
    assert [v.aval.shape for v in call.trace(x).jaxpr.jaxpr.outvars] == [(8, 4)]
    for compiled in (
        call.lower(x).compile(),
        call.lower_and_compile(x),
        partitioner.compile(call, x),
    ):
        y = compiled(jax.device_put(rows(8, 4), compiled.input_shardings[0][0]))
        np.testing.assert_allclose(y, expected)
        assert y.sharding.spec == P('data', 'model')


def test_type_and_name_of_a_partitioned_function(partitioner):
    call = partitioner.partition(affine, (P('data'),), None)
    assert isinstance(call, PjittedFnWithContext)
    assert not isinstance(affine, PjittedFnWithContext)
    assert not isinstance(jax.jit(affine), PjittedFnWithContext)
    assert call.__name__ == 'affine' and call.__wrapped__ is affine


# Contexts: the mesh and the rules are set while a function runs, and only then.


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
