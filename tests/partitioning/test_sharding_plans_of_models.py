"""Plans of whole models and states: buffers, boxes, nnx, optimizers and outputs by name."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from planned_models import MESH

from partitioning.compat.pytorch import ShardingPlan, constrain_outputs, shard_module
from partitioning.plan import impose_plan

pytestmark = pytest.mark.core


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(16, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.fc(x))


def test_statistics_of_an_nnx_module_are_replicated():
    """Left on one device, they would make the next step fail."""
    module, run = Normed(nnx.Rngs(0)), nnx.jit(lambda module, x: module(x))
    expected = run(module, jnp.ones((8, 16)))
    nnx.update(module, jax.device_put(nnx.state(module), jax.devices()[0]))
    shard_module(module, ShardingPlan({'fc/kernel': P(None, 'model')}), MESH)
    assert module.norm.mean[...].sharding.is_fully_replicated
    result = run(module, jnp.ones((8, 16)))
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def test_buffers_of_linen_variables():
    """The plan or a box lays out a large buffer; otherwise it is an error."""
    variables = {'params': {'w': jnp.ones((4, 4))}, 'cache': {'k': jnp.ones((100, 100))}}
    with pytest.raises(
        ValueError, match=r'cache/k of shape \(100, 100\) is not in the plan.*40,000'
    ):
        shard_module(variables, ShardingPlan({'w': P('data')}), MESH)
    for spec in (P('data'), P('data', 'model'), P()):
        placed = shard_module(variables, ShardingPlan({'w': P('data'), 'cache/k': spec}), MESH)
        assert placed['cache']['k'].sharding.is_equivalent_to(NamedSharding(MESH, spec), 2)
    boxed = {**variables, 'cache': {'k': nn.Partitioned(jnp.ones((100, 100)), ('data', None))}}
    placed = shard_module(boxed, ShardingPlan({'w': P('data')}), MESH)
    assert placed['cache']['k'].sharding.is_equivalent_to(NamedSharding(MESH, P('data')), 2)
    resolved = ShardingPlan({'w': P('data')}).resolve(variables, MESH, on_unmatched='replicate')
    assert resolved['cache/k'].role == 'other'
    assert shard_module(variables, resolved, MESH)['cache']['k'].sharding.is_fully_replicated


def test_boxes_that_name_mesh_axes_need_no_rules():
    tree = {'w': nn.Partitioned(jnp.ones((8, 8)), ('data', 'model'))}
    assert ShardingPlan({}).resolve(tree, MESH)['w'].spec == P('data', 'model')


@pytest.mark.parametrize('names', [('batch', 'embed'), ('data', None)])
def test_outputs_by_name(names):
    """The given rules apply, also where no mesh is set; a name may be a mesh axis."""
    rules, x = [('batch', 'data'), ('embed', None)], jnp.ones((8, 16))
    plan = ShardingPlan({}, {'fc': names})
    module = shard_module(Normed(nnx.Rngs(0)), plan, MESH, rules)
    over_data = NamedSharding(MESH, P('data'))
    assert module.fc(x).sharding.is_equivalent_to(over_data, 2)

    linen = nn.Sequential([nn.Dense(8)])
    variables = {'params': {'layers_0': {'kernel': jnp.ones((16, 8)), 'bias': jnp.zeros(8)}}}
    with constrain_outputs(ShardingPlan({}, {'layers_0': names}), MESH, rules):
        assert linen.apply(variables, x).sharding.is_equivalent_to(over_data, 2)
    wrong = ShardingPlan({}, {'fc': ('btach', None)})
    with pytest.raises(ValueError, match=r"output_plan of 'fc': no rule.*Did you mean 'batch'"):
        shard_module(Normed(nnx.Rngs(0)), wrong, MESH, rules).fc(x)


def test_named_shardings_that_the_mesh_cannot_express():
    reversed_mesh = Mesh(MESH.devices[::-1], MESH.axis_names)
    host = NamedSharding(MESH, P('data'), memory_kind='pinned_host')
    for entry, message in (
        (NamedSharding(reversed_mesh, P('data')), 'w: .*another order'),
        (host, "w: .*'pinned_host' memory"),
    ):
        with pytest.raises(ValueError, match=message):
            ShardingPlan({'w': entry}).resolve({'w': jnp.ones(8)}, MESH)


def test_arrays_of_another_dtype():
    plan = ShardingPlan({'w': P('data')}).resolve({'w': jnp.ones(8, jnp.float32)}, MESH)
    with pytest.raises(ValueError, match='w has dtype bfloat16, but float32 in the plan'):
        shard_module({'w': jnp.ones(8, jnp.bfloat16)}, plan, MESH)


def test_a_plan_made_of_a_whole_state():
    """The state of the optimizer follows the parameters, in a dict and in nnx."""
    params = {'w': jnp.ones((8, 8))}
    plan, tx = ShardingPlan({'w': P('data')}), optax.adam(1e-3)
    state = {'params': params, 'opt_state': tx.init(params), 'step': jnp.int32(0)}
    specs = impose_plan(plan.resolve(state, MESH), state, MESH).specs
    assert specs['opt_state'][0].mu == specs['params'] == {'w': P('data', None)}

    @nnx.eval_shape
    def both():
        model = Normed(nnx.Rngs(0))
        return nnx.state((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    plan = ShardingPlan({'0/fc/kernel': P(None, 'model')})
    imposed = impose_plan(plan.resolve(both, MESH), both, MESH)
    over_model = [row.path for row in imposed.rows if row.spec == P(None, 'model')]
    assert len(over_model) == 3 and all(path.endswith('kernel') for path in over_model)
