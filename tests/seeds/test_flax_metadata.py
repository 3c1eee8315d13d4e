"""Behaviours B18 and B19 of Flax: names in T5X's params_axes and in the metadata of nnx."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from boxed_states import KEY, ones, partitioner_of
from flax import nnx
from flax.linen import partitioning as t5x
from flax.nnx.training import optimizer as nnx_optimizer
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from partitioning import (
    AxisNames,
    PjitPartitioner,
    TrainState,
    create_mesh,
    get_logical_axes,
    to_linen_boxes,
)

pytestmark = pytest.mark.core

ON_BOTH = pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])

# T5X's names in a separate collection.


class TwoMatrices(nn.Module):
    @nn.compact
    def __call__(self, x):
        w1 = t5x.param_with_axes('W1', ones, (4, 6), axes=('emb', 'mlp'))
        w2 = t5x.param_with_axes('W2', ones, (6, 4), axes=('mlp', 'emb'))
        y = t5x.variable_with_axes('stats', 'y_st', jnp.zeros, (2, 4), axes=('batch', 'emb'))
        y.value = x @ w1 @ w2
        return y.value, None


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ t5x.param_with_axes('w', ones, (4, 3), axes=('out', 'in')).T


def test_B18_params_axes():
    class Foo(nn.Module):
        @nn.compact
        def __call__(self):
            return t5x.param_with_axes('foo', ones, (2, 3), axes=('foo', 'bar'))

    made = Foo().init(KEY)
    names = made['params_axes']['foo_axes']
    assert type(names) is t5x.AxisMetadata and tuple(names.names) == ('foo', 'bar')
    assert t5x.get_axis_names(made['params_axes']) == {'foo': P('foo', 'bar')}
    assert get_logical_axes(made)['params']['foo'] == AxisNames('foo', 'bar')
    assert to_linen_boxes(made)['params']['foo'].names == ('foo', 'bar')


def test_B18_scan_with_axes():
    lift = {'variable_axes': {'params': 0, 'stats': 1}, 'split_rngs': {'params': True}}
    named = {'axis_name': 'layer', 'axes_collections': ('params', 'stats')}
    scanned = t5x.scan_with_axes(TwoMatrices, **lift, **named, in_axes=(), length=3)()
    variables = jax.eval_shape(scanned.init, KEY, jnp.ones((2, 4)))
    expected = {
        'params': {'W1': ('layer', 'emb', 'mlp'), 'W2': ('layer', 'mlp', 'emb')},
        'stats': {'y_st': ('batch', 'layer', 'emb')},
    }
    names = get_logical_axes(variables)
    for collection, arrays in expected.items():
        by_flax = t5x.get_axis_names(variables[f'{collection}_axes'])
        for name, axes in arrays.items():
            assert names[collection][name] == AxisNames(*axes)
            assert by_flax[name] == P(*axes)
    state = jax.eval_shape(lambda v: TrainState.create(v, optax.adam(1e-3)), variables)
    rules = [('batch', 'model'), ('emb', 'data'), ('mlp', 'model'), ('layer', None)]
    specs = partitioner_of(rules).get_mesh_axes(state)
    assert specs.params == {'W1': P(None, 'data', 'model'), 'W2': P(None, 'model', 'data')}
    assert specs.opt_state[0].nu == specs.params
    assert specs.flax_mutables['stats']['y_st'] == P('model', None, 'data')


def test_B18_vmap_with_axes():
    lift = {'variable_axes': {'params': 1}, 'split_rngs': {'params': True}}
    many = t5x.vmap_with_axes(Dense, **lift, partitioning_axis_names={'params': 'vmap_axis'})
    made = jax.eval_shape(many().init, KEY, jnp.ones((2, 3)))
    assert made['params']['w'].shape == (4, 2, 3)
    assert get_logical_axes(made)['params']['w'] == AxisNames('out', 'vmap_axis', 'in')


# nnx.


def linear(**metadata):
    named = {'out_sharding': (None, 'model'), **metadata}
    return nnx.Linear(16, 64, use_bias=False, rngs=nnx.Rngs(0), kernel_metadata=named)


@ON_BOTH
def test_B19_variables_in_a_mesh(axis_type):
    partitioner = partitioner_of(axis_types=axis_type)
    with jax.set_mesh(partitioner.mesh):
        made = linear()
    assert made.kernel.sharding.spec == P(None, 'model')
    assert partitioner.get_mesh_axes(nnx.state(made))['kernel'] == P(None, 'model')


def test_B19_without_a_mesh():
    """flax raises an error without a mesh; `partitioner.init` sets the mesh."""
    with pytest.raises(ValueError, match='An auto mesh context or metadata is required'):
        linear()
    state = partitioner_of().init(lambda: nnx.state(linear()))
    assert state['kernel'].sharding.spec == P(None, 'model')


@pytest.mark.parametrize('written', ['tuple', 'spec', 'sharding'])
def test_B19_out_sharding_in_every_form(written):
    partitioner, spec = partitioner_of(), P(None, ('data', 'model'))
    given = {
        'tuple': tuple(spec),
        'spec': spec,
        'sharding': NamedSharding(partitioner.mesh, spec),
    }[written]
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.zeros((8, 8)), out_sharding=given)
    assert partitioner.get_mesh_axes({'w': variable})['w'] == spec


@pytest.mark.skipif(
    'optimizer_sharding' not in inspect.getsource(nnx_optimizer),
    reason='flax before 0.12.7 has no optimizer_sharding',
)
@pytest.mark.parametrize(
    'metadata',
    [
        {'out_sharding': (None, None), 'optimizer_sharding': ('row', 'col')},
        {'out_sharding': None, 'optimizer_sharding': ('row', 'col')},
    ],
    ids=['both', 'only the optimizer'],
)
@pytest.mark.parametrize('rules', [[], [('row', 'col'), ('col', 'row')]])
def test_B19_optimizer_sharding(metadata, rules):
    """The parameters are replicated and the statistics are sharded."""
    mesh = create_mesh((4, 2), ('row', 'col'))
    partitioner = PjitPartitioner(mesh=mesh, logical_axis_rules=rules)
    expected = P('col', 'row') if rules else P('row', 'col')

    def init():
        model = linear(**metadata)
        return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))

    plan = partitioner.plan(init)
    axes = plan.specs
    assert {row.path: row.role for row in plan.rows if row.path.endswith('/kernel')} == {
        '0/kernel': 'parameters',
        '1/opt_state/0/mu/kernel': 'optimizer',
        '1/opt_state/0/nu/kernel': 'optimizer',
    }
    assert set(axes[0]['kernel']) <= {None}
    assert axes[1]['opt_state'][0]['mu']['kernel'] == expected
    if rules:
        return  # one compiled program is enough
    state = plan.init()
    assert state[0]['kernel'].get_value().sharding.is_fully_replicated
    nu = state[1]['opt_state'][0]['nu']['kernel'].get_value()
    assert nu.sharding.is_equivalent_to(NamedSharding(mesh, expected), 2)
