"""An array of a state as the layouts without logical axis rules see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from partitioning.plan.rows import without_name
from partitioning.rules import Problem, ResolvedDimension
from partitioning.state import Path, shape_of


class Subject(NamedTuple):
    """An array that a layout decides about.

    Attributes:
      path: its place in the state.
      array: the array or its ShapeDtypeStruct.
      tree: the length of the path of the tree that the array belongs to, 1 for params/fc1/kernel.
      names: the logical axis of each dimension, if the array carries any. They explain a layout
        and never decide it.
      layers: the dimension that counts the layers of a stack, if there is one.
    """

    path: Path
    array: Any
    tree: int = 0
    names: tuple[Any, ...] = ()
    layers: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return shape_of(self.array)


# The dimensions of an array, and why it cannot have the layout that it should have.
Decision = tuple[tuple[ResolvedDimension, ...], tuple[Problem, ...]]


def whole(subject: Subject, reason: str) -> tuple[ResolvedDimension, ...]:
    """The dimensions of an array that every device holds whole."""
    return with_names([without_name(reason)] * len(subject.shape), subject.names)


def with_names(
    dimensions: Sequence[ResolvedDimension], names: Sequence[Any]
) -> tuple[ResolvedDimension, ...]:
    """The dimensions with the logical axes that the array carries, if there is one for each."""
    if len(names) != len(dimensions):
        return tuple(dimensions)
    return tuple(
        dataclasses.replace(d, name=name if isinstance(name, str) else None)
        for d, name in zip(dimensions, names, strict=True)
    )
