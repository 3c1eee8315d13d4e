"""Dimensions of different arguments that must be laid out alike, because products pair them."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from meshwright.jaxpr.values import Axes, Dim, Dims

_Key = tuple[str, int]


class LinkedDimensions:
    """Groups of dimensions of arguments, and the mesh axes that constraints give to them.

    A product sums over a dimension of each of its operands. If a
    constraint shards such a dimension of an activation over 'model', the matching dimension of the
    parameter should be sharded over 'model', too. This gives parameters without logical axes a
    layout.
    """

    def __init__(self) -> None:
        self._parents: dict[_Key, _Key] = {}
        self._axes: dict[_Key, collections.Counter[Axes]] = collections.defaultdict(
            collections.Counter
        )
        self._names: dict[_Key, str] = {}

    def link(self, one: Dim | None, other: Dim | None) -> None:
        """Notes that two dimensions are paired."""
        if one is not None and other is not None and one.argument and other.argument:
            self._parents[self._root(_key(one))] = self._root(_key(other))
            self._names.update((_key(dim), dim.name) for dim in (one, other) if dim.name)

    def are_linked(self, one: tuple[str, int], other: tuple[str, int]) -> bool:
        """Whether two dimensions, each the path of an argument and a number, are of one group."""
        return self._root(one) == self._root(other)

    def constrain(self, dims: Dims, layout: Sequence[Axes]) -> None:
        """Notes the layout that a constraint gives to a value."""
        for dim, axes in zip(dims, layout, strict=True):
            if dim is not None and dim.argument:
                self._axes[_key(dim)][axes] += 1

    def axes_of(self, argument: str, rank: int) -> tuple[Axes, ...]:
        """The mesh axes that constraints give to the dimensions of an argument."""
        votes: dict[_Key, collections.Counter[Axes]] = collections.defaultdict(collections.Counter)
        for key, counts in self._axes.items():
            votes[self._root(key)] += counts
        found: list[Axes] = []
        for number in range(rank):
            sharded = [a for a, _ in votes[self._root((argument, number))].most_common() if a]
            free = sharded and not {a for one in found for a in one} & set(sharded[0])
            found.append(sharded[0] if free else ())
        return tuple(found)

    def names_of(self, argument: str, rank: int) -> tuple[str | None, ...]:
        """For each dimension, the logical axis of most dimensions linked to it, or None."""
        found: list[str | None] = []
        for number in range(rank):
            key = argument, number
            root = self._root(key)
            votes = collections.Counter(
                name
                for other, name in self._names.items()
                if other[0] != argument and self._root(other) == root
            )
            most = votes.most_common(1)
            found.append(most[0][0] if most and 2 * most[0][1] > votes.total() else None)
        return tuple(found)

    def _root(self, key: _Key) -> _Key:
        first = key
        while (parent := self._parents.get(key, key)) != key:
            key = parent
        if first != key:
            self._parents[first] = key  # the next search is shorter
        return key


def _key(dim: Dim) -> _Key:
    return dim.argument, dim.number
