"""The order of rows: shuffled anew each epoch, and mixed by weights. Both at random access."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

# grain shuffles by 32-bit numbers.
MOST_ROWS = 1 << 32
# grain's shuffle takes the longer the fewer rows there are, milliseconds for a few of them.
FEW_ROWS = 1024
# A length for what has no end: grain's datasets have one.
NO_END = 1 << 62
# Weights are whole multiples of its inverse.
WEIGHT_UNITS = 1 << 32


def shuffled(rows: Any, seed: int) -> grain.MapDataset:
    """Rows without an end: each of them once an epoch, in an order of its own."""
    if len(rows) < FEW_ROWS:
        return grain.MapDataset.source(_Permuted(rows, seed)).seed(seed)
    return grain.MapDataset.source(rows).seed(seed).shuffle().repeat()


def mixed(datasets: Sequence[Any], weights: Sequence[float]) -> grain.MapDataset:
    """Rows of several datasets without an end, at any moment as near to the weights as can be.

    Args:
      datasets: rows without an end.
      weights: their shares, of a sum of 1.
    """
    source: Any = datasets[-1]
    left = weights[-1]
    for dataset, weight in zip(datasets[-2::-1], weights[-2::-1], strict=True):
        left += weight
        source = _Mixed(dataset, source, round(WEIGHT_UNITS * weight / left))
    return grain.MapDataset.source(source)


@dataclasses.dataclass(frozen=True)
class _Permuted:
    """Few rows without an end, each epoch in an order of its own."""

    rows: Any
    seed: int

    def __len__(self) -> int:
        return NO_END

    def __getitem__(self, index: int) -> Any:
        epoch, place = divmod(int(index), len(self.rows))
        return self.rows[_permutation(self.seed, epoch, len(self.rows))[place]]


@functools.lru_cache(maxsize=256)
def _permutation(seed: int, epoch: int, count: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """Rows of two datasets: of each n, `units` / WEIGHT_UNITS are of the first, rounded down."""

    first: Any
    second: Any
    units: int

    def __len__(self) -> int:
        return NO_END

    def __getitem__(self, index: int) -> Any:
        # In Python's whole numbers: others would lose or repeat rows far out.
        index = int(index)
        before = index * self.units // WEIGHT_UNITS
        if (index + 1) * self.units // WEIGHT_UNITS > before:
            return self.first[before]
        return self.second[index - before]
