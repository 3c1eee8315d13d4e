"""The feed reads batches and moves them to the devices before the steps need them."""

from __future__ import annotations

import dataclasses
import functools
import time
import weakref
from collections.abc import Iterator
from typing import Any

import grain

from partitioning import BasePartitioner
from train.data.batches import Batch, LocalBatches
from train.errors import check_counts
from train.processes.channel import tick


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
        prefetch: Prefetch | None = None,
    ):
        self.waited = 0.0
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
        """Continues with the batch of another step.

        Raises:
          ConfigError: if the step is not an integer >= 0.
        """
        check_counts(minimum=0, first_step=first_step)
        _close_all(self._iterators)
        self._error: Exception | None = None
        prefetch = self._prefetch
        steps = grain.MapDataset.source(self._batches)[first_step:]
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
