"""Plans that are refused, and in which words."""

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from planned_models import ENTRIES, MESH, ONE, RULES, ByData, params, resolve

from partitioning import PjitPartitioner
from partitioning.compat.pytorch import ShardingPlan, shard_module
from partitioning.plan import diff

pytestmark = pytest.mark.core


def mine(spec):
    """An entry that gives something other than a spec."""
    return type('Mine', (), {'to_partition_spec': lambda self, mesh, shape: spec})()


BIAS, KERNEL = 'fc1/bias', 'fc1/kernel'
WRONG = {
    'no such parameter': ({'fc1/kernal': P()}, "'fc1/kernal'.*Did you mean 'fc1/kernel'"),
    'no such module': ({'fc7': ByData()}, "'fc7'.*fc1/bias"),
    'a slash before the path': ({'/fc1/bias': P()}, "'/fc1/bias'.*Did you mean 'fc1/bias'"),
    'a layout for a module': ({'fc1': P('data')}, "'fc1' is a module.*fc1/bias, fc1/kernel"),
    'one array twice': ({BIAS: P(), 'fc1.bias': P()}, "'fc1/bias' and 'fc1.bias'.*same array"),
    'a part of a module': ({'fc1': ByData(), BIAS: P()}, "'fc1' and 'fc1/bias'.*within the other"),
    'an unknown mesh axis': ({BIAS: P('modle')}, "fc1/bias.*'modle'.*data 4 x model 2.*'model'"),
    'a mesh axis twice': ({KERNEL: P('data', 'data')}, "fc1/kernel.*'data' twice"),
    'too many dimensions': ({BIAS: P(None, 'data')}, r'fc1/bias.*2 dimensions.*\(64,\)'),
    'too few names': ({KERNEL: ('embed',)}, r"fc1/kernel.*\('embed',\).*\(16, 64\)"),
    'a name without a rule': ({KERNEL: ('embed', 'heads')}, r"fc1/kernel.*\('heads', None\)"),
    'an axis of a scalar': ({'scalar': P('data')}, 'scalar: .*1 dimensions.*has 0'),
    'a size that does not divide': ({'odd': P('data')}, 'odd: .*29.*28 or 32.*on_indivisible'),
    'a spec that decides nothing': ({BIAS: P(P.UNCONSTRAINED)}, 'fc1/bias.*decides nothing'),
    'another mesh': ({BIAS: NamedSharding(ONE, P('one'))}, 'fc1/bias.*one 1.*data 4 x model 2'),
    'a spec that is a text': ({BIAS: mine('model')}, "fc1/bias.*'model'"),
    'a spec that is None': ({BIAS: mine(None)}, 'fc1/bias.*None'),
    'a path that is no text': ({('fc1', 'bias'): P()}, r"\('fc1', 'bias'\)"),
    'a plan that is a list': ([(BIAS, P())], 'plan'),
}
WRONG_SETTINGS = {
    'a rule to no mesh axis': ({'rules': [('a', 'dta')]}, "fc1/bias.*'dta'.*Did you mean 'data'"),
    'rules without an order': ({'rules': {'a': 'data'}}, 'no order'),
    'no policy': ({'on_indivisible': 'pads'}, "on_indivisible must be .*'pad', not 'pads'"),
    'no policy of names': (
        {'on_unmatched': 'drop'},
        "on_unmatched must be .*'replicate', not 'drop'",
    ),
    'no mesh': ({'mesh': {'data': 4}}, 'mesh'),
    'no arrays': ({'module': {'a': {}}}, 'a dict without any arrays'),
}


@pytest.mark.parametrize('name', WRONG)
def test_held_wrong(name):
    plan, message = WRONG[name]
    tree = {**params(), 'odd': np.zeros(29), 'scalar': np.zeros(())}
    with pytest.raises((TypeError, ValueError), match=message):
        resolve(plan, tree, rules=RULES)


@pytest.mark.parametrize('name', WRONG_SETTINGS)
def test_settings_held_wrong(name):
    settings_given, message = WRONG_SETTINGS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        resolve({BIAS: ('a',)}, **settings_given)


@pytest.mark.parametrize('plan', [ENTRIES, None, ENTRIES.items()])
def test_what_is_no_plan(plan):
    with pytest.raises((TypeError, ValueError), match='ShardingPlan'):
        shard_module(params(), plan, MESH)


def test_a_partitioner_takes_a_resolved_plan():
    with pytest.raises((TypeError, ValueError), match='resolve'):
        PjitPartitioner(mesh=MESH, plan=ShardingPlan(ENTRIES))
    with pytest.raises(ValueError, match='plan decides what params_axes_names_override would'):
        plan = resolve(ENTRIES)
        PjitPartitioner(mesh=MESH, plan=plan, params_axes_names_override=plan.path_rules)


@pytest.mark.parametrize(
    'setting', [{'rules': RULES}, {'on_indivisible': 'pad'}, {'on_unmatched': 'replicate'}]
)
def test_a_resolved_plan_takes_no_settings(setting):
    """They are decided; what is given too late would be ignored."""
    with pytest.raises(ValueError, match=next(iter(setting))):
        shard_module(params(), resolve(ENTRIES), MESH, **setting)


def test_local_tensors_that_have_no_layout():
    for names in ['fc2'], ['fc1', 'fc2']:
        plan = ShardingPlan(ENTRIES, {'fc1': P('data')}, names)
        for use in shard_module, ShardingPlan.resolve:
            arguments = (params(), plan) if use is shard_module else (plan, params())
            with pytest.raises(ValueError, match=r"return_local_tensor names 'fc2'.*output_plan"):
                use(*arguments, MESH)


def test_local_tensors_as_one_text():
    plan = ShardingPlan(ENTRIES, {'fc1': P('data')}, 'fc1')
    with pytest.raises((TypeError, ValueError), match=r"return_local_tensor.*'fc1'"):
        shard_module(params(), plan, MESH)


def test_a_row_that_is_not_there():
    with pytest.raises(KeyError, match=r"fc1/kernal is not in the plan. Did you mean 'fc1/kernel'"):
        resolve(ENTRIES)['fc1/kernal']


def test_a_plan_as_text():
    text = str(resolve(ENTRIES))
    line = next(line for line in text.splitlines() if line.startswith('fc2/kernel'))
    assert "P(('model', 'data'), None)" in line and '8 x 16' in line and ' 512 ' in line
    assert text.splitlines()[-1] == (
        '4 arrays, 8,512 bytes; 2,880 bytes per device of the mesh data 4 x model 2'
    )
    assert not diff(resolve(ENTRIES), resolve(dict(reversed(ENTRIES.items()))))
