"""AutoDist's notation for how a variable is cut: `1,4,1` is four shards along dimension 1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from partitioning.rules import (
    MeshLike,
    as_tuple,
    axis_sizes,
    check_spec,
    describe_axes,
    is_count,
)


@dataclasses.dataclass(frozen=True, init=False)
class PartitionerConfig:
    """The number of shards along each dimension of a variable, of which one is more than 1.

    Usage:
      config = PartitionerConfig(partition_list=[1, 4, 1])  # or partition_str='1,4,1'
      config.num_shards, config.axis  # 4, 1
      config.to_partition_spec(mesh)  # PartitionSpec(None, 'model') where only 'model' has size 4

    Attributes:
      partition_str: the numbers, joined by commas and without blanks.
    """

    partition_str: str

    def __init__(
        self, partition_list: Sequence[int] | None = None, partition_str: str | None = None
    ):
        """Args:
        partition_list: a number of shards for each dimension.
        partition_str: the same as text, instead.

        Raises:
          ValueError: neither or both; what are no numbers of 1 or more; none or several above 1.
        """
        if partition_list is not None and partition_str is not None:
            raise ValueError(
                f'partition_list {partition_list!r} and partition_str {partition_str!r} are two '
                'ways to say one thing: give one of them'
            )
        counts = partition_list if partition_str is None else _counts(partition_str)
        object.__setattr__(self, 'partition_str', ','.join(map(str, _checked(counts))))

    @property
    def partition_list(self) -> list[int]:
        """The number of shards along each dimension."""
        return [int(count) for count in self.partition_str.split(',')]

    @property
    def num_shards(self) -> int:
        """In how many shards the variable is cut."""
        return max(self.partition_list)

    @property
    def axis(self) -> int:
        """The dimension that is cut."""
        return self.partition_list.index(self.num_shards)

    def to_partition_spec(
        self, mesh: MeshLike, shape: Sequence[int] | None = None
    ) -> PartitionSpec:
        """The spec that cuts the variable over the one mesh axis of as many devices as shards.

        Args:
          mesh: the mesh, or the sizes of its axes.
          shape: that of the variable, if known.

        Raises:
          ValueError: no mesh axis of that size, or several; a shape of another rank, or with a
            dimension that the shards do not divide.
        """
        sizes = axis_sizes(mesh)
        fitting = [axis for axis, size in sizes.items() if size == self.num_shards]
        if len(fitting) != 1:
            found = 'no axis' if not fitting else f'{len(fitting)} axes, {", ".join(fitting)},'
            raise ValueError(
                f'partitioner {self.partition_str!r} cuts dimension {self.axis} in '
                f'{self.num_shards}, and the mesh {describe_axes(sizes)} has {found} of size '
                f'{self.num_shards}. Use another number or mesh, or write a PartitionSpec.'
            )
        if shape is not None:
            self._check_shape(tuple(shape))
        return PartitionSpec(*[None] * self.axis, fitting[0])

    @classmethod
    def from_partition_spec(
        cls, spec: PartitionSpec, mesh: MeshLike, ndim: int
    ) -> PartitionerConfig:
        """What a spec makes of a variable on a mesh, in AutoDist's notation.

        Args:
          spec: one whose axes cut one dimension.
          mesh: the mesh, or the sizes of its axes.
          ndim: how many dimensions the variable has.

        Raises:
          ValueError: an axis that the mesh lacks; a spec that cuts no dimension, or several.
        """
        check_spec(spec, mesh, 'the spec', (1,) * ndim)
        sizes = axis_sizes(mesh)
        counts = [math.prod(sizes[axis] for axis in as_tuple(axes)) for axes in spec]
        cut = sum(count > 1 for count in counts)
        if cut != 1:
            raise ValueError(
                f'{spec} cuts {cut or "no"} dimensions on the mesh {describe_axes(sizes)}: '
                'AutoDist cuts variables along one axis, or leaves them whole without a partitioner'
            )
        return cls([*counts, *[1] * (ndim - len(counts))])

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        if len(shape) != len(self.partition_list):
            raise ValueError(
                f'partitioner {self.partition_str!r} is for {len(self.partition_list)} dimensions, '
                f'but the variable has {len(shape)}, {shape}: write a number for each'
            )
        if shape[self.axis] % self.num_shards:
            raise ValueError(
                f'partitioner {self.partition_str!r}: dimension {self.axis} of shape {shape} has '
                f'size {shape[self.axis]}, which does not divide by {self.num_shards}; a '
                'PartitionSpec in its place takes a policy for that, on_indivisible'
            )


def _counts(text: Any) -> list[int]:
    """The numbers of a partition string."""
    if not isinstance(text, str):
        raise ValueError(f"partition_str {text!r} is no text: write '1,4,1'")
    try:
        return [int(part) for part in text.split(',')] if text.strip() else []
    except ValueError:
        raise ValueError(
            f"partition_str {text!r} must be whole numbers with commas between them, as '1,4,1'"
        ) from None


def _checked(counts: Any) -> list[int]:
    """Numbers of shards, of which one is above 1."""
    if isinstance(counts, str) or not isinstance(counts, Iterable) or not (counts := [*counts]):
        raise ValueError(
            'a partitioner needs a number of shards for each dimension: partition_list=[1, 4, 1] '
            f"or partition_str='1,4,1', not {counts!r}"
        )
    if not all(is_count(count) for count in counts):
        raise ValueError(f'numbers of shards must be whole and 1 or more, not {counts}')
    cut = sum(count > 1 for count in counts)
    if not cut:
        raise ValueError(
            f'partitioner {counts} is trivial -- num_split is 1 on every axis; leave the '
            "variable without one, which is '' for a VariablePartitioner"
        )
    if cut > 1:
        raise ValueError(
            f'partitioner {counts} cuts {cut} dimensions: AutoDist configurations only '
            'support partitioning along one axis; a PartitionSpec cuts several'
        )
    return [int(count) for count in counts]
