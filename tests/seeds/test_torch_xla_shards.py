"""torch_xla's shards of an array, arrays made from shards, and the batches of an input loader."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import NamedSharding, PartitionSpec as P
from mock_devices import mesh_of_processes
from xla_meshes import SHUFFLED, bounds_by_device, mesh_of, refuses, xy_mesh

from partitioning.compat.torch_xla import (
    PaddedArray,
    ShardingSpec,
    global_from_shards,
    local_shards,
    mark_sharding,
    mesh_from_device_ids,
    shard_batch,
)

pytestmark = pytest.mark.core


@pytest.fixture
def xy():
    return xy_mesh()


def test_D8_replicas(xy):
    values = np.arange(256).reshape(16, 16)
    shards = local_shards(mark_sharding(values, xy, (None, 1)))
    assert bounds_by_device(shards) == {
        i: ([(0, 16), ((i % 2) * 8, (i % 2 + 1) * 8)], i // 2) for i in range(8)
    }
    for shard in shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])


def test_D8_order_within_a_tuple(xy):
    shards = local_shards(mark_sharding(np.arange(16), xy, (('y', 'x'),)))
    assert [shard.index[0].start for shard in shards] == [0, 8, 2, 10, 4, 12, 6, 14]


def test_D10_from_shards(xy):
    x = global_from_shards([np.array([[i]]) for i in range(8)], xy, (0, 1))
    assert x.tolist() == np.arange(8).reshape(4, 2).tolist()
    assert x.sharding == NamedSharding(xy, P('x', 'y'))
    x = global_from_shards([np.array([[i % 2]]) for i in range(8)], xy, (None, 1))
    assert x.tolist() == [[0, 1]]


def test_D10_shards_that_do_not_form_an_array(xy):
    ones = [np.array([[i]]) for i in range(8)]
    for shards, shape, message in [
        (ones[:7], None, '7 shards for 8 devices'),
        (ones, (4, 3), r'\(4, 3\): dimension 1 has 2 tiles of 1, .* 1 to 2, not 3'),
        (ones, (8,), r'\(8,\) has 1 dimensions, .*\(1, 1\) have 2'),
        ([*ones[:7], np.array([7])], None, r'shard 7 is int64 \(1,\), but shard 0'),
        ([*ones[:7], np.array([[7.0]])], None, 'shard 7 is float64'),
        (np.ones((8, 1)), None, 'not ndarray'),
    ]:
        refuses(lambda s=shards, n=shape: global_from_shards(s, xy, (0, 1), n), message)
    flat = [np.array([i]) for i in range(8)]
    refuses(lambda: global_from_shards(flat, xy, (0, 1)), '2 entries, but .* 1 dimension')
    refuses(
        lambda: global_from_shards(ones, xy, (0, None)),
        'shards 0 and 1, on devices 0 and 1, hold the same tile',
    )


def test_D10_the_tail_is_padding():
    mesh, shards = mesh_of((8,)), [np.full(8, i) for i in range(8)]
    assert global_from_shards(shards, mesh, (0,), (64,)).shape == (64,)
    for d in (1, 7):
        x = global_from_shards(shards, mesh, (0,), (64 - d,))
        assert x.shape == (64 - d,)
        assert x.unpadded().tolist() == np.repeat(range(8), 8)[: 64 - d].tolist()
    for size in (64 - 8, 65):
        refuses(
            lambda size=size: global_from_shards(shards, mesh, (0,), (size,)),
            f'8 tiles of 8, .* 57 to 64, not {size}',
        )


def test_D11_scalars(xy):
    for scalar in (3, np.float32(3), jax.numpy.array(3)):
        shards = local_shards(mark_sharding(scalar, xy, ()))
        assert bounds_by_device(shards) == {i: ([], i) for i in range(8)}
        assert {float(shard.data) for shard in shards} == {3.0}
    refuses(lambda: mark_sharding(3, xy, ('x',)), r"\('x',\) has 1 entry, but .* 0 dimensions")


@given(st.data())
@settings(max_examples=40)
def test_D8_D10_shards_of_random_layouts_and_back(data):
    ids = data.draw(st.permutations(range(8)))
    mesh = mesh_from_device_ids(ids, data.draw(st.sampled_from([(4, 2), (2, 2, 2), (1, 8)])))
    rank = data.draw(st.integers(1, 3))
    axes = data.draw(st.permutations([*mesh.axis_names, None, None]))
    shape = tuple(data.draw(st.integers(1, 9)) for _ in range(rank))
    values = np.arange(np.prod(shape)).reshape(shape)
    x = mark_sharding(values, mesh, axes[:rank], on_indivisible='pad')
    shards = local_shards(x)
    seen = np.zeros(shape, int)
    for shard in shards:
        cut = tuple(slice(s.stop - s.start) for s in shard.index)
        np.testing.assert_array_equal(np.asarray(shard.data)[cut], values[shard.index])
        seen[shard.index] += shard.replica_id == 0
    assert (seen == 1).all()
    for given_shards in (data.draw(st.permutations(shards)), [s.data for s in shards]):
        back = global_from_shards(given_shards, mesh, axes[:rank], shape)
        assert type(back) is type(x) and back.shape == shape
        whole = np.asarray(back.array if isinstance(back, PaddedArray) else back)
        np.testing.assert_array_equal(whole[tuple(map(slice, shape))], values)


def test_local_shards_of_other_values():
    refuses(lambda: local_shards(np.ones(8)), 'ndarray has no shards')
    refuses(lambda: jax.jit(lambda t: local_shards(t)[0].data)(np.ones(8)), 'not on any device yet')


def test_local_shards_that_do_not_form_an_array(xy):
    spec = (('x', 'y'),)
    shards = local_shards(mark_sharding(np.arange(8), xy, spec))
    data = [shard.data for shard in shards]
    for given_shards, shape, message in [
        ([*shards[:7], shards[0]], None, r'from devices \[0, 0, 1, 2, 3, 4, 5, 6\]'),
        ([*shards[:7], np.array([7])], None, '7 of 8 shards are LocalShards'),
        (shards, (), r'shape \(8,\), and global_shape is \(\)'),
        (data, 8, 'global_shape=8 must be a sequence'),
        (data, (8.0,), '1 to 8, not 8.0'),
        (data, (True,), '1 to 8, not True'),
        (data, (0,), '1 to 8, not 0'),
        (data, (-1,), '1 to 8, not -1'),
    ]:
        refuses(lambda s=given_shards, n=shape: global_from_shards(s, xy, spec, n), message)
    elsewhere = mesh_of_processes([[1, 1]], ('x', 'y'))
    refuses(lambda: global_from_shards(data, elsewhere, spec), 'process 0 has no device .* y 2')


def test_padding_is_known_from_the_shards(xy):
    x = np.arange(18.0).reshape(9, 2)
    padded = mark_sharding(x, xy, ('x', None), on_indivisible='pad')
    shards = local_shards(padded)
    assert {shard.global_shape for shard in shards} == {(9, 2)}
    for shape in (None, (9, 2)):
        back = global_from_shards(shards[::-1], xy, ('x', None), shape)
        assert isinstance(back, PaddedArray)
        np.testing.assert_array_equal(back.unpadded(), x)
    even = local_shards(padded.array)
    assert global_from_shards(even, xy, ('x', None)).shape == (12, 2)
    refuses(
        lambda: global_from_shards((*shards[:4], *even[4:]), xy, ('x', None)),
        r'of shape \(9, 2\), \(12, 2\)',
    )
    refuses(
        lambda: global_from_shards(shards, xy, ('x', None), (10, 2)),
        r'\(9, 2\), and global_shape is \(10, 2\)',
    )


# The input loader.


def test_D15_a_spec_for_each_array(xy):
    batch = {'x': np.zeros((16, 128)), 'y': np.zeros((16, 128, 128), np.float16)}
    made = shard_batch(batch, {'x': ('x', None), 'y': ('x', None, None)}, xy)
    assert made['x'].sharding == NamedSharding(xy, P('x', None))
    assert made['y'].sharding == NamedSharding(xy, P('x', None, None))
    made = shard_batch(batch, {'x': ShardingSpec(xy, (None, 'y')), 'y': None}, xy)
    assert made['x'].sharding == NamedSharding(xy, P(None, 'y'))
    assert made['y'].sharding.is_fully_replicated
    rows = jax.jit(lambda b: shard_batch(b, {'x': ('x', None)}, xy))({'x': np.ones((8, 8))})
    assert rows['x'].sharding.is_equivalent_to(NamedSharding(xy, P('x')), 2)


def test_D15_one_spec_for_all(xy):
    batch = {'x': np.zeros((16, 128)), 'y': np.zeros((8, 4))}
    for spec in (('x', None), ShardingSpec(xy, ('x', None))):
        made = shard_batch(batch, spec, xy)
        assert {a.sharding for a in made.values()} == {NamedSharding(xy, P('x', None))}
        assert shard_batch(batch['x'], spec, xy).sharding == NamedSharding(xy, P('x', None))
    assert all(a.sharding.is_fully_replicated for a in shard_batch(batch, None, xy).values())
    refuses(
        lambda: shard_batch({**batch, 'z': np.zeros(3)}, ('x', None), xy),
        r"z.*\('x', None\) has 2 entries, but .* 1 dimension, \(3,\)",
    )


def test_D15_batches_and_specs_that_do_not_match(xy):
    specs = {'x': ('x', None), 'labels': ('x',)}
    refuses(
        lambda: shard_batch(np.zeros((16, 128)), specs, xy),
        r"dict for \['labels', 'x'\], but the batch is ndarray",
    )
    with pytest.raises(KeyError, match=r"array 'label' has no entry .*Did you mean 'labels'"):
        shard_batch({'x': np.zeros((16, 128)), 'label': np.zeros(16)}, specs, xy)
    with pytest.raises(KeyError, match="spec 'labels' has no entry in batch"):
        shard_batch({'x': np.zeros((16, 128))}, specs, xy)


def test_D15_batches_that_are_not_divisible(xy):
    with pytest.raises(ValueError, match=r'rows: .*size 9 .* by 4.*8 or 12.*last batch') as error:
        shard_batch({'rows': np.ones(9)}, {'rows': ('x',)}, xy)
    assert 'on_indivisible' not in str(error.value)


def test_D15_can_apply(xy):
    spec = ShardingSpec(xy, ('x', None))
    assert spec.can_apply(np.zeros((16, 128))) and not spec.can_apply(np.zeros(16))
    assert spec.sharding(np.zeros((16, 128))) == NamedSharding(xy, P('x', None))
    assert spec.sharding(np.zeros(16)) is None


def test_D15_minibatch():
    spec = ShardingSpec(mesh_of((8,), ('data',)), ('data', None), minibatch=True)
    x = spec.apply(np.arange(48).reshape(16, 3))
    assert x.sharding == NamedSharding(spec.mesh, P('data', None))
    assert x.tolist() == np.arange(48).reshape(16, 3).tolist()
    refuses(lambda: spec.apply(np.zeros((7, 3))), '7 rows.* 8 of the 8')


def test_invalid_sharding_specs(xy):
    other = xy_mesh(ids=SHUFFLED)
    for call, message in [
        (lambda: ShardingSpec(xy, ('z',)), "'z' .* x 4 x y 2"),
        (lambda: ShardingSpec(xy, ('x',), minibatch=1), 'minibatch=1 must be True or False'),
        (lambda: ShardingSpec(xy, (None, 'x'), True), r"a mesh axis .* \(None, 'x'\)"),
        (lambda: ShardingSpec(xy, (), minibatch=True), r'a mesh axis .* \(\)'),
        (lambda: ShardingSpec(xy, ('x',)).apply(np.ones((8, 8))), '1 entry, but .* 2 dimensions'),
        (lambda: ShardingSpec(xy, ('x',)).can_apply([1]), 'list is not an array'),
        (lambda: shard_batch(np.ones(8), ShardingSpec(xy, ('x',)), other), 'another mesh'),
        (lambda: shard_batch({'a': [np.ones(9)]}, ('x',), xy), r"\['a'\]\[0\]: .*dimension 0"),
        (lambda: jax.jit(ShardingSpec(xy, ('x',), True).apply)(np.ones(8)), 'traced function'),
    ]:
        refuses(call, message)


def test_sharding_specs_are_values(xy):
    spec = ShardingSpec(xy, (0, (1,)))
    assert spec == ShardingSpec(xy, ('x', 'y')) and spec.partition_spec == P('x', 'y')
    assert len({spec, ShardingSpec(xy, ('x', 'y')), ShardingSpec(xy, ('x', 'y'), True)}) == 2
    with pytest.raises(AttributeError):
        spec.mesh = None
