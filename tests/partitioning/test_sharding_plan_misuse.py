"""Sharding plans that are refused."""

import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from planned_models import ENTRIES, MESH, ONE, RULES, ByData, params, resolve

from partitioning import PjitPartitioner
from partitioning.compat.pytorch import ShardingPlan, shard_module

pytestmark = pytest.mark.core


def returns(spec):
    """An entry whose to_partition_spec returns this."""
    return type('Entry', (), {'to_partition_spec': lambda self, mesh, shape: spec})()


BIAS, KERNEL = 'fc1/bias', 'fc1/kernel'
ENTRIES_MISUSE = {
    'no such parameter': ({'fc1/kernal': P()}, "'fc1/kernal'.*Did you mean 'fc1/kernel'"),
    'no such module': ({'fc7': ByData()}, "'fc7'.*fc1/bias"),
    'a slash before the path': ({'/fc1/bias': P()}, "'/fc1/bias'.*Did you mean 'fc1/bias'"),
    'a layout for a module': ({'fc1': P('data')}, "'fc1' is a module.*fc1/bias, fc1/kernel"),
    'one array twice': ({BIAS: P(), 'fc1.bias': P()}, "'fc1/bias' and 'fc1.bias'.*same array"),
    'a part of a module': ({'fc1': ByData(), BIAS: P()}, "'fc1' and 'fc1/bias'.*within the other"),
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
    with pytest.raises((TypeError, ValueError), match='resolve'):
        PjitPartitioner(mesh=MESH, plan=ShardingPlan(ENTRIES))
    override = [('fc1/kernel', (None, None))]
    with pytest.raises(ValueError, match='params_axes_names_override'):
        PjitPartitioner(mesh=MESH, plan=resolve(ENTRIES), params_axes_names_override=override)


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
