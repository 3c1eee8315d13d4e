"""Sharders, which lay out a part of a model by code, and parameters with several names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from planned_models import MESH, MODELS, OF_MODELS, ByData, NnxMlp, Returns, held, params, resolve

from partitioning import PjitPartitioner, create_mesh
from partitioning.compat.pytorch import ShardingPlan, place, shard_module
from partitioning.plan import impose_plan

pytestmark = pytest.mark.core


@OF_MODELS
def test_a_sharder(model):
    module = MODELS[model]()
    resolved = resolve({'fc1': ByData(), 'fc2.kernel': P('model')}, module)
    specs = {row.path: row.spec for row in resolved.rows if row.role == 'parameters'}
    assert specs == {
        'fc1/bias': P('data'),
        'fc1/kernel': P('data', None),
        'fc2/bias': P(None),
        'fc2/kernel': P('model', None),
    }
    assert [d.reason for d in resolved['fc1/bias'].dimensions] == ['ByData says so']
    plan = ShardingPlan({'fc1': ByData(), 'fc2.kernel': P('model')})
    assert {
        path: x.sharding.spec for path, x in held(shard_module(module, plan, MESH)).items()
    } == specs


def test_a_sharder_may_return_another_structure():
    def halves(module, mesh):
        kernel = module['kernel']
        parts = {'left': kernel[:, :32], 'right': kernel[:, 32:]}
        return {'kernels': [place(parts, mesh, P('data'))], 'bias': module['bias']}

    given = params()
    placed = shard_module(given, ShardingPlan({'fc1': Returns(halves)}), MESH)
    specs = {path: x.sharding.spec for path, x in held(placed['fc1']).items()}
    rows = P('data', None)
    assert specs == {'bias': P(None), 'kernels/0/left': rows, 'kernels/0/right': rows}
    right = placed['fc1']['kernels'][0]['right']
    np.testing.assert_array_equal(right, given['fc1']['kernel'][:, 32:])


def test_a_sharder_may_return_another_nnx_module():
    class Two(nnx.Module):
        def __init__(self, old):
            self.first, self.bias = nnx.Param(old.kernel[:, :32]), old.bias
            self.second = nnx.Param(old.kernel[:, 32:])

    module = NnxMlp(nnx.Rngs(0))
    plan = ShardingPlan({'fc1': Returns(lambda old, mesh: Two(old))})
    resolved = plan.resolve(module, MESH)
    assert isinstance(module.fc1, nnx.Linear), 'resolve leaves the module unchanged'
    placed = shard_module(module, plan, MESH)
    assert isinstance(placed.fc1, Two) and placed is module
    rows = {row.path for row in resolved.rows if row.role == 'parameters'}
    assert {*held(placed)} == rows
    assert 'fc1/second' in held(placed)


def test_a_sharder_may_return_the_array_of_an_nnx_variable():
    """The variable stays in the module, with its type and metadata."""
    module = NnxMlp(nnx.Rngs(0))
    variable = module.fc1.kernel
    variable.set_metadata('kept', 'yes')
    sharder = Returns(lambda variable, mesh: place(variable[...], mesh, P('data')))
    shard_module(module, ShardingPlan({'fc1/kernel': sharder}), MESH)
    assert type(module.fc1.kernel) is nnx.Param
    assert module.fc1.kernel.get_metadata('kept') == 'yes'
    assert module.fc1.kernel[...].sharding.spec == P('data', None)


def test_arrays_that_a_sharder_leaves_are_not_in_the_plan():
    tree = {'big': {'w': np.zeros((64, 128), 'float32')}}
    for function in (
        lambda module, mesh: module,
        lambda module, mesh: jax.tree.map(jnp.asarray, module),
    ):
        with pytest.raises(ValueError, match=r'big/w of shape .* is not in the plan'):
            resolve({'big': Returns(function)}, tree)


def test_a_sharder_that_uses_another_mesh():
    other = create_mesh((4,), ('model',), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r'fc1/.*mesh model 4.*data 4 x model 2'):
        resolve({'fc1': Returns(lambda module, mesh: place(module, other, P('model')))})


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.later = self.first
        self.last = nnx.Linear(16, 16, rngs=rngs)
        self.last.kernel = self.first.kernel


def test_shared_parameters_have_one_row():
    """The plan counts each byte once, and has the paths of the state that is trained."""
    module = Tied(nnx.Rngs(0))
    resolved = resolve({'first/kernel': P('data')}, module)
    state = nnx.state(module, nnx.Param)
    assert resolved.bytes_total == sum(x.nbytes for x in jax.tree.leaves(state))
    assert len(impose_plan(resolved, state, MESH).rows) == len(resolved.rows)
    PjitPartitioner(MESH, resolved).get_mesh_axes(state)


@pytest.mark.parametrize('name', ['later/kernel', 'last/kernel'])
def test_a_shared_parameter_by_its_other_names(name):
    """The layout of a further name is used, not ignored."""
    module = shard_module(Tied(nnx.Rngs(0)), ShardingPlan({name: P('data')}), MESH)
    assert module.first.kernel[...].sharding.spec == P('data', None)


def test_two_layouts_for_one_shared_parameter():
    plan = ShardingPlan({'first/kernel': P('data'), 'last/kernel': P('model')})
    with pytest.raises(ValueError, match=r'first/kernel.*last/kernel|last/kernel.*first/kernel'):
        shard_module(Tied(nnx.Rngs(0)), plan, MESH)
