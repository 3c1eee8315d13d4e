"""Global batches: row r of step n is row n * batch_size + r of the data, on every process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from partitioning import BasePartitioner
from train.data.rows.open_task import describe_features, features
from train.data.rows.packing import Row, check_within
from train.errors import ConfigError, check_counts

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

    Args:
      rows: the finite set, with random access.
      batch_size, row_indices: as for `LocalBatches`.

    Raises:
      ConfigError: if there are no rows, or if `LocalBatches` raises it.
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
