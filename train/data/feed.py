"""Global batches, and the feed that moves them to the devices before the steps need them.

Row r of step n is row n * batch_size + r of the data, on every process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from partitioning import BasePartitioner
from train.data.rows.open_task import describe_features, features
from train.data.rows.packing import Row, check_within
from train.errors import ConfigError, check_counts
from train.processes.channel import tick

Batch = dict[str, jax.Array]


def abstract_batch(
    row: Row, batch_size: int, partitioner: BasePartitioner
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the ShapeDtypeStructs of a batch of rows like `row`, each [batch, ...]."""
    sharding = NamedSharding(partitioner.mesh, partitioner.data_partition_spec)
    return {
        name: jax.ShapeDtypeStruct((batch_size, *shape), dtype, sharding=sharding)
        for name, (shape, dtype) in features(dict(row)).items()
    }


class LocalBatches:
    """The rows that one process reads in each step, with random access by step.

    This is an endless source with the interface of a Grain source.

    Args:
      rows: endless rows with random access.
      batch_size: number of rows in a global batch.
      row_indices: the rows of a global batch that this process reads; see
        `partitioner.get_data_layout(batch_size).row_indices`.

    Raises:
      ConfigError: if `batch_size` is not an integer >= 1, or if `row_indices` is invalid.
    """

    def __init__(self, rows: Any, batch_size: int, row_indices: Sequence[int]):
        check_counts(batch_size=batch_size)
        self._rows, self.batch_size = rows, batch_size
        self._row_indices = indices = tuple(map(int, row_indices))
        if not indices or not 0 <= min(indices) <= max(indices) < batch_size:
            raise ConfigError(
                f'row_indices must lie between 0 and {batch_size - 1}, the rows of a batch of '
                f'{batch_size}: use partitioner.get_data_layout({batch_size}).row_indices'
            )

    def __len__(self) -> int:
        return np.iinfo(np.int64).max // self.batch_size

    def __getitem__(self, step: int) -> Row:
        check_within(step, self)
        first = int(step) * self.batch_size
        return stack_rows([self._rows[first + r] for r in self._row_indices])


class FiniteBatches(LocalBatches):
    """The rows of a finite set that one process reads. Rows of zeros fill up the last batch.

    Batches have an additional array, 'row_weights', float32 [rows]: 0 for rows that fill up the
    last batch, and 1 for all others.

    `rows` has random access. Raises a ConfigError if there are none, or if `LocalBatches` raises
    it.
    """

    def __init__(self, rows: Sequence[Row], batch_size: int, row_indices: Sequence[int]):
        super().__init__(rows, batch_size, row_indices)
        if not len(rows):
            raise ConfigError('there are 0 rows: a batch needs at least one')
        self._filler = {name: np.zeros_like(value) for name, value in rows[0].items()}

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self.batch_size)

    def __getitem__(self, step: int) -> Row:
        check_within(step, self)
        indices = [step * self.batch_size + r for r in self._row_indices]
        rows = [self._rows[i] if i < len(self._rows) else self._filler for i in indices]
        weights = np.array([i < len(self._rows) for i in indices], np.float32)
        return {**stack_rows(rows), 'row_weights': weights}


def stack_rows(rows: Sequence[Row]) -> Row:
    """Stacks rows into one array [rows, ...] per name."""
    if all(row.keys() == rows[0].keys() for row in rows):
        with contextlib.suppress(ValueError):  # Shapes differ.
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    found = sorted({describe_features(features(row)) for row in rows})
    raise ConfigError(
        f'the rows of a batch have {" and ".join(found[:2])}: all need the same arrays'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefetch:
    """How far ahead of the current step batches are prepared.

    Attributes:
      workers: number of threads that read rows. 0 reads each batch only when it is requested.
      batches: number of local batches to read ahead.
      device_batches: number of global batches to keep ready on the devices.
    """

    workers: int = 2
    batches: int = 8
    device_batches: int = 2

    def __post_init__(self) -> None:
        check_counts(minimum=0, **{'Prefetch.workers': self.workers})
        for name in ('batches', 'device_batches'):
            check_counts(**{f'Prefetch.{name}': getattr(self, name)})


class Feed:
    """Iterates over global batches in the order of the steps.

    Usage:
      with closing(Feed(local_batches, partitioner, first_step=1000)) as feed:
        for batch in feed: ...

    Args:
      local_batches: this process's rows of each step.
      partitioner: assembles the rows of all processes into global arrays.
      first_step: the step of the first batch.
      starts_after: the step after which the data begins, 0 unless it begins anew.
      prefetch: how far ahead batches are prepared; by default `Prefetch()`.

    Attributes:
      waited: seconds that the steps have waited for batches so far.

    Raises:
      ConfigError: if `first_step` is not an integer >= 0.
    """

    def __init__(
        self,
        local_batches: LocalBatches,
        partitioner: BasePartitioner,
        *,
        first_step: int = 0,
        starts_after: int = 0,
        prefetch: Prefetch | None = None,
    ):
        self.waited, self._starts_after = 0.0, starts_after
        self._batches, self._prefetch = local_batches, prefetch or Prefetch()
        self._to_global = functools.partial(
            partitioner.to_global, batch_size=local_batches.batch_size
        )
        # The finalizer also runs when the program exits: grain's threads and iterators print errors
        # if they outlive the interpreter.
        self._iterators: list[Any] = []
        self._close = weakref.finalize(self, _close_all, self._iterators)
        self.restart(first_step)

    def restart(self, first_step: int) -> None:
        """Continues with the batch of another step. Raises a ConfigError if it is not one."""
        check_counts(minimum=self._starts_after, first_step=first_step)
        _close_all(self._iterators)
        self._error: Exception | None = None
        prefetch = self._prefetch
        steps = grain.MapDataset.source(self._batches)[first_step - self._starts_after :]
        ahead = prefetch.batches if prefetch.workers else 0
        options = grain.ReadOptions(num_threads=prefetch.workers, prefetch_buffer_size=ahead)
        batches = steps.to_iter_dataset(options).map(self._to_global)
        if prefetch.workers:
            batches = grain.experimental.ThreadPrefetchIterDataset(
                batches, prefetch_buffer_size=prefetch.device_batches
            )
        iterator: Any = iter(batches)
        if prefetch.workers:
            iterator.start_prefetch()
        self._iterators.append(iterator)

    def not_finite(self, step: int) -> list[str]:
        """The arrays with NaN or infinite values in this process's rows of a step, read again."""
        row = self._batches[step - self._starts_after]
        floats = {name: x for name, x in row.items() if np.issubdtype(x.dtype, np.floating)}
        return [name for name, x in floats.items() if not np.isfinite(x).all()]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._iterators:
            raise StopIteration
        if self._error is not None:  # the iterator would now yield the batch of a later step
            raise self._error
        tick()  # All processes ask for equally many batches, so a signal can stop them here.
        started = time.perf_counter()
        try:
            return next(self._iterators[0])
        except Exception as error:
            self._error = error
            raise
        finally:
            self.waited += time.perf_counter() - started

    def close(self) -> None:
        """Stops the threads and ends the iteration."""
        self._close()


def _close_all(iterators: list[Any]) -> None:
    while iterators:
        iterators.pop().close()
