"""Findings about rules, a mesh and a state: every kind of them, and all at once."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from boxed_states import abstract_box as box
from hypothesis import given, settings, strategies as st

from partitioning import (
    AxisRules,
    resolve_axes,
    unbox,
)
from partitioning.plan import Finding, RuleSet, lint as lint_rule_set

pytestmark = [pytest.mark.core, pytest.mark.smoke]

SIZES = {'data': 4, 'model': 2}
RULES = [('embed', 'data'), ('mlp', 'model'), ('heads', None)]


def lint(rules, mesh, state=None, optimizer=None, names=None):
    rules = AxisRules(rules, names=names, optimizer=optimizer)
    return lint_rule_set(RuleSet(rules=rules), mesh, state)


def mesh_axes_as_names(shape, *names):
    return box(shape, *names, kind=nn.Partitioned)


def params(**arrays):
    return {'params': arrays}


def of_kind(findings, kind):
    return [f for f in findings if f.kind == kind]


def errors(findings):
    return [f for f in findings if f.severity == 'error']


# Rules alone.


@pytest.mark.parametrize(
    'rules, sizes, severity, kind, rule, message',
    [
        ([('mlp', 'modle')], SIZES, 'error', 'absent axis', ('mlp', 'modle'), "mean 'model'?"),
        ([('mlp', ('data', 'zz'))], SIZES, 'error', 'absent axis', ('mlp', ('data', 'zz')), ''),
        ([('mlp', 'x')], {'x': 1}, 'warning', 'size 1', ('mlp', 'x'), 'size 1'),
        ([('mlp', ('x', 'y'))], {'x': 1, 'y': 1}, 'warning', 'size 1', ('mlp', ('x', 'y')), ''),
        ([('a', None), ('a', 'data')], SIZES, 'warning', 'shadowed', ('a', 'data'), "('a', None)"),
        (
            [('a', 'data'), ('b', None), ('a', ('model', 'data'))],
            SIZES,
            'warning',
            'shadowed',
            ('a', ('model', 'data')),
            "('a', 'data')",
        ),
        ([('a', 'data'), ('a', 'data')], SIZES, 'warning', 'shadowed', ('a', 'data'), ''),
    ],
)
def test_findings_of_rules(rules, sizes, severity, kind, rule, message):
    (finding,) = lint(rules, sizes)
    assert (finding.severity, finding.kind) == (severity, kind)
    assert finding.where == f'rule {rule!r}'
    assert message in finding.message


AXES = st.one_of(
    st.none(),
    st.sampled_from('xyz'),
    st.lists(st.sampled_from('xyz'), unique=True, max_size=3).map(tuple),
)
SOME_RULES = st.lists(st.tuples(st.sampled_from('ab'), AXES), unique=True, max_size=6)
TAKEN = [c for n in range(4) for c in itertools.combinations('xyz', n)]
# Every array of up to three dimensions that can make a difference: each of two names is present or
# not, and a further dimension uses any combination of mesh axes.
ARRAYS = [
    (*names, *([axes] if axes else []))
    for names in [(), ('a',), ('b',), ('a', 'b')]
    for axes in TAKEN
]


@settings(max_examples=100)
@given(SOME_RULES)
def test_shadowed_rules_are_those_that_win_in_no_array(rules):
    win = {
        dimension.rule
        for names in ARRAYS
        for dimension in resolve_axes(names, rules, on_unmatched='replicate')
    }
    shadowed = {f.where for f in of_kind(lint(rules, dict.fromkeys('xyz', 2)), 'shadowed')}
    assert shadowed == {f'rule {rule!r}' for rule in rules if rule not in win}


# A state.


@pytest.mark.parametrize(
    'array, kind, message',
    [
        (box((8, 8), 'embd', 'mlp'), 'unmatched', "('embd', None)"),
        (box((8, 8), 'embed', 'embed'), 'repeated name', 'two dimensions'),
        (box((7, 8), 'embed', 'mlp'), 'indivisible', '4 or 8'),
        (box((8,), 'embed', 'mlp'), 'rank', "('embed', 'mlp') has 2 entries"),
        (box((8, 8, 8)), 'rank', '3 dimensions'),
        (mesh_axes_as_names((8, 8), ('data', 'model'), ('data',)), 'conflict', "'data'"),
        (mesh_axes_as_names((8, 8), ('dta',), None), 'absent axis', "mean 'data'?"),
    ],
)
def test_errors_of_an_array(array, kind, message):
    (finding,) = errors(lint(RULES, SIZES, params(w=array)))
    assert (finding.kind, finding.where) == (kind, 'params/w')
    assert message in finding.message


@pytest.mark.parametrize(
    'state, message',
    [
        ({'params': {'w': jax.ShapeDtypeStruct((8, 8), jnp.float32)}}, 'no parameter'),
        (params(w=box((8, 8), 'embed', 'mlp'), v=jnp.zeros((8, 8))), 'params/v'),
        (params(w=box((8, 8), 'embed', 5)), '5'),
    ],
)
def test_names_that_are_missing_or_invalid(state, message):
    (finding,) = errors(lint(RULES, SIZES, state))
    assert finding.kind == 'names' and message in str(finding)


def test_everything_at_once():
    """Every error of each of five arrays, and of a rule."""
    state = params(
        a=box((8, 8), 'embd', 'mpl'),
        b=box((7, 8), 'embed', None),
        c=box((8, 8), 'mlp', 'mlp'),
        d=mesh_axes_as_names((8, 8), 'data', ('data',)),
        e=box((8,), 'vocab'),
        fine=box((8, 8), 'embed', 'mlp'),
    )
    rules = [*RULES, ('vocab', 'modle')]
    found = {(f.kind, f.where) for f in errors(lint(rules, SIZES, state))}
    assert found == {
        ('unmatched', 'params/a'),
        ('indivisible', 'params/b'),
        ('repeated name', 'params/c'),
        ('conflict', 'params/d'),
        ('absent axis', 'params/e'),
        ('absent axis', "rule ('vocab', 'modle')"),
    }
    unmatched = of_kind(lint(rules, SIZES, state), 'unmatched')
    assert [f.message.count('Did you mean') for f in unmatched] == [1, 1]
    assert "'embed'" in unmatched[0].message and "'mlp'" in unmatched[1].message


def test_errors_come_first():
    state = params(w=box((8, 8), 'embed', 'nothing'))
    rules = [('unused', None), ('embed', 'data'), ('embed', 'data'), ('heads', 'zz')]
    severities = [f.severity for f in lint(rules, SIZES, state)]
    assert severities.count('error') == 2 and severities.count('warning') >= 2
    assert severities == sorted(severities)


def test_a_finding_as_text():
    (finding,) = lint([('mlp', 'modle')], SIZES)
    text = str(finding)
    assert text.startswith("error: rule ('mlp', 'modle'): ") and text.endswith(finding.message)
    assert isinstance(finding, Finding) and finding[0] == 'error'


# Warnings about a state.


def test_unused_rules():
    rules = [
        ('mlp', 'model'),
        ('heads', 'model'),
        ('embed', None),
        ('emebd', 'data'),
        ('batch', 'data'),
    ]
    state = params(w=box((8, 8), 'mlp', 'heads'), v=box((8,), 'embed'))
    found = {f.where: f for f in lint(rules, SIZES, state)}
    assert {f.kind for f in found.values()} == {'unused'}
    assert found.keys() == {
        "rule ('heads', 'model')",
        "rule ('emebd', 'data')",
    }
    assert "'model' is taken by 'mlp'" in found["rule ('heads', 'model')"].message
    assert "mean 'embed'?" in found["rule ('emebd', 'data')"].message


@pytest.mark.parametrize(
    'policies, array, message',
    [
        ({'on_indivisible': 'replicate'}, box((7, 8), 'embed', 'mlp'), 'embed: replicate'),
        ({'on_indivisible': 'pad'}, box((8, 7), 'embed', 'mlp'), 'mlp: pad'),
        ({'on_indivisible': 'drop_axis'}, box((7, 8), 'embed', 'mlp'), 'embed: drop_axis'),
        ({'on_unmatched': 'replicate'}, box((8, 8), 'embed', 'new'), 'new: replicate'),
    ],
)
def test_decisions_of_policies(policies, array, message):
    found = lint(AxisRules(RULES, **policies), SIZES, params(w=array))
    assert errors(found) == []
    (finding,) = of_kind(found, 'policy')
    assert finding.where == 'params/w' and finding.message.startswith(message)


def test_an_error_of_a_parameter_is_not_repeated_for_its_statistics():
    wrong = params(w=jnp.ones((8, 7)))
    wrong['opt_state'] = optax.adam(1e-3).init(wrong['params'])
    wrong['params']['w'] = box((8, 7), 'embed', 'mlp')
    (finding,) = errors(lint(RULES, SIZES, wrong))
    assert (finding.kind, finding.where) == ('indivisible', 'params/w')


def test_rules_of_the_optimizer():
    """They are called so, and are compared with the optimizer's state alone."""
    state = params(w=box((8, 6), 'embed', 'mlp'))
    state['opt_state'] = jax.eval_shape(optax.adam(1e-3).init, unbox(state['params']))
    rules = [('embed', None), ('mlp', 'data'), ('mlp', 'zz'), ('embed', None)]
    found = lint(RULES, SIZES, state, optimizer=AxisRules(rules))
    assert {(f.severity, f.kind, f.where) for f in found} == {
        ('error', 'absent axis', "optimizer rule ('mlp', 'zz')"),
        ('error', 'absent axis', 'params/w'),
        ('error', 'indivisible', 'params/w'),
        ('warning', 'shadowed', "optimizer rule ('embed', None)"),
        ('warning', 'unused', "optimizer rule ('mlp', 'zz')"),
        ('warning', 'unused', "rule ('heads', None)"),
    }
    assert 'size 6 is not divisible by 4' in of_kind(found, 'indivisible')[0].message


# Mesh axes that nothing uses.


def test_an_axis_that_shards_nothing():
    """Boxes name only an axis of size 1, so all of the state is on every device."""
    state = params(w=mesh_axes_as_names((256, 512), 'data', None))
    rules = [('batch', 'data'), ('mlp', 'model')]
    (found,) = of_kind(lint(rules, {'data': 1, 'model': 8}, state), 'idle axis')
    assert found.severity == 'warning' and found.where == "mesh axis 'model'"
    for part in ('8 devices', '100%', '524.3 kB', "{'data': 8, 'model': 1}", "layout='fsdp'"):
        assert part in found.message, (part, found.message)
    for sizes in ({'data': 8, 'model': 1}, {'data': 8}):  # what the message says to write
        assert not of_kind(lint(rules[:1], sizes, state), 'idle axis')
    # 8 does not divide 12, so another mesh is not proposed.
    state = params(w=mesh_axes_as_names((12, 512), 'data', None))
    (found,) = of_kind(lint(rules, {'data': 1, 'model': 8}, state), 'idle axis')
    assert 'MeshConfig' not in found.message and 'that a rule maps to it' in found.message


def test_axes_that_the_batch_or_an_array_uses():
    state = params(w=box((256, 512), 'embed', 'mlp'))
    rules = [('batch', 'data'), ('embed', None), ('mlp', 'model')]
    assert not of_kind(lint(rules, SIZES, state), 'idle axis')
    (found,) = of_kind(lint(rules[1:], SIZES, state), 'idle axis')
    assert found.where == "mesh axis 'data'" and '0%' in found.message
