"""Policies for sizes that do not divide and names without a rule: layouts, costs, programs."""

import copy
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisRules,
    PjitPartitioner,
    constrain,
    fsdp_logical_axis_rules,
    logical_to_mesh_axes,
    resolve_axes,
    standard_logical_axis_rules,
    unbox,
    with_sharding_constraint,
)
from partitioning.rules import PaddedSpec

pytestmark = pytest.mark.core

DATA4_MODEL2 = {'data': 4, 'model': 2}
RULES = [('embed', 'data'), ('mlp', 'model'), ('both', ('data', 'model')), ('late', 'model')]
POLICIES = ('error', 'replicate', 'drop_axis', 'pad')


def box(shape, *names, dtype=jnp.float32):
    return nn.LogicallyPartitioned(jax.ShapeDtypeStruct(shape, dtype), names)


def padded(outside, inside):
    return PaddedSpec(P(*outside), P(*inside))


def partitioner_of(rules=RULES, policy=None, **settings):
    """Over 4 x 2 devices."""
    return PjitPartitioner(2, logical_axis_rules=rules, on_indivisible=policy, **settings)


# Tables.


@pytest.mark.parametrize(
    'names, shape, replicate, drop_axis, inside',
    [
        (('mlp',), (7,), [None], [None], ['model']),
        (('both',), (12,), [None], ['data'], [('data', 'model')]),
        (('both',), (6,), [None], ['model'], [('data', 'model')]),
        (('both',), (5,), [None], [None], [('data', 'model')]),
        (('embed', 'mlp'), (6, 7), [None, None], [None, None], ['data', 'model']),
        (('embed', 'mlp'), (8, 7), ['data', None], ['data', None], ['data', 'model']),
        ((None, 'mlp'), (5, 1), [None, None], [None, None], [None, 'model']),
        # What 'both' gives up it has won from 'late', which does not get it back.
        (('both', 'late'), (12, 8), [None, None], ['data', None], [('data', 'model'), None]),
    ],
)
def test_tables(names, shape, replicate, drop_axis, inside):
    def under(policy):
        of = {'mesh': DATA4_MODEL2, 'shape': shape, 'on_indivisible': policy}
        return logical_to_mesh_axes(names, RULES, **of)

    assert under('replicate') == P(*replicate)
    assert under('drop_axis') == P(*drop_axis)
    assert under('pad') == padded(replicate, inside)
    with pytest.raises(ValueError, match='does not divide'):
        under('error')


@pytest.mark.parametrize(
    'size, expected',
    [
        (12, ('x', 'y', 'z')),
        (4, ('x', 'y')),
        (6, ('x', 'z')),  # ('y', 'z') splits as much; it comes later
        (9, 'z'),
        (2, 'x'),
        (7, None),
    ],
)
def test_drop_axis_keeps_the_most_ways(size, expected):
    mesh, rules = {'x': 2, 'y': 2, 'z': 3}, [('a', ('x', 'y', 'z'))]
    (dim,) = resolve_axes(('a',), rules, mesh=mesh, shape=(size,), on_indivisible='drop_axis')
    assert dim.mesh_axes == expected and dim.wanted == ('x', 'y', 'z')
    assert dim.policy == (None if size == 12 else 'drop_axis')


@pytest.mark.parametrize('policy', POLICIES)
def test_what_divides_needs_no_policy(policy):
    state = {'w': box((8, 6, 5), 'embed', 'mlp', None)}
    assert partitioner_of(policy=policy).get_mesh_axes(state) == {'w': P('data', 'model', None)}


# Errors, and whether their ways out are any.


def state_of_width(width):
    return {'params': {'mlp': {'wi': box((16, width), 'embed', 'mlp')}}}


def test_message_of_a_size_that_does_not_divide():
    with pytest.raises(ValueError) as error:
        partitioner_of().get_mesh_axes(state_of_width(7))
    message = str(error.value)
    for part in ['params/mlp/wi', '(16, 7)', '7 does not divide by 2', "'model'", '6 or 8']:
        assert part in message
    for way_out in ["('mlp', None)", "on_indivisible='replicate'", "'drop_axis'", "'pad'"]:
        assert way_out in message


@pytest.mark.parametrize(
    'width, rules, policy, expected',
    [
        (6, RULES, None, P('data', 'model')),
        (8, RULES, None, P('data', 'model')),
        (7, [('mlp', None), *RULES], None, P('data', None)),
        (7, RULES, 'replicate', P('data', None)),
        (7, RULES, 'drop_axis', P('data', None)),
        (7, RULES, 'pad', padded(['data', None], ['data', 'model'])),
    ],
)
def test_the_ways_out_of_that_message(width, rules, policy, expected):
    axes = partitioner_of(rules, policy).get_mesh_axes(state_of_width(width))
    assert axes['params']['mlp']['wi'] == expected


def test_message_of_a_name_without_a_rule_and_its_ways_out():
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
        lambda **settings: PjitPartitioner(2, logical_axis_rules=RULES, **settings),
        lambda **settings: PjitPartitioner(2, **settings),
    ],
    ids=['rules', 'partitioner', 'partitioner of standard rules'],
)
def test_policies_that_do_not_exist(make, setting):
    with pytest.raises(ValueError, match=rf"{setting} must be .*'replicate'.*not 'ignore'"):
        make(**{setting: 'ignore'})


def test_unmatched_names_can_only_be_replicated():
    with pytest.raises(ValueError, match='on_unmatched'):
        AxisRules(RULES, on_unmatched='drop_axis')


# AxisRules: rules and policies that travel together.


def test_axis_rules_are_a_tuple_of_rules():
    rules = AxisRules(RULES, on_indivisible='pad')
    assert rules == tuple(RULES) and hash(rules) == hash(tuple(RULES))
    assert (rules.on_unmatched, rules.on_indivisible) == ('error', 'pad')
    assert eval(repr(rules)).on_indivisible == 'pad' and eval(repr(rules)) == rules


@pytest.mark.parametrize('given', [RULES, []], ids=['some', 'none'])
@pytest.mark.parametrize(
    'again', [AxisRules, copy.deepcopy, copy.copy, lambda rules: pickle.loads(pickle.dumps(rules))]
)
def test_policies_travel_with_the_rules(given, again):
    rules = again(AxisRules(given, on_unmatched='replicate', on_indivisible='pad'))
    assert isinstance(rules, AxisRules) and rules == tuple(given)
    assert (rules.on_unmatched, rules.on_indivisible) == ('replicate', 'pad')


def test_other_rules_under_the_same_policies():
    rules = AxisRules(RULES, 'replicate', 'drop_axis').with_rules([('a', 'data')])
    assert rules == (('a', 'data'),)
    assert (rules.on_unmatched, rules.on_indivisible) == ('replicate', 'drop_axis')


def test_policies_of_the_rules_decide_unless_others_are_given():
    rules = AxisRules(RULES, on_unmatched='replicate', on_indivisible='replicate')
    of = {'mesh': DATA4_MODEL2, 'shape': (7, 8)}
    assert logical_to_mesh_axes(('mlp', 'new'), rules, **of) == P(None, None)
    with pytest.raises(ValueError, match='does not divide'):
        logical_to_mesh_axes(('mlp', 'new'), rules, **of, on_indivisible='error')
    with pytest.raises(ValueError, match="no rule for logical axis 'new'"):
        logical_to_mesh_axes(('mlp', 'new'), rules, **of, on_unmatched='error')


def test_a_partitioner_keeps_the_policies_of_its_rules_unless_others_are_given():
    rules = AxisRules(RULES, on_indivisible='pad')
    state = {'w': box((7,), 'mlp')}
    assert partitioner_of(rules).get_mesh_axes(state) == {'w': padded([None], ['model'])}
    assert partitioner_of(rules, 'replicate').get_mesh_axes(state) == {'w': P(None)}


def test_a_partitioner_without_any_rule_keeps_their_policy():
    partitioner = partitioner_of(AxisRules([], on_unmatched='replicate'))
    assert partitioner.get_mesh_axes({'w': box((8,), 'mlp')}) == {'w': P(None)}


# States, with what an optimizer keeps.

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


@pytest.mark.parametrize('policy', WI)
def test_factored_statistics_under_a_policy(policy):
    """Of 16 x 7, the rows keep the 7 that does not divide, the columns the 16 that does."""
    tx = optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    axes = partitioner_of(policy=policy).get_mesh_axes(with_optimizer(PARAMETERS, tx))
    assert axes['opt_state'].v_row['wi'] == BIAS[policy]
    assert axes['opt_state'].v_col['wi'] == P('data')


@pytest.mark.parametrize('of_optimizer', [None, 'replicate'])
def test_policies_of_the_optimizer_rules(of_optimizer):
    """One for both sets of rules, or each its own."""
    zero = RULES if of_optimizer is None else AxisRules(RULES, on_indivisible=of_optimizer)
    rules = AxisRules([('embed', None), ('mlp', 'model')], on_indivisible='pad')
    policy = 'pad' if of_optimizer is None else None
    state = with_optimizer({'wi': PARAMETERS['wi']}, optax.trace(0.9))
    axes = partitioner_of(rules, policy, optimizer_axis_rules=zero).get_mesh_axes(state)
    assert axes['params']['wi'] == padded([None, None], [None, 'model'])
    assert axes['opt_state'].trace['wi'] == WI[of_optimizer or 'pad']


# What it costs: what a device holds, less its even share were the size to divide.


@pytest.mark.parametrize(
    'array, held, cost',
    [  # bytes of one device under replicate, drop_axis and pad
        (box((16, 7), 'embed', 'mlp'), (112, 112, 112), (56, 56, 56)),  # 448; a share is 56
        (box((14, 8), 'embed', 'mlp'), (224, 224, 224), (168, 168, 168)),
        (box((12,), 'both'), (48, 12, 48), (42, 6, 42)),
        (box((12,), 'both', dtype=jnp.int8), (12, 3, 12), (10, 1, 10)),  # a share is 2, not 1.5
        (box((5, 3), 'both', None), (60, 60, 60), (52, 52, 52)),  # and 8, not 7.5
        (box((16, 8), 'embed', 'mlp'), (64, 64, 64), (0, 0, 0)),
    ],
)
def test_cost_of_a_policy(array, held, cost):
    for policy, holds, costs in zip(('replicate', 'drop_axis', 'pad'), held, cost, strict=True):
        audit = partitioner_of(policy=policy).audit({'w': array})
        (row,) = audit.arrays
        assert (row.bytes_per_device, row.policy_bytes_per_device) == (holds, costs)
        assert audit.policies == ((row,) if costs else ())


def test_cost_of_a_policy_for_a_whole_state():
    """Three copies under Adam: wi costs 112 - 56, and bias 28 - 14."""
    audit = partitioner_of(policy='pad').audit(with_optimizer(PARAMETERS, optax.adam(1e-3)))
    assert sum(row.policy_bytes_per_device for row in audit.policies) == 3 * (56 + 14)
    assert {row.category for row in audit.policies} == {'parameters', 'optimizer'}
    assert audit.bytes_per_device == 3 * (112 + 28) + 4


# Programs: of a width of 7 over 2 devices each computes 4.

MODEL_RULES = [('batch', 'data'), ('embed', None), ('mlp', 'model')]
PADDED = padded([None, None], [None, 'model'])
TX = optax.adamw(1e-2)
KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(jax.random.key(1), (8, 16)))
W = np.asarray(jax.random.normal(jax.random.key(2), (16, 7)))


def init(key):
    for_up, for_down = jax.random.split(key)
    up, down = jax.random.normal(for_up, (16, 7)), jax.random.normal(for_down, (7, 16))
    params = {
        'up': nn.LogicallyPartitioned(up, ('embed', 'mlp')),
        'down': nn.LogicallyPartitioned(down, ('mlp', 'embed')),
    }
    return {'params': params, 'opt_state': TX.init(unbox(params))}


def train_step(state, x):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(x @ params['up']) @ params['down'] - x) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state['params'])
    updates, opt_state = TX.update(grads, state['opt_state'], state['params'])
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'opt_state': opt_state}, loss


def partitioned_step(partitioner):
    axes = partitioner.get_mesh_axes(jax.eval_shape(init, KEY))
    return partitioner.partition(train_step, (axes, partitioner.data_partition_spec), (axes, None))


def dot_shapes(lowered):
    """Shapes of the products that one device computes."""
    found = re.findall(r'= f32\[([\d,]+)\]\S* dot\(', lowered.compile().as_text())
    return {tuple(map(int, shape.split(','))) for shape in found}


def test_padded_training_is_training():
    partitioner = partitioner_of(MODEL_RULES, 'pad')
    step, plain_step = partitioned_step(partitioner), jax.jit(train_step)
    state, plain = partitioner.init(init, KEY), unbox(jax.jit(init)(KEY))
    shapes = jax.tree.map(jnp.shape, plain)
    for _ in range(3):
        state, loss = step(state, X)
        plain, plain_loss = plain_step(plain, X)
        np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, plain)
    assert jax.tree.map(jnp.shape, state) == shapes
    assert all(x.is_fully_replicated for x in jax.tree.leaves(state))
    assert step.num_compilations() == 1


@pytest.mark.parametrize('policy, width, never', [('pad', 4, 7), ('replicate', 7, 4)])
def test_what_a_device_computes_in_training(policy, width, never):
    """Of 8 rows over 4 devices, 2; of 7 columns over 2, what the policy says."""
    step = partitioned_step(partitioner_of(MODEL_RULES, policy))
    found = dot_shapes(step.lower(unbox(jax.eval_shape(init, KEY)), X))
    assert (2, width) in found and not any(never in shape for shape in found)


def project(w, x, negate=False, scale=1.0):
    y = (x @ w['w']) * scale
    return -y if negate else y


@pytest.mark.parametrize(
    'args, kwargs',
    [
        (({'w': W}, X, False), {}),
        (({'w': W}, X), {}),
        (({'w': W}, X), {'scale': 2.0}),
        (({'w': W},), {'x': X, 'scale': 2.0}),
        ((), {'w': {'w': W}, 'x': X, 'negate': True}),
    ],
    ids=['static', 'static left out', 'keyword', 'keywords', 'keywords only'],
)
def test_static_and_keyword_arguments_beside_padded_ones(args, kwargs):
    partitioner = partitioner_of(MODEL_RULES, 'pad')
    resources = ({'w': PADDED}, partitioner.data_partition_spec)
    fn = partitioner.partition(project, resources, None, static_argnums=2)
    result = fn(*args, **kwargs)
    np.testing.assert_allclose(result, project(*args, **kwargs), rtol=1e-5, atol=1e-5)
    assert dot_shapes(fn.lower(*args, **kwargs)) == {(2, 4)}


@pytest.mark.parametrize('static', [0, -3])
def test_static_arguments_before_padded_ones(static):
    fn = partitioner_of(MODEL_RULES, 'pad').partition(
        lambda scale, w, x: x @ w * scale, (PADDED, P('data')), None, static_argnums=static
    )
    np.testing.assert_allclose(fn(2, W, X), X @ W * 2, rtol=1e-5, atol=1e-5)
    assert dot_shapes(fn.lower(2, W, X)) == {(2, 4)}


def test_a_static_argument_left_out_takes_no_padding_away():
    """What its position stands for in a shorter call is no static argument."""
    fn = partitioner_of(MODEL_RULES, 'pad').partition(
        lambda x, w, scale=1: x @ w * scale, (P('data'), PADDED), None, static_argnums=2
    )
    assert dot_shapes(fn.lower(X, W, 1)) == {(2, 4)}
    assert dot_shapes(fn.lower(X, W)) == {(2, 4)}


def test_chunks_of_a_padded_array_are_those_of_its_state():
    """It is whole where checkpoints are written."""
    partitioner = partitioner_of(MODEL_RULES, 'pad')
    whole = partitioner.get_local_chunk_info((16, 7), P(None, None))
    assert partitioner.get_local_chunk_info((16, 7), PADDED) == whole


# Explicit axes.


def test_pad_takes_auto_axes():
    partitioner = partitioner_of(policy='pad', axis_types='explicit')
    assert partitioner.get_mesh_axes({'w': box((8,), 'mlp')}) == {'w': P('model')}
    with pytest.raises(ValueError, match=r"params/w.*'pad'.*Explicit.*'drop_axis'"):
        partitioner.get_mesh_axes({'params': {'w': box((7,), 'mlp')}})


@pytest.mark.parametrize('policy', ['replicate', 'drop_axis'])
def test_other_policies_take_explicit_axes(policy):
    partitioner = partitioner_of(policy=policy, axis_types='explicit')
    assert partitioner.get_mesh_axes({'w': box((8, 7), 'embed', 'mlp')}) == {'w': P('data', None)}


# Activations: `constrain` follows the policy of the rules around it.

WIDE = [('rows', None), ('width', ('data', 'model'))]
INSIDE = {  # of 8 x 6, with the 6 over data 4 x model 2
    'replicate': P(None, None),
    'drop_axis': P(None, 'model'),
    'pad': P(None, ('data', 'model')),
}


def assert_laid_out_inside(partitioner, spec, lay_out):
    """What `lay_out` makes of an 8 x 6 activation inside a partitioned function."""
    seen = []

    def fn(x):
        y = lay_out(jnp.tanh(x))
        jax.debug.inspect_array_sharding(y, callback=seen.append)
        return y * 2

    x = np.arange(48, dtype=np.float32).reshape(8, 6) / 48
    np.testing.assert_allclose(partitioner.partition(fn, None, None)(x), np.tanh(x) * 2, rtol=1e-5)
    (found,) = seen
    assert found.is_equivalent_to(NamedSharding(partitioner.mesh, spec), 2)


@pytest.mark.parametrize('policy', INSIDE)
def test_constrain_follows_the_policy_around_it(policy):
    partitioner = partitioner_of(WIDE, policy, on_unmatched='replicate')
    for names in [('rows', 'width'), ('new', 'width')]:
        lay_out = lambda x, names=names: constrain(x, names)  # noqa: E731
        assert_laid_out_inside(partitioner, INSIDE[policy], lay_out)


def test_constrain_prefers_policies_of_its_own():
    names, rules = ('rows', 'width'), AxisRules(WIDE, on_indivisible='pad')
    partitioner = partitioner_of(WIDE, 'replicate')
    drop = lambda x: constrain(x, names, on_indivisible='drop_axis')  # noqa: E731
    assert_laid_out_inside(partitioner, INSIDE['drop_axis'], drop)
    assert_laid_out_inside(partitioner, INSIDE['pad'], lambda x: constrain(x, names, rules))


@pytest.mark.parametrize(
    'names, message',
    [(('rows', 'width'), r'6 does not divide by 8.*8, '), (('new', 'rows'), "no rule .*'new'")],
)
def test_constrain_without_a_policy_is_an_error(names, message):
    fn = partitioner_of(WIDE).partition(lambda x: constrain(x, names), None, None)
    with pytest.raises(ValueError, match=message):
        fn(np.ones((8, 6), np.float32))


def test_a_padded_spec_constrains_to_what_it_is_inside():
    """As a step does that lays out gradients by the axes of its parameters."""
    partitioner = partitioner_of(WIDE, 'pad')
    spec = partitioner.get_mesh_axes({'w': box((8, 6), 'rows', 'width')})['w']
    lay_out = lambda x: with_sharding_constraint(x, spec)  # noqa: E731
    assert_laid_out_inside(partitioner, INSIDE['pad'], lay_out)


# fsdp_logical_axis_rules: FSDP as rules of everything, ZeRO as rules of the optimizer.

STANDARD = standard_logical_axis_rules()
WITH_FSDP = standard_logical_axis_rules(mesh_axes=('data', 'fsdp', 'model'))
BOTH = ('data', 'fsdp')
FSDP = {
    'standard': fsdp_logical_axis_rules(STANDARD),
    'backwards': fsdp_logical_axis_rules(STANDARD[::-1]),
    'activations in two dimensions': fsdp_logical_axis_rules(standard_logical_axis_rules(2, 1)),
    'two axes': fsdp_logical_axis_rules(WITH_FSDP, BOTH),
    'one of two': fsdp_logical_axis_rules(WITH_FSDP, 'fsdp'),
    'embed, kv': fsdp_logical_axis_rules(STANDARD, names=['embed', 'kv']),
    'kv, embed': fsdp_logical_axis_rules(STANDARD, names=('kv', 'embed')),
}


@pytest.mark.parametrize(
    'rules, names, expected',
    [
        ('standard', ('vocab', 'embed'), P('model', 'data')),
        ('standard', ('layers', 'embed', 'mlp'), P(None, 'data', 'model')),
        ('standard', ('embed',), P('data')),
        ('standard', ('mlp',), P('model')),
        # Activations keep their batch on the data axes, wherever its rule stands.
        ('standard', ('batch', 'length', 'embed'), P('data', None, None)),
        ('standard', ('batch', 'length', 'mlp'), P('data', None, 'model')),
        ('backwards', ('embed', 'batch'), P(None, 'data')),
        ('backwards', ('embed', 'mlp'), P('data', 'model')),
        ('activations in two dimensions', ('batch', 'length', 'embed'), P('data', None, 'model')),
        ('activations in two dimensions', ('embed', 'mlp'), P('data', 'model')),
        ('two axes', ('embed', 'mlp'), P(BOTH, 'model')),
        ('two axes', ('batch', 'embed'), P(BOTH, None)),
        ('one of two', ('embed', 'mlp'), P('fsdp', 'model')),
        ('one of two', ('batch', 'embed'), P(BOTH, None)),
        # The first name of an array's takes them.
        ('embed, kv', ('heads', 'kv', 'embed'), P('model', None, 'data')),
        ('kv, embed', ('heads', 'kv', 'embed'), P('model', 'data', None)),
        ('embed, kv', ('heads', 'kv'), P('model', 'data')),
    ],
)
def test_fsdp_rules(rules, names, expected):
    assert logical_to_mesh_axes(names, FSDP[rules]) == expected


@pytest.mark.parametrize(
    'rules, of_optimizer, params, statistics, held',
    [  # of 64 x 32 float32: 8192 bytes over data 4 x model 2
        (STANDARD, None, P(None, 'model'), P(None, 'model'), 4096 + 2 * 4096),
        (STANDARD, FSDP['standard'], P(None, 'model'), P('data', 'model'), 4096 + 2 * 1024),
        (FSDP['standard'], None, P('data', 'model'), P('data', 'model'), 1024 + 2 * 1024),
    ],
    ids=['data parallel', 'ZeRO 1', 'FSDP'],
)
def test_fsdp_and_zero_of_a_state(rules, of_optimizer, params, statistics, held):
    partitioner = partitioner_of(rules, optimizer_axis_rules=of_optimizer)
    state = with_optimizer({'w': box((64, 32), 'embed', 'mlp')}, optax.adam(1e-3))
    axes = partitioner.get_mesh_axes(state)
    adam = axes['opt_state'][0]
    assert axes['params']['w'] == params
    assert adam.mu['w'] == adam.nu['w'] == statistics
    assert partitioner.audit(state).bytes_per_device == held + 4  # and Adam's count
    assert partitioner.data_partition_spec == P('data')


def test_fsdp_rules_keep_the_policies_of_theirs():
    rules = fsdp_logical_axis_rules(AxisRules(STANDARD, 'replicate', 'drop_axis'))
    spec = logical_to_mesh_axes(('embed', 'new'), rules, mesh=DATA4_MODEL2, shape=(6, 7))
    assert spec == P(None, None)


@pytest.mark.parametrize(
    'arguments',
    [
        *({'names': names} for names in ('embed', (), (None,))),
        *({'axes': axes} for axes in ((), None, ('data', 'data'), 3)),
        *({'rules': rules} for rules in (None, [('embed',)])),
    ],
    ids=str,
)
def test_bad_arguments_of_fsdp_rules(arguments):
    with pytest.raises(ValueError, match=r'names=|rule|axis twice'):
        fsdp_logical_axis_rules(**{'rules': STANDARD, **arguments})
