"""Plans that drive a partitioner: states, optimizers, padding, gradients, and other specs."""

import jax
import numpy as np
import optax
import pytest
from boxed_states import by_path
from jax.sharding import PartitionSpec as P
from plans_by_hand import MESH, TREE, planned, read

from partitioning import (
    AxisRules,
    PaddedSpec,
    PjitPartitioner,
    Plan,
    TrainState,
    create_mesh,
    plan_diff,
)
from partitioning.compat.pytorch import shard_module
from partitioning.plan import check_mesh, impose_plan
from partitioning.plan.plan_file import to_json

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
ADAMW = optax.adamw(1e-2)
ADAFACTOR = optax.adafactor(1e-2, min_dim_size_to_factor=8)
RULES = [('embed', 'data'), ('mlp', 'model')]
NAMES = {'fc1/kernel': ('embed', 'mlp'), 'fc2/kernel': ('mlp', 'embed')}
PATHS = [*NAMES.items(), ('.*/bias', (None,))]
BY_RULES = {'mesh': MESH, 'layout': AxisRules([('batch', 'data'), *RULES], names=PATHS)}
PLAN = planned(names=NAMES, rules=RULES)


def from_file(plan):
    return read(to_json(plan.rows, plan.mesh))


def of_state(tx):
    """A plan of a whole train state."""
    return PjitPartitioner(**BY_RULES).plan(TrainState.create(TREE, tx))


def test_states_are_born_as_by_equivalent_rules():
    """The plan is of the parameters alone, and the optimizer follows."""

    def init(key):
        tree = jax.tree.map(lambda x: jax.random.normal(key, x.shape), TREE)
        return TrainState.create(tree, ADAMW)

    plan = PjitPartitioner(MESH, from_file(PLAN)).plan(init, KEY)
    expected = PjitPartitioner(**BY_RULES).init(init, KEY)
    state = plan.init(KEY)
    shardings = by_path(jax.tree.map(lambda x: x.sharding, state))
    assert shardings == by_path(jax.tree.map(lambda x: x.sharding, expected))
    assert len(shardings) > 2 * len(PLAN.rows)
    followed = [path for path in shardings if path.startswith('opt_state') and 'kernel' in path]
    assert any('data' in str(shardings[path].spec) for path in followed)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    assert by_path(plan.specs) == {path: sharding.spec for path, sharding in shardings.items()}


def test_factored_statistics_keep_the_axes_of_their_dimensions():
    """By hand: the rows of a kernel are over its first axes, the columns over its second."""
    plan = impose_plan(PLAN, TrainState.create(TREE, ADAFACTOR), MESH)
    specs = {path.removeprefix('opt_state/0/'): spec for path, spec in by_path(plan.specs).items()}
    # optax reduces the largest dimension for v_row and the second largest for v_col.
    assert specs['v_row/fc1/kernel'] == P('data') and specs['v_col/fc1/kernel'] == P('model')
    assert specs['v_row/fc2/kernel'] == P('data') and specs['v_col/fc2/kernel'] == P('model')


def test_the_plan_of_a_train_state_is_imposed_row_by_row():
    state = TrainState.create(TREE, ADAFACTOR)
    plan = from_file(of_state(ADAFACTOR))
    assert {row.role for row in plan.rows} == {'parameters', 'optimizer', 'other'}
    assert impose_plan(plan, state, MESH).specs == impose_plan(PLAN, state, MESH).specs
    assert impose_plan(plan, state.params, MESH).specs == impose_plan(PLAN, TREE, MESH).specs
    with pytest.raises(
        ValueError, match=r'lacks 12 arrays of the plan.*opt_state/0/v/.* parameters only'
    ):
        impose_plan(plan, TrainState.create(TREE, ADAMW), MESH)


def test_the_optimizer_is_laid_out_as_the_plan_says():
    """ZeRO's plan has other rows for the optimizer than its parameters imply."""
    state = TrainState.create(TREE, ADAMW)
    rules = AxisRules([('embed', None), ('mlp', 'model')], names=PATHS, optimizer=RULES)
    zero = PjitPartitioner(MESH, rules)
    plan = from_file(zero.plan(state))
    driven = PjitPartitioner(MESH, plan)
    assert driven.get_mesh_axes(state) == zero.get_mesh_axes(state)
    assert plan['opt_state/0/mu/fc1/kernel'].spec == P('data', 'model')
    assert plan['params/fc1/kernel'].spec == P(None, 'model')
    assert driven.plan(state) == plan and not plan_diff(plan, driven.plan(state))


@pytest.mark.parametrize(
    'settings',
    [{'optimizer': RULES}, {'names': [('.*', (None,))]}],
)
def test_settings_that_a_plan_already_determines(settings):
    rules, name = AxisRules(RULES, **settings), next(iter(settings))
    with pytest.raises(ValueError, match=rf'Plan .*{name}= of logical_axis_rules.*remove {name}'):
        PjitPartitioner(MESH, PLAN, logical_axis_rules=rules)


@pytest.mark.parametrize(
    'layout, instead',
    [('plan.json', r"Plan.load\('plan.json'\)"), ({'fc1/kernel': P('data')}, r'partition rules')],
)
def test_values_that_are_not_layouts(layout, instead):
    with pytest.raises(ValueError, match=rf'^layout=.* must be .*{instead}'):
        PjitPartitioner(MESH, layout)


PADDED_TREE = {'w': np.ones((29, 12), 'float32'), 'v': np.ones(12, 'float32')}
PADDED_NAMES = {'w': ('embed', None), 'v': ('embed',)}


def test_padded_parameters():
    """The policy that a plan has applied needs no policy of the partitioner."""
    plan = planned(PADDED_TREE, PADDED_NAMES, RULES, on_indivisible='pad')
    expected = {'w': PaddedSpec(P(None, None), P('data', None)), 'v': P('data')}
    assert plan.specs == expected
    for given in (plan, from_file(plan)):
        assert given['w'].spec == expected['w']
        partitioner = PjitPartitioner(MESH, given)
        assert partitioner.get_mesh_axes({'params': PADDED_TREE})['params'] == expected
    add = partitioner.partition(lambda s: jax.tree.map(lambda x: x + 1, s), (expected,), expected)
    np.testing.assert_array_equal(add(PADDED_TREE)['w'], np.full((29, 12), 2.0))


USES = {
    'impose_plan': lambda plan, tree: impose_plan(plan, tree, MESH),
    'shard_module': lambda plan, tree: shard_module(tree, plan, MESH),
    'layout': lambda plan, tree: PjitPartitioner(MESH, plan).plan({'params': tree}),
}


@pytest.mark.parametrize('use', USES)
def test_states_that_are_not_those_of_the_plan(use):
    """Otherwise they would have layouts that nobody has reviewed."""
    kernel = lambda *shape: {'kernel': np.zeros(shape, 'float32')}  # noqa: E731
    other = {**TREE, 'fc1': {**TREE['fc1'], **kernel(8, 32)}}
    half = {**TREE, 'fc1': {**TREE['fc1'], 'kernel': np.zeros((16, 64), 'float16')}}
    for tree, message in (
        (other, r'fc1/kernel.*\(8, 32\).*\(16, 64\)'),
        (half, r'fc1/kernel.*float16.*float32'),
        ({**TREE, 'fc3': kernel(8, 8)}, r'fc3/kernel is not in the plan'),
        ({'fc1': TREE['fc1']}, r'lacks 2 arrays of the plan.*fc2/bias'),
    ):
        with pytest.raises(ValueError, match=message):
            USES[use](PLAN, tree)


def test_other_meshes():
    other = create_mesh((2, 4), ('data', 'model'))
    for use in (
        lambda: impose_plan(PLAN, TREE, other),
        lambda: shard_module(TREE, PLAN, other),
        lambda: PjitPartitioner(other, PLAN).get_mesh_axes({'params': TREE}),
        lambda: check_mesh(PLAN, other),
    ):
        with pytest.raises(ValueError, match=r'data 4 x model 2.*data 2 x model 4'):
            use()
    for same in (MESH.abstract_mesh, {'data': 4, 'model': 2}):
        check_mesh(PLAN, same)
        assert planned(names=NAMES, rules=RULES, mesh=MESH) == Plan(same, PLAN.rows)


# Plans with other specs.


def test_other_specs_for_some_arrays():
    plan = impose_plan(PLAN, TREE, MESH)
    new = plan.replace_specs({'fc1/kernel': P(None, 'data'), 'fc1/bias': P()}, 'measured')
    assert new.specs == {
        'fc1': {'bias': P(None), 'kernel': P(None, 'data')},
        'fc2': {'bias': P(None), 'kernel': P('model', 'data')},
    }
    row = new['fc1/kernel']
    assert (row.shard_shape, row.dtype, row.bytes_per_device) == ((16, 16), 'float32', 1024)
    assert row.reason == 'embed, mlp: measured' and row.bytes_total == 4096
    assert plan.specs['fc1']['kernel'] == P('data', 'model')  # the plan itself is unchanged
    (change,) = plan_diff(plan, new).changed
    assert change.path == 'fc1/kernel' and 'shard_shape' in change.fields
    assert impose_plan(from_file(new), TREE, MESH).specs == new.specs


@pytest.mark.parametrize(
    'specs, error, message',
    [
        ({'fc1/kernle': P()}, ValueError, "fc1/kernle.*Did you mean 'fc1/kernel'"),
        ({'kernel': P()}, ValueError, r"Did you mean 'fc1/kernel' or 'fc2/kernel'\?$"),
        ({'bias': P()}, ValueError, r"^bias is not in the plan\. Did you mean 'fc1/bias'"),
        ({'fc1/kernel': P('modle')}, ValueError, r"fc1/kernel.*Did you mean 'model'"),
        ({'fc1/kernel': P(None, None, 'model')}, ValueError, r'fc1/kernel.*3 entries.*2 dim'),
        ({'fc1/bias': P(('data', 'data'))}, ValueError, "fc1/bias.*'data' appears twice"),
    ],
)
def test_specs_that_an_array_cannot_have(specs, error, message):
    with pytest.raises(error, match=message):
        PLAN.replace_specs(specs, 'measured')


# What a plan alone cannot do.


def test_a_plan_of_a_file_has_no_state():
    plan = from_file(PLAN)
    for use in (lambda: plan.specs, lambda: plan.logical_axes):
        with pytest.raises(ValueError, match=r'PjitPartitioner\(mesh, plan\)'):
            use()
    with pytest.raises(ValueError, match=r'PjitPartitioner\(mesh, plan\)'):
        plan.shardings  # noqa: B018  # the property raises
    for use in (plan.init, lambda: plan.abstract_state):
        with pytest.raises(ValueError, match=r'init function: use PjitPartitioner\(mesh, plan\)'):
            use()
    assert plan.audit().bytes_per_device == PLAN.bytes_per_device == 256 + 64 + 512 + 512
    with pytest.raises(KeyError, match=r"fc1/kernal.*Did you mean 'fc1/kernel'"):
        plan['fc1/kernal']
