"""What torch_xla's SPMD does, row by row, in its words over jax's sharding."""

import collections
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mock_devices import SliceDevice, cpus, ids, tpu_slices, tpus, v3_4x4

from partitioning import (
    constrain,
    create_hybrid_mesh,
    create_mesh,
    describe_topology,
    with_sharding_constraint,
)
from partitioning.compat.torch_xla import (
    HybridMesh,
    ShardingSpec,
    ShardingType,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    get_1d_mesh,
    get_axis_name_idx,
    get_global_mesh,
    get_logical_mesh,
    global_from_shards,
    group_assignment,
    hlo_sharding,
    iota_tile_assignment,
    local_shards,
    mark_sharding,
    mark_sharding_with_gradients,
    mesh_from_device_ids,
    replication_groups,
    resolve_partition_spec,
    set_global_mesh,
    shard_batch,
    sharding_type,
    tile_assignment,
)

pytestmark = pytest.mark.core

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason='libtpu, which describes TPUs, is not installed',
)
IN_ORDER = list(range(8))
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
ACROSS = [[0, 4], [1, 5], [2, 6], [3, 7]]


def mesh_of(shape, names=None, ids=IN_ORDER):
    return mesh_from_device_ids(ids, shape, names)


@pytest.fixture
def xy():
    return mesh_of((4, 2), ('x', 'y'))


def explicit(mesh):
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)


# Meshes.


@pytest.mark.parametrize(
    'ids, shape, names, message',
    [
        (IN_ORDER, (4, 2), ('x', 'y', 'z'), 'mesh_shape has 2 sizes for 3 axis names'),
        (IN_ORDER, (4, 2), ('x', 'x'), "'x' appears twice"),
        (IN_ORDER, (4, 3), ('x', 'y'), r'\(4, 3\) has product 12, .* device ids is 8'),
        ([*IN_ORDER[:7], 0], (4, 2), ('x', 'y'), 'device id 0 is given 2 times of 8'),
        ([*IN_ORDER[:7], 8], (4, 2), ('x', 'y'), 'device id 8 is of none of the 8 devices'),
        ([*IN_ORDER[:7], -1], (4, 2), ('x', 'y'), 'device id -1 is of none of the 8 devices'),
        (IN_ORDER[:4], (2, 2), ('x', 'y'), r'4 device ids \[0, 1, 2, 3\] for 8 devices'),
    ],
)
def test_D1_meshes_that_cannot_be(ids, shape, names, message):
    with pytest.raises(ValueError, match=message):
        mesh_from_device_ids(ids, shape, names)


def test_D1_names_and_devices_that_jax_would_take_twice(xy):
    twice = np.array([jax.devices()[0]] * 2)
    for mesh in (Mesh(xy.devices, ('x', 'x')), Mesh(twice, ('x',))):
        for refuse in (
            lambda mesh=mesh: mark_sharding(np.ones(8), mesh, ('x',)),
            lambda mesh=mesh: tile_assignment(mesh, ('x',)),
            lambda mesh=mesh: set_global_mesh(mesh),
        ):
            with pytest.raises(ValueError, match=r"2 axes named 'x'|has device 0 2 times"):
                refuse()


def test_D2_parts_of_a_mesh(xy):
    assert get_logical_mesh(xy).tolist() == PAIRS
    assert dict(xy.shape) == {'x': 4, 'y': 2} and xy.size == 8
    assert dict(mesh_of((4, 2)).shape) == {'0': 4, '1': 2}
    assert get_axis_name_idx(xy, 'y') == 1 and get_axis_name_idx(xy, 'z') is None
    line = get_1d_mesh('data')
    assert line.devices.shape == (8,) and line.axis_names == ('data',)
    assert get_logical_mesh(line).tolist() == IN_ORDER
    assert set(xy.axis_types) == {AxisType.Auto}


def test_D2_global_mesh(xy):
    assert get_global_mesh() is None
    set_global_mesh(xy)
    try:
        assert get_global_mesh() is xy
        assert mark_sharding(np.ones(8), None, ('x',)).sharding == NamedSharding(xy, P('x'))
    finally:
        set_global_mesh(None)
    assert get_global_mesh() is None
    with pytest.raises(ValueError, match='set_global_mesh'):
        mark_sharding(np.ones(8), None, ('x',))


# Tiles.

EACH_HALF = [[half] for half in HALVES]
EACH_PAIR = [[pair] for pair in PAIRS]
MAJOR_LAST = [0, 4, 1, 5, 2, 6, 3, 7]
# (mesh shape, spec, ids by tile: nested by dimension, innermost the holders of one tile where
# there are several, HLO)
PARTITIONS = [
    ((8,), (0,), IN_ORDER, '{devices=[8]<=[8]}'),
    ((8,), (None,), [IN_ORDER], '{replicated}'),
    ((1, 8), (0, 1), [IN_ORDER], '{devices=[1,8]<=[8]}'),
    ((4, 2), (0, None), EACH_PAIR, '{devices=[4,1,2]<=[8] last_tile_dim_replicate}'),
    (
        *((4, 2), (None, 1), [[[0, 2, 4, 6], [1, 3, 5, 7]]]),
        '{devices=[1,2,4]<=[4,2]T(1,0) last_tile_dim_replicate}',
    ),
    ((2, 4), (0, None), EACH_HALF, '{devices=[2,1,4]<=[8] last_tile_dim_replicate}'),
    ((2, 4), (1, 0), ACROSS, '{devices=[4,2]<=[2,4]T(1,0)}'),
    ((2, 4), ((0, 1),), IN_ORDER, '{devices=[8]<=[8]}'),
    ((2, 4), (None, 0, 1), [HALVES], '{devices=[1,2,4]<=[8]}'),
    (
        *((2, 4, 1), (2, 1), [ACROSS]),
        '{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}',
    ),
    ((1, 2, 4), ((0, 1), None), EACH_HALF, '{devices=[2,1,4]<=[8] last_tile_dim_replicate}'),
    ((1, 2, 4), (None, (1, 2)), [IN_ORDER], '{devices=[1,8]<=[8]}'),
    (
        *((1, 2, 4), (None, (0, 2)), [ACROSS]),
        '{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}',
    ),
    ((1, 2, 4), (None, (2, 1)), [MAJOR_LAST], '{devices=[1,8]<=[2,4]T(1,0)}'),
]


def groups_of(tiles, spec):
    """The holders of each tile, one after another."""
    by_tile = np.array(tiles)
    holders = by_tile.shape[-1] if by_tile.ndim > len(spec) else 1
    return by_tile.reshape(-1, holders).tolist()


@pytest.mark.parametrize('shape, spec, tiles, hlo', PARTITIONS)
def test_D3_tile_assignments(shape, spec, tiles, hlo):
    mesh = mesh_of(shape)
    assert tile_assignment(mesh, spec).tolist() == tiles
    assert replication_groups(mesh, spec) == groups_of(tiles, spec)
    assert hlo_sharding(mesh, spec) == hlo
    named = NamedSharding(mesh, resolve_partition_spec(mesh, spec))
    assert str(named._to_xla_hlo_sharding(len(spec))) == hlo


@pytest.mark.parametrize('shape, spec, tiles, hlo', PARTITIONS)
def test_D3_tiles_are_where_jax_puts_them(shape, spec, tiles, hlo):
    """What NamedSharding gives each device of an array of 8 along each dimension."""
    mesh, size = mesh_of(shape), (8,) * len(spec)
    named = NamedSharding(mesh, resolve_partition_spec(mesh, spec)).devices_indices_map(size)
    made = tile_assignment(mesh, spec)
    ways = made.shape[: len(spec)]
    for device, index in named.items():
        place = tuple((s.start or 0) * n // 8 for s, n in zip(index, ways, strict=True))
        assert device.id in np.ravel(made[place])


def test_D3_tiles_by_the_names_of_axes(xy):
    assert tile_assignment(xy, ('x', None)).tolist() == EACH_PAIR
    assert tile_assignment(xy, (None, 'y')).tolist() == [[[0, 2, 4, 6], [1, 3, 5, 7]]]
    assert tile_assignment(xy, (None,)).tolist() == [IN_ORDER]


def test_D3_ids_in_reverse():
    mesh = mesh_of((1, 8), ids=IN_ORDER[::-1])
    assert tile_assignment(mesh, (0, 1)).tolist() == [IN_ORDER[::-1]]
    assert hlo_sharding(mesh, (0, 1)) == '{devices=[1,8]7,6,5,4,3,2,1,0}'
    x = mark_sharding(np.arange(256).reshape(16, 16), mesh, (0, 1))
    columns = {shard.device_id: shard.index[1] for shard in local_shards(x)}
    assert columns[7] == slice(0, 2) and columns[0] == slice(14, 16)


@pytest.mark.parametrize(
    'shape, spec, groups',
    [
        ((4, 2), (0, None), [[0], [1], [2], [3]]),
        ((4, 2), (None, 1), [[0, 1]]),
        ((2, 2, 2), (0, None, 2), [[[0, 1]], [[2, 3]]]),
        ((2, 1, 4), (1, None, 0), [[[0, 1]]]),
        ((4, 2), (0, 1), []),
        ((4, 2), (None, None), []),
    ],
)
def test_D4_group_assignments(shape, spec, groups):
    assert group_assignment(mesh_of(shape), spec) == groups


def test_D5_numbers_of_types():
    assert {kind.name: kind.value for kind in ShardingType} == {
        **{'REPLICATED': 0, 'MAXIMAL': 1, 'TUPLE': 2, 'TILED': 3},
        **{'MANUAL': 4, 'PARTIAL': 5, 'UNKNOWN': 6},
    }


@pytest.mark.parametrize(
    'shape, spec, kind',
    [
        ((4, 2), (None, None), 'REPLICATED'),
        ((4, 2), (), 'REPLICATED'),
        ((4, 2), (0, None), 'PARTIAL'),
        ((4, 2), (1, 0), 'TILED'),
        ((4, 2), (0,), 'PARTIAL'),
        # In effect: what matters is how many devices hold a tile.
        ((4, 2), (None, (0, 1)), 'TILED'),
        ((1, 2, 4), (None, (1, 2)), 'TILED'),
        ((1, 8), (0, None), 'REPLICATED'),
    ],
)
def test_D5_types_in_effect(shape, spec, kind):
    assert sharding_type(mesh_of(shape), spec) == ShardingType[kind]


def test_D5_one_device():
    mesh = mesh_from_device_ids([3], (1, 1), devices=jax.devices()[3:4])
    for spec in ((0, 1), (None, None)):
        assert sharding_type(mesh, spec) == ShardingType.MAXIMAL
        assert replication_groups(mesh, spec) == [[3]]
        assert hlo_sharding(mesh, spec) == '{maximal device=0}'


def test_D6_iota_arguments():
    assert iota_tile_assignment(mesh_of((4, 2)), (None, 1)) == (
        *([1, 2, 4], [4, 2], [1, 0], [ShardingType.REPLICATED]),
    )
    assert iota_tile_assignment(mesh_of((1, 2, 4)), (None, (2, 1))) == (
        *([1, 8], [1, 2, 4], [2, 1, 0], []),
    )
    with pytest.raises(ValueError, match='device 7 at place 0'):
        iota_tile_assignment(mesh_of((8,), ids=IN_ORDER[::-1]), (0,))


@pytest.mark.parametrize('shape, spec, tiles, hlo', PARTITIONS)
def test_D6_iota_arguments_make_the_tiles(shape, spec, tiles, hlo):
    dims, reshape_dims, transpose_perm, subgroup = iota_tile_assignment(mesh_of(shape), spec)
    made = np.arange(8).reshape(reshape_dims).transpose(transpose_perm).reshape(dims)
    assert made.tolist() == tiles
    assert subgroup == ([ShardingType.REPLICATED] if made.ndim > len(spec) else [])


@pytest.mark.parametrize(
    'spec, message',
    [
        (('z', None), "axis name 'z' .* is not defined in the mesh x 4 x y 2"),
        ((1.0, None), r'1.0 \(float\) .* is not supported'),
        (([0, 1], None), r'\[0, 1\] \(list\) .* is not supported'),
        (((0, (1,)), None), r'\(0, \(1,\)\) .* has \(1,\) in it'),
        (((0, None), None), r'\(0, None\) .* has None in it'),
        ((5, None), 'mesh dimension 5 .* out of bounds'),
        ((-1, None), 'mesh dimension -1 .* out of bounds'),
        ((True, None), r'True \(bool\) .* is not supported'),
        ((0, 0), "mesh axis 'x' 2 times: .* at most once"),
        (((0, 'x'), None), "mesh axis 'x' 2 times: .* at most once"),
        ((0,), r'\(0,\) is for rank 1, but the array is of rank 2'),
        (P('x'), 'for rank 1, but the array is of rank 2'),
        ((0, 1, None), 'for rank 3, but the array is of rank 2'),
        ('xy', "'xy' must have an entry for each dimension"),
        (None, 'None must have an entry for each dimension'),
        (0, '0 must have an entry for each dimension'),
    ],
)
def test_D7_specs_that_cannot_be(xy, spec, message):
    with pytest.raises(ValueError, match=message):
        mark_sharding(np.ones((8, 8)), xy, spec)
    with pytest.raises(ValueError, match=message):
        resolve_partition_spec(xy, spec, ndim=2)


def test_D7_nearest_name():
    mesh = mesh_of((4, 2), ('data', 'model'))
    with pytest.raises(ValueError, match="Did you mean 'model'"):
        resolve_partition_spec(mesh, (None, 'modle'))


def test_D7_meshes_of_some_devices():
    """'Not mappable over 8 devices' in torch_xla: in its words here, too; jax's meshes may be."""
    with pytest.raises(ValueError, match=r'4 device ids \[0, 1, 2, 3\] for 8 devices'):
        mesh_from_device_ids(IN_ORDER[:4], (4,), ('x',))
    with pytest.raises(ValueError, match=r'\(4, 4\) has product 16, .* device ids is 8'):
        mesh_of((4, 4), ('x', 'y'))
    some = create_mesh((4,), ('x',), devices=jax.devices()[4:])
    assert held(local_shards(mark_sharding(np.arange(8), some, ('x',)))) == {
        4 + i: ([(2 * i, 2 * i + 2)], 0) for i in range(4)
    }


def test_D7_specs(xy):
    for spec in ((None, (1, 0)), (None, ('y', 'x')), [None, ('y', 0)], P(None, ('y', 'x'))):
        assert resolve_partition_spec(xy, spec, ndim=2) == P(None, ('y', 'x'))
    assert resolve_partition_spec(xy, (np.int64(1), ('x',))) == P('y', 'x')


# Shards.


def held(x):
    """Of each device: the bounds of what it holds, and the number of its replica."""
    return {s.device_id: ([(i.start, i.stop) for i in s.index], s.replica_id) for s in x}


def test_D8_one_dimension():
    shards = local_shards(mark_sharding(np.arange(8), mesh_of((8,)), (0,)))
    assert held(shards) == {i: ([(i, i + 1)], 0) for i in range(8)}
    assert [shard.data.tolist() for shard in shards] == [[i] for i in range(8)]


def test_D8_replicated():
    shards = local_shards(mark_sharding(np.arange(8), mesh_of((8,)), (None,)))
    assert held(shards) == {i: ([(0, 8)], i) for i in range(8)}
    assert all(shard.data.tolist() == IN_ORDER for shard in shards)


def test_D8_replicas(xy):
    values = np.arange(256).reshape(16, 16)
    shards = local_shards(mark_sharding(values, xy, (None, 1)))
    assert held(shards) == {
        i: ([(0, 16), ((i % 2) * 8, (i % 2 + 1) * 8)], i // 2) for i in range(8)
    }
    for shard in shards:
        np.testing.assert_array_equal(shard.data, values[shard.index])


def test_D8_order_within_a_tuple(xy):
    shards = local_shards(mark_sharding(np.arange(16), xy, (('y', 'x'),)))
    assert [shard.index[0].start for shard in shards] == [0, 8, 2, 10, 4, 12, 6, 14]


@pytest.mark.parametrize('types', ['auto', 'explicit'])
@pytest.mark.parametrize('within', [False, True])
def test_D9_uneven_sizes_are_padded(types, within):
    mesh = mesh_of((8,))
    mesh = explicit(mesh) if types == 'explicit' else mesh

    def mark(t):
        return mark_sharding(t, mesh, (0,), on_indivisible='pad')

    with jax.set_mesh(mesh):
        x = jax.jit(mark)(jnp.arange(9)) if within else mark(np.arange(9))
    assert x.shape == (9,)
    assert x.array.sharding == NamedSharding(mesh, P('0'))
    shards = local_shards(x)
    data = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 0], [0, 0], [0, 0], [0, 0]]
    assert [shard.data.tolist() for shard in shards] == data
    unpadded = [[0, 1], [2, 3], [4, 5], [6, 7], [8], [], [], []]
    assert [shard.unpadded_data.tolist() for shard in shards] == unpadded
    assert [s.index[0].stop - s.index[0].start for s in shards] == [*map(len, unpadded)]
    assert x.unpadded().tolist() == list(range(9))


def test_D9_uneven_sizes_are_an_error_unless_asked_for():
    mesh = mesh_of((8,))
    message = r'dimension 0 of shape \(9,\): 9 does not divide by 8.* Use 8 or 16'
    with pytest.raises(ValueError, match=message):
        mark_sharding(np.arange(9), mesh, (0,))
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda t: mark_sharding(t, mesh, (0,)))(np.arange(9))
    x = mark_sharding(np.arange(9), mesh, (0,), on_indivisible='replicate')
    assert x.sharding == NamedSharding(mesh, P(None))


@pytest.mark.parametrize('types', ['auto', 'explicit'])
def test_D9_constraints_of_uneven_sizes_are_an_error_too(types):
    """jax leaves the array whole over Auto axes, without a word."""
    mesh = mesh_of((8,), ('x',))
    mesh = explicit(mesh) if types == 'explicit' else mesh
    message = r'dimension 0 .*of shape \(9,\): 9 does not divide by 8, .* Use 8 or 16'
    with jax.set_mesh(mesh):
        for constrained in (
            lambda t: with_sharding_constraint(t, P('x')),
            jax.jit(lambda t: with_sharding_constraint(t, P('x'))),
            jax.jit(lambda t: constrain(t, ('rows',), [('rows', 'x')])),
        ):
            with pytest.raises(ValueError, match=message):
                constrained(jnp.arange(9))
        if types == 'auto':
            silent = jax.jit(lambda t: jax.lax.with_sharding_constraint(t, P('x')))
            assert silent(jnp.arange(9)).sharding.is_fully_replicated


def test_D10_from_shards(xy):
    x = global_from_shards([np.array([[i]]) for i in range(8)], xy, (0, 1))
    assert x.tolist() == np.arange(8).reshape(4, 2).tolist()
    assert x.sharding == NamedSharding(xy, P('x', 'y'))
    x = global_from_shards([np.array([[i % 2]]) for i in range(8)], xy, (None, 1))
    assert x.tolist() == [[0, 1]]


def test_D10_shards_that_make_no_array(xy):
    ones = [np.array([[i]]) for i in range(8)]
    for shards, shape, message in [
        (ones[:7], None, '7 shards for 8 devices'),
        (ones, (4, 3), r'\(4, 3\): dimension 1 in 2 tiles of 1 can be 1 to 2, not 3'),
        (ones, (8,), r'\(8,\) has 1 dimensions, shards of shape \(1, 1\) 2'),
        ([*ones[:7], np.array([7])], None, r'shard 7 is int64 \(1,\), but shard 0'),
        ([*ones[:7], np.array([[7.0]])], None, 'shard 7 is float64'),
    ]:
        with pytest.raises(ValueError, match=message):
            global_from_shards(shards, xy, (0, 1), shape)
    with pytest.raises(ValueError, match='is for rank 2, but the array is of rank 1'):
        global_from_shards([np.array([i]) for i in range(8)], xy, (0, 1))
    with pytest.raises(ValueError, match='shards 0 and 1, of devices 0 and 1, hold the same'):
        global_from_shards(ones, xy, (0, None))


def test_D10_the_tail_is_padding():
    mesh, shards = mesh_of((8,)), [np.full(8, i) for i in range(8)]
    assert global_from_shards(shards, mesh, (0,), (64,)).shape == (64,)
    for d in range(1, 8):
        x = global_from_shards(shards, mesh, (0,), (64 - d,))
        assert x.shape == (64 - d,)
        assert x.unpadded().tolist() == np.repeat(range(8), 8)[: 64 - d].tolist()
    for size in (64 - 8, 65):
        with pytest.raises(ValueError, match=f'8 tiles of 8 can be 57 to 64, not {size}'):
            global_from_shards(shards, mesh, (0,), (size,))


def test_D11_scalars(xy):
    for scalar in (3, np.float32(3), jnp.array(3)):
        shards = local_shards(mark_sharding(scalar, xy, ()))
        assert held(shards) == {i: ([], i) for i in range(8)}
        assert {float(shard.data) for shard in shards} == {3.0}
    with pytest.raises(ValueError, match=r"\('x',\) is for rank 1, but the array is of rank 0"):
        mark_sharding(3, xy, ('x',))


# Manual sharding.


@pytest.mark.parametrize('jitted', [False, True])
def test_D12_manual_sharding(jitted):
    mesh = mesh_of((1, 8))
    seen = []

    def add_one(t):
        shards = enable_manual_sharding(t, mesh, (0, 1))
        assert shards.shape == (8, 1)
        done = shards.apply(lambda block: (seen.append(block.shape), block + 1)[1])
        assert done.shape == (8, 1)
        return disable_manual_sharding(done, (8, 8))

    x = (jax.jit(add_one) if jitted else add_one)(jnp.zeros((8, 8)))
    assert x.tolist() == np.ones((8, 8)).tolist() and set(seen) == {(8, 1)}
    assert x.sharding.is_equivalent_to(NamedSharding(mesh, P('0', '1')), 2)
    assert enable_manual_sharding(x, mesh, (None, None)).shape == (8, 8)


@pytest.mark.parametrize('dim, spec', [(0, ('1', None)), (-1, (None, '1'))])
def test_D12_reduce_scatter(dim, spec):
    shards = enable_manual_sharding(jnp.ones((8, 8)), mesh_of((1, 8)), (None, None))
    summed = shards.apply(
        lambda block: jax.lax.psum_scatter(
            block, '1', scatter_dimension=dim % block.ndim, tiled=True
        ),
        partition_spec=spec,
    )
    assert summed.shape == ((1, 8) if dim == 0 else (8, 1))
    assert {(float(s.data.min()), s.data.shape) for s in local_shards(summed.array)} == {
        (8.0, summed.shape)
    }
    assert disable_manual_sharding(summed).tolist() == np.full((8, 8), 8.0).tolist()


@pytest.mark.parametrize('scale, of_ones, of_ranks', [(1.0, 8.0, 36.0), (0.25, 2.0, 9.0)])
def test_D12_all_reduce(scale, of_ones, of_ranks):
    """Of ones, and of what differs from device to device; torch_xla's `scale` is a product."""
    shards = enable_manual_sharding(jnp.ones((8, 8)), mesh_of((1, 8)), (None, None))

    def of_rank(block):
        return block * (1 + jax.lax.axis_index('1'))

    for rank, expected in ((lambda block: block, of_ones), (of_rank, of_ranks)):
        summed = shards.apply(lambda block, rank=rank: jax.lax.psum(rank(block), '1') * scale)
        assert summed.shape == (8, 8)
        whole = disable_manual_sharding(summed)
        assert whole.tolist() == np.full((8, 8), expected).tolist()
        assert whole.sharding.is_fully_replicated


def test_D12_results_that_differ_where_they_should_be_one():
    shards = enable_manual_sharding(jnp.ones((8, 8)), mesh_of((1, 8)), (None, None))
    with pytest.raises(ValueError, match=r'\(None, None\) leaves out .* 0 1 x 1 8 .*psum'):
        shards.apply(lambda block: block + jax.lax.axis_index('1'))


def test_D12_full_shape():
    shards = enable_manual_sharding(jnp.ones((8, 8)), mesh_of((1, 8)), (0, 1))
    with pytest.raises(ValueError, match=r'make an array of shape \(8, 8\), not \(8, 1\)'):
        disable_manual_sharding(shards, (8, 1))


# Marks.


def test_D13_clear_sharding(xy):
    x = mark_sharding(np.arange(16).reshape(8, 2), xy, ('x', 'y'))
    cleared = clear_sharding(x)
    assert {d.id for d in cleared.sharding.device_set} == {0}
    assert cleared.tolist() == x.tolist()
    assert x.sharding == NamedSharding(xy, P('x', 'y'))
    padded = mark_sharding(np.arange(9), xy, ('x',), on_indivisible='pad')
    assert clear_sharding(padded).tolist() == list(range(9))


def test_D13_clear_sharding_within_a_program(xy):
    def program(t):
        return clear_sharding(mark_sharding(t, xy, ('x', None)))

    marked, cleared = jax.make_jaxpr(program)(jnp.ones((8, 2))).eqns
    assert not marked.params['unconstrained_dims']
    assert cleared.params['unconstrained_dims'] == {0, 1}


def test_D13_clear_sharding_over_explicit_axes(xy):
    """There an array always has a layout: within a program, the one that is whole everywhere."""
    mesh = explicit(xy)
    x = mark_sharding(np.arange(16).reshape(8, 2), mesh, ('x', 'y'))
    assert {d.id for d in clear_sharding(x).sharding.device_set} == {0}
    seen = []

    @jax.jit
    def program(t):
        before, cleared = jax.typeof(t).sharding.spec, clear_sharding(t)
        seen.append((before, jax.typeof(cleared).sharding.spec))
        return cleared

    with jax.set_mesh(mesh):
        cleared = program(x)
    assert seen == [(P('x', 'y'), P(None, None))]
    assert cleared.sharding == NamedSharding(mesh, P(None, None))
    assert cleared.tolist() == np.arange(16).reshape(8, 2).tolist()


def test_D13_marks_again(xy):
    x = mark_sharding(np.arange(16).reshape(8, 2), xy, (None, None))
    for spec in (P('x', 'y'), P(None, 'y'), P(('y', 'x'), None), P(None, None)):
        x = mark_sharding(x, xy, spec)
        assert x.sharding == NamedSharding(xy, spec)
        assert x.tolist() == np.arange(16).reshape(8, 2).tolist()
        inside = jax.jit(lambda t, spec=spec: mark_sharding(t, xy, spec))
        assert inside(x).sharding.is_equivalent_to(NamedSharding(xy, spec), 2)


@pytest.mark.parametrize('jitted', [False, True])
def test_D14_gradients_over_auto_axes(xy, jitted):
    def loss(t):
        return mark_sharding_with_gradients(t, xy, ('x', None)).sum()

    gradient = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)
    x = mark_sharding(np.zeros((8, 2)), xy, (None, None))
    grad = gradient(x)
    assert grad.sharding.is_equivalent_to(NamedSharding(xy, P('x')), 2)
    assert grad.tolist() == np.ones((8, 2)).tolist()


@pytest.mark.parametrize('jitted', [False, True])
def test_D14_gradients_over_explicit_axes(xy, jitted):
    """The type of the gradient is that of the array, by which it has the mark from there on."""
    mesh = explicit(xy)
    seen = []

    @jax.custom_vjp
    def look(t):
        return t

    def backward(_, gradient):
        seen.append(jax.typeof(gradient).sharding.spec)
        return (gradient,)

    look.defvjp(lambda t: (t, None), backward)

    def loss(t):
        return look(mark_sharding_with_gradients(t, mesh, ('x', None))).sum()

    gradient = jax.jit(jax.grad(loss)) if jitted else jax.grad(loss)
    with jax.set_mesh(mesh):
        for own in (P(None, None), P('x', None), P(None, 'y')):
            grad = gradient(mark_sharding(np.zeros((8, 2)), mesh, own))
            assert grad.sharding == NamedSharding(mesh, own)
            assert grad.tolist() == np.ones((8, 2)).tolist()
    assert set(seen) == {P('x', None)}


# The input loader.


def test_D15_a_spec_for_each_array(xy):
    batch = {'x': np.zeros((16, 128)), 'y': np.zeros((16, 128, 128), np.float16)}
    made = shard_batch(batch, {'x': ('x', None), 'y': ('x', None, None)}, xy)
    assert made['x'].sharding == NamedSharding(xy, P('x', None))
    assert made['y'].sharding == NamedSharding(xy, P('x', None, None))
    made = shard_batch(batch, {'x': ShardingSpec(xy, (None, 'y')), 'y': None}, xy)
    assert made['x'].sharding == NamedSharding(xy, P(None, 'y'))
    assert made['y'].sharding.is_fully_replicated


def test_D15_one_spec_for_all(xy):
    batch = {'x': np.zeros((16, 128)), 'y': np.zeros((8, 4))}
    for spec in (('x', None), ShardingSpec(xy, ('x', None))):
        made = shard_batch(batch, spec, xy)
        assert {a.sharding for a in made.values()} == {NamedSharding(xy, P('x', None))}
        assert shard_batch(batch['x'], spec, xy).sharding == NamedSharding(xy, P('x', None))
    assert all(a.sharding.is_fully_replicated for a in shard_batch(batch, None, xy).values())
    with pytest.raises(ValueError, match=r'z.*\(3,\) is of rank 1, .* is for rank 2'):
        shard_batch({**batch, 'z': np.zeros(3)}, ('x', None), xy)


def test_D15_batches_and_specs_that_do_not_meet(xy):
    specs = {'x': ('x', None), 'labels': ('x',)}
    with pytest.raises(ValueError, match=r"specs for \['labels', 'x'\], but the batch is ndarray"):
        shard_batch(np.zeros((16, 128)), specs, xy)
    with pytest.raises(KeyError, match=r"array 'label' has no entry .*Did you mean 'labels'"):
        shard_batch({'x': np.zeros((16, 128)), 'label': np.zeros(16)}, specs, xy)
    with pytest.raises(KeyError, match="spec 'labels' has no entry in batch"):
        shard_batch({'x': np.zeros((16, 128))}, specs, xy)


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
    with pytest.raises(ValueError, match=r'7 rows .* holds 8 of the 8 parts'):
        spec.apply(np.zeros((7, 3)))


# Meshes over slices.


def two_slices():
    """Two v4 slices of 2x2x1 whose ids do not follow their coordinates."""
    places = [
        *((0, 1, 0), (1, 0, 0), (0, 0, 0), (1, 1, 0)),
        *((0, 0, 0), (1, 1, 0), (0, 1, 0), (1, 0, 0)),
    ]
    return [SliceDevice(i, i // 4, place, slice_index=i // 4) for i, place in enumerate(places)]


@pytest.mark.parametrize(
    'ici, dcn, expected',
    [
        ((2, 2), (2, 1), [[2, 1], [0, 3], [4, 7], [6, 5]]),
        ((2, 2), (1, 2), [[2, 1, 4, 7], [0, 3, 6, 5]]),
        ((1, 4), (2, 1), [[2, 0, 1, 3], [4, 6, 7, 5]]),
    ],
)
def test_D16_hybrid_meshes(ici, dcn, expected):
    devices = two_slices()
    for given in (devices, devices[::-1], devices[4:] + devices[:4]):
        mesh = HybridMesh(
            ici_mesh_shape=ici, dcn_mesh_shape=dcn, axis_names=('x', 'y'), devices=given
        )
        assert get_logical_mesh(mesh).tolist() == expected
        assert mesh.axis_names == ('x', 'y')


@pytest.mark.parametrize(
    'slices, ici, dcn, message',
    [
        (2, (2, 2), (2, 1, 1), r'\(2, 2\) has 2 axes and dcn_mesh_shape \(2, 1, 1\) has 3'),
        (2, (2, 2), None, r'2 slices: provide dcn_mesh_shape.* for example \(2, 1\)'),
        (2, (2, 2), (1, 1), r'\(1, 1\) .* product 1, but the number of slices is 2'),
        (1, (2, 2), (2, 1), r'\(2, 1\) .* product 2, but the number of slices is 1'),
        (2, (2, 2), (4, 1), r'\(4, 1\) .* product 4, but the number of slices is 2'),
        (2, (4, 2), (2, 1), r'\(4, 2\) .* product 8, but the number of devices in each .* is 4'),
    ],
)
def test_D17_hybrid_meshes_that_cannot_be(slices, ici, dcn, message):
    with pytest.raises(ValueError, match=message):
        HybridMesh(ici_mesh_shape=ici, dcn_mesh_shape=dcn, devices=two_slices()[: 4 * slices])


def test_D17_devices_that_know_no_slice():
    for devices in (tpus((2, 2, 1), 'TPU v4'), cpus(4, 1)):
        for dcn in (None, (1, 1)):
            mesh = HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=dcn, devices=devices)
            assert ids(mesh) == [[0, 1], [2, 3]]


V4_2X2X4 = [[0, 2, 1, 3], [4, 6, 5, 7], [8, 10, 9, 11], [12, 14, 13, 15]]


@pytest.mark.parametrize(
    'kind, bounds, expected',
    [
        ('TPU v4', (2, 2, 1), [[0, 2, 1, 3]]),
        ('TPU v4', (2, 2, 1), [[0], [2], [1], [3]]),
        ('TPU v4', (2, 2, 1), [[0, 1], [2, 3]]),
        ('TPU v4', (2, 2, 2), [[0, 4, 2, 6, 1, 5, 3, 7]]),
        ('TPU v4', (2, 2, 2), V4_2X2X4[:2]),
        ('TPU v4', (2, 2, 2), [[0, 1], [4, 5], [2, 3], [6, 7]]),
        ('TPU v4', (2, 2, 2), [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        ('TPU v4', (2, 2, 4), V4_2X2X4),
        ('TPU v4', (2, 2, 4), [[0, 4, 8, 12, 1, 5, 9, 13], [2, 6, 10, 14, 3, 7, 11, 15]]),
        ('TPU v4', (2, 2, 4), [V4_2X2X4[:2], V4_2X2X4[2:]]),
        ('TPU v5 lite', (2, 2, 1), [[0, 1, 3, 2]]),
        ('TPU v5 lite', (2, 4, 1), [[0, 1, 2, 3], [7, 6, 5, 4]]),
        ('TPU v5 lite', (4, 2, 1), [[0, 1, 2, 3], [7, 6, 5, 4]]),
        ('TPU v5', (2, 2, 2), [[0, 1, 3, 2], [6, 7, 5, 4]]),
        ('TPU v5', (2, 2, 2), [[0, 1], [3, 2], [6, 7], [5, 4]]),
    ],
)
def test_D18_orders_on_a_torus(kind, bounds, expected):
    sizes = np.shape(expected)
    names = 'xyz'[: len(sizes)]
    assert ids(create_mesh(sizes, tuple(names), devices=tpus(bounds, kind))) == expected


def test_D18_an_axis_that_splits_a_dimension():
    """jax has no order of 2 x 2 x 4 for a mesh of 2, 2 and 4 before it may split; here it may."""
    devices = tpus((2, 2, 4), 'TPU v4')
    with pytest.raises(NotImplementedError, match='Failed to find assignment'):
        mesh_utils.create_device_mesh((2, 2, 4), devices)
    split = mesh_utils.create_device_mesh((2, 2, 4), devices, allow_split_physical_axes=True)
    expected = [[[0, 2, 1, 3], [4, 6, 5, 7]], [[8, 10, 9, 11], [12, 14, 13, 15]]]
    assert [[[d.id for d in row] for row in plane] for plane in split] == expected
    assert ids(create_mesh((2, 2, 4), ('x', 'y', 'z'), devices=devices)) == expected


def test_D18_orders_of_two_cores():
    small = tpus((2, 2, 1), 'TPU v3', cores=2)
    assert ids(create_mesh((8,), ('x',), devices=small)) == [0, 1, 2, 3, 6, 7, 4, 5]
    large = create_mesh((4, 8), ('x', 'y'), devices=v3_4x4())
    assert ids(large)[0] == [0, 1, 2, 3, 10, 11, 8, 9]


def test_D18_orders_over_slices():
    mesh = HybridMesh(
        ici_mesh_shape=(1, 2, 4),
        dcn_mesh_shape=(2, 1, 1),
        devices=tpu_slices(2, (2, 2, 2), 'TPU v4'),
    )
    assert ids(mesh) == [V4_2X2X4[:2], V4_2X2X4[2:]]
    mesh = HybridMesh(
        ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 2), devices=tpu_slices(4, (2, 2, 1), 'TPU v4')
    )
    assert ids(mesh) == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


@needs_libtpu
def test_D19_described_machines():
    cube = describe_topology('v5p:2x2x2')
    assert len(cube.devices) == 8
    assert {d.device_kind for d in cube.devices} == {'TPU v5'}
    of_process = collections.defaultdict(set)
    for device in cube.devices:
        of_process[device.process_index].add((device.id, device.coords[2]))
    assert of_process == {
        process: {(4 * process + i, process) for i in range(4)} for process in (0, 1)
    }
    theirs = {(d.id, d.process_index, tuple(d.coords)) for d in describe_topology('v3:4x4').devices}
    assert theirs == {(d.id, d.process_index, d.coords) for d in v3_4x4()}


@needs_libtpu
def test_D19_slices_and_programs():
    pods = describe_topology('v5e:4x4', num_slices=2)
    assert {d.slice_index for d in pods.devices} == {0, 1}
    mesh = create_hybrid_mesh(
        (1, 4, 4), (2, 1, 1), ('replica', 'data', 'model'), devices=pods.devices
    )
    assert dict(mesh.shape) == {'replica': 2, 'data': 4, 'model': 4}
    in_slice = get_logical_mesh(mesh) % 100_000
    assert in_slice.tolist() == np.tile(np.arange(16).reshape(4, 4), (2, 1, 1)).tolist()
    x = jax.ShapeDtypeStruct(
        (64, 64),
        jnp.float32,
        sharding=NamedSharding(mesh, resolve_partition_spec(mesh, (('replica', 'data'), 'model'))),
    )
    compiled = jax.jit(lambda t: t @ t.T).lower(x).compile()
    assert compiled.memory_analysis().argument_size_in_bytes >= 64 * 64 * 4 // 32
