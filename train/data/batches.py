"""Global batches: row r of step n is row n * batch_size + r of the data, wherever it is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from train.data.rows.packing import Row
from train.errors import ConfigError

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
        self._row_indices = row_indices

    def __len__(self) -> int:
        return np.iinfo(np.int64).max // self.batch_size

    def __getitem__(self, step: int) -> Row:
        first = step * self.batch_size
        return stack([self._rows[first + r] for r in self._row_indices])


class FiniteBatches:
    """The rows that one process reads of a finite set; rows without weight fill the last batch."""

    def __init__(self, rows: Sequence[Row], batch_size: int, row_indices: Sequence[int]):
        self._rows = rows
        self.batch_size = batch_size
        self._row_indices = row_indices
        if not len(rows):
            raise ConfigError('there are no rows to make batches of')
        self._filler = {name: np.zeros_like(value) for name, value in rows[0].items()}

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self.batch_size)

    def __getitem__(self, step: int) -> Row:
        indices = [step * self.batch_size + r for r in self._row_indices]
        return stack([self._rows[i] if i < len(self._rows) else self._filler for i in indices])


def stack(rows: Sequence[Row]) -> Row:
    """Arrays [rows, ...] of rows."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
