"""Policies for sizes that do not divide and names without a rule: layouts, costs, programs."""

import copy
import pickle

import jax
import optax
import pytest
from boxed_states import abstract_box as box, padded
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisRules,
    PjitPartitioner,
    logical_to_mesh_axes,
    resolve_axes,
    unbox,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]

DATA4_MODEL2 = {'data': 4, 'model': 2}
RULES = [('embed', 'data'), ('mlp', 'model'), ('both', ('data', 'model')), ('late', 'model')]


def partitioner_of(rules=RULES, policy=None, **settings):
    """A partitioner for a mesh of data 4 x model 2."""
    return PjitPartitioner(2, AxisRules(rules, on_indivisible=policy, **settings))


# Tables.


@pytest.mark.parametrize(
    'size, expected',
    [
        (12, ('x', 'y', 'z')),
        (4, ('x', 'y')),
        (6, ('x', 'z')),  # ('y', 'z') gives as many shards, but comes later
        (9, 'z'),
        (2, 'x'),
        (7, None),
    ],
)
def test_drop_axis_keeps_the_most_shards(size, expected):
    mesh, rules = {'x': 2, 'y': 2, 'z': 3}, [('a', ('x', 'y', 'z'))]
    (dim,) = resolve_axes(('a',), rules, mesh=mesh, shape=(size,), on_indivisible='drop_axis')
    assert dim.mesh_axes == expected and dim.wanted == ('x', 'y', 'z')
    assert dim.policy == (None if size == 12 else 'drop_axis')


# Errors, and whether the solutions they propose work.


def test_message_of_a_name_without_a_rule_and_its_solutions():
    state = {'params': {'w': box((16, 8), 'embed', 'mpl')}}
    with pytest.raises(ValueError, match=r"params/w.*'mpl'.*Did you mean 'mlp'") as error:
        partitioner_of().get_mesh_axes(state)
    assert "('mpl', None)" in str(error.value)
    named = partitioner_of([*RULES, ('mpl', None)])
    for partitioner in (named, partitioner_of(on_unmatched='replicate')):
        assert partitioner.get_mesh_axes(state)['params']['w'] == P('data', None)


@pytest.mark.parametrize('setting', ['on_unmatched', 'on_indivisible'])
@pytest.mark.parametrize(
    'make',
    [
        lambda **settings: AxisRules(RULES, **settings),
        lambda **settings: AxisRules(**settings),
        lambda **settings: PjitPartitioner.from_partition_rules([('.*', P())], 2, **settings),
    ],
    ids=['rules', 'standard rules', 'partition rules'],
)
def test_policies_that_do_not_exist(make, setting):
    with pytest.raises(ValueError, match=rf"{setting} must be .*'replicate'.*not 'ignore'"):
        make(**{setting: 'ignore'})


def test_unmatched_names_can_only_be_replicated():
    with pytest.raises(ValueError, match='on_unmatched'):
        AxisRules(RULES, on_unmatched='drop_axis')


# AxisRules keep rules and policies together.


def test_axis_rules_are_a_tuple_of_rules():
    rules = AxisRules(RULES, on_indivisible='pad')
    assert rules == tuple(RULES) and hash(rules) == hash(tuple(RULES))
    assert (rules.on_unmatched, rules.on_indivisible) == ('error', 'pad')
    assert eval(repr(rules)).on_indivisible == 'pad' and eval(repr(rules)) == rules


@pytest.mark.parametrize('given', [RULES, []], ids=['some', 'none'])
@pytest.mark.parametrize(
    'again', [AxisRules, copy.deepcopy, copy.copy, lambda rules: pickle.loads(pickle.dumps(rules))]
)
def test_copies_of_axis_rules_keep_their_policies(given, again):
    rules = again(AxisRules(given, on_unmatched='replicate', on_indivisible='pad'))
    assert isinstance(rules, AxisRules) and rules == tuple(given)
    assert (rules.on_unmatched, rules.on_indivisible) == ('replicate', 'pad')


def test_policies_of_the_rules_decide_unless_others_are_given():
    rules = AxisRules(RULES, on_unmatched='replicate', on_indivisible='replicate')
    of = {'mesh': DATA4_MODEL2, 'shape': (7, 8)}
    assert logical_to_mesh_axes(('mlp', 'new'), rules, **of) == P(None, None)
    with pytest.raises(ValueError, match=r'not divisible by \d'):
        logical_to_mesh_axes(('mlp', 'new'), rules, **of, on_indivisible='error')
    with pytest.raises(ValueError, match="no rule for logical axis 'new'"):
        logical_to_mesh_axes(('mlp', 'new'), rules, **of, on_unmatched='error')


# States with optimizers.

PARAMETERS = {'wi': box((16, 7), 'embed', 'mlp'), 'bias': box((7,), 'mlp')}
WI = {
    'replicate': P('data', None),
    'drop_axis': P('data', None),
    'pad': padded(['data', None], ['data', 'model']),
}
BIAS = {'replicate': P(None), 'drop_axis': P(None), 'pad': padded([None], ['model'])}


def with_optimizer(parameters, tx):
    return {'params': parameters, 'opt_state': jax.eval_shape(tx.init, unbox(parameters))}


@pytest.mark.parametrize('policy', WI)
def test_statistics_follow_under_a_policy(policy):
    state = with_optimizer(PARAMETERS, optax.adam(1e-3))
    axes = partitioner_of(policy=policy).get_mesh_axes(state)
    adam = axes['opt_state'][0]
    for tree in (axes['params'], adam.mu, adam.nu):
        assert tree == {'wi': WI[policy], 'bias': BIAS[policy]}
    assert adam.count == P()


@pytest.mark.parametrize('of_optimizer', [None, 'replicate'])
def test_policies_of_the_optimizer_rules(of_optimizer):
    """One policy applies to both sets of rules, or each set has its own."""
    zero = RULES if of_optimizer is None else AxisRules(RULES, on_indivisible=of_optimizer)
    rules = AxisRules([('embed', None), ('mlp', 'model')], on_indivisible='pad')
    policy = 'pad' if of_optimizer is None else None
    state = with_optimizer({'wi': PARAMETERS['wi']}, optax.trace(0.9))
    axes = partitioner_of(rules, policy, optimizer=zero).get_mesh_axes(state)
    assert axes['params']['wi'] == padded([None, None], [None, 'model'])
    assert axes['opt_state'].trace['wi'] == WI[of_optimizer or 'pad']


# The cost is the bytes on one device, minus an even share of the array.
