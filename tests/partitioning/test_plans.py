"""Sharding plans: what entries mean, for every kind of model, and what is refused."""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import PaddedSpec, PjitPartitioner, TrainState, create_mesh
from partitioning.plans import Sharder, ShardingPlan, diff, parameters, place, shard_module
from partitioning.plans.shards import ChunkShardingSpec

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
MESH = create_mesh((4, 2), ('data', 'model'))
RULES = [('embed', 'data'), ('mlp', 'model')]
SHAPES = {'fc1/bias': (64,), 'fc1/kernel': (16, 64), 'fc2/bias': (16,), 'fc2/kernel': (64, 16)}
ENTRIES = {'fc1/kernel': P(None, 'model'), 'fc2/kernel': P(('model', 'data'))}
SPECS = {
    'fc1/bias': P(None),
    'fc1/kernel': P(None, 'model'),
    'fc2/bias': P(None),
    'fc2/kernel': P(('model', 'data'), None),
}
SHARDS = {'fc1/bias': (64,), 'fc1/kernel': (16, 32), 'fc2/bias': (16,), 'fc2/kernel': (8, 16)}


def params() -> Any:
    rng = np.random.default_rng(0)
    flat = {path: rng.normal(size=shape).astype('float32') for path, shape in SHAPES.items()}
    return {m: {k: flat[f'{m}/{k}'] for k in ('bias', 'kernel')} for m in ('fc1', 'fc2')}


class Mlp(nn.Module):
    """With names in boxes for the kernels, if they are wanted."""

    names: bool = False

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        up, down = init, init
        if self.names:
            up = nn.with_logical_partitioning(init, ('embed', 'mlp'))
            down = nn.with_logical_partitioning(init, ('mlp', 'embed'))
        x = nn.relu(nn.Dense(64, name='fc1', kernel_init=up)(x))
        return nn.Dense(16, name='fc2', kernel_init=down)(x)


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(16, 64, rngs=rngs)
        self.fc2 = nnx.Linear(64, 16, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.fc2(self.drop(nnx.relu(self.fc1(x))))


class Pair(NamedTuple):
    fc1: Any
    fc2: Any


def linen(names=False):
    return Mlp(names).init(KEY, jnp.ones((2, 16)))


MODELS = {
    'a dict': params,
    'a FrozenDict': lambda: freeze(params()),
    'a NamedTuple': lambda: Pair(**params()),
    'linen variables': linen,
    'linen parameters': lambda: linen()['params'],
    'linen boxes': lambda: linen(names=True),
    'an nnx module': lambda: NnxMlp(nnx.Rngs(0)),
    'an nnx state': lambda: nnx.state(NnxMlp(nnx.Rngs(0)), nnx.Param),
}
OF_MODELS = pytest.mark.parametrize('model', MODELS)


def held(module):
    """The arrays of parameters that are not planned any more, by path."""
    return {
        '/'.join(path): x[...] if isinstance(x, nnx.Variable) else x
        for path, x in parameters(module).items()
    }


class ByData(Sharder):
    """All of a module by rows over 'data'."""

    def shard(self, module, mesh):
        if isinstance(module, nnx.Module):
            nnx.update(module, place(nnx.state(module, nnx.Param), mesh, P('data')))
            return module
        return place(module, mesh, P('data'))


class Returns(Sharder):
    """Whatever a function of the module and the mesh makes of it."""

    def __init__(self, function):
        self.function = function

    def shard(self, module, mesh):
        return self.function(module, mesh)


def resolve(plan, module=None, mesh=MESH, rules=None, **policies):
    return ShardingPlan(plan).resolve(
        params() if module is None else module, mesh, rules, **policies
    )


# What a plan comes to.


@OF_MODELS
@pytest.mark.parametrize('separator', ['/', '.'])
def test_rows(model, separator):
    plan = {path.replace('/', separator): spec for path, spec in ENTRIES.items()}
    resolved = resolve(plan, MODELS[model]())
    rows = {row.path: row for row in resolved.arrays}
    assert {path: row.spec for path, row in rows.items()} == SPECS
    assert {path: row.shape for path, row in rows.items()} == SHAPES
    assert {path: row.shard_shape for path, row in rows.items()} == SHARDS
    assert {row.dtype for row in resolved.arrays} == {'float32'}
    assert resolved.bytes_per_device == 4 * sum(np.prod(s) for s in SHARDS.values())
    assert resolved.bytes_total == 4 * sum(np.prod(s) for s in SHAPES.values())
    assert resolved['fc1/kernel'].reason == 'the plan says so'
    assert 'not in the plan' in resolved['fc1/bias'].reason


@OF_MODELS
def test_models_laid_out(model):
    module = MODELS[model]()
    before = {path: np.asarray(jax.tree.leaves(x)[0]) for path, x in held(module).items()}
    after = held(shard_module(module, ShardingPlan(ENTRIES), MESH))
    assert {path: x.sharding for path, x in after.items()} == {
        path: NamedSharding(MESH, spec) for path, spec in SPECS.items()
    }
    assert {path: x.addressable_shards[0].data.shape for path, x in after.items()} == SHARDS
    for path, x in after.items():
        np.testing.assert_array_equal(x, before[path])


@OF_MODELS
def test_a_resolved_plan_lays_out_the_same(model):
    module = MODELS[model]()
    resolved = resolve(ENTRIES, module)
    after = held(shard_module(module, resolved, MESH))
    assert {path: x.sharding.spec for path, x in after.items()} == SPECS


@pytest.mark.parametrize('model', ['a dict', 'linen variables', 'linen boxes'])
def test_nothing_is_needed_but_shapes(model):
    module = MODELS[model]()
    abstract = jax.eval_shape(lambda: module)
    for plan in ENTRIES, {'fc1': ByData(), 'fc2/kernel': P('model')}:
        assert resolve(plan, abstract) == resolve(plan, module)


def test_nothing_is_needed_but_shapes_of_an_nnx_module():
    abstract = nnx.eval_shape(lambda: NnxMlp(nnx.Rngs(0)))
    for plan in ENTRIES, {'fc1': ByData(), 'fc2/kernel': P('model')}:
        assert resolve(plan, abstract) == resolve(plan, NnxMlp(nnx.Rngs(0)))


def test_only_parameters_are_laid_out():
    """Random keys of an nnx module and statistics of linen variables are none."""
    module = shard_module(NnxMlp(nnx.Rngs(0)), ShardingPlan(ENTRIES), MESH)
    assert module.drop.rngs.key[...].sharding.num_devices == 1
    variables = {'params': params(), 'batch_stats': {'mean': jnp.zeros(8)}}
    resolved = resolve(ENTRIES, variables)
    assert {row.path for row in resolved.arrays} == {*SHAPES}
    placed = shard_module(variables, ShardingPlan(ENTRIES), MESH)
    assert placed['batch_stats']['mean'].sharding.is_fully_replicated


def test_the_path_of_linen_variables_may_say_params():
    assert resolve({'params/fc1/kernel': P('data')}, linen())['fc1/kernel'].spec == P('data', None)
    deep = {'params': {'params': {'w': jnp.zeros(8)}, 'w': jnp.zeros(4)}}
    assert resolve({'params/w': P('data')}, deep)['params/w'].spec == P('data')


def test_keys_with_separators_in_them():
    tree = {'fc1.weight': jnp.zeros(8), 'a.b': {'c': jnp.zeros(8)}, 'a': {'b': {'c': jnp.zeros(8)}}}
    resolved = resolve({'fc1.weight': P('data'), 'a.b/c': P('model'), 'a.b.c': P('data')}, tree)
    assert resolved['fc1.weight'].spec == P('data')
    assert resolved['a.b/c'].spec == P('model')
    assert resolved['a/b/c'].spec == P('data')


def test_lists_and_numbers_as_keys():
    tree = {'layers': [{'w': jnp.zeros(8)}, (jnp.zeros(8),) * 2], 'by_number': {3: jnp.zeros(8)}}
    plan = {'layers.0.w': P('data'), 'layers/1': ByData(), 'by_number/3': P('model')}
    resolved = resolve(plan, tree)
    specs = {row.path: row.spec for row in resolved.arrays}
    by_data = dict.fromkeys(['layers/0/w', 'layers/1/0', 'layers/1/1'], P('data'))
    assert specs == {'by_number/3': P('model'), **by_data}


ONE = create_mesh((4, 1, 2), ('data', 'one', 'model'))


@pytest.mark.parametrize(
    'spec',
    [P('one'), P('one', 'data'), P(('data', 'one', 'model')), P(('one',), ('model', 'data')), P()],
)
def test_axes_of_size_1_and_several_in_a_dimension(spec):
    resolved = resolve({'w': spec}, {'w': np.zeros((16, 64), 'float32')}, ONE)
    sharding = NamedSharding(ONE, spec)
    assert resolved['w'].shard_shape == sharding.shard_shape((16, 64))
    placed = shard_module({'w': np.zeros((16, 64))}, resolved, ONE)['w']
    assert placed.sharding.is_equivalent_to(sharding, 2)


class RowsOverModel:
    """As a PartitionerConfig of AutoDist: a spec that depends on mesh and shape."""

    def to_partition_spec(self, mesh, shape):
        return P('model') if shape[0] % mesh.shape['model'] == 0 else P()


@pytest.mark.parametrize(
    'entry',
    [
        P('data', None),
        P('data'),
        P(('data',), None),
        NamedSharding(MESH, P('data')),
        ('rows', None),
        ['rows', 'columns'],
        (('data',), None),
        ('data', None),
        ChunkShardingSpec(0, range(4)),
    ],
)
def test_words_for_one_layout(entry):
    rules = [('rows', 'data'), ('columns', None)]
    assert resolve({'fc1/kernel': entry}, rules=rules)['fc1/kernel'].spec == P('data', None)


def test_layouts_that_depend_on_the_shape():
    plan = {'fc1/kernel': RowsOverModel(), 'w': RowsOverModel()}
    resolved = resolve(plan, {**params(), 'w': jnp.zeros(3)})
    assert resolved['fc1/kernel'].spec == P('model', None)
    assert resolved['w'].spec == P(None)


@pytest.mark.parametrize('entry', [P(), ()])
def test_scalars(entry):
    tree = {'scale': jnp.ones(()), 'number': 3.0, 'w': jnp.ones(8)}
    resolved = resolve({'scale': entry, 'number': entry, 'w': P('data')}, tree)
    assert resolved['scale'].shape == resolved['number'].shape == ()
    placed = shard_module(tree, resolved, MESH)
    assert placed['scale'].sharding == NamedSharding(MESH, P())
    assert placed['number'] == 3.0


def test_random_keys_are_arrays():
    tree = {'keys': jax.random.split(KEY, 8), 'w': jnp.ones(8)}
    resolved = resolve({'keys': P('data')}, tree)
    assert resolved['keys'].dtype == str(KEY.dtype)
    assert resolved['keys'].bytes_total == 8 * KEY.dtype.itemsize
    placed = shard_module(tree, resolved, MESH)['keys']
    assert placed.sharding.is_equivalent_to(NamedSharding(MESH, P('data')), 1)
    np.testing.assert_array_equal(jax.random.key_data(placed), jax.random.key_data(tree['keys']))


@pytest.mark.parametrize('number', [4096, 4097])
def test_large_arrays_that_the_plan_does_not_name(number):
    """16 KiB and no more are replicated without a word."""
    tree = {'w': jax.ShapeDtypeStruct((number,), 'float32')}
    if number == 4096:
        assert resolve({}, tree)['w'].spec == P(None)
        return
    with pytest.raises(
        ValueError, match=r"w of .*not in the plan.* 16,388 bytes.*Add 'w': P"
    ) as error:
        resolve({}, tree)
    assert '8 devices (data 4 x model 2)' in str(error.value)
    for said in resolve({'w': P()}, tree), resolve({}, tree, on_unmatched='replicate'):
        assert said['w'].spec == P(None)


# Names that parameters carry.


def test_names_of_boxes():
    """The rules lay out what the plan does not name."""
    resolved = resolve({'fc2/kernel': P('model')}, linen(names=True), rules=RULES)
    row = resolved['fc1/kernel']
    assert row.spec == P('data', 'model') and row.logical_axes == ('embed', 'mlp')
    assert 'a rule says so' in row.reason
    assert resolved['fc2/kernel'].spec == P('model', None)
    assert resolved['fc2/kernel'].logical_axes is None


def test_names_of_nnx_variables():
    metadata = {'out_sharding': ('embed', 'mlp')}
    with nnx.use_eager_sharding(False):
        module = nnx.Linear(16, 64, rngs=nnx.Rngs(0), kernel_metadata=metadata)
    placed = shard_module(module, ShardingPlan({}), MESH, RULES)
    assert placed.kernel[...].sharding == NamedSharding(MESH, P('data', 'model'))


def test_rules_that_a_box_has_of_its_own():
    """As a partitioner takes them, before all others."""
    box = nn.LogicallyPartitioned(jnp.ones((8, 8)), ('a', 'b'), rules=(('a', 'model'), ('b', None)))
    rules = [('a', 'data'), ('b', 'data')]
    by_rules = PjitPartitioner(mesh=MESH, logical_axis_rules=rules).get_mesh_axes(
        {'params': {'w': box}}
    )
    assert by_rules['params']['w'] == P('model', None)
    assert resolve({}, {'w': box}, rules=rules)['w'].spec == P('model', None)


# Sharders.


@OF_MODELS
def test_a_sharder(model):
    module = MODELS[model]()
    resolved = resolve({'fc1': ByData(), 'fc2.kernel': P('model')}, module)
    specs = {row.path: row.spec for row in resolved.arrays}
    assert specs == {
        'fc1/bias': P('data'),
        'fc1/kernel': P('data', None),
        'fc2/bias': P(None),
        'fc2/kernel': P('model', None),
    }
    assert resolved['fc1/bias'].reason == 'ByData says so'
    plan = ShardingPlan({'fc1': ByData(), 'fc2.kernel': P('model')})
    assert {
        path: x.sharding.spec for path, x in held(shard_module(module, plan, MESH)).items()
    } == specs


def test_a_sharder_of_one_parameter():
    resolved = resolve({'fc1/kernel': ByData()})
    assert resolved['fc1/kernel'].spec == P('data', None)
    assert resolved['fc1/bias'].spec == P(None)


def test_a_sharder_may_return_another_structure():
    def halves(module, mesh):
        kernel = module['kernel']
        parts = {'left': kernel[:, :32], 'right': kernel[:, 32:]}
        return {'kernels': [place(parts, mesh, P('data'))], 'bias': module['bias']}

    given = params()
    placed = shard_module(given, ShardingPlan({'fc1': Returns(halves)}), MESH)
    specs = {path: x.sharding.spec for path, x in held(placed).items()}
    assert specs == {
        'fc1/bias': P(None),
        'fc1/kernels/0/left': P('data', None),
        'fc1/kernels/0/right': P('data', None),
        'fc2/bias': P(None),
        'fc2/kernel': P(None, None),
    }
    np.testing.assert_array_equal(
        placed['fc1']['kernels'][0]['right'], given['fc1']['kernel'][:, 32:]
    )


def test_a_sharder_may_return_another_nnx_module():
    class Two(nnx.Module):
        def __init__(self, old):
            self.first, self.bias = nnx.Param(old.kernel[:, :32]), old.bias
            self.second = nnx.Param(old.kernel[:, 32:])

    module = NnxMlp(nnx.Rngs(0))
    plan = ShardingPlan({'fc1': Returns(lambda old, mesh: Two(old))})
    resolved = plan.resolve(module, MESH)
    assert isinstance(module.fc1, nnx.Linear), 'to resolve changes nothing'
    placed = shard_module(module, plan, MESH)
    assert isinstance(placed.fc1, Two) and placed is module
    assert {*held(placed)} == {row.path for row in resolved.arrays}
    assert 'fc1/second' in held(placed)


def test_what_a_sharder_does_not_lay_out_is_not_named():
    tree = {'big': {'w': np.zeros((64, 128), 'float32')}}
    for function in (
        lambda module, mesh: module,
        lambda module, mesh: jax.tree.map(jnp.asarray, module),
    ):
        with pytest.raises(ValueError, match=r'big/w of shape .* is not in the plan'):
            resolve({'big': Returns(function)}, tree)


def test_a_sharder_that_forgets_to_return():
    """The module would be gone, and the model with it."""
    with pytest.raises((TypeError, ValueError), match=r'fc1.*None'):
        resolve({'fc1': Returns(lambda module, mesh: None)})


def test_a_sharder_that_lays_out_over_another_mesh():
    """As of a NamedSharding in the plan."""
    other = create_mesh((4,), ('model',), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match=r'fc1/.*mesh model 4.*data 4 x model 2'):
        resolve({'fc1': Returns(lambda module, mesh: place(module, other, P('model')))})


# One array by several names.


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(16, 16, rngs=rngs)
        self.later = self.first
        self.last = nnx.Linear(16, 16, rngs=rngs)
        self.last.kernel = self.first.kernel


def test_shared_modules_stay_shared():
    module = Tied(nnx.Rngs(0))
    shard_module(module, ShardingPlan({'first/kernel': P('data')}), MESH)
    assert module.later is module.first and module.last.kernel is module.first.kernel
    assert module.last.kernel[...].sharding.spec == P('data', None)


def test_shared_parameters_are_there_once():
    """The plan counts no byte twice, and has the paths of the state that is trained."""
    module = Tied(nnx.Rngs(0))
    resolved = resolve({'first/kernel': P('data')}, module)
    state = nnx.state(module, nnx.Param)
    assert resolved.bytes_total == sum(x.nbytes for x in jax.tree.leaves(state))
    resolved.mesh_axes(state)
    PjitPartitioner(mesh=MESH, plan=resolved).get_mesh_axes(state)


@pytest.mark.parametrize('name', ['later/kernel', 'last/kernel'])
def test_a_shared_parameter_by_its_other_names(name):
    """The layout is used or refused, not passed over."""
    module = Tied(nnx.Rngs(0))
    try:
        shard_module(module, ShardingPlan({name: P('data')}), MESH)
    except ValueError as error:
        assert 'first/kernel' in str(error)
    else:
        assert module.first.kernel[...].sharding.spec == P('data', None)


def test_two_layouts_for_one_shared_parameter():
    plan = ShardingPlan({'first/kernel': P('data'), 'last/kernel': P('model')})
    with pytest.raises(ValueError, match=r'first/kernel.*last/kernel|last/kernel.*first/kernel'):
        shard_module(Tied(nnx.Rngs(0)), plan, MESH)


# A plan drives a partitioner.

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
    with pytest.raises(ValueError, match=r"w: .*29 does not divide by 4.*'pad'"):
        PjitPartitioner(mesh=MESH, plan=resolved).get_mesh_axes({'params': tree})


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
        lambda: plan.check(params(), other),
    ):
        with pytest.raises(ValueError, match=message):
            use()
    plan.check(params(), MESH.abstract_mesh)
    assert resolve(ENTRIES, mesh=MESH.abstract_mesh) == plan


# Anything that the mesh can have.

SIZES = st.sampled_from([0, 1, 2, 4, 8, 24])


@st.composite
def specs_and_shapes(draw):
    """A shape, and a spec that divides it."""
    axes = draw(st.permutations(['data', 'one', 'model']))
    shape, entries = [], []
    for _ in range(draw(st.integers(0, 3))):
        taken = tuple(axes.pop() for _ in range(draw(st.integers(0, min(2, len(axes))))))
        ways = int(np.prod([ONE.shape[a] for a in taken]))
        size = draw(SIZES)
        shape.append(size if size % ways == 0 else size * ways)
        entries.append(
            draw(st.sampled_from([taken, taken[0]])) if len(taken) == 1 else taken or None
        )
    return tuple(shape), P(*entries)


@settings(max_examples=100, deadline=None)
@given(specs_and_shapes(), st.sampled_from(['float32', 'bfloat16', 'int8']))
def test_rows_are_what_jax_does(of, dtype):
    shape, spec = of
    row = resolve({'w': spec}, {'w': jax.ShapeDtypeStruct(shape, dtype)}, ONE)['w']
    sharding = NamedSharding(ONE, spec)
    assert row.shard_shape == sharding.shard_shape(shape)
    assert row.bytes_per_device == int(np.prod(row.shard_shape)) * jnp.dtype(dtype).itemsize
    assert NamedSharding(ONE, row.spec).is_equivalent_to(sharding, len(shape))
    assert len(row.spec) == len(shape)


# Held wrong.


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
    with pytest.raises(ValueError, match='plan and params_axes_names_override'):
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
