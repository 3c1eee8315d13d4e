"""Layouts that one word selects: every array is whole, or sharded by its sizes alone.

'data_parallel' replicates every array. 'fsdp' (fully sharded data parallelism) shards every array
over the mesh axes of the batch, and XLA gathers it where it is used:

- The largest dimension that the number of shards divides is sharded. Of two equal dimensions it is
  the first, because the shards of a first dimension are joined without moving elements.
- A lookup table is sharded along its vocabulary, the first dimension, if the shards divide it. XLA
  then gathers the table. If the other dimension is sharded, XLA gathers the rows of the whole batch
  instead: a GPT on 8 CPU devices then moves 8 times as many bytes and needs twice the temporary
  memory (compiler). This also holds if the output layer is the transpose of the table.
- A stack of layers, which a scan slices, is sharded along the dimension of the layers only if no
  other can be sharded, because XLA would gather the whole stack to take one layer out of it.
- If the shards divide no dimension, the mesh axes are distributed over several dimensions, and some
  are left out.
- An array with fewer than MIN_SHARD_SIZE elements per shard stays whole.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

from partitioning.plan.rows import SMALL, without_name
from partitioning.plan.subject import Decision, Subject, whole, with_names
from partitioning.rules import (
    MeshLike,
    ResolvedDimension,
    axis_sizes,
    from_tuple,
    largest_divisor,
    num_shards,
    sharding_axes,
    sizes_that_fit,
)
from partitioning.state import nbytes

LayoutWord = Literal['fsdp', 'data_parallel']

# With fewer elements per shard, it is cheaper to keep an array than to gather it: a float32 shard
# would have less than 64 bytes, one line of a cache. The limit for an array grows with the number
# of devices, as the latency of a gather does: it is 128 elements on 8 devices, and 65,536 on 4,096.
MIN_SHARD_SIZE = 16


@dataclasses.dataclass(frozen=True)
class WordLayout:
    """The layout that a word selects.

    Attributes:
      word: 'fsdp' or 'data_parallel'.
      axes: the mesh axes that 'fsdp' shards arrays over.
    """

    word: LayoutWord
    axes: tuple[str, ...]

    def decide(self, subject: Subject, mesh: MeshLike) -> Decision:
        """The dimensions of an array. Every array has a layout, so there are no problems."""
        shards, size = num_shards(self.axes, mesh), math.prod(subject.shape)
        if self.word == 'data_parallel':
            return whole(subject, "layout 'data_parallel' replicates every array"), ()
        if size <= 1:
            return whole(subject, 'an array of one element'), ()
        if shards == 1:
            return whole(subject, "layout 'fsdp' has only one shard on this mesh"), ()
        if size < (least := MIN_SHARD_SIZE * shards):
            why = f"layout 'fsdp' keeps arrays of fewer than {least:,} elements whole"
            return whole(subject, why), ()
        kind = _Kind(
            shape=subject.shape,
            is_table=_is_table(subject),
            layers=subject.layers,
            is_large=nbytes(subject.array) > SMALL,
        )
        sizes = tuple((axis, axis_sizes(mesh)[axis]) for axis in self.axes)
        return with_names(_shard(kind, sizes), subject.names), ()


class _Kind(NamedTuple):
    """What decides how 'fsdp' shards an array."""

    shape: tuple[int, ...]
    is_table: bool
    layers: int | None
    is_large: bool


def _is_table(subject: Subject) -> bool:
    """Whether an array seems to be a lookup table: [vocabulary, features], by its path or names."""
    if len(subject.shape) != 2:
        return False
    keys = [key.lower() for key in subject.path]
    return subject.names[:1] == ('vocab',) or any(
        'embed' in key or key in ('wte', 'wpe') for key in keys
    )


@functools.lru_cache(maxsize=4096)
def _shard(kind: _Kind, sizes: tuple[tuple[str, int], ...]) -> tuple[ResolvedDimension, ...]:
    """The dimensions of an array, sharded over mesh axes of these sizes as far as they divide."""
    mesh = dict(sizes)
    placed, shards = _place(kind, mesh), math.prod(mesh.values())
    sharded = ' and '.join(f'dimension {dim}' for dim in sorted(placed))
    instead = f"layout 'fsdp' shards {sharded}" if placed else 'no dimension is sharded'
    dimensions = [without_name(instead)] * len(kind.shape)
    for dim, part in placed.items():
        reason = f"layout 'fsdp' shards the largest dimension that {shards} divides"
        if dim == 0 and kind.is_table:
            reason = "layout 'fsdp' shards a lookup table by its vocabulary"
        elif num_shards(part, mesh) < shards:
            reason = f"{shards} divides no dimension, so layout 'fsdp' shards {sharded}"
        kept = from_tuple(part)
        dimensions[dim] = dataclasses.replace(
            dimensions[dim], mesh_axes=kept, wanted=kept, reason=reason
        )
    return tuple(_report_sizes(kind, dimensions, mesh) if kind.is_large else dimensions)


def _report_sizes(
    kind: _Kind, dimensions: list[ResolvedDimension], mesh: dict[str, int]
) -> list[ResolvedDimension]:
    """The dimensions, with a mark on a size that costs bytes because it is not divisible."""
    shape, shards = kind.shape, math.prod(mesh.values())
    sharded = {d: sharding_axes(one.mesh_axes) for d, one in enumerate(dimensions) if one.mesh_axes}
    all_shards = math.prod(num_shards(part, mesh) for part in sharded.values()) == shards
    dim = max(range(len(shape)), key=lambda d: (shape[d], -d))
    if kind.is_table and 0 not in sharded:
        dim = 0
    elif all_shards:
        return dimensions
    over = ' and '.join(f'dimension {d} over {", ".join(part)}' for d, part in sharded.items())
    result = f'shards {over}' if sharded else 'keeps the array whole'
    cost = ', and each lookup moves rows of the whole batch' if dim == 0 and all_shards else ''
    marked = [dataclasses.replace(d, wanted=None) for d in dimensions]
    marked[dim] = dataclasses.replace(
        marked[dim],
        reason=f"size {shape[dim]} is not divisible by {shards}, so layout 'fsdp' {result}{cost}",
        policy='drop_axis' if dim in sharded else 'replicate',
        wanted=from_tuple(tuple(mesh)),
        fits=sizes_that_fit(shape[dim], shards),
    )
    return marked


def _place(kind: _Kind, mesh: dict[str, int]) -> dict[int, tuple[str, ...]]:
    """The mesh axes of each dimension that is sharded."""
    shape, axes = kind.shape, tuple(mesh)
    if kind.is_table and shape[0] % math.prod(mesh.values()) == 0:
        return {0: axes}
    within_layers = [dim for dim in range(len(shape)) if dim != kind.layers]
    for dims in (within_layers, range(len(shape))):
        placed: dict[int, tuple[str, ...]] = {}
        left = axes
        while left:
            fits = {d: largest_divisor(shape[d], left, mesh) for d in dims if d not in placed}
            best = max(fits, key=lambda d: (num_shards(fits[d], mesh), shape[d], -d), default=None)
            if best is None or num_shards(fits[best], mesh) == 1:
                break
            placed[best] = fits[best]
            left = tuple(axis for axis in left if axis not in fits[best])
        if placed:
            return placed
    return {}
