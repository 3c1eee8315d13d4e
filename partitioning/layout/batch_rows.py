"""Which rows of the batch each process reads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh

from partitioning.hardware import this_process
from partitioning.layout.ownership import shard_ownership
from partitioning.rules import as_tuple, describe_axes, is_count, sizes_that_fit


@dataclasses.dataclass(frozen=True)
class DataLayout:
    """The part of the batch that one process reads, which T5X calls its shard.

    `row_indices` is correct on every mesh. A reader that uses only `shard_id` and `num_shards`, as
    in T5X, reads the correct rows if `is_even` is True.

    Attributes:
      batch_size: the number of rows of the global batch.
      shard_id: the number of the shard that this process reads.
      num_shards: the number of distinct shards that processes read.
      is_first_host_in_replica_set: True for exactly one of the processes that read this shard.
      row_indices: the global rows of this process in rising order, which is also the order of its
        local rows.
      is_even: whether all shards have equal sizes and different shards have no row in common.
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
      batch_size: the number of rows of the global batch.
      process_index: the process that reads; by default this one.

    Raises:
      ValueError: if `batch_size` is not an integer >= 1 that divides into equal shards, if an axis
        does not exist or appears twice, or if the process holds no device of the mesh.
    """
    process = this_process() if process_index is None else process_index
    ownership = shard_ownership(mesh, (as_tuple(axes),))
    [num_shards] = ownership.num_shards
    check_batch_size(batch_size, num_shards, mesh)
    ownership.check_process(process, mesh)
    chunk, rows_per_shard = ownership.chunks[process], batch_size // num_shards
    return DataLayout(
        batch_size=int(batch_size),
        shard_id=ownership.chunk_ids[chunk],
        num_shards=len(ownership.chunk_ids),
        is_first_host_in_replica_set=ownership.replica_ids[process] == 0,
        row_indices=tuple(
            itertools.chain.from_iterable(
                range(shard * rows_per_shard, (shard + 1) * rows_per_shard) for shard in chunk
            )
        ),
        is_even=ownership.is_even,
    )


def check_batch_size(batch_size: Any, num_shards: int, mesh: Mesh) -> None:
    """Raises ValueError unless the batch size is an integer >= 1 that the shards divide."""
    if not is_count(batch_size):
        raise ValueError(f'batch size {batch_size!r} must be an integer >= 1')
    if batch_size % num_shards:
        fits = ' or '.join(map(str, sizes_that_fit(batch_size, num_shards)))
        raise ValueError(  # The first clause is T5X's.
            f'Batch size ({batch_size}) must be divisible by corresponding data mesh size '
            f'({num_shards}); the mesh is {describe_axes(mesh.shape)}. Use {fits}.'
        )
