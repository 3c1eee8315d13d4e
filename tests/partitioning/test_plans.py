"""Sharding plans: what entries mean, for every kind of model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from planned_models import (
    ENTRIES,
    KEY,
    MESH,
    MODELS,
    OF_MODELS,
    ONE,
    RULES,
    SHAPES,
    SHARDS,
    SPECS,
    ByData,
    NnxMlp,
    Returns,
    held,
    linen,
    params,
    resolve,
)

from partitioning import PjitPartitioner, create_mesh
from partitioning.compat.pytorch import ShardingPlan, place, shard_module
from partitioning.compat.pytorch import ChunkShardingSpec

pytestmark = pytest.mark.core

# What a plan comes to.


@OF_MODELS
@pytest.mark.parametrize('separator', ['/', '.'])
def test_rows(model, separator):
    plan = {path.replace('/', separator): spec for path, spec in ENTRIES.items()}
    resolved = resolve(plan, MODELS[model]())
    rows = {row.path: row for row in resolved.arrays if row.category == 'parameters'}
    assert {path: row.spec for path, row in rows.items()} == SPECS
    assert {path: row.shape for path, row in rows.items()} == SHAPES
    assert {path: row.shard_shape for path, row in rows.items()} == SHARDS
    assert {row.dtype for row in rows.values()} == {'float32'}
    beside = sum(row.bytes_total for row in resolved.arrays if row.category == 'other')
    assert resolved.bytes_per_device == 4 * sum(np.prod(s) for s in SHARDS.values()) + beside
    assert resolved.bytes_total == 4 * sum(np.prod(s) for s in SHAPES.values()) + beside
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


def test_what_is_beside_the_parameters():
    """Random keys of an nnx module and statistics of linen variables are whole on every device."""
    module = shard_module(NnxMlp(nnx.Rngs(0)), ShardingPlan(ENTRIES), MESH)
    key = module.drop.rngs.key[...]
    assert key.sharding.is_fully_replicated and key.sharding.num_devices == 8
    variables = {'params': params(), 'batch_stats': {'mean': jnp.zeros(8)}}
    resolved = resolve(ENTRIES, variables)
    assert {row.path: row.category for row in resolved.arrays} == {
        **dict.fromkeys(SHAPES, 'parameters'),
        'batch_stats/mean': 'other',
    }
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
    specs = {row.path: row.spec for row in resolved.arrays if row.category == 'parameters'}
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
    rows = {row.path for row in resolved.arrays if row.category == 'parameters'}
    assert {*held(placed)} == rows
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
