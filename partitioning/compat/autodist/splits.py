"""How AutoDist cuts one variable: its notation, the sizes of the shards, and where each row goes.

AutoDist gives the remainder to the first shards: it cuts 10 rows in shards of 4, 3 and 3 rows. jax,
torch.chunk and XLA's padding fill all shards but the last (4, 4 and 2).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from partitioning.rules import (
    MeshLike,
    as_tuple,
    axis_sizes,
    check_axes,
    check_layout,
    check_spec,
    describe_axes,
    is_count,
    num_shards,
    rank_problem,
)


@dataclasses.dataclass(frozen=True, init=False)
class PartitionerConfig:
    """The number of shards along each dimension of a variable; exactly one of them is above 1.

    Usage:
      config = PartitionerConfig([1, 4, 1])  # or PartitionerConfig(partition_str='1,4,1')
      config.to_partition_spec(mesh)  # PartitionSpec(None, 'model') if only 'model' has size 4

    Args:
      partition_list: the number of shards along each dimension.
      partition_str: the same numbers as text, in place of the list. The attribute omits blanks.

    Raises:
      ValueError: if neither or both are given, if a number is not an integer >= 1, or if none or
        several are above 1.
    """

    partition_str: str

    def __init__(
        self, partition_list: Sequence[int] | None = None, partition_str: str | None = None
    ):
        if partition_list is not None and partition_str is not None:
            both = f'partition_list {partition_list!r} and partition_str {partition_str!r}'
            raise ValueError(f'{both} are both given: give one of them')
        counts: Any = partition_list
        if partition_str is not None:
            try:
                counts = list(map(int, partition_str.split(','))) if partition_str.strip() else []
            except (AttributeError, ValueError):
                raise ValueError(
                    f'partition_str {partition_str!r} must be integers separated by commas, such '
                    "as '1,4,1'"
                ) from None
        object.__setattr__(self, 'partition_str', ','.join(map(str, _check_counts(counts))))

    @property
    def partition_list(self) -> list[int]:
        """The number of shards along each dimension."""
        return [int(count) for count in self.partition_str.split(',')]

    @property
    def num_shards(self) -> int:
        """The number of shards of the variable."""
        return max(self.partition_list)

    @property
    def axis(self) -> int:
        """The dimension that is cut (AutoDist calls it an axis)."""
        return self.partition_list.index(self.num_shards)

    def to_partition_spec(
        self, mesh: MeshLike, shape: Sequence[int] | None = None
    ) -> PartitionSpec:
        """The spec that cuts the variable over the only mesh axis whose size is `num_shards`.

        Raises:
          ValueError: if no mesh axis or several have that size, or if `shape` is given and has
            another rank or a size that the shards do not divide.
        """
        sizes = axis_sizes(mesh)
        fitting = [axis for axis, size in sizes.items() if size == self.num_shards]
        if len(fitting) != 1:
            found = 'no axis' if not fitting else f'{len(fitting)} axes ({", ".join(fitting)})'
            raise ValueError(
                f'partitioner {self.partition_str!r} cuts dimension {self.axis} in '
                f'{self.num_shards} shards, but the mesh {describe_axes(sizes)} has {found} of '
                f'size {self.num_shards}. Use another number or mesh, or write a PartitionSpec.'
            )
        spec = PartitionSpec(*[None] * self.axis, fitting[0])
        if shape is not None:
            self.check_rank(shape)
            check_layout(spec, mesh, f'partitioner {self.partition_str!r}', shape)
        return spec

    @classmethod
    def from_partition_spec(
        cls, spec: PartitionSpec, mesh: MeshLike, ndim: int
    ) -> PartitionerConfig:
        """The notation for a variable with `ndim` dimensions that a spec shards over a mesh.

        Raises:
          ValueError: if the spec names an axis that the mesh lacks, or does not shard exactly one
            dimension.
        """
        check_spec(spec, mesh, 'the spec', (1,) * ndim)
        counts = [num_shards(as_tuple(axes), mesh) for axes in spec]
        cut = sum(count > 1 for count in counts)
        if cut != 1:
            raise ValueError(
                f'{spec} cuts {cut or "no"} dimensions on the mesh '
                f'{describe_axes(axis_sizes(mesh))}, but AutoDist cuts a variable along one axis, '
                'or leaves it whole without a partitioner'
            )
        return cls([*counts, *[1] * (ndim - len(counts))])

    def check_rank(self, shape: Sequence[int], name: str = '') -> None:
        """Raises ValueError unless there is one number per dimension of a variable."""
        if len(shape) != len(self.partition_list):
            described = f'{f"{name}: " if name else ""}partitioner {self.partition_str!r}'
            raise ValueError(rank_problem(described, len(self.partition_list), shape).message)


def split_sizes(size: int, num_shards: int) -> tuple[int, ...]:
    """The number of rows in each shard. The first shards get one row more if there is a remainder.

    Raises:
      ValueError: if an argument is not an integer >= 1, or if there are more shards than rows.
    """
    if not is_count(size) or not is_count(num_shards):
        raise ValueError(f'size {size!r} and num_shards {num_shards!r} must be integers >= 1')
    if num_shards > size:
        raise ValueError(
            f'a dimension of size {size} cannot be cut in {num_shards} shards: use {size} or fewer'
        )
    least, larger = divmod(size, num_shards)
    return tuple(least + (shard < larger) for shard in range(num_shards))


def split_offsets(size: int, num_shards: int) -> tuple[int, ...]:
    """The first row of each shard of a dimension; see `split_sizes` for arguments and errors."""
    sizes = split_sizes(size, num_shards)
    return tuple(itertools.accumulate(sizes[:-1], initial=0))


def split_rows(
    rows: Sequence[int] | np.ndarray, size: int, num_shards: int, axis: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """The shard that holds each row of a sparse gradient, and the row's number within that shard.

    `rows` are [n] rows of a variable that has `size` of them, such as the indices of the gradient.
    The results are two int64 arrays [n]: the shard, and the row within it. A row that the variable
    lacks is a ValueError, and so is an `axis` other than 0: a sparse gradient consists of rows.
    Other errors come from `split_sizes`.
    """
    check_sparse_axis(axis)
    offsets = np.array(split_offsets(size, num_shards))
    found: np.ndarray[Any, Any] = np.asarray(rows)
    if found.size and found.dtype.kind not in 'iu':
        raise ValueError(f'rows must be integers, not {found.dtype}')
    found = found.astype(np.int64)
    outside = found[(found < 0) | (found >= size)]
    if outside.size:
        raise ValueError(f'row {outside.flat[0]} is outside of a variable of {size} rows')
    shards = np.searchsorted(offsets, found, side='right') - 1
    return shards, found - offsets[shards]


def check_sparse_axis(axis: int, name: str = 'this one') -> None:
    """Raises ValueError unless a variable with sparse gradients is cut along its rows."""
    if axis != 0:
        raise ValueError(
            'Embedding variables can only be partitioned along the first axis, because their '
            f'gradients are rows: {name} is cut along {axis}. Cut it along 0, or do not declare '
            'it sparse.'
        )


def even_shards(size: int) -> int:
    """The number of equal shards that AutoDist uses: the smallest divisor of `size` above 1."""
    divisors = (n for n in range(2, int(size**0.5) + 1) if size % n == 0)
    return max(next(divisors, size), 1)


def uneven_shards(size: int) -> int:
    """The number of shards that UnevenPartitionedPS uses: the smallest that does not divide `size`.

    If no number below `size` fits, which is so for 1 and 2, each row gets a shard.
    """
    return max(next((n for n in range(2, size) if size % n), size), 1)


def split_axis(mesh: MeshLike, mesh_axis: str | None = None) -> str:
    """The mesh axis that variables are split over.

    By default it is 'data', or the only axis larger than 1 if 'data' is missing or has size 1, or
    the first axis if all have size 1.

    Raises:
      ValueError: if the axis does not exist, or if it is not given and several could be meant.
    """
    sizes = axis_sizes(mesh)
    if mesh_axis is not None:
        check_axes([mesh_axis], mesh, 'mesh_axis')
        return mesh_axis
    larger = [axis for axis, size in sizes.items() if size > 1] or list(sizes)[:1]
    if 'data' in larger:
        return 'data'
    if len(larger) != 1:
        raise ValueError(
            f'variables could be split over {" or ".join(map(repr, larger))} of the mesh '
            f"{describe_axes(sizes)}: choose one, such as mesh_axis='{larger[0]}'"
        )
    return larger[0]


def _check_counts(counts: Any) -> list[int]:
    """The numbers of shards, if they are valid and exactly one of them is above 1."""
    if isinstance(counts, str) or not isinstance(counts, Iterable) or not (counts := [*counts]):
        raise ValueError(
            f'partition_list={counts!r} must list the number of shards per dimension, as [1, 4, 1]'
        )
    if not all(is_count(count) for count in counts):
        raise ValueError(f'the numbers of shards must be integers >= 1, not {counts}')
    cut = sum(count > 1 for count in counts)
    if not cut:
        raise ValueError(
            f"partitioner {counts} is trivial -- num_split is 1 on every axis; use '' instead"
        )
    if cut > 1:
        raise ValueError(
            f'partitioner {counts} cuts {cut} dimensions: AutoDist configurations only support '
            'partitioning along one axis; a PartitionSpec can cut several'
        )
    return [int(count) for count in counts]
