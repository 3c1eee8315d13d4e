"""Plans that drive a partitioner: states, optimizers, padding, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from planned_models import ENTRIES, KEY, MESH, RULES, SHAPES, params, resolve

from partitioning import PaddedSpec, PjitPartitioner, TrainState, create_mesh
from partitioning.compat.pytorch import shard_module

pytestmark = pytest.mark.core

OPTIMIZERS = {
    'adamw': lambda: optax.adamw(1e-2),
    'adafactor': lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
}
NAMES = [
    ('fc1/kernel', ('embed', 'mlp')),
    ('fc2/kernel', ('mlp', 'embed')),
    ('.*/bias', ('other',)),
]
BY_RULES = {'fc1/kernel': P('data', 'model'), 'fc2/kernel': P('model', 'data')}


def by_path(tree):
    is_leaf = lambda x: isinstance(x, P | PaddedSpec)  # noqa: E731
    flat = jax.tree_util.tree_leaves_with_path(tree, is_leaf)
    return {jax.tree_util.keystr(p, simple=True, separator='/'): x for p, x in flat}


def driven(plan, how):
    if how == 'plan':
        return PjitPartitioner(mesh=MESH, plan=plan)
    return PjitPartitioner(mesh=MESH, params_axes_names_override=plan.path_rules)


@pytest.mark.parametrize('how', ['plan', 'path_rules'])
@pytest.mark.parametrize('tx', OPTIMIZERS)
def test_states_are_born_as_equivalent_rules_bear_them(tx, how):
    def init(key):
        tree = jax.tree.map(lambda x: jax.random.normal(key, x.shape), params())
        return TrainState.create(tree, OPTIMIZERS[tx]())

    rules = PjitPartitioner(
        mesh=MESH,
        logical_axis_rules=[('batch', 'data'), *RULES, ('other', None)],
        params_axes_names_override=NAMES,
    )
    resolved = resolve(BY_RULES)
    state, expected = driven(resolved, how).init(init, KEY), rules.init(init, KEY)
    shardings = by_path(jax.tree.map(lambda x: x.sharding, state))
    assert shardings == by_path(jax.tree.map(lambda x: x.sharding, expected))
    assert len(shardings) > 2 * len(SHAPES)
    followed = [path for path in shardings if path.startswith('opt_state') and 'kernel' in path]
    assert any('data' in str(shardings[path].spec) for path in followed)
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    axes = resolved.resolve_state(jax.eval_shape(init, KEY), MESH).mesh_axes
    assert by_path(axes) == {path: sharding.spec for path, sharding in shardings.items()}


def test_factored_statistics_keep_the_axes_of_their_dimensions():
    """By hand: rows of a kernel are over its first axes, columns over its second."""
    state = TrainState.create(params(), OPTIMIZERS['adafactor']())
    axes = by_path(resolve(BY_RULES).resolve_state(state, MESH).mesh_axes)
    of = {path.removeprefix('opt_state/0/'): spec for path, spec in axes.items()}
    # optax reduces the largest dimension for v_row and the second largest for v_col.
    assert of['v_row/fc1/kernel'] == P('data') and of['v_col/fc1/kernel'] == P('model')
    assert of['v_row/fc2/kernel'] == P('data') and of['v_col/fc2/kernel'] == P('model')


def test_the_audit_of_a_plan():
    resolved = resolve(BY_RULES)
    partitioner = PjitPartitioner(mesh=MESH, plan=resolved)
    state = partitioner.init(lambda: TrainState.create(_born(), OPTIMIZERS['adamw']()))
    audit = partitioner.audit(state)
    assert audit.by_category['parameters'] == resolved.bytes_per_device
    assert not audit.misplaced
    rows = {row.path.removeprefix('params/'): row for row in audit.arrays}
    for row in resolved.arrays:
        assert rows[row.path].spec == row.spec
        assert rows[row.path].shard_shape == row.shard_shape
    moved = jax.device_put(state, NamedSharding(MESH, P()))
    misplaced = {row.path for row in partitioner.audit(moved).misplaced}
    assert {'params/fc1/kernel', 'params/fc2/kernel'} <= misplaced


def _born():
    return jax.tree.map(jnp.zeros_like, params())


def test_gradients_are_those_of_one_device():
    def gradients(p, x):
        def loss(p):
            y = jnp.tanh(x @ p['fc1']['kernel'] + p['fc1']['bias'])
            return jnp.mean((y @ p['fc2']['kernel'] + p['fc2']['bias'] - x) ** 2)

        return jax.value_and_grad(loss)(p)

    resolved, x = resolve(BY_RULES), np.ones((8, 16), 'float32')
    axes = resolved.mesh_axes(params())
    partitioner = PjitPartitioner(mesh=MESH, plan=resolved)
    run = partitioner.partition(gradients, (axes, P('data')), (None, axes))
    loss, grads = run(shard_module(params(), resolved, MESH), x)
    assert {path: g.sharding.spec for path, g in by_path(grads).items()} == by_path(axes)
    expected = jax.jit(gradients)(params(), x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), (loss, grads), expected)


def test_padded_parameters():
    tree = {'w': np.ones((29, 12), 'float32'), 'v': np.ones(12, 'float32')}
    resolved = resolve({'w': P('data'), 'v': P('data')}, tree, on_indivisible='pad')
    padded = PaddedSpec(P(None, None), P('data', None))
    expected = {'w': padded, 'v': P('data')}
    assert resolved['w'].mesh_axes == padded
    assert resolved.mesh_axes(tree) == expected
    assert resolved.resolve_state(tree, MESH).mesh_axes == expected
    partitioner = PjitPartitioner(mesh=MESH, plan=resolved, on_indivisible='pad')
    assert partitioner.get_mesh_axes({'params': tree})['params'] == expected
    partitioner = PjitPartitioner(mesh=MESH, plan=resolved)  # the plan has said it
    assert partitioner.get_mesh_axes({'params': tree})['params'] == expected


def test_padding_needs_auto_axes():
    """No plan is made that no partitioner can follow."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=AxisType.Explicit)
    with pytest.raises(ValueError, match="'pad' needs Auto mesh axes"):
        resolve({'w': P('data')}, {'w': np.ones(29)}, mesh, on_indivisible='pad')


USES = {
    'mesh_axes': lambda plan, tree: plan.mesh_axes(tree),
    'resolve_state': lambda plan, tree: plan.resolve_state(tree, MESH),
    'shard_module': lambda plan, tree: shard_module(tree, plan, MESH),
    'plan=': lambda plan, tree: PjitPartitioner(mesh=MESH, plan=plan).get_mesh_axes(
        {'params': tree}
    ),
}


@pytest.mark.parametrize('use', USES)
def test_models_that_are_not_those_of_the_plan(use):
    """Another shape would be laid out by numbers that nobody has reviewed."""
    plan = resolve(ENTRIES)
    other = params()
    other['fc1']['kernel'] = np.zeros((8, 32), 'float32')
    more = params() | {'fc3': {'kernel': np.zeros((8, 8), 'float32')}}
    less = {'fc1': params()['fc1']}
    for tree, message in (
        (other, r'fc1/kernel.*\(8, 32\).*\(16, 64\)'),
        (more, 'fc3/kernel.*plan|plan.*fc3/kernel'),
        (less, 'fc2/bias.*plan|plan.*fc2/bias'),
    ):
        with pytest.raises(ValueError, match=message):
            USES[use](plan, tree)


def test_other_meshes():
    plan, other = resolve(ENTRIES), create_mesh((2, 4), ('data', 'model'))
    message = 'the plan is for the mesh data 4 x model 2, not data 2 x model 4'
    for use in (
        lambda: plan.resolve_state(params(), other),
        lambda: shard_module(params(), plan, other),
        lambda: PjitPartitioner(mesh=other, plan=plan).get_mesh_axes({'params': params()}),
        lambda: plan.check_mesh(other),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    plan.check_mesh(MESH.abstract_mesh)
    assert resolve(ENTRIES, mesh=MESH.abstract_mesh) == plan
