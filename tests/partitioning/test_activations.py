"""UNCONSTRAINED dimensions of activations, over axes of every type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from partitioning import (
    AxisRules,
    PjitPartitioner,
    constrain,
    create_mesh,
    with_logical_partitioning,
    with_sharding_constraint,
)
from partitioning.compat.pytorch import ShardingPlan, place

pytestmark = pytest.mark.core

UNC = P.UNCONSTRAINED
RULES = [('batch', 'data'), ('embed', 'model'), ('both', ('data', 'model')), ('no', None)]
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@functools.cache
def mesh_of(*axis_types):
    return create_mesh((4, 2), ('data', 'model'), axis_types=axis_types)


def laid_out(mesh, *spec):
    return jax.device_put(X, NamedSharding(mesh, P(*spec)))


ALL = pytest.mark.parametrize(
    'types', [('auto', 'auto'), ('explicit', 'explicit'), ('auto', 'explicit')], ids='-'.join
)


@ALL
def test_unconstrained_dimensions_keep_their_layout(types):
    mesh = mesh_of(*types)
    with jax.set_mesh(mesh):
        for kept, spec, names in (
            (P(None, 'model'), P('data', UNC), ('batch', UNC)),
            (P('data', None), P(UNC, 'model'), (UNC, 'embed')),
            (P('data', 'model'), P(UNC, UNC), (UNC, UNC)),
        ):
            x = laid_out(mesh, *kept)
            for fn in (
                lambda x, spec=spec: with_sharding_constraint(x * 2, spec),
                lambda x, names=names: constrain(x * 2, names, RULES),
            ):
                y = jax.jit(fn)(x)
                assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('data', 'model')), 2)
                np.testing.assert_array_equal(y, X * 2)


@ALL
@pytest.mark.parametrize('sharding', [P, NamedSharding])
def test_unconstrained_dimensions_of_partitioned_functions(types, sharding):
    """An argument keeps the layout of the dimension, and the rest of the spec applies inside."""
    mesh = mesh_of(*types)
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES)
    spec = P('data', UNC)
    if sharding is NamedSharding and 'auto' in types:  # jax refuses it over Explicit axes only
        spec = NamedSharding(mesh, spec)

    def double(x, scale, y=0):
        return {'a': x['a'] * scale + y}, x['b'] * scale

    fn = partitioner.partition(
        double, ({'a': spec, 'b': None},), ({'a': spec}, P(UNC, 'data')), static_argnums=1
    )
    for a in (laid_out(mesh, None, 'model'), laid_out(mesh, 'data', 'model')):
        for keywords in ({}, {'y': 1}):
            first, second = fn({'a': a, 'b': X}, 2, **keywords)
            np.testing.assert_array_equal(first['a'], X * 2 + keywords.get('y', 0))
            np.testing.assert_array_equal(second, X * 2)
            expected = NamedSharding(mesh, P('data', 'model'))
            assert first['a'].sharding.is_equivalent_to(expected, 2)
            assert second.sharding.spec[1] == 'data'


def test_every_resource_may_be_unconstrained_over_auto_axes():
    partitioner = PjitPartitioner(mesh=mesh_of('auto', 'auto'), logical_axis_rules=RULES)
    y = partitioner.partition(lambda x: x * 2, P(UNC, 'model'), P(UNC, UNC))(X)
    np.testing.assert_array_equal(y, X * 2)
    assert y.sharding.spec[1] == 'model' and len(y.sharding.device_set) == 8


def rows(mesh, spec):
    return PjitPartitioner(mesh=mesh, logical_axis_rules=RULES).partition(
        lambda x: x, (spec,), P()
    )(X[:6])


def all_open(mesh, spec):
    explicit = mesh_of('explicit', 'explicit')
    PjitPartitioner(mesh=explicit).partition(lambda x: x, P(UNC, 'model'), P(UNC))


def plan_of(mesh, *names):
    init = with_logical_partitioning(lambda key: jnp.ones((8, 8)), names)
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=RULES)
    return partitioner.plan(lambda key: {'w': init(key)}, jax.random.key(0))


STATE = r'w: .*P\(UNCONSTRAINED.*\) leaves dimension 0 UNCONSTRAINED.*state.*None or a mesh axis'
REFUSED = {
    'a size that does not divide': (
        rows,
        r'argument 0: .*\(6, 8\).* 6 .*by 4.*4 or 8',
        P('data', UNC),
    ),
    'no definite resource over Explicit axes': (all_open, 'Explicit.*write None or', None),
    'names of a state': (lambda mesh, spec: plan_of(mesh, UNC, 'embed'), STATE, None),
    'specs of a plan': (
        lambda mesh, spec: plan_of(mesh, 'no', 'embed').replace_specs({'w': spec}, 'by hand'),
        STATE,
        P(UNC),
    ),
    'a ShardingPlan': (
        lambda mesh, spec: ShardingPlan({'w': spec}).resolve({'w': X}, mesh),
        STATE,
        P(UNC),
    ),
    'a state in host memory': (
        lambda mesh, spec: PjitPartitioner(mesh=mesh).move_params_to_devices({'w': X}, {'w': spec}),
        STATE,
        P(UNC, 'model'),
    ),
    'place': (lambda mesh, spec: place({'w': X}, mesh, spec), STATE, P(UNC)),
    'a rule': (lambda mesh, spec: AxisRules([('embed', UNC)]), "'embed', UNC.*None", None),
    'a batch': (
        lambda mesh, spec: PjitPartitioner(mesh=mesh).to_global(X, spec=spec),
        'UNCONSTRAINED.*mesh axis',
        P('data', UNC),
    ),
}


@pytest.mark.parametrize('use, message, spec', REFUSED.values(), ids=REFUSED)
def test_where_a_layout_must_be_definite(use, message, spec):
    with pytest.raises(ValueError, match=message):
        use(mesh_of('auto', 'auto'), spec)


@pytest.mark.parametrize('not_spec', [UNC, 'data', NamedSharding(mesh_of('auto', 'auto'), P())])
def test_what_is_not_a_spec(not_spec):
    with jax.set_mesh(mesh_of('auto', 'auto')), pytest.raises(ValueError, match='PartitionSpec'):
        with_sharding_constraint(X, not_spec)
