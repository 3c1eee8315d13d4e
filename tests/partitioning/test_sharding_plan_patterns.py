"""Patterns as the paths of a ShardingPlan, and the plan without entries."""

import jax
import pytest
from jax.sharding import PartitionSpec as P
from planned_models import MESH, MODELS, OF_MODELS, SPECS, ByData, params, resolve

from partitioning import PjitPartitioner
from partitioning.compat.pytorch import ShardingPlan, shard_module

pytestmark = pytest.mark.core


def specs(plan, module=None):
    rows = resolve(plan, module).rows
    return {row.path: row.spec for row in rows if row.role == 'parameters'}


@OF_MODELS
@pytest.mark.parametrize('separator', '/.')
def test_exact_paths_win_over_patterns_and_earlier_patterns_over_later_ones(model, separator):
    plan = {
        '**': P(),
        'fc1/kernel': P(None, 'model'),
        'fc?/ker*': P('data'),
    }
    plan = {path.replace('/', separator): spec for path, spec in plan.items()}
    found = specs(plan, MODELS[model]())
    assert set(found) == set(SPECS)
    assert found['fc1/kernel'] == P(None, 'model')
    assert found['fc2/kernel'] == P(None, None)  # '**' comes first
    plan = dict(reversed(plan.items()))
    assert specs(plan, MODELS[model]())['fc2/kernel'] == P('data', None)


@pytest.mark.parametrize(
    'pattern, matched',
    [
        ('a/*/w', {'a/b/w', 'a/c/w'}),
        ('a.*.w', {'a/b/w', 'a/c/w'}),
        ('*/w', {'d/w'}),
        ('**/w', {'a/b/w', 'a/c/w', 'd/w', 'w'}),
        ('a/**', {'a/b/w', 'a/c/w', 'a/c/v'}),
        ('a/?/v', {'a/c/v'}),
        ('params/d/*', {'d/w'}),
    ],
)
def test_what_a_pattern_matches(pattern, matched):
    leaf = jax.ShapeDtypeStruct((8,), 'float32')
    tree = {'a': {'b': {'w': leaf}, 'c': {'w': leaf, 'v': leaf}}, 'd': {'w': leaf}, 'w': leaf}
    found = specs({pattern: P('data')}, tree)
    assert {path for path, spec in found.items() if spec == P('data')} == matched


def test_a_sharder_can_lay_out_the_modules_that_match():
    found = specs({'fc1/bias': P('model'), 'fc2': ByData(), '*': ByData()})
    assert found['fc1/bias'] == P('model')  # so 'fc1' is not given to the Sharder
    assert found['fc1/kernel'] == P(None, None)
    assert found['fc2/kernel'] == P('data', None)
    assert specs({'f*': ByData()})['fc1/kernel'] == P('data', None)


def test_a_pattern_that_matches_nothing():
    with pytest.raises(ValueError, match=r"'fc3/\*' matches no parameter.*'\*\*'.*fc1/bias"):
        resolve({'fc3/*': P()})
    with pytest.raises(ValueError, match=r"'fc\*' matches no parameter"):  # only modules
        resolve({'fc*': P()})


@OF_MODELS
def test_an_empty_plan_replicates_everything_on_purpose(model):
    plan = ShardingPlan({}).resolve(MODELS[model](), MESH)
    assert plan.bytes_per_device == plan.bytes_total
    assert {row.reason for row in plan.rows if row.shape} == {
        'the plan is empty, so every array is replicated'
    }


def test_an_empty_plan_of_large_arrays():
    large = {'w': jax.ShapeDtypeStruct((1 << 20,), 'float32')}
    plan = ShardingPlan({}).resolve(large, MESH)
    assert plan['w'].spec == P(None)
    partitioner = PjitPartitioner(mesh=MESH, plan=plan)
    assert partitioner.resolve({'params': large})['params/w'].spec == P(None)
    placed = shard_module(params(), ShardingPlan({}), MESH)
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(placed))
