"""Feeding: batches are read and moved to the devices ahead of the steps that take them."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import gin
import grain

from partitioning import BasePartitioner
from train.data.batches import Batch, FiniteBatches, LocalBatches
from train.errors import check_counts


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefetch:
    """How far ahead of the step batches are made.

    Attributes:
      workers: threads that read rows; 0: none, each batch is read when it is asked for.
      batches: local batches that are read ahead.
      device_batches: global batches that lie ready on the devices.
    """

    workers: int = 2
    batches: int = 8
    device_batches: int = 2

    def __post_init__(self) -> None:
        check_counts(minimum=0, **{'Prefetch.workers': self.workers})
        for name in ('batches', 'device_batches'):
            check_counts(**{f'Prefetch.{name}': getattr(self, name)})


class Feed:
    """Global batches in the order of the steps.

    Usage:
      with closing(Feed(local_batches, partitioner, first_step=1000)) as feed:
        for batch in feed: ...

    Attributes:
      waited: seconds that the steps have waited for batches so far.
    """

    def __init__(
        self,
        local_batches: LocalBatches | FiniteBatches,
        partitioner: BasePartitioner,
        *,
        first_step: int = 0,
        prefetch: Prefetch | None = None,
    ):
        """Args:
        local_batches: `LocalBatches` or `FiniteBatches`, this process's rows of each step.
        partitioner: puts the rows of all processes together.
        first_step: begin with this step's batch.
        prefetch: how far ahead batches are made.
        """
        check_counts(minimum=0, first_step=first_step)
        prefetch = prefetch or Prefetch()
        self.waited = 0.0
        self._error: Exception | None = None
        steps = grain.MapDataset.source(local_batches)[first_step:]
        ahead = prefetch.batches if prefetch.workers else 0
        options = grain.ReadOptions(num_threads=prefetch.workers, prefetch_buffer_size=ahead)
        to_global = functools.partial(partitioner.to_global, batch_size=local_batches.batch_size)
        batches = steps.to_iter_dataset(options).map(to_global)
        if prefetch.workers:
            batches = grain.experimental.ThreadPrefetchIterDataset(
                batches, prefetch_buffer_size=prefetch.device_batches
            )
        iterator: Any = iter(batches)
        if prefetch.workers:
            iterator.start_prefetch()
        # Ended with the feed or with the program: grain's threads and iterators that live longer
        # complain when the interpreter goes.
        self._iterators = [iterator]
        self._close = weakref.finalize(self, _end, self._iterators)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._iterators:
            raise StopIteration
        if self._error is not None:  # what comes behind it would be another step's batch
            raise self._error
        asked = time.perf_counter()
        try:
            return next(self._iterators[0])
        except Exception as error:
            self._error = error
            raise
        finally:
            self.waited += time.perf_counter() - asked

    def close(self) -> None:
        """Stops the threads; nothing comes after it."""
        self._close()


def _end(iterators: list[Any]) -> None:
    while iterators:
        iterators.pop().close()
