"""Rows of a corpus as global batches: row r of step n is a function of (seed, n, r) alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from train.data.corpus import SEPARATOR, Corpus

Batch = dict[str, jax.Array]
Row = dict[str, np.ndarray]


class Rows:
    """A corpus cut into rows of `length` targets, each behind the token before it.

    Rows follow each other without a gap; the last one is filled up with SEPARATORs, which carry no
    weight.
    """

    def __init__(self, corpus: Corpus, length: int):
        self._tokens = corpus.tokens
        self._length = length

    def __len__(self) -> int:
        return math.ceil((len(self._tokens) - 1) / self._length)

    def __getitem__(self, index: int) -> Row:
        start = index * self._length
        row = self._tokens[start : start + self._length + 1].astype(np.int32)
        weights = np.zeros(self._length, np.float32)
        weights[: len(row) - 1] = 1
        row = np.pad(row, (0, self._length + 1 - len(row)), constant_values=SEPARATOR)
        return {
            'decoder_input_tokens': row[:-1],
            'decoder_target_tokens': row[1:],
            'decoder_loss_weights': weights,
        }


class TrainingBatches:
    """The batches of a training run, shuffled anew each epoch."""

    def __init__(
        self, corpus: Corpus, *, batch_size: int, length: int, seed: int, sharding: NamedSharding
    ):
        """Args:
        corpus: the text.
        batch_size: rows of a global batch.
        length: tokens of a row.
        seed: of the shuffle.
        sharding: of the batch; a process reads only the rows that it holds.
        """
        rows = grain.MapDataset.source(Rows(corpus, length)).seed(seed)
        self._rows = rows.shuffle().repeat()
        self._batch_size = batch_size
        self._sharding = sharding
        self.rows_per_epoch = len(rows)

    def at(self, step: int) -> Batch:
        """The global batch of a step."""
        first = step * self._batch_size
        return _global_batch(self._sharding, self._batch_size, lambda r: self._rows[first + r])


class EvaluationBatches:
    """The rows of a held-out corpus in order, each once; weightless rows fill the last batch."""

    def __init__(self, corpus: Corpus, *, batch_size: int, length: int, sharding: NamedSharding):
        self._rows = Rows(corpus, length)
        self._batch_size = batch_size
        self._sharding = sharding

    def __len__(self) -> int:
        return math.ceil(len(self._rows) / self._batch_size)

    def __iter__(self) -> Iterator[Batch]:
        filler = {k: np.zeros_like(v) for k, v in self._rows[0].items()}
        for first in range(0, len(self) * self._batch_size, self._batch_size):
            left = len(self._rows) - first
            rows = [self._rows[first + r] for r in range(min(self._batch_size, left))]
            rows += [filler] * (self._batch_size - len(rows))
            yield _global_batch(self._sharding, self._batch_size, rows.__getitem__)


def _global_batch(sharding: NamedSharding, batch_size: int, row: Callable[[int], Row]) -> Batch:
    """Global arrays of rows 0 .. batch_size - 1, of which this process reads those it holds."""

    def rows_of(index: Any) -> tuple[int, int, int]:
        return index[0].indices(batch_size)

    index_map = sharding.addressable_devices_indices_map((batch_size,))
    held = {rows_of(index) for index in index_map.values()}
    blocks = {block: [row(r) for r in range(*block)] for block in held}

    def array(key: str) -> jax.Array:
        shape = (batch_size, *next(iter(blocks.values()))[0][key].shape)
        stacked = {block: np.stack([r[key] for r in rows]) for block, rows in blocks.items()}
        return jax.make_array_from_callback(shape, sharding, lambda index: stacked[rows_of(index)])

    keys = next(iter(blocks.values()))[0]
    return {key: array(key) for key in keys}
