"""Counts hops independently, pair by pair, and computes a lower bound on the hops of a mesh."""

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
    """Returns the number of links on the shortest path between two chips of a slice."""
    hops = 0
    for dimension in range(3):
        distance = (b.coords[dimension] - a.coords[dimension]) % bounds[dimension]
        if wrap[dimension]:
            hops += min(distance, bounds[dimension] - distance)
        else:
            hops += abs(b.coords[dimension] - a.coords[dimension])
    return hops


def steps(grid: np.ndarray, axis: int) -> Iterator[tuple]:
    """Yields the neighbours in all rings along an axis, including the pair of last and first."""
    for start in itertools.product(*(range(n) for i, n in enumerate(grid.shape) if i != axis)):
        ring = [grid[(*start[:axis], i, *start[axis:])] for i in range(grid.shape[axis])]
        for i, device in enumerate(ring):
            yield device, ring[(i + 1) % len(ring)]


def hops_of_axis(
    grid: np.ndarray, axis: int, bounds: Sequence[int], wrap: Sequence[bool]
) -> list[int]:
    """Returns the hops of every step along an axis, except steps between slices."""
    return [
        hops_between(a, b, bounds, wrap)
        for a, b in steps(grid, axis)
        if getattr(a, 'slice_index', 0) == getattr(b, 'slice_index', 0)
    ]


def mean_hops(grid: np.ndarray, bounds: Sequence[int], wrap: Sequence[bool]) -> list[float]:
    """Returns the mean hops of each axis of a mesh in one slice."""
    found = [hops_of_axis(grid, axis, bounds, wrap) for axis in range(grid.ndim)]
    return [sum(hops) / len(hops) for hops in found]


def networks(mesh: Mesh, axis: int) -> str:
    """Returns the networks that the steps along an axis use: ICI, DCN or both."""
    if mesh.devices.shape[axis] == 1:
        return '-'
    crossings = {
        getattr(a, 'slice_index', 0) != getattr(b, 'slice_index', 0)
        for a, b in steps(mesh.devices, axis)
    }
    return ' + '.join({False: 'ICI', True: 'DCN'}[crosses] for crosses in sorted(crossings))


def weighted(means: Sequence[float], shape: Sequence[int]) -> float:
    """Returns the weighted sum of mean hops. Each axis weighs four times as much as the last."""
    cost, weight = 0.0, 1.0
    for mean, size in zip(reversed(means), reversed(shape), strict=True):
        cost += weight * mean
        weight /= 4 if size > 1 else 1
    return cost


# A lower bound on the hops of meshes whose axes are boxes of the torus.


@functools.cache
def fewest_hops(box: Sizes, strides: Sizes, bounds: Sizes, wrap: Wrap, cores: int) -> int:
    """Returns a lower bound on the hops of any ring through a box of devices.

    A ring crosses each dimension twice, or once if the dimension wraps around. In addition, take
    all dimensions whose steps cost at least some price. Devices that differ only along these
    dimensions can be reached only by such expensive steps, so the ring needs one for each of them.

    Args:
      box: the number of devices along x, y, z and the cores of a chip.
      strides: the distance between neighbours of the box along each dimension.
      bounds: the size of the slice in chips, followed by the cores per chip.
      wrap: whether links close x, y and z to rings.
      cores: the index of the dimension of the cores, whose steps cost nothing.
    """
    dimensions = [d for d, size in enumerate(box) if size > 1]
    step = {d: 0 if d == cores else _shorter(strides[d], bounds[d], wrap[d]) for d in dimensions}
    moves = {}
    for d in dimensions:
        around = wrap[d] and box[d] * strides[d] == bounds[d]
        moves[d] = min(box[d], 2 * (box[d] - 1)) if around else 2 * (box[d] - 1)
    for price in sorted(set(step.values()), reverse=True):
        expensive = [d for d in dimensions if step[d] >= price]
        needed = math.prod(box[d] for d in expensive)
        cheapest = min(expensive, key=lambda d: step[d])
        moves[cheapest] += max(0, needed - sum(moves[d] for d in expensive))
    return sum(moves[d] * step[d] for d in dimensions)


def fewest_weighted(
    shape: Sequence[int], bounds: Sequence[int], wrap: Sequence[bool], cores: int
) -> tuple[float, list[float]]:
    """Returns the smallest weighted sum of mean hops over all ways to give each axis a box.

    Args:
      shape: the shape of the mesh.
      bounds: the size of the slice, in chips.
      wrap: whether links close x, y and z to rings.
      cores: the number of devices per chip.

    Returns:
      The sum, and the mean hops of each axis of the mesh that has this sum.
    """
    machine, closed = (*bounds, cores), (*wrap, False)
    splits = [list(_splits(n, len(shape))) for n in machine]
    best = math.inf, [math.inf]
    for choice in itertools.product(*splits):
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
    """Returns all ways to split a dimension between the axes, as (sizes, strides) of the axes."""
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
