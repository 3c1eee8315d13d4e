"""Rows of the batch: which process reads which."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from partitioning.layout.held import check_rows_divide, held_parts
from partitioning.rules import as_tuple


@dataclasses.dataclass(frozen=True)
class DataLayout:
    """One process's part of the batch.

    `row_indices` is right on every mesh. A reader that knows only the two numbers of T5X, and takes
    `batch_size / num_shards` rows, is right where each shard has as many rows and no two share one,
    as `is_even` says.

    Attributes:
      batch_size: rows of the global batch.
      shard_id: which shard of the batch this process reads.
      num_shards: number of distinct shards that processes read.
      is_first_host_in_replica_set: True for one of the processes that read the same shard.
      row_indices: the global rows of this process, in the order of its local rows; rising.
      is_even: whether the shards are equal in size and have no row in common.
    """

    batch_size: int
    shard_id: int
    num_shards: int
    is_first_host_in_replica_set: bool
    row_indices: tuple[int, ...] = dataclasses.field(repr=False)
    is_even: bool = True


def data_layout(
    mesh: Mesh, axes: str | Sequence[str], batch_size: int, process_index: int | None = None
) -> DataLayout:
    """The part of a batch that a process reads.

    Args:
      mesh: the mesh.
      axes: the mesh axes that the batch is sharded over, in order.
      batch_size: rows of the global batch.
      process_index: by default that of this process.

    Raises:
      ValueError: the batch is no positive whole number, the axes do not divide it, or the process
        holds no device of the mesh.
    """
    process = jax.process_index() if process_index is None else process_index
    held = held_parts(mesh, (as_tuple(axes),))
    [ways] = held.ways
    check_rows_divide(batch_size, ways, mesh)
    held.check_holds(process, mesh)
    mine, block = held.parts[process], batch_size // ways
    return DataLayout(
        batch_size=int(batch_size),
        shard_id=held.shards[mine],
        num_shards=len(held.shards),
        is_first_host_in_replica_set=held.replica_ids[process] == 0,
        row_indices=tuple(row for p in mine for row in range(p * block, (p + 1) * block)),
        is_even=held.is_even,
    )
