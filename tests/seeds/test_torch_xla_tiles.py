"""torch_xla's tile assignments, against its tables and, for random meshes, jax's index maps."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from mock_devices import MockDevice
from xla_meshes import IN_ORDER, mesh_of, refuses, xy_mesh

from partitioning.compat.torch_xla import (
    ShardingType,
    group_assignment,
    hlo_sharding,
    iota_tile_assignment,
    local_shards,
    mark_sharding,
    mesh_from_device_ids,
    replication_groups,
    sharding_type,
    tile_assignment,
)

pytestmark = [pytest.mark.core, pytest.mark.smoke]

PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
EACH_PAIR = [[pair] for pair in PAIRS]


def test_D3_tiles_by_the_names_of_axes():
    mesh = xy_mesh()
    assert tile_assignment(mesh, ('x', None)).tolist() == EACH_PAIR
    assert tile_assignment(mesh, (None, 'y')).tolist() == [[[0, 2, 4, 6], [1, 3, 5, 7]]]
    assert tile_assignment(mesh, (None,)).tolist() == [IN_ORDER]


def test_D3_ids_in_reverse():
    mesh = mesh_of((1, 8), ids=IN_ORDER[::-1])
    assert tile_assignment(mesh, (0, 1)).tolist() == [IN_ORDER[::-1]]
    assert hlo_sharding(mesh, (0, 1)) == '{devices=[1,8]7,6,5,4,3,2,1,0}'
    refuses(lambda: iota_tile_assignment(mesh, (0, 1)), 'device 7 is at position 0')
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


def test_D5_one_device():
    mesh = mesh_from_device_ids([3], (1, 1), devices=jax.devices()[3:4])
    for spec in ((0, 1), (None, None)):
        assert sharding_type(mesh, spec) == ShardingType.MAXIMAL
        assert replication_groups(mesh, spec) == [[3]]
        assert hlo_sharding(mesh, spec) == '{maximal device=0}'


# Random meshes and specs.

NAMES = ('a', 'b', 'c', 'd')


@st.composite
def layouts(draw):
    """Draws a mesh of up to 24 devices in some order, and a spec of numbers and names for it.

    Every spec divides arrays whose dimensions all have the size `mesh.size`.
    """
    shape = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 24)
    )
    size = math.prod(shape)
    step = draw(st.sampled_from([1, 3]))
    order = draw(st.one_of(st.just(range(size)), st.permutations(range(size))))
    devices = np.empty(size, object)
    devices[:] = [MockDevice(id=step * i, process_index=0, platform='cpu') for i in order]
    rank = draw(st.integers(0, 5))
    spec = [()] * rank
    for axis in draw(st.permutations(range(len(shape)))):
        dim = draw(st.integers(-1, rank - 1))
        if dim >= 0:
            spec[dim] = (*spec[dim], draw(st.sampled_from([axis, NAMES[axis]])))
    mesh = Mesh(devices.reshape(shape), NAMES[: len(shape)])
    return mesh, tuple(e[0] if len(e) == 1 and draw(st.booleans()) else e or None for e in spec)


def jax_spec(spec):
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
    return P(*(tuple(a if isinstance(a, str) else NAMES[a] for a in e) or None for e in entries))


def holders_by_tile(sharding, size, rank):
    """Returns the device ids of each tile, in mesh order, and the number of tiles per dimension."""
    found, counts = {}, [1] * rank
    for device, index in sharding.devices_indices_map((size,) * rank).items():
        bounds = [s.indices(size)[:2] for s in index]
        counts = [size // (stop - start) for start, stop in bounds]
        tile = tuple(start // (stop - start) for start, stop in bounds)
        found.setdefault(tile, []).append(device.id)
    return found, counts


@settings(max_examples=100)
@given(layouts())
def test_D3_D5_D6_tiles_match_the_index_map_of_jax(layout):
    mesh, spec = layout
    sharding = NamedSharding(mesh, jax_spec(spec))
    held, counts = holders_by_tile(sharding, mesh.size, len(spec))
    tiles, groups = tile_assignment(mesh, spec), replication_groups(mesh, spec)
    assert groups == [held[tile] for tile in np.ndindex(*counts)]
    replicas = mesh.size // len(held)
    assert tiles.shape == ((*counts, replicas) if replicas > 1 else (*counts,))
    for tile, ids in held.items():
        assert np.ravel(tiles[tile]).tolist() == ids
    kind = sharding_type(mesh, spec)
    assert (kind == ShardingType.MAXIMAL) == (mesh.size == 1)
    if mesh.size > 1:
        assert (kind == ShardingType.REPLICATED) == (len(held) == 1)
        assert (kind == ShardingType.TILED) == (len(held) == mesh.size)
    ids = [d.id for d in mesh.devices.flat]
    numbers = {number: i for i, number in enumerate(sorted(ids))}
    text = hlo_sharding(mesh, spec)
    if ids == sorted(ids):
        if mesh.size > 1:
            assert text == str(sharding._to_xla_hlo_sharding(len(spec)))
        dims, reshape_dims, transpose_perm, subgroup = iota_tile_assignment(mesh, spec)
        made = np.array(ids).reshape(reshape_dims).transpose(transpose_perm).reshape(dims)
        np.testing.assert_array_equal(made, tiles)
        assert subgroup == ([ShardingType.REPLICATED] if replicas > 1 else [])
    else:
        refuses(lambda: iota_tile_assignment(mesh, spec), 'not ordered by id')
        if len(held) > 1:
            listed = [n for group in groups for n in sorted(numbers[i] for i in group)]
            assert f']{",".join(map(str, listed))}' in text and '<=' not in text
