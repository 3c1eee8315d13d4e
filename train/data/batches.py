"""Global batches: row r of step n is row n * batch_size + r of the data, wherever it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from train.data.rows.packing import Row, check_within
from train.errors import ConfigError, check_counts

Batch = dict[str, jax.Array]


class LocalBatches:
    """The rows that one process reads of each step, at random access by step.

    Grain's readers take it for a source without an end.
    """

    def __init__(self, rows: Any, batch_size: int, row_indices: Sequence[int]):
        """Args:
        rows: rows without an end, at random access.
        batch_size: rows of a global batch.
        row_indices: which of them this process reads, as a `DataLayout` says.
        """
        self._rows = rows
        self.batch_size = batch_size
        self._row_indices = _checked(row_indices, batch_size)

    def __len__(self) -> int:
        return np.iinfo(np.int64).max // self.batch_size

    def __getitem__(self, step: int) -> Row:
        check_within(step, self)
        first = int(step) * self.batch_size
        return stack([self._rows[first + r] for r in self._row_indices])


class FiniteBatches:
    """The rows that one process reads of a finite set; rows without weight fill the last batch."""

    def __init__(self, rows: Sequence[Row], batch_size: int, row_indices: Sequence[int]):
        self._rows = rows
        self.batch_size = batch_size
        self._row_indices = _checked(row_indices, batch_size)
        if not len(rows):
            raise ConfigError('there are no rows to make batches of')
        self._filler = {name: np.zeros_like(value) for name, value in rows[0].items()}

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self.batch_size)

    def __getitem__(self, step: int) -> Row:
        check_within(step, self)
        indices = [step * self.batch_size + r for r in self._row_indices]
        return stack([self._rows[i] if i < len(self._rows) else self._filler for i in indices])


def _checked(row_indices: Sequence[int], batch_size: int) -> tuple[int, ...]:
    """Rows of a batch, as a DataLayout has them."""
    check_counts(batch_size=batch_size)
    rows = tuple(map(int, row_indices))
    if not rows or not 0 <= min(rows) <= max(rows) < batch_size:
        raise ConfigError(
            f'row_indices must be of 0 to {batch_size - 1}, the rows of a batch of {batch_size}: '
            'they are those of partitioner.get_data_layout(batch_size)'
        )
    return rows


def stack(rows: Sequence[Row]) -> Row:
    """Arrays [rows, ...] of rows."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
