"""Names beside parameters: T5X's params_axes, and the metadata of nnx."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.linen.partitioning import (
    get_axis_names,
    param_with_axes,
    scan_with_axes,
    variable_with_axes,
    vmap_with_axes,
)
from flax.nnx.training import optimizer as nnx_optimizer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisNames,
    PjitPartitioner,
    TrainState,
    create_mesh,
    get_logical_axes,
)

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
ones = nn.initializers.ones


def partitioner_of(rules=(), **settings):
    return PjitPartitioner(2, logical_axis_rules=rules, **settings)


# Names beside the parameters.


class BesideLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        w1 = param_with_axes('W1', ones, (4, 6), axes=('emb', 'mlp'))
        w2 = param_with_axes('W2', ones, (6, 4), axes=('mlp', 'emb'))
        y = variable_with_axes('stats', 'y_st', jnp.zeros, (2, 4), axes=('batch', 'emb'))
        y.value = x @ w1 @ w2
        return y.value, None


def test_scan_with_axes():
    lift = {'variable_axes': {'params': 0, 'stats': 1}, 'split_rngs': {'params': True}}
    named = {'axis_name': 'layer', 'axes_collections': ('params', 'stats')}
    variables = scan_with_axes(BesideLayer, **lift, **named, in_axes=(), length=3)().init(
        KEY, jnp.ones((2, 4))
    )
    expected = {
        'params': {'W1': ('layer', 'emb', 'mlp'), 'W2': ('layer', 'mlp', 'emb')},
        'stats': {'y_st': ('batch', 'layer', 'emb')},
    }
    names = get_logical_axes(variables)
    for collection, of_collection in expected.items():
        flax = get_axis_names(variables[f'{collection}_axes'])
        for name, axes in of_collection.items():
            assert names[collection][name] == AxisNames(*axes)
            assert flax[name] == P(*axes)
    state = TrainState.create(variables, optax.adam(1e-3))
    rules = [('batch', 'model'), ('emb', 'data'), ('mlp', 'model'), ('layer', None)]
    axes = partitioner_of(rules).get_mesh_axes(state)
    assert axes.params == {'W1': P(None, 'data', 'model'), 'W2': P(None, 'model', 'data')}
    assert axes.opt_state[0].nu == axes.params
    assert axes.flax_mutables['stats']['y_st'] == P('model', None, 'data')


class BesideDense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ param_with_axes('w', ones, (4, 3), axes=('out', 'in')).T


def test_vmap_with_axes():
    lift = {'variable_axes': {'params': 1}, 'split_rngs': {'params': True}}
    many = vmap_with_axes(BesideDense, **lift, partitioning_axis_names={'params': 'vmap_axis'})
    variables = many().init(KEY, jnp.ones((2, 3)))
    assert variables['params']['w'].shape == (4, 2, 3)
    assert get_logical_axes(variables)['params']['w'] == AxisNames('out', 'vmap_axis', 'in')


# nnx.


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_nnx_variables_made_in_a_mesh(axis_type):
    partitioner = partitioner_of([('batch', 'data')], axis_types=axis_type)
    with jax.set_mesh(partitioner.mesh):
        metadata = {'out_sharding': (None, 'model')}
        model = nnx.Linear(16, 64, use_bias=False, rngs=nnx.Rngs(0), kernel_metadata=metadata)
    assert model.kernel.sharding.spec == P(None, 'model')
    assert partitioner.get_mesh_axes(nnx.state(model))['kernel'] == P(None, 'model')


@pytest.mark.parametrize('written', ['tuple', 'spec', 'sharding'])
def test_nnx_shardings_however_written(written):
    partitioner = partitioner_of()
    spec = P(None, ('data', 'model'))
    given = {
        'tuple': tuple(spec),
        'spec': spec,
        'sharding': NamedSharding(partitioner.mesh, spec),
    }[written]
    with nnx.use_eager_sharding(False):
        variable = nnx.Param(jnp.zeros((8, 8)), out_sharding=given)
    assert partitioner.get_mesh_axes({'w': variable})['w'] == spec


def nnx_and_adam(metadata):
    def init(key):
        model = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(key), kernel_metadata=metadata)
        return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))

    return init


@pytest.mark.skipif(
    'optimizer_sharding' not in inspect.getsource(nnx_optimizer),
    reason='flax before 0.12.7 has no optimizer_sharding',
)
@pytest.mark.parametrize(
    'metadata',
    [
        {'out_sharding': (None, None), 'optimizer_sharding': ('row', 'col')},
        {'optimizer_sharding': ('row', 'col')},
    ],
    ids=['both', 'of the optimizer alone'],
)
@pytest.mark.parametrize('rules', [[], [('row', 'col'), ('col', 'row')]])
def test_nnx_sharding_of_the_optimizer(metadata, rules):
    """Parameters are replicated, statistics are not."""
    partitioner = PjitPartitioner(
        mesh=create_mesh((4, 2), ('row', 'col')), logical_axis_rules=rules
    )
    init, expected = nnx_and_adam(metadata), P('col', 'row') if rules else P('row', 'col')
    axes = partitioner.get_mesh_axes(partitioner.partition(init, None, None).eval_shape(KEY))
    assert set(axes[0]['kernel']) <= {None}
    statistics = axes[1]['opt_state'][0]
    assert statistics['mu']['kernel'] == expected
    state = partitioner.init(init, KEY)
    assert state[0]['kernel'].get_value().sharding.is_fully_replicated
    born = state[1]['opt_state'][0]['nu']['kernel'].get_value()
    assert born.sharding.is_equivalent_to(NamedSharding(partitioner.mesh, expected), 2)
