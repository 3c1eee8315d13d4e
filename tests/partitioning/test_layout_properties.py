"""Layouts of any assignment of devices to processes, against the oracle; and the oracle itself."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from layout_oracle import check_chunks, check_rows
from mock_devices import mesh_of_processes

from partitioning.layout import data_layout

pytestmark = pytest.mark.core

# Properties.


@st.composite
def meshes(draw):
    """Meshes of one to three axes; the numbers of the processes have gaps."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    numbers = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5, unique=True))
    size = math.prod(shape)
    owners = draw(st.lists(st.sampled_from(numbers), min_size=size, max_size=size))
    return mesh_of_processes(np.reshape(owners, shape), ('x', 'y', 'z')[: len(shape)])


def some_axes(draw, mesh):
    """Any of the axes, in any order."""
    axes = draw(st.permutations(mesh.axis_names))
    return tuple(axes[: draw(st.integers(0, len(axes)))])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), mesh=meshes(), rows_per_shard=st.integers(1, 3))
def test_rows_of_any_assignment(data, mesh, rows_per_shard):
    axes = some_axes(data.draw, mesh)
    batch_size = rows_per_shard * math.prod(mesh.shape[a] for a in axes)
    held = check_rows(mesh, axes, batch_size)
    assert set().union(*held.values()) == set(range(batch_size))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), mesh=meshes())
def test_chunks_of_any_assignment(data, mesh):
    """The axes shard two dimensions, of sizes that divide or of any size under 'pad'."""
    axes = some_axes(data.draw, mesh)
    cut = data.draw(st.integers(0, len(axes)))
    spec = (axes[:cut], axes[cut:])
    num_shards = [math.prod(mesh.shape[a] for a in dimension) for dimension in spec]
    if data.draw(st.booleans()):
        shape = tuple(data.draw(st.integers(0, 9)) for _ in spec)
        writes = check_chunks(mesh, spec, shape, 'pad')
    else:
        shape = tuple(data.draw(st.integers(1, 2)) * n for n in num_shards)
        writes = check_chunks(mesh, spec, shape)
    assert sum(writes.values()) == math.prod(shape)


# The oracle: it must fail for a wrong layout.

STRIDED = mesh_of_processes([[0, 0], [1, 1], [0, 0], [1, 1]], ('data', 'model'))
SHARED = mesh_of_processes([[0, 1], [0, 1], [2, 3], [2, 3]], ('data', 'model'))
IN_A_RING = mesh_of_processes([[0, 1], [1, 2], [2, 3], [3, 0]], ('data', 'model'))


@pytest.mark.parametrize(
    'mesh, rows, is_even',
    [
        (STRIDED, {0: (0, 1, 4, 5), 1: (2, 3, 6, 7)}, True),
        (SHARED, dict.fromkeys((0, 1), (0, 1, 2, 3)) | dict.fromkeys((2, 3), (4, 5, 6, 7)), True),
        (IN_A_RING, {0: (0, 1, 6, 7), 1: (0, 1, 2, 3), 2: (2, 3, 4, 5), 3: (4, 5, 6, 7)}, False),
    ],
)
def test_the_oracle_on_known_meshes(mesh, rows, is_even):
    assert check_rows(mesh, 'data', 8) == rows
    assert data_layout(mesh, 'data', 8, 1).is_even == is_even


def test_one_replica_writes_a_replicated_array():
    assert check_chunks(SHARED, ('data', None), (4, 3)) == {0: 6, 1: 0, 2: 6, 3: 0}
    assert check_chunks(SHARED, (None, None), (4, 3)) == {0: 12, 1: 0, 2: 0, 3: 0}
    assert check_chunks(SHARED, (), ()) == {0: 1, 1: 0, 2: 0, 3: 0}
