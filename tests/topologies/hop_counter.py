"""An independent count of hops, one pair of devices at a time, and a bound on the fewest hops."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

Sizes = tuple[int, ...]
Wrap = tuple[bool, ...]


def hops_between(a, b, bounds: Sequence[int], wrap: Sequence[bool]) -> int:
    """The number of links on the shortest way from one chip of a slice to another."""
    hops = 0
    for dimension in range(3):
        there = (b.coords[dimension] - a.coords[dimension]) % bounds[dimension]
        if wrap[dimension]:
            hops += min(there, bounds[dimension] - there)
        else:
            hops += abs(b.coords[dimension] - a.coords[dimension])
    return hops


def steps(grid: np.ndarray, axis: int) -> Iterator[tuple]:
    """The pairs of neighbours in all rings along an axis, including the last and the first."""
    for start in itertools.product(*(range(n) for i, n in enumerate(grid.shape) if i != axis)):
        ring = [grid[(*start[:axis], i, *start[axis:])] for i in range(grid.shape[axis])]
        for i, device in enumerate(ring):
            yield device, ring[(i + 1) % len(ring)]


def hops_of_axis(
    grid: np.ndarray, axis: int, bounds: Sequence[int], wrap: Sequence[bool]
) -> list[int]:
    """The hops of every step along an axis that stays within a slice."""
    return [
        hops_between(a, b, bounds, wrap)
        for a, b in steps(grid, axis)
        if getattr(a, 'slice_index', 0) == getattr(b, 'slice_index', 0)
    ]


def mean_hops(grid: np.ndarray, bounds: Sequence[int], wrap: Sequence[bool]) -> list[float]:
    """The mean hops of each axis of a mesh of one slice."""
    found = [hops_of_axis(grid, axis, bounds, wrap) for axis in range(grid.ndim)]
    return [sum(hops) / len(hops) for hops in found]


def networks(mesh: Mesh, axis: int) -> str:
    """ICI, DCN or both, from the slices of the two ends of each step."""
    if mesh.devices.shape[axis] == 1:
        return '-'
    crossings = {
        getattr(a, 'slice_index', 0) != getattr(b, 'slice_index', 0)
        for a, b in steps(mesh.devices, axis)
    }
    return ' + '.join({False: 'ICI', True: 'DCN'}[crosses] for crosses in sorted(crossings))


def weighted(means: Sequence[float], shape: Sequence[int]) -> float:
    """The weighted sum over the axes: each weighs four times as much as the axis before it."""
    cost, weight = 0.0, 1.0
    for mean, size in zip(reversed(means), reversed(shape), strict=True):
        cost += weight * mean
        weight /= 4 if size > 1 else 1
    return cost


# The fewest hops of meshes made of boxes, from a lower bound on closed tours.


@functools.cache
def fewest_hops(box: Sizes, strides: Sizes, bounds: Sizes, wrap: Wrap, cores: int) -> int:
    """A lower bound on the hops of any ring through a box.

    It crosses each dimension there and back, or once around it. And to come to all places that
    differ only along the dimensions of dear steps, it needs one dear step for each of those.

    Args:
      box: places along x, y, z and the cores of a chip.
      strides: the distance between them along each.
      bounds: of the slice in chips, then its cores a chip.
      wrap: whether x, y and z close to a ring.
      cores: index of the dimension whose steps cost nothing.
    """
    dimensions = [d for d, size in enumerate(box) if size > 1]
    step = {d: 0 if d == cores else _shorter(strides[d], bounds[d], wrap[d]) for d in dimensions}
    moves = {}
    for d in dimensions:
        around = wrap[d] and box[d] * strides[d] == bounds[d]
        moves[d] = min(box[d], 2 * (box[d] - 1)) if around else 2 * (box[d] - 1)
    for price in sorted(set(step.values()), reverse=True):
        dear = [d for d in dimensions if step[d] >= price]
        needed = math.prod(box[d] for d in dear)
        cheapest = min(dear, key=lambda d: step[d])
        moves[cheapest] += max(0, needed - sum(moves[d] for d in dear))
    return sum(moves[d] * step[d] for d in dimensions)


def fewest_weighted(
    shape: Sequence[int], bounds: Sequence[int], wrap: Sequence[bool], cores: int
) -> tuple[float, list[float]]:
    """The least weighted sum of mean hops over all choices of a box per axis, in any nesting.

    Args:
      shape: of the mesh.
      bounds: of the slice, in chips.
      wrap: whether x, y and z close to a ring.
      cores: devices of a chip.

    Returns:
      (the sum, the mean hops of each axis that it is of).
    """
    machine, closed = (*bounds, cores), (*wrap, False)
    ways = [list(_splits(n, len(shape))) for n in machine]
    best = math.inf, [math.inf]
    for choice in itertools.product(*ways):
        sizes = [tuple(c[0][axis] for c in choice) for axis in range(len(shape))]
        if any(math.prod(s) != n for s, n in zip(sizes, shape, strict=True)):
            continue
        means = [
            fewest_hops(s, tuple(c[1][axis] for c in choice), machine, closed, 3) / shape[axis]
            for axis, s in enumerate(sizes)
        ]
        best = min(best, (weighted(means, shape), means))
    return best


def _shorter(distance: int, bound: int, wraps: bool) -> int:
    return min(distance, bound - distance) if wraps else distance


def _splits(size: int, axes: int) -> set[tuple[Sizes, Sizes]]:
    """All ways to share a dimension between the axes, as (size, stride) of each axis."""
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    orders = itertools.permutations(range(axes))
    shares = [s for s in itertools.product(divisors, repeat=axes) if math.prod(s) == size]
    found = set()
    for order, share in itertools.product(list(orders), shares):
        strides, stride = [1] * axes, 1
        for axis in reversed(order):
            if share[axis] > 1:
                strides[axis] = stride
            stride *= share[axis]
        found.add((share, tuple(strides)))
    return found
