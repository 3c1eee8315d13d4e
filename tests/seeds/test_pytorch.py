"""PyTorch's ShardingPlan on a mesh: behaviours C1 to C8 and C17 to C19 of the seeds."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from boxed_states import by_path
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from mock_devices import mesh_of_processes

from partitioning import LocalChunker, PaddedSpec, PjitPartitioner, create_mesh
from partitioning.compat.pytorch import (
    ChunkShardingSpec,
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    constrain_outputs,
    place,
    shard_module,
)
from partitioning.plan import impose_plan

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
TWO_LAYERS = {  # PyTorch's order: (out, in)
    'fc1': {'weight': (12, 17), 'bias': (12,)},
    'fc2': {'weight': (29, 12), 'bias': (29,)},
}


@pytest.fixture(scope='module')
def four():
    return create_mesh((4,), ('model',), devices=jax.devices()[:4])


@pytest.fixture(scope='module')
def mesh():
    return create_mesh((4, 2), ('data', 'model'))


def arrays(shapes):
    rng = np.random.default_rng(0)
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    return jax.tree.map(lambda s: rng.normal(size=s).astype('float32'), shapes, is_leaf=is_leaf)


def two_layers(params, x):
    x = jnp.maximum(x @ params['fc1']['weight'].T + params['fc1']['bias'], 0)
    return x @ params['fc2']['weight'].T + params['fc2']['bias']


def specs(tree):
    return {path: x.sharding.spec for path, x in by_path(tree).items()}


def test_C1_a_plan_is_plain_data():
    """The entries are not checked before there is a model."""
    plan = ShardingPlan({'nowhere': 'nothing'})
    assert dataclasses.is_dataclass(plan)
    assert (plan.output_plan, plan.return_local_tensor) == (None, None)
    fields = [field.name for field in dataclasses.fields(ShardingPlan)]
    assert fields == ['plan', 'output_plan', 'return_local_tensor']


@pytest.mark.parametrize('base', [ShardingPlanner, Sharder])
def test_C1_planners_are_abstract(base):
    for cls in base, type('Unfinished', (base,), {}):
        with pytest.raises(TypeError, match='abstract'):
            cls()


@pytest.mark.parametrize('entry', [np.ones(3), jnp.ones(3), 3, 'model', None, {}, Sharder])
def test_C2_entries_that_are_not_a_layout(four, entry):
    with pytest.raises(TypeError, match=r"Only .* supported to shard 'fc1\.weight'"):
        ShardingPlan({'fc1.weight': entry}).resolve(arrays(TWO_LAYERS), four)


@pytest.mark.parametrize('entry', [np.ones(3), jnp.ones(3), 3, 'model', None, {}])
def test_C3_output_entries_that_are_not_a_layout(four, entry):
    plan = ShardingPlan({'fc1.weight': P()}, output_plan={'fc1': entry})
    with pytest.raises(TypeError, match=r"Only .* supported as output_plan for 'fc1'"):
        plan.resolve(arrays(TWO_LAYERS), four)
    with pytest.raises(TypeError, match=r"Only .* supported as output_plan for 'fc1'"):
        constrain_outputs(plan).__enter__()


def test_C4_unknown_modules_and_parameters(four):
    with pytest.raises(
        ValueError, match=r"parameter or module 'fc1.biass'.*Did you mean 'fc1/bias'"
    ):
        ShardingPlan({'fc1.biass': P()}).resolve(arrays(TWO_LAYERS), four)
    with pytest.raises(
        ValueError, match=r"parameter or module 'fc3.weight'.*fc1/weight.*fc2/weight"
    ):
        ShardingPlan({'fc3.weight': P()}).resolve(arrays(TWO_LAYERS), four)


class RowsOrColumns(Sharder):
    """Shards the rows of the tables below `split`, and the columns of the others."""

    def __init__(self, split: int):
        self.split = split

    def shard(self, module, mesh):
        if not isinstance(module, dict):
            raise TypeError(f'{type(module).__name__} is not a dict of tables')
        rows, columns = P('model'), P(None, 'model')
        return {
            name: place(table, mesh, rows if int(name.split('_')[1]) < self.split else columns)
            for name, table in module.items()
        }


BAGS = {f'bag_{i}': (12, 8) for i in range(10)}


def test_C5_a_sharder_needs_a_path(four):
    with pytest.raises(ValueError, match="'' is not a path"):
        ShardingPlan({'': RowsOrColumns(2)}).resolve(arrays({'bags': BAGS}), four)


def test_C5_a_sharder_and_a_spec_for_the_same_array(four):
    plan = {'bags': RowsOrColumns(2), 'bags.bag_0': P('model')}
    for entries in plan, dict(reversed(plan.items())):
        with pytest.raises(ValueError, match=r"'bags.*'bags.*within the other"):
            ShardingPlan(entries).resolve(arrays({'bags': BAGS}), four)


def test_C5_names_with_a_common_beginning_do_not_conflict(four):
    tree = arrays({'bags': BAGS, 'bags2': {'w': (8, 8)}})
    plan = ShardingPlan({'bags': RowsOrColumns(2), 'bags2.w': P('model')})
    assert plan.resolve(tree, four)['bags2/w'].spec == P('model', None)


class OneTable(Sharder):
    """Joins all tables into one, which is another structure."""

    def shard(self, module, mesh):
        return {'all': place(jnp.concatenate([*module.values()]), mesh, P('model'))}


def test_C6_what_a_sharder_returns_is_the_module(four):
    tree = arrays({'bags': BAGS, 'top': (8, 8)})
    placed = shard_module(tree, ShardingPlan({'bags': OneTable()}), four)
    assert {*by_path(placed)} == {'bags/all', 'top'}
    assert specs(placed)['bags/all'] == P('model', None)
    np.testing.assert_array_equal(placed['bags']['all'][12:24], tree['bags']['bag_1'])
    assert {*by_path(tree)} == {'top', *(f'bags/{name}' for name in BAGS)}, (
        'the given tree is unchanged'
    )


class ChunkAll(ShardingPlanner):
    def __init__(self, dim: int, devices: int):
        self.spec = ChunkShardingSpec(dim, [f'rank:{i}/cuda:{i}' for i in range(devices)])

    def build_plan(self, module, mesh):
        return ShardingPlan(dict.fromkeys(by_path(module), self.spec))


def test_C7_chunks_of_every_parameter(four):
    """29 rows in 4 chunks are 8, 8, 8 and 5, which jax does not lay out without a policy."""
    params = arrays(TWO_LAYERS)
    plan = ChunkAll(0, 4).build_plan(params, four)
    assert {*plan.plan} == {'fc1/weight', 'fc1/bias', 'fc2/weight', 'fc2/bias'}
    sizes = {
        path: [s.shard_sizes[0] for s in plan.plan[path].build_metadata(x.shape)]
        for path, x in by_path(params).items()
    }
    assert sizes['fc1/weight'] == sizes['fc1/bias'] == [3, 3, 3, 3]
    assert sizes['fc2/weight'] == sizes['fc2/bias'] == [8, 8, 8, 5]
    with pytest.raises(ValueError, match=r'fc2/bias.*size 29 .* 4\b.*28 or 32.*on_indivisible'):
        plan.resolve(params, four)
    with pytest.raises(ValueError, match=r'fc2/bias.*size 29 .* 4\b'):
        shard_module(params, plan, four)


@pytest.mark.parametrize('policy', ['replicate', 'drop_axis', 'pad'])
def test_C7_the_output_equals_that_of_the_whole_model(four, policy):
    params, x = arrays(TWO_LAYERS), np.ones((8, 17), 'float32')
    plan = ChunkAll(0, 4).build_plan(params, four)
    resolved = plan.resolve(params, four, on_indivisible=policy)
    assert resolved['fc1/weight'].shard_shape == (3, 17)
    assert resolved['fc2/weight'].shard_shape == (29, 12)
    whole = P(None, None)
    padded = PaddedSpec(whole, P('model', None)) if policy == 'pad' else whole
    assert resolved['fc2/weight'].spec == padded
    partitioner = PjitPartitioner(mesh=four)
    run = partitioner.partition(two_layers, (impose_plan(resolved, params, four).specs, None), None)
    placed = shard_module(params, plan, four, on_indivisible=policy)
    assert specs(placed)['fc1/weight'] == P('model', None)
    np.testing.assert_allclose(run(placed, x), two_layers(params, x), rtol=1e-4, atol=1e-4)


def bags_of(tables, ids):
    """The means of the given rows of each table, concatenated."""
    return jnp.concatenate([table[ids].mean(1) for table in tables], axis=-1)


def test_C8_a_sharder_of_ten_tables(four):
    tables, ids = arrays({'bags': BAGS}), np.arange(8).reshape(2, 4)
    placed = shard_module(tables, ShardingPlan({'bags': RowsOrColumns(4 // 2)}), four)
    assert specs(placed)['bags/bag_0'] == P('model', None)
    assert specs(placed)['bags/bag_9'] == P(None, 'model')
    assert placed['bags']['bag_0'].addressable_shards[0].data.shape == (3, 8)
    assert placed['bags']['bag_9'].addressable_shards[0].data.shape == (12, 2)
    out = jax.jit(lambda t, ids: bags_of([*t['bags'].values()], ids))(placed, ids)
    np.testing.assert_allclose(out, bags_of([*tables['bags'].values()], ids), rtol=1e-6)


def test_C8_a_module_that_the_sharder_refuses(four):
    """The error of the Sharder is raised as it is, and the model is unchanged."""
    plan, tree = ShardingPlan({'bags': RowsOrColumns(2)}), {'bags': [np.ones((8, 8))]}
    for lay_out in (shard_module, lambda tree, plan, mesh: plan.resolve(tree, mesh)):
        with pytest.raises(TypeError, match=r'^list is not a dict of tables$'):
            lay_out(tree, plan, four)
    assert type(tree['bags'][0]) is np.ndarray


def test_C8_a_sharder_gets_its_module_and_must_return_one(four):
    tree, given = arrays({'bags': BAGS, 'top': (8, 8)}), []

    class Forgetful(Sharder):
        def shard(self, module, mesh):
            given.append((module, mesh))

    with pytest.raises(TypeError, match=r"Forgetful\.shard of 'bags' has returned None"):
        shard_module(tree, ShardingPlan({'bags': Forgetful()}), four)
    [(module, mesh)] = given
    assert {*module} == {*BAGS} and mesh is four


class Mlp(nn.Module):
    """16 -> 64 -> 16; `explicit` is the spec of the output whose sum is over devices."""

    explicit: P | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64, name='fc1')(x))
        dot = jax.lax.dot_general
        if self.explicit is not None:
            dot = lambda *a, **k: jax.lax.dot_general(*a, **k, out_sharding=self.explicit)  # noqa: E731
        return nn.Dense(16, name='fc2', use_bias=False, dot_general=dot)(x)


def test_C17_local_tensors_are_parts_of_the_global_array(four):
    """jax does not squeeze: 4 rows over 4 devices stay (4, 16), in blocks of (1, 16).

    One process has all devices here, so it reads all rows. A LocalChunker tells which rows each of
    four processes would read.
    """
    model, x = Mlp(), np.random.default_rng(0).normal(size=(4, 16)).astype('float32')
    variables = model.init(KEY, x)
    expected = np.asarray(model.apply(variables, x))
    plan = ShardingPlan({}, {'fc2': P('model')}, return_local_tensor=['fc2'])
    partitioner = PjitPartitioner(mesh=four)

    def run(variables, x):
        with constrain_outputs(plan):
            return model.apply(variables, x)

    out = jax.jit(run)(variables, x)
    assert out.shape == (4, 16), 'without a mesh nothing is sharded'
    with jax.set_mesh(four):
        out = jax.jit(run)(variables, x)
    assert out.shape == (4, 16)
    blocks = {s.device.id: s.data for s in out.addressable_shards}
    assert {*blocks} == {0, 1, 2, 3}
    for row, block in blocks.items():
        assert block.shape == (1, 16)
        np.testing.assert_allclose(block, expected[row : row + 1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(partitioner.to_local(out), expected, rtol=1e-5, atol=1e-6)
    each = mesh_of_processes(range(4), ('model',))
    for process in range(4):
        [chunk] = LocalChunker(each, process).get_local_chunks((4, 16), P('model', None))
        assert chunk.slice == (slice(process, process + 1), slice(None))


@pytest.mark.parametrize('outputs', [None, {'fc1': P('model')}])
def test_C17_local_tensors_without_a_layout(four, outputs):
    plan = ShardingPlan({}, outputs, return_local_tensor=['fc2'])
    message = "return_local_tensor names 'fc2', which has no layout in output_plan"
    with pytest.raises(ValueError, match=message):
        plan.resolve(arrays(TWO_LAYERS), four, on_unmatched='replicate')
    with pytest.raises(ValueError, match=message), constrain_outputs(plan):
        pass


def test_C18_arrays_are_global_and_in_any_memory_order(four):
    """Arrays have no source rank, and may have any order in memory."""
    turned = np.arange(32, dtype='float32').reshape(4, 8).T
    assert not turned.flags['C_CONTIGUOUS']
    for given in turned, turned[::-1], np.asfortranarray(turned), jnp.asarray(turned):
        placed = shard_module({'w': given}, ShardingPlan({'w': P('model')}), four)['w']
        assert placed.sharding == NamedSharding(four, P('model', None))
        np.testing.assert_array_equal(placed, given)


PLAN = ShardingPlan(
    {'fc1/kernel': P(None, 'model'), 'fc2/kernel': P('model', None)},
    output_plan={'fc2': P('data', 'model')},
)


def lay_out(model, mesh):
    """The parameters, the output, and the output on one device."""
    x = np.random.default_rng(0).normal(size=(8, 16)).astype('float32')
    variables = Mlp().init(KEY, x)
    placed = shard_module(variables, PLAN, mesh)

    def run(variables, x):
        with constrain_outputs(PLAN):
            return model.apply(variables, x)

    with jax.set_mesh(mesh):
        out = jax.jit(run)(placed, jax.device_put(x, NamedSharding(mesh, P('data'))))
    return placed, out, Mlp().apply(variables, x)


def test_C19_a_plan_on_auto_axes(mesh):
    placed, out, expected = lay_out(Mlp(), mesh)
    assert specs(placed)['params/fc1/kernel'] == P(None, 'model')
    assert specs(placed)['params/fc2/kernel'] == P('model', None)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P('data', 'model')), 2)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_C19_a_plan_on_explicit_axes():
    """jax requires an out_sharding for a sum over devices; then the plan's layout applies."""
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=AxisType.Explicit)
    with pytest.raises(Exception, match=r'[Cc]ontracting dimensions are sharded') as error:
        lay_out(Mlp(), mesh)
    assert error.type.__name__ == 'ShardingTypeError'
    _, out, expected = lay_out(Mlp(explicit=P('data', None)), mesh)
    assert out.sharding == NamedSharding(mesh, P('data', 'model'))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
