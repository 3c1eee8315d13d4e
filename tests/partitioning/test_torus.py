"""Orders of a torus: each place appears once, rings are short, and no choice is cheaper."""

import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from partitioning.mesh.torus import Torus, ring_order, snake

pytestmark = pytest.mark.core


def divisors(number):
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def cases(draw, dimensions=4, largest=6, most=96, cores=False):
    """A torus and sizes of axes with its number of devices."""
    bounds = tuple(draw(st.lists(st.integers(1, largest), min_size=1, max_size=dimensions)))
    assume(math.prod(bounds) <= most)
    wrap = tuple(draw(st.booleans()) for _ in bounds)
    hops = tuple(draw(st.integers(0, 1)) if cores else 1 for _ in bounds)
    left, sizes = math.prod(bounds), []
    for _ in range(draw(st.integers(0, 3))):
        sizes.append(draw(st.sampled_from(divisors(left))))
        left //= sizes[-1]
    return Torus(bounds, wrap, hops), tuple(draw(st.permutations([*sizes, left])))


def distance(torus, a, b):
    """Links between two places, counted dimension by dimension."""
    links = 0
    for n, wraps, hop, i, j in zip(torus.bounds, torus.wrap, torus.hops, a, b, strict=True):
        away = abs(int(i) - int(j))
        links += hop * (min(away, n - away) if wraps else away)
    return links


def places_of(torus, order):
    """The coordinates of each position of a mesh, of shape `(*mesh, dimensions)`."""
    return np.stack(np.unravel_index(order, torus.bounds), axis=-1)


def mean_hops(torus, order, axis):
    places = np.moveaxis(places_of(torus, order), axis, 0)
    rings = places.reshape(len(places), -1, len(torus.bounds))
    return np.mean(
        [
            distance(torus, rings[i, k], rings[(i + 1) % len(rings), k])
            for i in range(len(rings))
            for k in range(rings.shape[1])
        ]
    )


def weighted(means):
    """The weighted sum of the means: each axis weighs a quarter of the axis after it."""
    return sum(mean / 4**i for i, mean in enumerate(reversed(means)))


# Properties of every torus.


@settings(max_examples=100)
@given(cases(cores=True), st.booleans())
def test_each_place_once(case, whole_row_major):
    torus, sizes = case
    order = ring_order(torus, sizes, whole_row_major=whole_row_major)
    assert order.shape == sizes
    assert sorted(order.ravel().tolist()) == list(range(math.prod(torus.bounds)))


@settings(max_examples=60)
@given(cases(), st.booleans())
def test_axes_take_boxes(case, whole_row_major):
    """All rings of one axis are the same box at different offsets."""
    torus, sizes = case
    places = places_of(torus, ring_order(torus, sizes, whole_row_major=whole_row_major))
    for axis, size in enumerate(sizes):
        rings = np.moveaxis(places, axis, 0).reshape(size, -1, len(torus.bounds))
        assert (rings - rings[:1] == (rings - rings[:1])[:, :1]).all()
        extents = [len(np.unique(rings[:, 0, d])) for d in range(len(torus.bounds))]
        assert math.prod(extents) == size


@settings(max_examples=100)
@given(cases(largest=8, most=128))
def test_rings_of_neighbours_where_a_box_is_even(case):
    """A part of a plane with an even side has a closed ring, whose steps are one stride each."""
    torus, sizes = case
    order = ring_order(torus, sizes)
    places = places_of(torus, order)
    for axis in range(len(sizes)):
        ring = np.moveaxis(places, axis, 0).reshape(sizes[axis], -1, len(torus.bounds))[:, 0]
        values = [np.unique(column) for column in ring.T]
        extents = [len(v) for v in values]
        used = [d for d, extent in enumerate(extents) if extent > 1]
        strides = {int(values[d][1] - values[d][0]) for d in used}
        part = any(1 < e < b for e, b in zip(extents, torus.bounds, strict=True))
        if len(used) > 1 and part and len(strides) == 1 and sizes[axis] % 2 == 0:
            assert mean_hops(torus, order, axis) == strides.pop()


@pytest.mark.parametrize('bounds', [(4, 6), (2, 2, 4)])
@pytest.mark.parametrize('wraps', [False, True])
def test_axes_of_one_device_change_nothing(bounds, wraps):
    """In particular, they do not change the weights of the other axes."""
    torus = Torus(bounds, (wraps,) * len(bounds), (1,) * len(bounds))
    total = math.prod(bounds)
    for last, middle in itertools.product(divisors(total), repeat=2):
        if total % (last * middle * 2) == 0:
            sizes = (2, total // (last * middle * 2), middle, last)
            order = ring_order(torus, sizes)
            for place in range(5):
                more = (*sizes[:place], 1, *sizes[place:])
                assert (ring_order(torus, more).reshape(sizes) == order).all()


def test_whole_dimensions_are_row_major():
    """Collectives can then run a ring along each dimension; a ring through all is optional."""
    torus = Torus((4, 4, 2), (False,) * 3, (1, 1, 1))
    assert ring_order(torus, (2, 16)).tolist() == [
        [2 * i for i in range(16)],
        [2 * i + 1 for i in range(16)],
    ]
    closed = ring_order(torus, (2, 16), whole_row_major=False)
    assert mean_hops(torus, closed, axis=1) == 1.0


def test_cores_of_a_chip_are_no_hop_apart():
    torus = Torus((4, 2, 1, 2), (False,) * 4, (1, 1, 1, 0))
    assert (
        ring_order(torus, (8, 2))[:, 1].tolist() == (ring_order(torus, (8, 2))[:, 0] + 1).tolist()
    )
    assert mean_hops(torus, ring_order(torus, (8, 2)), axis=1) == 0


@pytest.mark.parametrize(
    'bounds, wrap, sizes, means',
    [
        # v5e 4 x 4, data 2 x model 8: half of the plane closes, its halves are two apart.
        ((4, 4, 1, 1), (False,) * 4, (2, 8), (2.0, 1.0)),
        # v5e 4 x 4, data 8 x model 2: pairs of neighbours, then a ring of pairs.
        ((4, 4, 1, 1), (False,) * 4, (8, 2), (1.25, 1.0)),
        # Four of a closed ring of eight are not a ring, but a square is.
        ((8, 8, 1, 1), (True, True, False, False), (16, 4), (2.0, 1.0)),
        ((8, 8, 8, 1), (True, True, True, False), (64, 8), (1.0, 1.0)),
    ],
)
def test_known_rings(bounds, wrap, sizes, means):
    torus = Torus(bounds, wrap, (1, 1, 1, 0))
    order = ring_order(torus, sizes, whole_row_major=False)
    assert tuple(mean_hops(torus, order, axis) for axis in range(len(sizes))) == means


# Comparison with all choices.


@functools.cache
def shortest_ring(torus, sizes, strides):
    """The hops of the shortest closed tour of a box, by dynamic programming over sets of places."""
    places = [
        tuple(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, sizes))
    ]
    links = [[distance(torus, a, b) for b in places] for a in places]
    number = len(places)
    best = {(1, 0): 0}  # (set of places, the last of them) -> hops from place 0
    for size in range(1, number):
        for others in itertools.combinations(range(1, number), size):
            members = 1 | sum(1 << i for i in others)
            for last in others:
                before = members & ~(1 << last)
                best[members, last] = min(
                    best[before, p] + links[p][last] for p in (0, *others) if (before, p) in best
                )
    everyone = (1 << number) - 1
    return min(best[everyone, p] + links[p][0] for p in range(number) if (everyone, p) in best)


def cheapest(torus, sizes):
    """The least cost over all boxes in any nesting, with the best tour of each box."""
    boxes = itertools.product(*map(divisors, torus.bounds))
    of_size = {}
    for box in boxes:
        of_size.setdefault(math.prod(box), []).append(box)
    costs = []
    for choice in itertools.product(*(of_size.get(size, []) for size in sizes)):
        if tuple(math.prod(column) for column in zip(*choice, strict=True)) != torus.bounds:
            continue
        for nesting in itertools.permutations(range(len(sizes))):
            means, strides = {}, (1,) * len(torus.bounds)
            for axis in nesting:
                box = choice[axis]
                means[axis] = shortest_ring(torus, box, strides) / math.prod(box)
                strides = tuple(s * b for s, b in zip(strides, box, strict=True))
            costs.append(weighted([means[i] for i, size in enumerate(sizes) if size > 1]))
    return min(costs)


@settings(max_examples=60)
@given(cases(dimensions=3, largest=8, most=32, cores=True))
def test_no_cheaper_choice(case):
    torus, sizes = case
    assume(max(sizes) <= 8)  # a tour of nine places takes too long to prove
    order = ring_order(torus, sizes, whole_row_major=False)
    means = [mean_hops(torus, order, axis) for axis, size in enumerate(sizes) if size > 1]
    assert weighted(means) == pytest.approx(cheapest(torus, sizes))


@pytest.mark.parametrize(
    'bounds, wrap, sizes',
    [
        ((4, 4), (True, False), (2, 4, 2)),
        ((4, 6), (False, False), (2, 6, 2)),
        ((4, 6), (True, False), (3, 4, 2)),
        ((4, 6), (True, True), (4, 3, 2)),
    ],
)
def test_the_best_of_one_axis_is_not_the_best_of_all(bounds, wrap, sizes):
    """The best box for the last axis costs the other axes more than it saves."""
    torus = Torus(bounds, wrap, (1, 1))
    order = ring_order(torus, sizes, whole_row_major=False)
    means = [mean_hops(torus, order, axis) for axis in range(len(sizes))]
    assert weighted(means) == pytest.approx(cheapest(torus, sizes))


# Paths.


@settings(max_examples=100)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_snakes_go_from_neighbour_to_neighbour(sizes):
    path = snake(sizes)
    assert sorted(map(tuple, path.tolist())) == list(itertools.product(*map(range, sizes)))
    assert not path[0].any()
    assert (np.abs(np.diff(path, axis=0)).sum(axis=1) == 1).all()
