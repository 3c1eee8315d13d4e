"""The order of the chips of a torus in which every axis of a mesh is a short ring.

This file knows positions only, no devices. Each mesh axis takes a box of the torus: a factor of
every dimension, at the stride that other axes leave it. An axis that takes part of a dimension
goes through its box as a closed ring of neighbours if there is one. An axis of whole dimensions may
keep them row-major, because collectives can run a separate ring along each of them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

Sizes = tuple[int, ...]
_TRAFFIC_RATIO = 4.0  # the traffic of an axis, relative to the axis before it
_LARGEST_SLICE = 2**15  # devices; for larger slices not every order of axes is searched


@dataclasses.dataclass(frozen=True)
class Torus:
    """A grid of devices with links between neighbours.

    Attributes:
      bounds: the number of devices along each dimension.
      wrap: for each dimension, whether links close it to a ring.
      hops: for each dimension, the number of links between neighbours: 1, or 0 if they share a
        chip.
    """

    bounds: Sizes
    wrap: tuple[bool, ...]
    hops: Sizes


class _Box(NamedTuple):
    """The part of each dimension that a mesh axis takes: the number of devices and their stride."""

    sizes: Sizes
    strides: Sizes


def ring_order(
    torus: Torus, axis_sizes: Sequence[int], *, whole_row_major: bool = True
) -> np.ndarray:
    """Returns the place on the torus of each position of a mesh.

    It minimizes the weighted sum of the mean hops of the axes' rings over all choices of boxes. An
    axis weighs four times as much as the axis before it, because axes are in ascending order of
    traffic: tensor parallelism of an 8B transformer moves 3 to 15 times the bytes of its data axis.

    Args:
      torus, axis_sizes: the machine and the sizes of the mesh axes, with equal products.
      whole_row_major: whether an axis of whole dimensions goes through them row-major instead of as
        a ring.

    Returns:
      Row-major indices into `torus.bounds`, as an array of shape `axis_sizes`.
    """
    boxes = _best_boxes(torus, tuple(axis_sizes))
    order = np.zeros((1,) * len(axis_sizes), dtype=np.int64)
    for axis, box in enumerate(boxes):
        whole = all(s in (1, b) for s, b in zip(box.sizes, torus.bounds, strict=True))
        if whole and whole_row_major:
            places = np.indices(box.sizes).reshape(len(box.sizes), -1).T
        else:
            places = _ring(torus, box)[1]
        flat = np.ravel_multi_index(tuple(places.T), torus.bounds)
        order = order + flat.reshape([-1 if i == axis else 1 for i in range(len(axis_sizes))])
    return order


def hops_to_next(torus: Torus, places: np.ndarray, axis: int) -> np.ndarray:
    """Counts the hops from each position of a mesh to the next along an axis, which is a ring.

    The coordinates of each position on the torus, `places`, have the shape `(*mesh, dimensions)`.
    """
    away = np.abs(places - np.roll(places, -1, axis=axis))
    shorter = np.where(torus.wrap, np.minimum(away, np.array(torus.bounds) - away), away)
    return shorter @ np.array(torus.hops)


def mean_hops(torus: Torus, order: np.ndarray) -> list[float]:
    """Returns the mean hops of the rings along each axis, including the step back to the start."""
    places = np.stack(np.unravel_index(order, torus.bounds), axis=-1)
    return [float(hops_to_next(torus, places, axis).mean()) for axis in range(order.ndim)]


def _best_boxes(torus: Torus, axis_sizes: Sizes) -> list[_Box]:
    """Returns one box per axis, found by depth-first search with the better boxes first.

    Boxes that are chosen earlier determine its strides. The last axis is placed first; on
    all but the very largest slices, every other order of the axes is tried as well.
    """
    unit = _Box((1,) * len(torus.bounds), (1,) * len(torus.bounds))
    best: tuple[float, dict[int, _Box]] = math.inf, {}
    used = [axis for axis, size in enumerate(axis_sizes) if size > 1]
    weights = {axis: _TRAFFIC_RATIO**-i for i, axis in enumerate(reversed(used))}

    def search(axes: Sequence[int], taken: Sizes, cost: float, boxes: dict[int, _Box]) -> None:
        nonlocal best
        if not axes:
            best = cost, boxes
            return
        for mean, box in _ranked_boxes(torus, taken, axis_sizes[axes[0]]):
            then = cost + weights[axes[0]] * mean
            if then >= best[0] - 1e-9:
                return
            left = tuple(t * s for t, s in zip(taken, box.sizes, strict=True))
            search(axes[1:], left, then, {**boxes, axes[0]: box})

    inner_first = tuple(reversed(used))
    few = len(used) <= 4 and math.prod(torus.bounds) <= _LARGEST_SLICE
    for axes in itertools.permutations(inner_first) if few else [inner_first]:
        search(axes, unit.strides, 0.0, {})
    return [best[1].get(axis, unit) for axis in range(len(axis_sizes))]


@functools.lru_cache(maxsize=4096)
def _ranked_boxes(torus: Torus, taken: Sizes, size: int) -> tuple[tuple[float, _Box], ...]:
    """Returns the boxes of `size` devices with the mean hops of their rings, the best box first.

    A shorter ring is better; then more whole dimensions, whose links no other axis shares; then
    earlier dimensions.
    """
    free = tuple(b // t for b, t in zip(torus.bounds, taken, strict=True))
    ranked = []
    for sizes in _factors(free, size):
        box = _Box(sizes, taken)
        mean = _ring(torus, box)[0] / size
        whole = math.prod(s for s, b in zip(sizes, torus.bounds, strict=True) if s == b)
        ranked.append((mean, -whole, tuple(-s for s in sizes), box))
    ranked.sort(key=lambda entry: entry[:3])
    return tuple((mean, box) for mean, _, _, box in ranked)


def _factors(free: Sizes, size: int) -> Iterator[Sizes]:
    """Yields all ways to write `size` as a product with one divisor of each entry of `free`."""
    if not free:
        if size == 1:
            yield ()
        return
    for first in range(1, math.gcd(free[0], size) + 1):
        if free[0] % first == 0 and size % first == 0:
            for rest in _factors(free[1:], size // first):
                yield (first, *rest)


@functools.lru_cache(maxsize=8)  # enough for the axes of a mesh, whose slices are alike
def _ring(torus: Torus, box: _Box) -> tuple[int, np.ndarray]:
    """Returns the hops and the places of the shortest ring that a snake makes through a box."""
    strides = np.array(box.strides)
    used = [d for d, size in enumerate(box.sizes) if size > 1]
    best: tuple[int, np.ndarray] | None = None
    for order in itertools.permutations(used):
        sizes = [box.sizes[d] for d in order]
        paths = [snake(sizes)]
        if len(sizes) > 1 and sizes[0] % 2 == 0:
            paths.append(_closed_snake(sizes))
        for path in paths:
            places = np.zeros((len(path), len(box.sizes)), dtype=np.int64)
            places[:, list(order)] = path
            places *= strides
            hops = int(hops_to_next(torus, places, axis=0).sum())
            if best is None or hops < best[0]:
                best = hops, places
    assert best is not None  # there is at least the empty permutation
    return best


def snake(sizes: Sequence[int]) -> np.ndarray:
    """Returns a path through a grid from neighbour to neighbour, the last dimension fastest."""
    path = np.zeros((1, 0), dtype=np.int64)
    for size in reversed(sizes):
        there_and_back = (path, path[::-1])
        path = np.concatenate([np.insert(there_and_back[i % 2], 0, i, axis=1) for i in range(size)])
    return path


def _closed_snake(sizes: Sequence[int]) -> np.ndarray:
    """Returns a closed path of neighbours through a grid whose first size is even.

    It snakes through all places of the rows except the first of each, and returns along those.
    """
    rows = snake([sizes[0], math.prod(sizes[1:]) - 1])
    row = snake(sizes[1:])
    outward = np.concatenate([rows[:, :1], row[1 + rows[:, 1]]], axis=1)
    home = np.insert(np.repeat(row[:1], sizes[0], axis=0), 0, np.arange(sizes[0]), axis=1)
    return np.concatenate([home[:1], outward, home[:0:-1]])
