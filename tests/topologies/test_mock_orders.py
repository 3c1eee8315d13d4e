"""Device orders of meshes on mock TPU slices, which need no libtpu."""

import itertools
import math

import numpy as np
import pytest
from described_machines import assert_each_device_once
from hop_counter import fewest_weighted, hops_of_axis, mean_hops, weighted
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh
from mock_devices import tpus

from partitioning import axis_rings, create_mesh

pytestmark = pytest.mark.core


def names(shape):
    return tuple('abcd'[: len(shape)])


# Random machines and shapes.

# Some of these slices are not cubes of 4, and a side of 6 is not a power of two.
boxes = st.tuples(*[st.sampled_from((2, 4, 6, 8))] * 2, st.sampled_from((1, 2, 4)))
chips = st.sampled_from([('TPU v4', 1), ('TPU v5', 1), ('TPU v5 lite', 1), ('TPU7x', 2)])


@st.composite
def meshes(draw):
    kind, cores = draw(chips)
    bounds = draw(boxes)
    devices = tpus(bounds, kind, cores)
    shape, left = [], len(devices)
    for _ in range(draw(st.integers(0, 2))):
        shape.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= shape[-1]
    return create_mesh([*shape, left], names([*shape, left]), devices=devices), bounds, devices


def closed(kind, bounds):
    """Returns which of x, y and z are rings: all in slices of whole cubes, none in v5e here."""
    whole = kind != 'TPU v5 lite' and all(n % 4 == 0 for n in bounds)
    return (whole, whole, whole)


@settings(max_examples=60)
@given(meshes())
def test_a_mesh_of_any_shape_has_every_device_and_axis_rings_counts_its_hops(case):
    mesh, bounds, devices = case
    assert_each_device_once(mesh, devices)
    wrap = closed(devices[0].device_kind, bounds)
    for axis, ring in enumerate(axis_rings(mesh)):
        counted = hops_of_axis(mesh.devices, axis, bounds, wrap)
        assert ring.mean_hops == pytest.approx(sum(counted) / len(counted))
        assert ring.worst_hops == max(counted)
        assert ring.network == ('ICI' if ring.size > 1 else '-')


@settings(max_examples=40)
@given(
    st.sampled_from(
        [('TPU v5', (4, 4, 8)), ('TPU v5 lite', (8, 8, 1)), ('TPU v5 lite', (16, 8, 1))]
    ),
    st.data(),
)
def test_axes_that_split_dimensions_have_as_few_hops_as_any_boxes(chip, data):
    kind, bounds = chip
    size = math.prod(bounds)
    powers = [2**i for i in range(size.bit_length())]
    last = data.draw(st.sampled_from(powers))
    middle = data.draw(st.sampled_from([n for n in powers if n * last <= size]))
    shape = (size // last // middle, middle, last)
    devices = tpus(bounds, kind)
    mesh = create_mesh(shape, ('data', 'fsdp', 'model'), devices=devices)
    assert_each_device_once(mesh, devices)
    wrap = (bounds[0] == 16, False, False) if kind == 'TPU v5 lite' else (True, True, True)
    means = mean_hops(mesh.devices, bounds, wrap)
    whole, several = _sizes_of_whole_dimensions(bounds)
    # Other shapes use jax's order, or an axis that takes several whole dimensions row by row.
    if not whole.issuperset(shape) and several.isdisjoint(shape):
        fewest = fewest_weighted(shape, bounds, wrap, 1)[0]
        assert weighted(means, shape) <= fewest + 1e-9, (shape, means)


def _sizes_of_whole_dimensions(bounds):
    """Returns the sizes of axes that take any number of whole dimensions, or at least two."""
    used = [n for n in bounds if n > 1]
    sizes = [
        {math.prod(some) for some in itertools.combinations(used, number)}
        for number in range(len(used) + 1)
    ]
    return set().union(*sizes), set().union(*sizes[2:])


def test_axis_rings_measures_a_mesh_that_ignores_the_links():
    devices = tpus((4, 4, 4), 'TPU v5')
    plain = np.array(sorted(devices, key=lambda d: d.id), dtype=object).reshape(8, 8)
    assert [r.mean_hops for r in axis_rings(Mesh(plain, ('data', 'model')))] == [
        *mean_hops(plain, (4, 4, 4), (True, True, True))
    ]
    best = create_mesh((8, 8), ('data', 'model'), devices=devices)
    assert axis_rings(best)[1].mean_hops < axis_rings(Mesh(plain, ('data', 'model')))[1].mean_hops
