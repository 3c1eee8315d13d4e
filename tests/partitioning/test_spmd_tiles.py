"""Tiles and their holders, against jax's index maps, for random meshes, orders and specs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mock_devices import MockDevice

from partitioning.compat.torch_xla import (
    ShardingType,
    hlo_sharding,
    iota_tile_assignment,
    replication_groups,
    sharding_type,
    tile_assignment,
)

pytestmark = pytest.mark.core

NAMES = ('a', 'b', 'c', 'd')


@st.composite
def layouts(draw):
    """A mesh of up to 24 devices in some order, and a spec of places and names for it.

    Arrays of `mesh.size` in each dimension divide by any spec.
    """
    shape = draw(
        st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda s: math.prod(s) <= 24)
    )
    size = math.prod(shape)
    step = draw(st.sampled_from([1, 1, 1, 3]))
    order = draw(st.one_of(st.just(range(size)), st.permutations(range(size))))
    devices = np.empty(size, object)
    devices[:] = [MockDevice(id=step * i, process_index=0, platform='cpu') for i in order]
    rank = draw(st.integers(0, 5))
    spec = [()] * rank
    for axis in draw(st.permutations(range(len(shape)))):
        place = draw(st.integers(-1, rank - 1))
        if place >= 0:
            name = draw(st.sampled_from([axis, NAMES[axis]]))
            spec[place] = (*spec[place], name)
    mesh = Mesh(devices.reshape(shape), NAMES[: len(shape)])
    return mesh, tuple(e[0] if len(e) == 1 and draw(st.booleans()) else e or None for e in spec)


def dimension_axes(spec):
    """The spec as jax takes it."""
    entries = [() if e is None else e if isinstance(e, tuple) else (e,) for e in spec]
    return P(*(tuple(a if isinstance(a, str) else NAMES[a] for a in e) or None for e in entries))


def holders(sharding, size, rank):
    """Device ids by the place of what they hold, in the order of the mesh; tiles a dimension."""
    found, ways = {}, [1] * rank
    for device, index in sharding.devices_indices_map((size,) * rank).items():
        bounds = [s.indices(size)[:2] for s in index]
        ways = [size // (stop - start) for start, stop in bounds]
        place = tuple(start // (stop - start) for start, stop in bounds)
        found.setdefault(place, []).append(device.id)
    return found, ways


@settings(max_examples=5000, deadline=None)
@given(layouts())
def test_tiles_are_those_of_the_index_map(layout):
    mesh, spec = layout
    sharding = NamedSharding(mesh, dimension_axes(spec))
    held, ways = holders(sharding, mesh.size, len(spec))
    tiles, groups = tile_assignment(mesh, spec), replication_groups(mesh, spec)
    assert groups == [held[place] for place in np.ndindex(*ways)]
    replicas = mesh.size // len(held)
    assert tiles.shape == ((*ways, replicas) if replicas > 1 else (*ways,))
    for place, ids in held.items():
        assert np.ravel(tiles[place]).tolist() == ids
    kind = sharding_type(mesh, spec)
    assert (kind == ShardingType.MAXIMAL) == (mesh.size == 1)
    if mesh.size > 1:
        assert (kind == ShardingType.REPLICATED) == (len(held) == 1)
        assert (kind == ShardingType.TILED) == (len(held) == mesh.size)
    text = hlo_sharding(mesh, spec)
    numbers = {d.id: i for i, d in enumerate(sorted(mesh.devices.flat, key=lambda d: d.id))}
    if [numbers[d.id] for d in mesh.devices.flat] == [*range(mesh.size)]:
        if mesh.size > 1:
            assert text == str(sharding._to_xla_hlo_sharding(len(spec)))
    elif len(held) > 1:
        listed = [n for ids in groups for n in sorted(numbers[i] for i in ids)]
        assert f']{",".join(map(str, listed))}' in text and '<=' not in text


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_iota_arguments_are_the_tiles_or_an_error(layout):
    mesh, spec = layout
    ids = [d.id for d in mesh.devices.flat]
    if ids != sorted(ids):
        with pytest.raises(ValueError, match='not in the order of their ids'):
            iota_tile_assignment(mesh, spec)
        return
    dims, reshape_dims, transpose_perm, _ = iota_tile_assignment(mesh, spec)
    made = np.array(ids).reshape(reshape_dims).transpose(transpose_perm).reshape(dims)
    np.testing.assert_array_equal(made, tile_assignment(mesh, spec))
