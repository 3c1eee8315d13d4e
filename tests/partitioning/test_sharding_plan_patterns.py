"""Patterns as the paths of a ShardingPlan, plans without entries, and plans that are refused."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from planned_models import (
    ENTRIES,
    MESH,
    MODELS,
    OF_MODELS,
    ONE,
    RULES,
    SPECS,
    params,
    resolve,
)

from partitioning import AxisRules, PjitPartitioner
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


# Plans that are refused.


def returns(spec):
    """An entry whose to_partition_spec returns this."""
    return type('Entry', (), {'to_partition_spec': lambda self, mesh, shape: spec})()


BIAS, KERNEL = 'fc1/bias', 'fc1/kernel'
ENTRIES_MISUSE = {
    'a slash before the path': ({'/fc1/bias': P()}, "'/fc1/bias'.*Did you mean 'fc1/bias'"),
    'a layout for a module': ({'fc1': P('data')}, "'fc1' is a module.*fc1/bias, fc1/kernel"),
    'one array twice': ({BIAS: P(), 'fc1.bias': P()}, "'fc1/bias' and 'fc1.bias'.*same array"),
    'an unknown mesh axis': ({BIAS: P('modle')}, "fc1/bias.*'modle'.*data 4 x model 2.*'model'"),
    'a mesh axis twice': ({KERNEL: P('data', 'data')}, "fc1/kernel.*'data' appears twice"),
    'too many dimensions': ({BIAS: P(None, 'data')}, r'fc1/bias.*2 entries.*1 dim.*\(64,\)'),
    'too few names': ({KERNEL: ('embed',)}, r"fc1/kernel.*\('embed',\).*\(16, 64\)"),
    'a name without a rule': ({KERNEL: ('embed', 'heads')}, r"fc1/kernel.*\('heads', None\)"),
    'an axis of a scalar': ({'scalar': P('data')}, 'scalar: .*1 entry.*0 dimensions'),
    'a size that does not divide': ({'odd': P('data')}, 'odd: .*29.*28 or 32.*on_indivisible'),
    'an unconstrained dimension': ({BIAS: P(P.UNCONSTRAINED)}, 'fc1/bias.*UNCONSTRAINED.*None'),
    'another mesh': ({BIAS: NamedSharding(ONE, P('one'))}, 'fc1/bias.*one 1.*data 4 x model 2'),
    'a text instead of a spec': ({BIAS: returns('model')}, "fc1/bias.*PartitionSpec.*'model'"),
    'None instead of a spec': ({BIAS: returns(None)}, 'fc1/bias.*PartitionSpec.*None'),
    'a path that is a tuple': ({('fc1', 'bias'): P()}, r"\('fc1', 'bias'\)"),
    'a plan that is a list': ([(BIAS, P())], r"plan=\[\('fc1/bias'"),
}
SETTINGS_MISUSE = {
    'a rule to no mesh axis': ({'rules': [('a', 'dta')]}, "fc1/bias.*'dta'.*Did you mean 'data'"),
    'rules without an order': ({'rules': {'a': 'data'}}, 'rules must be ordered'),
    'no such policy': ({'on_indivisible': 'pads'}, "on_indivisible must be .*'pad', not 'pads'"),
    'no such policy for names': (
        {'on_unmatched': 'drop'},
        "on_unmatched must be .*'replicate', not 'drop'",
    ),
    'a mesh that is a dict': ({'mesh': {'data': 4}}, "mesh={'data': 4}"),
    'no arrays': ({'module': {'a': {}}}, 'a dict without arrays'),
}


@pytest.mark.parametrize('name', ENTRIES_MISUSE)
def test_entries(name):
    plan, message = ENTRIES_MISUSE[name]
    tree = {**params(), 'odd': np.zeros(29), 'scalar': np.zeros(())}
    with pytest.raises((TypeError, ValueError), match=message):
        resolve(plan, tree, rules=RULES)


@pytest.mark.parametrize('name', SETTINGS_MISUSE)
def test_settings(name):
    given, message = SETTINGS_MISUSE[name]
    with pytest.raises((TypeError, ValueError), match=message):
        resolve({BIAS: ('a',)}, **given)


@pytest.mark.parametrize('plan', [ENTRIES, None, ENTRIES.items()])
def test_values_that_are_not_a_plan(plan):
    with pytest.raises((TypeError, ValueError), match='ShardingPlan'):
        shard_module(params(), plan, MESH)


def test_a_partitioner_takes_a_resolved_plan():
    rules = AxisRules(names=[('fc1/kernel', (None, None))])
    with pytest.raises(ValueError, match='remove names'):
        PjitPartitioner(MESH, resolve(ENTRIES), logical_axis_rules=rules)


@pytest.mark.parametrize(
    'setting', [{'rules': RULES}, {'on_indivisible': 'pad'}, {'on_unmatched': 'replicate'}]
)
def test_a_resolved_plan_takes_no_settings(setting):
    with pytest.raises(ValueError, match=f'{next(iter(setting))}.*remove'):
        shard_module(params(), resolve(ENTRIES), MESH, **setting)


def test_local_tensors_given_as_text():
    plan = ShardingPlan(ENTRIES, {'fc1': P('data')}, 'fc1')
    with pytest.raises((TypeError, ValueError), match=r"return_local_tensor.*'fc1'.*list"):
        shard_module(params(), plan, MESH)
