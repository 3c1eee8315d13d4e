"""What AutoDist's planners decide, the files that hold it, and its compressors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partitioning.compat.autodist import (
    PS,
    AllReduce,
    Parallax,
    PartitionedAR,
    PartitionedPS,
    PSLoadBalancing,
    RandomAxisPartitionAR,
    Strategy,
    UnevenPartitionedPS,
    Variable,
    compress_gradients,
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


def test_A9_load_balancing():
    strategy = PSLoadBalancing().build(MODEL, ['A', 'B'])
    assert strategy.placements == {
        'emb': ('A',), 'w1': ('B',), 'b1': ('B',), 'w2': ('B',), 'b2': ('B',)
    }  # fmt: skip
    assert strategy.loads == {'A': 640000, 'B': 1156}
    assert strategy.balance == (640_000 + 1156) / 2 / 640_000
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
    groups = PartitionedAR(chunk_size=3).build(MODEL, ['A']).groups
    assert groups == {'emb': (0, 0), 'w1': (0, 1), 'b1': (1, 1), 'w2': (2, 2), 'b2': (2,)}


@pytest.mark.parametrize('planner', [AllReduce, PartitionedAR, RandomAxisPartitionAR, Parallax])
def test_A10_settings_that_xla_decides(planner):
    assert planner(all_reduce_spec='AUTO', compressor='NoneCompressor') == planner()
    with pytest.raises(ValueError, match=r'chunk_size 0 .*>= 1'):
        planner(chunk_size=0)
    with pytest.raises(ValueError, match=r"'AUTO' .*'NCCL'"):
        planner(all_reduce_spec='NCCL')
    with pytest.raises(ValueError, match=r"'HorovodCompressor'.*compress_gradients\("):
        planner(compressor='HorovodCompressor')


def test_A11_parallax():
    strategy = Parallax(chunk_size=2, local_proxy_variable=True).build(SPARSE, ['A', 'B'])
    assert strategy.placements == {'emb': ('A',)}
    assert strategy.groups == {'w1': (0,), 'b1': (1,), 'w2': (1,), 'b2': (2,)}
    assert not strategy.node_config[0].local_replication
    assert PS(local_proxy_variable=True).build(SPARSE, ['A']).node_config[0].local_replication


@pytest.mark.parametrize(
    'planner', [PS, PSLoadBalancing, PartitionedPS, UnevenPartitionedPS, Parallax]
)
def test_A11_steps_that_do_not_wait(planner):
    for settings in {'staleness': 3}, {'sync': False}, {'sync': False, 'staleness': 1}:
        named = '.*'.join(f'{name}={value}' for name, value in settings.items())
        with pytest.raises(ValueError, match=f'{planner.__name__}: .*{named}.*sync=True'):
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
    with pytest.raises(FileNotFoundError, match='not the id of a strategy'):
        Strategy.deserialize(strategy.id)


# Compressors, against their rounding worked out in numpy.


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_A15_gradients_are_rounded_and_cast_back(dtype):
    grads = {'w': np.linspace(-3, 3, 8, dtype='float32'), 'half': jnp.ones(3, 'bfloat16')}
    grads['n'] = np.arange(3)
    tx = compress_gradients(dtype)
    rounded, _ = tx.update(grads, tx.init(grads))
    assert {k: x.dtype for k, x in rounded.items()} == {k: x.dtype for k, x in grads.items()}
    np.testing.assert_array_equal(
        rounded['w'], grads['w'].astype(jnp.dtype(dtype)).astype('float32')
    )
    np.testing.assert_array_equal(rounded['n'], np.arange(3))
    assert (rounded['w'] != grads['w']).any()


def test_A15_doubles_are_sent_as_floats():
    """HorovodCompressor casts float64 to float32 and back, and leaves float32 as it is."""
    with jax.enable_x64(True):
        gradients = np.random.default_rng(0).normal(size=64)
        grads = {'w': jnp.asarray(gradients), 'single': np.ones(3, 'float32') / 3}
        tx = compress_gradients('float32', error_feedback=True)
        state, error = tx.init(grads), np.zeros(64)
        for _ in range(3):
            found, state = tx.update(grads, state)
            assert (found['w'].dtype, found['single'].dtype) == ('float64', 'float32')
            sent = (gradients + error).astype('float32').astype('float64')
            error = gradients + error - sent
            np.testing.assert_array_equal(found['w'], sent)
            np.testing.assert_array_equal(state.error['w'], error[None])
            np.testing.assert_array_equal(found['single'], grads['single'])
        assert state.error['w'].dtype == 'float64' and error.any()


def test_A15_error_feedback():
    """t += err; c = cast(t); err = t - uncast(c), worked out in numpy."""
    random = np.random.default_rng(0)
    tx = compress_gradients('bfloat16', error_feedback=True)
    update = jax.jit(tx.update)
    params = {'w': np.zeros(64, 'float32'), 'n': np.arange(2)}
    state, error = tx.init(params), np.zeros(64, 'float32')
    for _ in range(4):
        gradient = random.normal(size=64).astype('float32')
        found, state = update({'w': gradient, 'n': params['n']}, state)
        wanted = gradient + error
        sent = wanted.astype(jnp.bfloat16).astype('float32')
        error = wanted - sent
        np.testing.assert_array_equal(found['w'], sent)
        np.testing.assert_array_equal(state.error['w'], error[None])
        assert state.error['n'] is None and (found['n'] == params['n']).all()
    assert error.any()


def test_A15_errors_that_are_not_finite_are_dropped():
    tx = compress_gradients('float16', error_feedback=True)
    state = tx.init({'w': np.zeros(2, 'float32')})
    update = jax.jit(tx.update)
    found, state = update({'w': np.array([1e6, 1], 'float32')}, state)
    assert np.isinf(found['w'][0]) and not state.error['w'].any()
    found, _ = update({'w': np.array([2, 1], 'float32')}, state)
    np.testing.assert_array_equal(found['w'], [2, 1])
