"""The order of rows: shuffled differently in each epoch, and mixed by weights, by random access."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

# grain shuffles with 32-bit numbers.
MAX_ROWS = 1 << 32
# grain's shuffle is slow for short datasets: for a few rows it takes milliseconds per row.
FEW_ROWS = 1024
# grain needs the length of a dataset; this stands for an endless one.
ENDLESS = 1 << 62
# Weights are rounded to multiples of 1 / WEIGHT_UNITS.
WEIGHT_UNITS = 1 << 32


def shuffle(rows: Any, seed: int) -> grain.MapDataset:
    """Endless rows: every row once per epoch, and each epoch in a different order."""
    if len(rows) < FEW_ROWS:
        return grain.MapDataset.source(_Permuted(rows, seed)).seed(seed)
    return grain.MapDataset.source(rows).seed(seed).shuffle().repeat()


def mix(datasets: Sequence[Any], weights: Sequence[float]) -> grain.MapDataset:
    """Endless rows of endless datasets. The first n rows follow the weights closely, for every n.

    The weights are the share of each dataset, and add up to 1.
    """
    source: Any = datasets[-1]
    total = weights[-1]
    for dataset, weight in zip(datasets[-2::-1], weights[-2::-1], strict=True):
        total += weight
        source = _Mixed(dataset, source, round(WEIGHT_UNITS * weight / total))
    return grain.MapDataset.source(source)


@dataclasses.dataclass(frozen=True)
class _Permuted:
    """An endless dataset of few rows, with one permutation per epoch."""

    rows: Any
    seed: int

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        epoch, place = divmod(int(index), len(self.rows))
        return self.rows[_permutation(self.seed, epoch, len(self.rows))[place]]


@functools.lru_cache(maxsize=256)
def _permutation(seed: int, epoch: int, count: int) -> list[int]:
    return np.random.default_rng([seed, epoch]).permutation(count).tolist()


@dataclasses.dataclass(frozen=True)
class _Mixed:
    """Two mixed datasets. Of the first n rows, n * `units` // WEIGHT_UNITS come from `first`."""

    first: Any
    second: Any
    units: int

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Any:
        # Python's integers do not overflow; NumPy's would lose or repeat rows at large indices.
        index = int(index)
        before = index * self.units // WEIGHT_UNITS
        if (index + 1) * self.units // WEIGHT_UNITS > before:
            return self.first[before]
        return self.second[index - before]
