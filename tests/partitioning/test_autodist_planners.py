"""AutoDist's planners and configurations on meshes, beyond what AutoDist itself has."""

import dataclasses
import json
import re
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import PaddedSpec, PjitPartitioner, TrainState, create_mesh
from partitioning.compat.autodist import (
    PS,
    AllReduce,
    GraphConfig,
    NodeConfig,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PartitionerConfig,
    RandomAxisPartitionAR,
    Strategy,
    UnevenPartitionedPS,
    Variable,
    VariablePartitioner,
    compress_gradients,
    describe_variables,
    split_axis,
    split_offsets,
    split_rows,
    split_sizes,
)
from partitioning.compat.pytorch import ShardingPlan, shard_module

pytestmark = pytest.mark.core

PARAMS = {'fc1': {'kernel': jnp.ones((8, 16)), 'bias': jnp.ones(16)}, 'emb': jnp.ones((32, 8))}


def mesh_of(*shape, names=('data', 'model'), **settings):
    devices = jax.devices()[: int(np.prod(shape))]
    return create_mesh(shape, names[: len(shape)], devices=devices, **settings)


@given(st.integers(1, 300), st.data())
@settings(deadline=None)
def test_shards_are_those_of_numpy(size, data):
    num = data.draw(st.integers(1, size))
    parts = np.array_split(np.arange(size), num)
    assert split_sizes(size, num) == tuple(map(len, parts))
    shards, local = split_rows(np.arange(size), size, num)
    assert shards.tolist() == [i for i, part in enumerate(parts) for _ in part]
    assert local.tolist() == [k for part in parts for k in range(len(part))]


@pytest.mark.parametrize(
    'call, message',
    [
        (lambda: split_sizes(3, 4), 'size 3 has no 4 shards'),
        (lambda: split_sizes(0, 1), '1 or more'),
        (lambda: split_rows([3], 3, 2), 'row 3 is not in a variable of 3 rows'),
        (lambda: split_rows([0.5], 3, 2), 'not whole numbers'),
    ],
)
def test_what_cannot_be_split(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.integers(0, 3), st.integers(2, 9), st.integers(0, 3))
@settings(deadline=None)
def test_configs_and_specs_are_one(before, count, after):
    config = PartitionerConfig([*[1] * before, count, *[1] * after])
    sizes = {'one': 1, 'other': 10, 'cut': count}
    spec = config.to_partition_spec(sizes)
    assert spec == P(*[None] * before, 'cut')
    assert PartitionerConfig.from_partition_spec(spec, sizes, before + 1 + after) == config


def test_configs_of_specs():
    sizes = {'data': 2, 'model': 4, 'one': 1}
    both = PartitionerConfig.from_partition_spec(P('one', ('data', 'model')), sizes, 3)
    assert both.partition_str == '1,8,1'
    for spec in P('data', 'model'), P(), P('one'):
        with pytest.raises(ValueError, match='AutoDist cuts variables along one axis'):
            PartitionerConfig.from_partition_spec(spec, sizes, 2)
    with pytest.raises(ValueError, match="Did you mean 'data'"):
        PartitionerConfig.from_partition_spec(P('date'), sizes, 2)


def test_configs_are_values():
    config = PartitionerConfig(partition_str='1,4')
    assert {config: 1}[PartitionerConfig(np.array([1, 4]))] == 1
    assert eval(repr(config)) == config
    for wrong in ({'partition_list': 4}, {'partition_list': '1,4'}, {'partition_str': 4}):
        with pytest.raises(ValueError):
            PartitionerConfig(**wrong)


# Variables and strategies.


def test_variables_of_trees():
    found = describe_variables({'params': PARAMS}, sparse=['em.'])
    assert [v.name for v in found] == ['emb', 'fc1/bias', 'fc1/kernel']
    assert [v.sparse for v in found] == [True, False, False]
    assert [v.nbytes for v in found] == [1024, 64, 512]
    half = describe_variables(jax.ShapeDtypeStruct((3, 5), 'bfloat16'))
    assert (half[0].nbytes, half[0].dtype) == (30, 'bfloat16')


@pytest.mark.parametrize(
    'sparse, message',
    [
        (['embd'], "'embd' matches no variable. Did you mean 'emb'?"),
        ('emb', r"write \['emb'\]"),
        (['('], 'no regular expression'),
    ],
)
def test_sparse_variables_that_are_none(sparse, message):
    with pytest.raises(ValueError, match=message):
        describe_variables(PARAMS, sparse)


def test_nnx_and_linen_have_the_same_plan():
    module = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    variables = nn.Dense(16).init(jax.random.key(0), jnp.ones((1, 8)))
    mesh = mesh_of(2, 4)
    plans = [PartitionedPS().build_plan(x, mesh).plan for x in (module, variables)]
    assert plans[0] == plans[1] == {'kernel': P('data'), 'bias': P('data')}
    placed = shard_module(module, PartitionedPS().build_plan(module, mesh), mesh)
    assert placed.kernel[...].sharding.shard_shape((8, 16)) == (4, 16)


def test_parallax_guesses_by_name():
    params = {'Embedding_0': {'embedding': jnp.ones((8, 4))}, 'dense': {'kernel': jnp.ones((4, 4))}}
    assert list(Parallax().build(params, ['A']).placements) == ['Embedding_0/embedding']
    strategy = Parallax(sparse=['dense/.*']).build(params, ['A'])
    assert list(strategy.placements) == ['dense/kernel']
    assert not Parallax(sparse=()).build(params, ['A']).placements


@pytest.mark.parametrize('servers', [[], 'AB', ['A', 'A'], [1], 2])
def test_servers_that_are_none(servers):
    with pytest.raises(ValueError, match='servers'):
        PS().build(PARAMS, servers)


def test_the_report():
    report = PartitionedPS().build(PARAMS, ['A', 'B', 'C']).report()
    assert re.search(r'fc1/kernel +8 x 16 +512 +2 +2,1 +[ABC], [ABC]\n', report)
    loads = dict(re.findall(r'^([ABC]) +([\d,]+)$', report, re.MULTILINE))
    assert sum(int(load.replace(',', '')) for load in loads.values()) == 1600
    assert 'balance' in report
    assert 'all-reduce group 0' in AllReduce().build(PARAMS, ['A']).report()


def test_the_report_of_very_many_shards():
    emb = [Variable('emb', (32_003, 4))]
    served = PartitionedPS().build(emb, ['A', 'B']).report()
    assert re.search(r'32003,1 +A, B in turns\n', served)
    many = PartitionedPS().build(emb, [f's{i}' for i in range(9)]).report()
    assert 's0, s1, s2, s3, s4, s5 and 3 more in turns' in many
    reduced = PartitionedAR(chunk_size=1).build(emb, ['A']).report()
    assert 'all-reduce groups 0, 1, 2, 3, 4, 5 and 31997 more' in reduced
    assert max(map(len, f'{served}{many}{reduced}'.splitlines())) < 120
    node = PartitionedPS().build([Variable('w', (7,))], ['A', 'B']).node_config[0]
    moved = dataclasses.replace(node, servers=('A',) * 6 + ('B',))
    graph = GraphConfig(planner='mine', servers=('A', 'B'))
    assert 'A, B in another order' in Strategy(node_config=(moved,), graph_config=graph).report()


@pytest.mark.parametrize('planner', [AllReduce, PartitionedAR, RandomAxisPartitionAR, Parallax])
def test_settings_of_all_reduces(planner):
    assert planner(all_reduce_spec='AUTO', compressor='NoneCompressor') == planner()
    with pytest.raises(ValueError, match="all_reduce_spec 'NCCL' cannot be had: XLA chooses"):
        planner(all_reduce_spec='NCCL')
    with pytest.raises(ValueError, match=r"'HorovodCompressor'.*compress_gradients\("):
        planner(compressor='HorovodCompressor')


def test_strategies_are_files(tmp_path):
    strategy = PS().build(PARAMS, ['A'])
    with pytest.raises(ValueError, match=f"takes the file to write, such as '{strategy.id}.json'"):
        strategy.serialize()
    with pytest.raises(FileNotFoundError, match='not the id of a strategy'):
        Strategy.deserialize(strategy.id)
    path = tmp_path / 'strategy.json'
    assert strategy.serialize(path=path).path == str(path)
    assert Strategy.deserialize(path) == strategy


def test_variables_in_any_sequence():
    named = {'emb': Variable('emb', (32, 8)), 'w': Variable('w', (8,))}
    strategy = PartitionedPS().build([*named.values()], ['A'])
    for given_variables in (iter(named.values()), named.values(), tuple(named.values())):
        assert PartitionedPS().build(given_variables, ['A']) == strategy
    for wrong in (named['emb'], named, [named['emb'], jnp.ones(3)], iter([jnp.ones(3)])):
        with pytest.raises(TypeError, match=r'Variables: give a list, \[Variable'):
            PS().build(wrong, ['A'])
    with pytest.raises(ValueError, match='no variables'):
        PS().build(iter([]), ['A'])


def test_strategies_of_one_content_have_one_id():
    strategy = RandomAxisPartitionAR(seed=3).build(PARAMS, ['A'])
    text = strategy.to_json()
    assert strategy.to_json() == text and Strategy.from_json(text) == strategy
    assert json.loads(text)['id'] == strategy.id
    other = RandomAxisPartitionAR(seed=3, mesh_axis='model').build(PARAMS, ['A'])
    assert other.id == strategy.id


@pytest.mark.parametrize(
    'change, message',
    [
        (('"A"', '"B"'), 'after a change write that'),
        (('"sparse"', '"sparce"'), "Did you mean 'sparse'"),
        (('"PS"', '"P2P"'), "neither 'PS' nor 'AllReduce'"),
        (('"2,1"', '"2"'), "partitioner '2' is not for an array of shape"),
        (('"2,1"', '"3,1"'), '3 shards has 3 servers'),
        (('"servers": ["A", "A"]', '"servers": ["A"]'), '2 servers'),
        (('"float32"', '"floaty"'), 'no type of arrays'),
        (('{', '['), 'is JSON, but this is none'),
    ],
)
def test_strategies_changed_by_hand(change, message, tmp_path):
    path = tmp_path / 'strategy.json'
    path.write_text(PartitionedPS().build(PARAMS, ['A']).to_json().replace(*change, 1))
    with pytest.raises(ValueError, match=message) as error:
        Strategy.deserialize(path)
    assert str(path) in str(error.value)


def test_strategies_name_their_servers():
    strategy = PS().build(PARAMS, ['A'])
    with pytest.raises(ValueError, match='none of the servers'):
        dataclasses.replace(strategy, graph_config=GraphConfig(planner='PS', servers=('B',)))
    with pytest.raises(ValueError, match='emb is in the strategy more than once'):
        dataclasses.replace(strategy, node_config=strategy.node_config[:1] * 2)


def test_sparse_variables_are_cut_by_rows():
    with pytest.raises(ValueError, match='first axis'):
        NodeConfig(
            variable=Variable('emb', (8, 4), sparse=True),
            partitioner='1,2',
            synchronizer='AllReduce',
            groups=(0, 0),
        )


# Onto a mesh.


@pytest.mark.parametrize(
    'sizes, axis',
    [
        ({'data': 1, 'model': 8}, 'model'),
        ({'data': 2, 'model': 4}, 'data'),
        ({'data': 8, 'model': 1}, 'data'),
        ({'x': 8}, 'x'),
        ({'data': 1, 'model': 1}, 'data'),
    ],
)
def test_the_axis_that_splits(sizes, axis):
    assert split_axis(sizes) == axis


def test_axes_that_could_split():
    with pytest.raises(ValueError, match="'x' or 'y' of the mesh x 2 x y 4"):
        split_axis({'x': 2, 'y': 4})
    with pytest.raises(ValueError, match="Did you mean 'model'"):
        PartitionedPS(mesh_axis='modle').build_plan(PARAMS, mesh_of(2, 4))
    plan = PartitionedPS(mesh_axis='model').build_plan(PARAMS, mesh_of(2, 4))
    assert plan.plan['emb'] == P('model')


def test_the_dimension_that_is_split():
    params = {f'w{i}': jnp.ones((8, 8, 8)) for i in range(12)}
    planner = RandomAxisPartitionAR(seed=0)
    plan = planner.build_plan(params, mesh_of(1, 8)).plan
    wanted = {'2,1,1': P('model'), '1,2,1': P(None, 'model'), '1,1,2': P(None, None, 'model')}
    partitions = planner.build(params, ['A']).partitions
    assert plan == {name: wanted[cut] for name, cut in partitions.items()}
    assert {*partitions.values()} == {*wanted}


def held(tx=None):
    return {'params': PARAMS, 'opt_state': (tx or optax.adam(1e-3)).init(PARAMS), 'step': 0}


def flax_state():
    return train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3))


STATES = {
    'dict': held,
    'ours': lambda: TrainState.create({'params': PARAMS}, optax.adam(1e-3)),
    'flax': flax_state,
    'params': lambda: PARAMS,
    'abstract': lambda: jax.eval_shape(lambda: TrainState.create(PARAMS, optax.adam(1e-3))),
}


@pytest.mark.parametrize('kind', STATES)
def test_parameters_and_moments_together(kind):
    config = {
        'emb': PartitionerConfig([4, 1]),
        'fc1/kernel': '1, 2',
        'fc1/bias': '',
    }
    laid_out = VariablePartitioner(mesh_of(2, 4)).apply(STATES[kind](), config)
    wanted = {'emb': (8, 8), 'kernel': (8, 8), 'bias': (16,)}
    seen = []
    for path, x in jax.tree_util.tree_leaves_with_path(laid_out.state):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        shape = wanted.get(name, ())
        assert x.sharding.shard_shape(x.shape) == shape, path
        seen.append(name)
    assert seen.count('emb') == (1 if kind == 'params' else 3)


def test_nnx_states():
    mesh = mesh_of(2, 4)
    module = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, optax.adam(1e-3), wrt=nnx.Param)
    state = nnx.state((module, optimizer))
    laid_out = VariablePartitioner(mesh).apply(state, PartitionedPS())
    kernels = [
        x
        for path, x in jax.tree_util.tree_leaves_with_path(laid_out.state)
        if "'kernel'" in jax.tree_util.keystr(path)
    ]
    assert len(kernels) == 3
    assert {x.sharding.shard_shape(x.shape) for x in kernels} == {(4, 16)}
    grads = jax.jit(laid_out.shard_gradients)(nnx.state(module, nnx.Param))
    assert grads['kernel'][...].sharding.spec == P('data')


def test_gradients_are_laid_out_as_their_parameters():
    mesh = mesh_of(2, 4)
    laid_out = VariablePartitioner(mesh).apply(held(), PartitionedPS())
    for grads in PARAMS, {'params': PARAMS}:
        found = jax.jit(laid_out.shard_gradients)(grads)
        assert {x.sharding.spec for x in jax.tree.leaves(found)} == {P('data')}
    with pytest.raises(ValueError, match=r"of no parameter of the plan. Did you mean 'emb'"):
        laid_out.shard_gradients({'embd': jnp.ones(3)})
    with pytest.raises(ValueError, match=r'shape \(3,\) of a parameter of \(32, 8\)'):
        laid_out.shard_gradients({'emb': jnp.ones(3)})


def test_gradients_under_explicit_axes():
    mesh = mesh_of(2, 4, axis_types='explicit')
    laid_out = VariablePartitioner(mesh).apply(held(), PartitionedPS())
    grads = jax.jit(laid_out.shard_gradients)(laid_out.state['params'])
    assert grads['emb'].sharding.spec[0] == 'data'


@pytest.mark.parametrize(
    'config, error, message',
    [
        ({'embd': '2,1'}, ValueError, "Did you mean 'emb'"),
        ({'emb': '2,2'}, ValueError, 'emb: .*along one axis'),
        ({'emb': '8,1'}, ValueError, 'no axis of size 8'),
        ({'emb': 3}, TypeError, "'emb'"),
        (PartitionedPS, TypeError, 'neither a partitioner'),
    ],
)
def test_configs_that_are_none(config, error, message):
    with pytest.raises(error, match=message):
        VariablePartitioner(mesh_of(2, 4)).apply(PARAMS, config)


@pytest.mark.parametrize('decided', ['plan', 'resolved', 'strategy'])
def test_whoever_decides(decided):
    mesh = mesh_of(2, 4)
    strategy = PartitionedPS().build(PARAMS, ['A'])
    config = {
        'plan': ShardingPlan({'emb': P('model'), 'fc1/kernel': P(None, 'model'), 'fc1/bias': P()}),
        'resolved': PartitionedPS().build_plan(PARAMS, mesh).resolve(PARAMS, mesh),
        'strategy': strategy,
    }[decided]
    axis = 'model' if decided == 'strategy' else None
    laid_out = VariablePartitioner(mesh, mesh_axis=axis).apply(held(), config)
    rows = {'plan': 8, 'resolved': 16, 'strategy': 8}[decided]
    mu = laid_out.state['opt_state'][0].mu['emb']
    assert mu.sharding.shard_shape(mu.shape) == (rows, 8)


@pytest.mark.parametrize(
    'config, settings, message',
    [
        (PartitionedPS(), {'mesh_axis': 'model'}, r'PartitionedPS has its own: PartitionedPS\('),
        ({'emb': '2,1'}, {'mesh_axis': 'model'}, "mesh_axis='model' is for a Strategy"),
        (ShardingPlan({}), {'mesh_axis': 'model'}, 'a ShardingPlan says itself'),
        ('resolved', {'mesh_axis': 'model'}, 'a ResolvedPlan says itself'),
        ('resolved', {'on_unmatched': 'replicate'}, "on_unmatched='replicate' decides nothing"),
        ('resolved', {'on_indivisible': 'pad'}, "on_indivisible='pad' decides nothing"),
    ],
)
def test_settings_that_would_be_ignored(config, settings, message):
    mesh = mesh_of(2, 4)
    if config == 'resolved':
        config = PartitionedPS().build_plan(PARAMS, mesh).resolve(PARAMS, mesh)
    with pytest.raises(ValueError, match=message):
        VariablePartitioner(mesh, **settings).apply(held(), config)


@pytest.mark.parametrize('mesh', [None, {'data': 8}])
def test_meshes_that_are_none(mesh):
    with pytest.raises(TypeError, match='takes the mesh to lay out over, not'):
        VariablePartitioner(mesh)


@pytest.mark.parametrize(
    'variables, message',
    [
        (
            {**PARAMS, 'emb': jnp.ones((16, 8))},
            r'emb is of shape \(32, 8\), .* built for \(16, 8\)',
        ),
        ({'fc1': PARAMS['fc1']}, 'has nothing of emb'),
        ([Variable('fc1', (8, 16)), Variable('emb', (32, 8))], 'fc1 is a module'),
        ({**PARAMS, 'embd': jnp.ones(3)}, "'embd' is no parameter"),
    ],
)
def test_strategies_for_other_parameters(variables, message):
    strategy = PartitionedPS().build(variables, ['A'])
    with pytest.raises(ValueError, match=message):
        VariablePartitioner(mesh_of(2, 4)).apply(held(), strategy)


def test_strategies_of_names_with_dots():
    shapes = {'params.fc1.kernel': (8, 16), 'fc1.bias': (16,), 'emb': (32, 8)}
    strategy = PartitionedPS().build([Variable(*item) for item in shapes.items()], ['A'])
    laid_out = VariablePartitioner(mesh_of(2, 4)).apply(held(), strategy)
    assert laid_out.state['params']['fc1']['kernel'].sharding.spec[0] == 'data'


def test_gradients_below_others():
    mesh = mesh_of(2, 4)
    params = (
        {'kernel': jnp.ones((8, 4)), 'sub': {'kernel': jnp.ones((4, 8))}},
        {'rest': jnp.ones(8)},
    )
    laid_out = VariablePartitioner(mesh).apply(
        params, {'0/kernel': P('data'), '0/sub/kernel': P('model')}
    )
    found = jax.jit(laid_out.shard_gradients)(params[0])
    assert (found['kernel'].sharding.spec, found['sub']['kernel'].sharding.spec) == (
        P('data'),
        P('model'),
    )


def test_gradients_of_one_of_several():
    params = {name: {'kernel': jnp.ones((8, 4))} for name in ('down', 'up')}
    laid_out = VariablePartitioner(mesh_of(2, 4)).apply(params, PartitionedPS())
    with pytest.raises(ValueError, match='any of down/kernel, up/kernel'):
        laid_out.shard_gradients({'kernel': jnp.ones((8, 4))})


def test_very_many_gradients_and_shards():
    """What grows with the square of these numbers takes minutes."""
    start = time.perf_counter()
    params = {f'w{i}': jax.ShapeDtypeStruct((8,), 'float32') for i in range(10_000)}
    rows = VariablePartitioner(mesh_of(8)).apply(params, {'w0': P('data')})
    assert {rows._row(name).path for name in params} == {*params}
    assert split_offsets(200_003, 200_003) == tuple(range(200_003))
    assert time.perf_counter() - start < 15


ODD = {'emb': jnp.arange(20.0).reshape(10, 2)}


def test_rows_that_do_not_divide():
    mesh = mesh_of(4, 2)
    with pytest.raises(ValueError, match=r'emb: dimension 0 .*10 does not divide by 4'):
        VariablePartitioner(mesh).apply(ODD, UnevenPartitionedPS())
    whole = VariablePartitioner(mesh, on_indivisible='replicate').apply(ODD, UnevenPartitionedPS())
    assert whole.state['emb'].sharding.is_fully_replicated


def test_rows_that_do_not_divide_are_padded():
    mesh = mesh_of(4, 2)
    state = {'params': ODD, 'opt_state': optax.sgd(0.1, 0.9).init(ODD)}
    partitioner = VariablePartitioner(mesh, on_indivisible='pad')
    laid_out = partitioner.apply(state, UnevenPartitionedPS())
    assert laid_out.mesh_axes['params']['emb'] == PaddedSpec(P(None, None), P('data', None))

    def step(state):
        grads = jax.grad(lambda p: (p['emb'] ** 2).sum())(state['params'])
        grads = laid_out.shard_gradients(grads)
        updates, opt_state = optax.sgd(0.1, 0.9).update(grads, state['opt_state'])
        return {'params': optax.apply_updates(state['params'], updates), 'opt_state': opt_state}

    run = PjitPartitioner(mesh=mesh).partition(step, (laid_out.mesh_axes,), laid_out.mesh_axes)
    assert 'f32[3,2]' in run.lower(laid_out.state).compile().as_text()  # of 10 rows over 4
    np.testing.assert_allclose(run(laid_out.state)['params']['emb'], ODD['emb'] * 0.8, rtol=1e-6)


def test_abstract_states_have_the_layout():
    abstract = jax.eval_shape(held)
    laid_out = VariablePartitioner(mesh_of(8, 1)).apply(abstract, PartitionedPS())
    emb = laid_out.state['params']['emb']
    assert isinstance(emb, jax.ShapeDtypeStruct)
    assert emb.sharding == NamedSharding(laid_out.mesh, P('data', None))


def test_errors_of_workers_are_laid_out_by_worker():
    mesh = mesh_of(4, 2)
    compressed = compress_gradients(error_feedback=True, axis_name='data', mesh=mesh)
    params = {**PARAMS, 'scale': jnp.float32(1), 'four': jnp.ones(4)}
    tx = optax.chain(compressed, optax.adam(1e-3))
    state = {'params': params, 'opt_state': tx.init(params)}
    laid_out = VariablePartitioner(mesh).apply(state, PartitionedPS(mesh_axis='model'))
    error = laid_out.state['opt_state'][0].error['emb']
    assert error.shape == (4, 32, 8) and error.sharding.spec == P('data', 'model', None)
    errors = laid_out.mesh_axes['opt_state'][0].error
    assert (errors['scale'], errors['four']) == (P('data'), P('data', 'model'))
    mu = laid_out.state['opt_state'][1][0].mu['emb']
    assert mu.sharding.spec == P('model', None)
    with pytest.raises(ValueError, match="4 workers, which are along 'model'"):
        VariablePartitioner(mesh, mesh_axis='model').apply(state, AllReduce())


def test_graphs_need_servers():
    with pytest.raises(ValueError, match='servers'):
        GraphConfig(planner='PS', servers=())
