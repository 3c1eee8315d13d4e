"""What AutoDist's partitioner decides, and that programs of jax follow it, row by row."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import TrainState, create_mesh
from partitioning.compat.autodist import (
    PS,
    AllReduce,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PartitionerConfig,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    Strategy,
    UnevenPartitionedPS,
    Variable,
    VariablePartitioner,
    compress_gradients,
    even_shards,
    split_offsets,
    split_rows,
    split_sizes,
    uneven_shards,
)

pytestmark = pytest.mark.core

MODEL = [
    Variable('emb', (10000, 16)),
    Variable('w1', (16, 16)),
    Variable('b1', (16,)),
    Variable('w2', (16, 1)),
    Variable('b2', (1,)),
]
SPARSE = [Variable('emb', (10000, 16), sparse=True), *MODEL[1:]]
MESHES = [(1, 8), (2, 4), (8, 1)]


def mesh_of(shape, names=('data', 'model')):
    return create_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])


# How one variable is cut.


def test_A1_from_a_list():
    config = PartitionerConfig(partition_list=[1, 4, 1])
    assert (config.partition_str, config.num_shards, config.axis) == ('1,4,1', 4, 1)


def test_A2_from_a_string():
    config = PartitionerConfig(partition_str='2')
    assert (config.partition_list, config.num_shards, config.axis) == ([2], 2, 0)
    config = PartitionerConfig(partition_str='1,1,8')
    assert (config.axis, config.num_shards) == (2, 8)


@pytest.mark.parametrize(
    'settings, message',
    [
        ({}, 'partition_list'),
        ({'partition_list': []}, 'number of shards for each dimension'),
        ({'partition_str': ''}, 'number of shards for each dimension'),
        ({'partition_list': [1, 1, 1]}, 'trivial -- num_split is 1 on every axis'),
        ({'partition_list': [2, 2]}, 'only support partitioning along one axis'),
        ({'partition_list': [0, 4]}, '1 or more'),
        ({'partition_str': 'a,b'}, "'a,b'"),
        ({'partition_str': '4,'}, "'4,'"),
    ],
)
def test_A3_no_partitioner(settings, message):
    with pytest.raises(ValueError, match=message):
        PartitionerConfig(**settings)


def test_A4_quirks_that_are_errors_here():
    with pytest.raises(ValueError, match='two ways to say one thing'):
        PartitionerConfig(partition_list=[1, 4], partition_str='1,4')
    with pytest.raises(ValueError, match=r'1 or more, not \[-1, 4\]'):
        PartitionerConfig(partition_list=[-1, 4])


def test_A4_blanks_are_normalised():
    config = PartitionerConfig(partition_str='1, 4, 1')
    assert config.partition_str == '1,4,1'
    assert config == PartitionerConfig(partition_list=[1, 4, 1])


@pytest.mark.parametrize(
    'size, num, sizes',
    [
        (10, 3, [4, 3, 3]),
        (11, 4, [3, 3, 3, 2]),
        (13, 4, [4, 3, 3, 3]),
        (5, 4, [2, 1, 1, 1]),
        (16, 3, [6, 5, 5]),
        (10000, 3, [3334, 3333, 3333]),
        (21, 4, [6, 5, 5, 5]),
    ],
)
def test_A5_dense_gradients(size, num, sizes):
    assert list(split_sizes(size, num)) == sizes
    assert [*split_offsets(size, num), size] == [0, *np.cumsum(sizes)]


@pytest.mark.parametrize(
    'size, num, shards, local',
    [
        (10, 3, [0, 0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2, 3, 0, 1, 2, 0, 1, 2]),
        (
            13,
            4,
            [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
            [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 0, 1, 2],
        ),
    ],
)
def test_A6_sparse_gradients(size, num, shards, local):
    found_shards, found_local = split_rows(np.arange(size), size, num)
    assert found_shards.tolist() == shards and found_local.tolist() == local


def test_A6_sparse_gradients_along_columns():
    message = 'Embedding variables can only be partitioned along the first axis'
    with pytest.raises(ValueError, match=message):
        split_rows([0, 1], 10, 3, axis=1)


EVEN = {
    1: 1, 2: 2, 3: 3, 4: 2, 5: 5, 6: 2, 7: 7, 8: 2, 9: 3, 10: 2, 12: 2, 15: 3, 16: 2, 25: 5, 49: 7,
    97: 97, 100: 2, 10000: 2,
}  # fmt: skip
UNEVEN = {1: 1, 2: 2, 3: 2, 4: 3, 5: 2, 6: 4, 7: 2, 8: 3, 12: 5, 16: 3, 60: 7, 10000: 3}


def test_A7_even_shards():
    assert {size: even_shards(size) for size in EVEN} == EVEN
    scalar = PartitionedPS().build([Variable('step', ())], ['A'])
    assert scalar.node_config[0].num_shards == 1


def test_A8_uneven_shards():
    assert {size: uneven_shards(size) for size in UNEVEN} == UNEVEN


# What planners decide.


def test_A9_load_balancing():
    strategy = PSLoadBalancing().build(MODEL, ['A', 'B'])
    assert strategy.placements == {
        'emb': ('A',), 'w1': ('B',), 'b1': ('B',), 'w2': ('B',), 'b2': ('B',)
    }  # fmt: skip
    assert strategy.loads == {'A': 640000, 'B': 1156}
    strategy = PSLoadBalancing().build(MODEL, ['A', 'B', 'C'])
    assert strategy.placements == {
        'emb': ('A',), 'w1': ('B',), 'b1': ('C',), 'w2': ('C',), 'b2': ('C',)
    }  # fmt: skip
    assert strategy.loads == {'A': 640000, 'B': 1024, 'C': 132}


def test_A9_parameter_server():
    strategy = PS().build(MODEL, ['A', 'B'])
    assert set(strategy.placements.values()) == {('A',)}
    assert strategy.loads == {'A': 641156, 'B': 0}


def test_A9_partitioned():
    strategy = PartitionedPS().build(MODEL, ['A', 'B'])
    assert strategy.partitions == {'emb': '2,1', 'w1': '2,1', 'b1': '2', 'w2': '2,1', 'b2': ''}
    both = ('A', 'B')
    assert strategy.placements == {'emb': both, 'w1': both, 'b1': both, 'w2': both, 'b2': ('A',)}
    assert strategy.loads == {'A': 320580, 'B': 320576}


def test_A9_more_shards_than_servers():
    strategy = UnevenPartitionedPS().build(MODEL, ['A', 'B'])
    assert strategy.partitions['emb'] == '3,1'
    assert strategy.placements['emb'] == ('A', 'B', 'A')
    assert strategy.placements['w1'] == ('B', 'A', 'B')  # B had less by then


def test_A9_a_shard_is_a_part_of_the_load():
    variables = [Variable('split', (4,)), Variable('row', (1, 3)), Variable('next', (1, 2))]
    strategy = PartitionedPS().build(variables, ['A', 'B', 'C'])
    assert strategy.placements == {'split': ('A', 'B'), 'row': ('C',), 'next': ('A',)}
    assert strategy.loads == {'A': 16, 'B': 8, 'C': 12}


def test_A10_groups():
    groups = AllReduce(chunk_size=2).build(MODEL, ['A']).groups
    assert groups == {'emb': (0,), 'w1': (0,), 'b1': (1,), 'w2': (1,), 'b2': (2,)}
    groups = PartitionedAR(chunk_size=2).build(MODEL, ['A']).groups
    assert groups == {'emb': (0, 0), 'w1': (1, 1), 'b1': (2, 2), 'w2': (3, 3), 'b2': (4,)}


@pytest.mark.parametrize('planner', [AllReduce, PartitionedAR, RandomAxisPartitionAR, Parallax])
def test_A10_no_chunk_size(planner):
    with pytest.raises(ValueError, match='greater than zero'):
        planner(chunk_size=0)


def test_A11_parallax():
    strategy = Parallax(chunk_size=2, local_proxy_variable=True).build(SPARSE, ['A', 'B'])
    assert strategy.placements == {'emb': ('A',)}
    assert strategy.groups == {'w1': (0,), 'b1': (1,), 'w2': (1,), 'b2': (2,)}
    assert not strategy.node_config[0].local_replication
    assert PS(local_proxy_variable=True).build(SPARSE, ['A']).node_config[0].local_replication


@pytest.mark.parametrize(
    'planner', [PS, PSLoadBalancing, PartitionedPS, UnevenPartitionedPS, Parallax]
)
@pytest.mark.parametrize(
    'settings', [{'staleness': 3}, {'sync': False}, {'sync': False, 'staleness': 1}]
)
def test_A11_steps_that_do_not_wait(planner, settings):
    with pytest.raises(ValueError, match='each of its steps waits'):
        planner(**settings)


def test_A12_random_axis():
    variables = [Variable('one', (1, 1)), Variable('column', (16, 1)), Variable('scalar', ())]
    variables += [Variable(f'table{i}', (9, 10), sparse=True) for i in range(20)]
    variables += [Variable(f'w{i}', (1, 7, 1, 10)) for i in range(200)]
    partitions = RandomAxisPartitionAR(seed=0).build(variables, ['A']).partitions
    assert (partitions['one'], partitions['column'], partitions['scalar']) == ('', '2,1', '')
    assert {partitions[f'table{i}'] for i in range(20)} == {'3,1'}
    drawn = [partitions[f'w{i}'] for i in range(200)]
    assert set(drawn) == {'1,7,1,1', '1,1,1,2'}
    assert 60 < drawn.count('1,7,1,1') < 140  # the chance of any other is below 1e-7


def test_A12_the_seed_decides():
    variables = [Variable(f'w{i}', (4, 4)) for i in range(32)]
    partitions = RandomAxisPartitionAR(seed=1).build(variables, ['A']).partitions
    np.random.seed(7)  # what AutoDist draws from, and differs from process to process
    assert RandomAxisPartitionAR(seed=1).build(variables, ['A']).partitions == partitions
    assert RandomAxisPartitionAR(seed=2).build(variables, ['A']).partitions != partitions
    fewer = RandomAxisPartitionAR(seed=1).build(variables[::-2], ['A']).partitions
    assert fewer.items() <= partitions.items()


# Numbers of data-parallel steps.


def line(seed):
    """1000 points of AutoDist's linear regression."""
    random = np.random.RandomState(seed)
    x = random.randn(1000)
    return x, 3.0 * x + 2.0 + random.randn(1000)


def objective(params, x, y):
    return jnp.mean((params['W'] * x + params['b'] - y) ** 2)


def test_A13_gradients_of_each_seed():
    with jax.enable_x64(True):
        for seed, numbers in {
            123: (4.231471367403939, -4.175034879114915, 9.40178802581827),
            456: (3.890762517830649, -4.05530707554011, 8.934178605795172),
        }.items():
            params = {'W': jnp.float64(5), 'b': jnp.float64(0)}
            loss, grads = jax.value_and_grad(objective)(params, *map(jnp.asarray, line(seed)))
            np.testing.assert_allclose((grads['W'], grads['b'], loss), numbers, rtol=1e-12)


# What W and b are after one step on the whole set of one seed, or of both: from 5 and 0.
AFTER_A_STEP = {(123,): (4.95768529, 0.04175035), (123, 456): (4.95938883, 0.04115171)}


@pytest.mark.parametrize('seeds', AFTER_A_STEP, ids=str)
@pytest.mark.parametrize('shape', MESHES, ids=str)
@pytest.mark.parametrize('planner', [AllReduce(), PartitionedPS(), Parallax()], ids=repr)
def test_A13_one_step_on_a_mesh(shape, planner, seeds):
    mesh, tx = mesh_of(shape), optax.sgd(0.01)
    sets = zip(*map(line, seeds), strict=True)
    points = [np.concatenate(x).astype('float32') for x in sets]
    x, y = jax.device_put(points, NamedSharding(mesh, P('data')))
    state = TrainState.create({'W': jnp.float32(5), 'b': jnp.float32(0)}, tx)
    laid_out = VariablePartitioner(mesh).apply(state, planner)

    @functools.partial(jax.jit, out_shardings=laid_out.shardings)
    def step(state, x, y):
        grads = jax.grad(objective)(state.params, x, y)
        return state.apply_gradients(laid_out.shard_gradients(grads), tx)

    params = step(laid_out.state, x, y).params
    w, b = AFTER_A_STEP[seeds]
    np.testing.assert_allclose(params['b'], b, rtol=1e-5)
    np.testing.assert_allclose(params['W'], w, rtol=1e-6)


@pytest.mark.parametrize('ratio, b', [((2, 1), 0.0413512), ((1, 3), 0.0408524)], ids=str)
def test_A13_workers_of_different_sizes(ratio, b):
    """Devices of one worker have its whole set each: the mean of gradients is by devices."""
    mesh = mesh_of((sum(ratio),), ('data',))
    x, y = (
        np.stack([*[a] * ratio[0], *[b] * ratio[1]]).astype('float32')
        for a, b in zip(line(123), line(456), strict=True)
    )
    tx = optax.chain(compress_gradients('float32', axis_name='data'), optax.sgd(0.01))
    params = {'W': jnp.float32(5), 'b': jnp.float32(0)}

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P('data'), P('data')), out_specs=P()
    )
    def step(params, x, y):
        own = jax.lax.pcast(params, 'data', to='varying')
        updates, _ = tx.update(jax.grad(objective)(own, x, y), tx.init(params))
        return optax.apply_updates(params, updates)

    stepped = step(params, x, y)
    np.testing.assert_allclose(stepped['b'], b, rtol=1e-5)
    means = [np.average(d, weights=ratio) for d in ((4.231471, 3.890763), (-4.175035, -4.055307))]
    np.testing.assert_allclose(stepped['W'], 5 - 0.01 * means[0], rtol=1e-6)
    np.testing.assert_allclose(stepped['b'], -0.01 * means[1], rtol=1e-5)


def test_A14_saved_sharded_restored_anywhere(tmp_path):
    """Trained on 4 x 2 and saved, restored by a plain program of one device, and on 2 x 4."""
    ocp = pytest.importorskip('orbax.checkpoint')
    tx = optax.adam(1e-2)
    mesh = mesh_of((4, 2))
    state = TrainState.create(two_layers(), tx)
    laid_out = VariablePartitioner(mesh).apply(state, PartitionedPS())
    state, _ = jax.jit(training_step(tx, laid_out), out_shardings=(laid_out.shardings, None))(
        laid_out.state, jax.device_put(TOKENS, NamedSharding(mesh, P('data')))
    )
    assert state.params['emb'].sharding.spec == P('data', None)
    held = state.state_dict()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / 'saved', held)
        checkpointer.wait_until_finished()
    with ocp.StandardCheckpointer() as checkpointer:
        described = checkpointer.metadata(tmp_path / 'saved')
    written = {
        jax.tree_util.keystr(path, simple=True, separator='/'): tuple(x.shape)
        for path, x in jax.tree_util.tree_leaves_with_path(
            described.item_metadata.tree, is_leaf=lambda x: hasattr(x, 'shape')
        )
    }
    shapes = {'emb': (32, 8), 'dense/kernel': (8, 32), 'dense/bias': (32,)}
    assert written == {
        **{f'params/{name}': shape for name, shape in shapes.items()},
        **{f'opt_state/0/mu/{name}': shape for name, shape in shapes.items()},
        **{f'opt_state/0/nu/{name}': shape for name, shape in shapes.items()},
        **{'opt_state/0/count': (), 'step': ()},
    }, 'the names of the whole variables, and no part of any'
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), held)
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    other = VariablePartitioner(mesh_of((2, 4))).apply(
        jax.eval_shape(lambda: TrainState.create(two_layers(), tx)), PartitionedPS()
    )
    for target in (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), shapes),
        other.state.state_dict(),
    ):
        with ocp.StandardCheckpointer() as checkpointer:
            restored = checkpointer.restore(tmp_path / 'saved', target)
        for (path, saved), (same, found), wanted in zip(
            jax.tree_util.tree_leaves_with_path(held),
            jax.tree_util.tree_leaves_with_path(restored),
            jax.tree.leaves(target),
            strict=True,
        ):
            assert path == same and saved.shape == found.shape
            assert found.sharding.is_equivalent_to(wanted.sharding, found.ndim)
            np.testing.assert_array_equal(np.asarray(saved), np.asarray(found))
    assert restored['params']['emb'].sharding.mesh.shape == {'data': 2, 'model': 4}


def two_layers():
    random = np.random.default_rng(0)
    shapes = {'emb': (32, 8), 'dense/kernel': (8, 32), 'dense/bias': (32,)}
    flat = {k: random.normal(0, 0.3, s).astype('float32') for k, s in shapes.items()}
    dense = {'kernel': flat['dense/kernel'], 'bias': flat['dense/bias']}
    return jax.tree.map(jnp.asarray, {'emb': flat['emb'], 'dense': dense})


TOKENS = np.random.default_rng(1).integers(0, 32, (16, 4), np.int32)


def next_token_loss(params, tokens):
    logits = params['emb'][tokens] @ params['dense']['kernel'] + params['dense']['bias']
    return optax.softmax_cross_entropy_with_integer_labels(logits, (tokens + 1) % 32).mean()


def training_step(tx, laid_out=None):
    def step(state, tokens):
        loss, grads = jax.value_and_grad(next_token_loss)(state.params, tokens)
        grads = grads if laid_out is None else laid_out.shard_gradients(grads)
        return state.apply_gradients(grads, tx), loss

    return step


SPLIT_OVER = {(1, 8): 8, (2, 4): 2, (8, 1): 8}  # 'data', or the only axis larger than 1


@functools.cache
def losses_of_one_device(steps=3):
    tx, losses = optax.adam(1e-2), []
    state, step = TrainState.create(two_layers(), tx), jax.jit(training_step(tx))
    for _ in range(steps):
        state, loss = step(state, TOKENS)
        losses.append(float(loss))
    return losses


PLANNERS = [
    PS(), PSLoadBalancing(), PartitionedPS(), UnevenPartitionedPS(), AllReduce(), PartitionedAR(),
    RandomAxisPartitionAR(seed=1), Parallax(sparse=['emb']),
]  # fmt: skip


@pytest.mark.parametrize('shape', MESHES, ids=str)
@pytest.mark.parametrize('planner', PLANNERS, ids=lambda p: type(p).__name__)
def test_A13_every_planner_trains_as_one_device(planner, shape):
    mesh, tx = mesh_of(shape), optax.adam(1e-2)
    laid_out = VariablePartitioner(mesh).apply(TrainState.create(two_layers(), tx), planner)
    by_rows = isinstance(planner, Parallax)  # sparse, and held by a server
    cut = by_rows or bool(planner.build(two_layers(), ['A']).partitions['emb'])
    emb = laid_out.state.params['emb']
    shard = emb.sharding.shard_shape(emb.shape)
    assert emb.size == math.prod(shard) * (SPLIT_OVER[shape] if cut else 1)
    step = jax.jit(
        training_step(tx, laid_out), out_shardings=(laid_out.shardings, None), donate_argnums=0
    )
    state, losses = laid_out.state, []
    tokens = jax.device_put(TOKENS, NamedSharding(mesh, P('data')))
    for _ in range(3):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, losses_of_one_device(), rtol=1e-5)
    moments = state.opt_state[0].mu['emb']
    assert moments.sharding.is_equivalent_to(state.params['emb'].sharding, 2)


# Gradients in few bits.


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
def test_A15_gradients_are_rounded_and_cast_back(dtype):
    grads = {
        'w': jnp.linspace(-3, 3, 7), 'half': jnp.ones(3, 'bfloat16'), 'n': jnp.arange(3),
    }  # fmt: skip
    tx = compress_gradients(dtype)
    rounded, _ = tx.update(grads, tx.init(grads))
    assert jax.tree.map(lambda x: x.dtype, rounded) == jax.tree.map(lambda x: x.dtype, grads)
    np.testing.assert_array_equal(
        rounded['w'], np.asarray(grads['w']).astype(jnp.dtype(dtype)).astype('float32')
    )
    np.testing.assert_array_equal(rounded['n'], np.arange(3))
    assert (dtype == 'float32') == bool((rounded['w'] == grads['w']).all())


def test_A15_doubles_travel_as_floats():
    """HorovodCompressor, which casts float64 to float32 and back; float32 it leaves as it is."""
    with jax.enable_x64(True):
        gradients = np.random.default_rng(0).normal(size=64)
        grads = {'w': jnp.asarray(gradients), 'single': jnp.ones(3, 'float32') / 3}
        tx = compress_gradients('float32')
        found, _ = tx.update(grads, tx.init(grads))
        assert (found['w'].dtype, found['single'].dtype) == ('float64', 'float32')
        np.testing.assert_array_equal(found['w'], gradients.astype('float32').astype('float64'))
        assert (np.asarray(found['w']) != gradients).any()
        np.testing.assert_array_equal(found['single'], grads['single'])

        tx = compress_gradients('float32', error_feedback=True)
        state, error = tx.init(grads), np.zeros(64)
        for _ in range(3):
            found, state = tx.update(grads, state)
            sent = (gradients + error).astype('float32').astype('float64')
            error = gradients + error - sent
            np.testing.assert_array_equal(found['w'], sent)
            np.testing.assert_array_equal(state.error['w'], error[None])
        assert state.error['w'].dtype == 'float64' and error.any()


def test_A15_no_compressor():
    """NoneCompressor: nothing is rounded, and nothing is kept."""
    with jax.enable_x64(True):
        grads = {'w': jnp.asarray(np.random.default_rng(0).normal(size=64)), 'n': jnp.arange(3)}
        tx = optax.identity()
        found, state = tx.update(grads, tx.init(grads))
        assert not jax.tree.leaves(state)
        for name, gradient in grads.items():
            assert found[name].dtype == gradient.dtype
            np.testing.assert_array_equal(found[name], gradient)


def test_A15_error_feedback():
    """t += err; c = cast(t); err = t - uncast(c), worked out in numpy."""
    random = np.random.default_rng(0)
    tx = compress_gradients('bfloat16', error_feedback=True)
    params = {'w': jnp.zeros(64), 'n': jnp.arange(2)}
    state, error = tx.init(params), np.zeros(64, 'float32')
    for _ in range(4):
        gradient = random.normal(size=64).astype('float32')
        found, state = tx.update({'w': jnp.asarray(gradient), 'n': params['n']}, state)
        wanted = gradient + error
        sent = wanted.astype(jnp.bfloat16).astype('float32')
        error = wanted - sent
        np.testing.assert_array_equal(found['w'], sent)
        np.testing.assert_array_equal(state.error['w'], error[None])
        assert state.error['n'] is None and (found['n'] == params['n']).all()
    assert error.any()


def test_A15_what_travels_between_workers():
    """The all-reduce of the lowered program is of bfloat16, and the mean is that of the rounded."""
    mesh = mesh_of((4, 2))
    tx = compress_gradients('bfloat16', axis_name='data')
    gradients = np.random.default_rng(0).normal(size=(4, 64)).astype('float32')

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P('data'), out_specs=P())
    def mean(gradient):
        return tx.update({'w': gradient[0]}, tx.init({}))[0]['w']

    text = mean.lower(gradients).as_text()
    reduced = re.findall(r'stablehlo\.all_reduce.*?\}\) : \((.*?)\)', text, re.DOTALL)
    assert reduced == ['tensor<64xbf16>']
    wanted = gradients.astype(jnp.bfloat16).astype('float32').mean(0)
    np.testing.assert_allclose(mean(gradients), wanted, atol=0.02)


def test_A16_strategies_in_files(tmp_path):
    strategy = PartitionedPS(local_proxy_variable=True).build(SPARSE, ['A', 'B'])
    written = strategy.serialize(tmp_path / 'strategy.json')
    read = Strategy.deserialize(written.path)
    assert read.id == strategy.id and read.path == str(tmp_path / 'strategy.json')
    assert read.node_config == strategy.node_config
    assert read.graph_config == strategy.graph_config
    assert PartitionedPS().build(SPARSE, ['A', 'B']).id != strategy.id
    again = Strategy.from_json(written.to_json())
    assert (again, again.path) == (written, written.path)


@pytest.mark.parametrize('loop', ['scan', 'while_loop', 'cond'])
@pytest.mark.parametrize('planner', [PartitionedPS(), UnevenPartitionedPS()], ids=repr)
def test_A17_split_weights_in_control_flow(loop, planner):
    mesh = mesh_of((2, 4))
    w = np.random.default_rng(0).normal(0, 0.4, (8, 8)).astype('float32')
    laid_out = VariablePartitioner(mesh).apply({'w': jnp.asarray(w)}, planner)
    assert laid_out.state['w'].sharding.shard_shape((8, 8)) == (4, 8)

    @jax.jit
    def run(params, x):
        def turn(x):
            return jnp.tanh(x @ params['w'])

        if loop == 'scan':
            return jax.lax.scan(lambda x, _: (turn(x), None), x, length=5)[0]
        if loop == 'while_loop':
            return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, turn(c[1])), (0, x))[
                1
            ]
        for _ in range(5):
            x = jax.lax.cond(x.sum() > -1e9, turn, lambda x: x, x)
        return x

    x = wanted = np.ones((4, 8), 'float32')
    for _ in range(5):
        wanted = np.tanh(wanted @ w)
    np.testing.assert_allclose(run(laid_out.state, x), wanted, rtol=1e-5, atol=1e-6)


def test_A18_over_the_axis_of_that_size():
    config, mesh = PartitionerConfig(partition_str='1,4,1'), mesh_of((2, 4))
    assert config.to_partition_spec(mesh) == P(None, 'model')
    assert config.to_partition_spec(mesh, (3, 8, 5)) == P(None, 'model')
    assert PartitionerConfig([2]).to_partition_spec(mesh) == P('data')
    assert PartitionerConfig.from_partition_spec(P(None, 'model'), mesh, 3) == config


@pytest.mark.parametrize(
    'counts, sizes, shape, words',
    [
        ([1, 4], {'data': 2, 'model': 8}, None, ['4', 'data 2 x model 8', 'no axis']),
        ([1, 4], {'data': 4, 'model': 4}, None, ['4', 'data 4 x model 4', 'data, model']),
        ([1, 4], {'data': 2, 'model': 4}, (3, 6), ['dimension 1', 'size 6', 'divide by 4']),
        ([1, 4], {'data': 2, 'model': 4}, (3, 8, 2), ['2 dimensions', 'has 3']),
    ],
)
def test_A18_no_such_axis(counts, sizes, shape, words):
    with pytest.raises(ValueError) as error:
        PartitionerConfig(counts).to_partition_spec(sizes, shape)
    for word in words:
        assert word in str(error.value)
