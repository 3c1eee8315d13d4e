"""PjitPartitioner.from_partition_rules: (regular expression, PartitionSpec) rules on paths."""

import re

import jax
import pytest
from jax.sharding import PartitionSpec as P

from partitioning import AxisRules, MeshConfig, PjitPartitioner

pytestmark = pytest.mark.core

MESH = MeshConfig(axes={'dp': 2, 'fsdp': 2, 'mp': 2})
# The rules of EasyLM for LLaMA, shortened. The specs of the test model follow by hand.
RULES = [
    ('transformer/wte/embedding', P('mp', 'fsdp')),
    ('attention/(wq|wk|wv)/kernel', P('fsdp', 'mp')),
    ('attention/wo/kernel', P('mp', 'fsdp')),
    ('attention_norm/kernel', P(None)),
    ('lm_head/kernel', P('fsdp')),
    ('.*', P(None)),
]
EXPECTED = {
    'transformer/wte/embedding': ((32, 16), P('mp', 'fsdp')),
    'transformer/h/0/attention/wq/kernel': ((16, 24), P('fsdp', 'mp')),
    'transformer/h/0/attention/wo/kernel': ((24, 16), P('mp', 'fsdp')),
    'transformer/h/0/attention_norm/kernel': ((16,), P(None)),
    'lm_head/kernel': ((16, 32), P('fsdp', None)),
    'other/kernel': ((2, 3, 4), P(None, None, None)),
    'scale': ((1, 1), P(None, None)),
    'step': ((), P()),
}


def tree(leaves):
    """Nested dicts from a dict with paths."""
    nested = {}
    for path, leaf in leaves.items():
        *keys, last = path.split('/')
        below = nested
        for key in keys:
            below = below.setdefault(key, {})
        below[last] = leaf
    return nested


def abstract(**shapes):
    return {path: jax.ShapeDtypeStruct(shape, 'float32') for path, shape in shapes.items()}


PARAMS = tree(abstract(**{path: shape for path, (shape, _) in EXPECTED.items()}))


def partitioner_of(rules=RULES, mesh=MESH, **settings):
    return PjitPartitioner.from_partition_rules(rules, mesh=mesh, **settings)


def problem(rules, state=PARAMS, mesh=MESH, **settings):
    with pytest.raises(ValueError) as error:
        partitioner_of(rules, mesh, **settings).plan(state)
    message = str(error.value)
    assert '\n' not in message
    return message


def test_the_first_rule_that_is_found_in_a_path_decides():
    plan = partitioner_of().plan({'params': {'params': PARAMS}})
    assert {row.path: row.spec for row in plan.rows} == {
        f'params/params/{path}': spec for path, (_, spec) in EXPECTED.items()
    }
    reason = plan['params/params/lm_head/kernel'].reason
    assert 'lm_head/kernel' in reason


def test_rules_from_a_gin_file():
    rules = [['lm_head', ['mp', ['dp', 'fsdp']]], ('wte', 'mp'), ('.*', None)]
    plan = partitioner_of(rules).plan(PARAMS)
    assert plan['lm_head/kernel'].spec == P('mp', ('dp', 'fsdp'))
    assert plan['transformer/wte/embedding'].spec == P('mp', None)
    assert plan['other/kernel'].spec == P(None, None, None)


# What is wrong with rules.


def test_arrays_that_no_rule_matches_are_listed_once():
    message = problem([('lm_head|wte', P())])
    # Dicts are sorted by jax; the scalar and the array of one element need no rule.
    assert 'other/kernel, transformer/h/0/attention/wo/kernel' in message
    assert 'and 1 more' in message
    assert "('other/kernel', PartitionSpec(...))" in message
    assert "('.*', PartitionSpec())" in message
    partitioner = partitioner_of([('lm_head|wte', P())], on_unmatched='replicate')
    assert partitioner.plan(PARAMS)['other/kernel'].spec == P(None, None, None)
    assert 'other/kernel' in {finding.where for finding in partitioner.lint(PARAMS)}


@pytest.mark.parametrize(
    'rule, parts',
    [
        (('norm', P('fsdp', 'mp')), ['attention_norm/kernel', "'norm'", '2 entries', '(16,)']),
        (('norm', P('fsd')), ['attention_norm', "'fsd' does not exist", "Did you mean 'fsdp'"]),
        (('norm', P(('mp', 'mp'))), ["'norm'", "'mp' appears twice"]),
        (('other', P(None, 'mp')), ['other/kernel', "'other'", 'size 3', 'by 2', 'drop_axis']),
    ],
    ids=['too long', 'unknown axis', 'axis used twice', 'size'],
)
def test_a_rule_that_does_not_fit_its_array(rule, parts):
    message = problem([rule, *RULES])
    for part in parts:
        assert part in message
    found = [str(f) for f in partitioner_of([rule, *RULES]).lint(PARAMS) if f.severity == 'error']
    assert any(all(part in f for part in parts[1:]) for f in found)


@pytest.mark.parametrize(
    'policy, spec', [('drop_axis', P(None, ('dp', 'mp'))), ('replicate', P(None, None))]
)
def test_the_policy_for_sizes_that_do_not_divide(policy, spec):
    mesh = MeshConfig(axes={'dp': 2, 'fsdp': 1, 'mp': 4})
    rules, state = [('k', P(None, ('dp', 'mp')))], abstract(k=(8, 24), b=(1,))
    assert partitioner_of(rules, mesh, on_indivisible=policy).plan(state)['k'].spec == P(
        None, ('dp', 'mp')
    )
    odd = partitioner_of(rules, mesh, on_indivisible=policy).plan(abstract(k=(8, 12)))['k']
    assert odd.spec == (P(None, 'mp') if policy == 'drop_axis' else P(None, None))
    assert "'k'" in odd.reason


@pytest.mark.parametrize(
    'rules, part',
    [
        ([('kernel', P(P.UNCONSTRAINED))], 'UNCONSTRAINED, but a state'),
        ([('ker[', P())], 'not a valid regular expression'),
        ([('kernel', 3)], "'regular expression', PartitionSpec"),
        ([('kernel', P(3))], 'the entry 3'),
        ([(P(), 'kernel')], "'regular expression', PartitionSpec"),
        ({'kernel': P()}, "'.*', PartitionSpec()"),
        ([], 'data_parallel'),
    ],
)
def test_malformed_rules(rules, part):
    with pytest.raises(ValueError, match=re.escape(part)):
        partitioner_of(rules)


def test_lint_names_the_rules_that_decide_nothing():
    rules = [('never', P('mp')), ('lm_head/k', P('fsdp')), ('lm_head', P()), *RULES]
    warnings = {f.where: f.message for f in partitioner_of(rules).lint(PARAMS)}
    (unmatched,) = [message for where, message in warnings.items() if "'never'" in where]
    assert 'no path' in unmatched
    (shadowed,) = [message for where, message in warnings.items() if "('lm_head', P())" in where]
    assert 'lm_head/kernel' in shadowed
    all_used = [(path, P()) for path, (shape, _) in EXPECTED.items() if shape not in ((), (1, 1))]
    assert not partitioner_of([*all_used, ('.*', P())]).lint(PARAMS)


@pytest.mark.parametrize('setting', ['optimizer', 'names'])
def test_rules_exclude_the_settings_that_they_replace(setting):
    value = {'optimizer': [('embed', 'mp')], 'names': [('.*', (None,))]}[setting]
    rules = AxisRules([('batch', 'dp')], **{setting: value})
    with pytest.raises(ValueError, match=f'remove {setting} or layout'):
        partitioner_of(logical_axis_rules=rules)


# The batch.


@pytest.mark.parametrize(
    'axes, spec',
    [
        ({'dp': 2, 'fsdp': 2, 'mp': 2}, P(('dp', 'fsdp'))),
        ({'replica': 1, 'data': 4, 'model': 2}, P(('replica', 'data'))),
        ({'dp': 2, 'fsdp': 2, 'tp': 2, 'sp': 1}, P(('dp', 'fsdp'))),
        ({'batch': 4, 'heads': 2}, P('batch')),
    ],
)
def test_the_batch_is_sharded_over_axes_with_usual_names(axes, spec):
    partitioner = partitioner_of([('.*', P())], MeshConfig(axes=axes))
    assert partitioner.data_partition_spec == spec


def test_other_axes_of_the_batch_are_named_by_a_rule():
    mesh = MeshConfig(axes={'rows': 4, 'columns': 2})
    partitioner = partitioner_of([('.*', P())], mesh)
    assert partitioner.plan(PARAMS)  # parameters need no batch
    with pytest.raises(ValueError, match=r"rows 4 x columns 2.*\('batch', 'rows'\)"):
        partitioner.data_partition_spec  # noqa: B018
    named = partitioner_of([('.*', P())], mesh, logical_axis_rules=[('batch', ('rows', 'columns'))])
    assert named.data_partition_spec == P(('rows', 'columns'))
    assert not named.lint(PARAMS)
