"""There is an error in lint exactly where a state has no plan; plans lint themselves."""

import jax
import jax.numpy as jnp
import optax
import pytest
from boxed_states import box

from partitioning import AxisRules, PjitPartitioner, Plan, create_mesh, unbox
from partitioning.plan import RuleSet, lint

pytestmark = pytest.mark.core

SIZES = {'data': 4, 'model': 2}
RULES = [('embed', 'data'), ('mlp', 'model'), ('heads', None)]


def params(**arrays):
    return {'params': arrays}


def errors(findings):
    return [f for f in findings if f.severity == 'error']


def adam_state(array):
    state = params(w=array)
    return {**state, 'opt_state': jax.eval_shape(optax.adam(1e-3).init, unbox(state['params']))}


GOOD = box((8, 8), 'embed', 'mlp')
ODD = box((7, 8), 'embed', 'mlp')
MESH = create_mesh((4, 2), ('data', 'model'))
EXPLICIT = create_mesh((4, 2), ('data', 'model'), axis_types='explicit')
STATES = {
    'clean': ({}, adam_state(GOOD)),
    'unmatched': ({}, adam_state(box((8, 8), 'embd', 'mlp'))),
    'indivisible': ({}, adam_state(ODD)),
    'pad': ({'on_indivisible': 'pad'}, adam_state(ODD)),
    'pad over Explicit axes': (
        {'on_indivisible': 'pad', 'mesh': EXPLICIT},
        adam_state(ODD),
    ),
    'drop_axis over Explicit axes': (
        {'on_indivisible': 'drop_axis', 'mesh': EXPLICIT},
        adam_state(ODD),
    ),
    'large without names': ({}, {**adam_state(GOOD), 'cache': jnp.zeros((64, 1024))}),
    'small without names': ({}, {**adam_state(GOOD), 'seeds': jnp.zeros((5,))}),
    'statistic of another shape': (
        {},
        {**adam_state(GOOD), 'statistic': {'w': jnp.zeros((5, 3))}},
    ),
    'optimizer rules': ({'optimizer': RULES}, adam_state(GOOD)),
    'optimizer rule to no axis': (
        {'optimizer': [('embed', 'dta'), ('mlp', None)]},
        adam_state(GOOD),
    ),
    'no optimizer rule': ({'optimizer': [('embed', 'data')]}, adam_state(GOOD)),
    'optimizer rule that does not divide': (
        {'optimizer': [('embed', ('data', 'model')), ('mlp', None)]},
        adam_state(box((4, 8), 'embed', 'mlp')),
    ),
}


@pytest.mark.parametrize('name', STATES)
def test_errors_exactly_where_a_state_cannot_be_resolved(name):
    settings, state = STATES[name]
    mesh = settings.get('mesh', MESH)
    rules = {name: value for name, value in settings.items() if name != 'mesh'}
    partitioner = PjitPartitioner(mesh, AxisRules(**{'rules': RULES, **rules}))
    try:
        partitioner.plan(state)
        raised = False
    except ValueError:
        raised = True
    found = partitioner.lint(state)
    assert bool(errors(found)) == raised, '\n'.join(map(str, found))


def test_default_rules_that_leave_an_axis_unused():
    partitioner = PjitPartitioner(mesh=create_mesh((4, 2), ('data', 'foo')))
    with pytest.raises(ValueError, match=r"standard rule.*'foo'"):
        partitioner.plan(params(w=GOOD))
    assert "'foo'" in '\n'.join(map(str, errors(partitioner.lint(params(w=GOOD)))))
    assert "'foo'" in '\n'.join(map(str, errors(partitioner.lint())))


def test_a_partitioner_lints_its_own_rules():
    partitioner = PjitPartitioner(2, logical_axis_rules=[('mlp', 'modle')])
    assert partitioner.lint() == lint(RuleSet(rules=AxisRules([('mlp', 'modle')])), SIZES)
    assert errors(PjitPartitioner(2).lint()) == []


def test_a_plan_lints_itself():
    """It has the warnings of its rules and rows; where there is an error, there is no plan."""
    state = params(w=box((7, 8), 'embed', 'mlp'), n=jax.ShapeDtypeStruct((), jnp.int32))
    state['seeds'] = jnp.zeros((5,))
    partitioner = PjitPartitioner(2, AxisRules(RULES, on_indivisible='pad'))
    plan = partitioner.plan(state)
    assert {(f.severity, f.kind, f.where) for f in plan.lint()} == {
        ('warning', 'policy', 'params/w'),
        ('warning', 'no names', 'seeds'),
        ('warning', 'unused', "rule ('heads', None)"),
    }
    assert {*plan.lint()} == {*partitioner.lint(state)}


def test_a_plan_of_a_file_lints_its_rows(tmp_path):
    """It has no rules to examine."""
    state = params(w=box((7, 8), 'embed', 'mlp'))
    PjitPartitioner(2, AxisRules(RULES, on_indivisible='pad')).plan(state).save(
        tmp_path / 'plan.json'
    )
    (finding,) = Plan.load(tmp_path / 'plan.json').lint()
    assert (finding.kind, finding.where) == ('policy', 'params/w')
    assert 'embed: pad' in finding.message
    loaded = PjitPartitioner(2, Plan.load(tmp_path / 'plan.json'))
    assert errors(loaded.lint(state)) == []
