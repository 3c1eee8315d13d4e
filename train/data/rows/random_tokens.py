"""Rows of random tokens, to measure or to forecast a run without data."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from train.data.rows.examples import OpenExamples
from train.data.rows.lengths import Lengths, target_length
from train.data.rows.packing import Row, blank_tokens, check_within
from train.data.rows.tasks import Task, no_progress
from train.data.text.token_index import Progress
from train.errors import check_counts

_TRAINING, _HELD_OUT = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomTokens(Task):
    """Language modeling of random tokens. Its rows have the arrays of `CausalLM`.

    There is nothing to learn from it. It measures the speed of a run, or compiles its step for a
    machine that is not here, without files.

    Attributes:
      vocab_size: the number of different tokens.
      num_rows: the number of rows in an epoch, and of held-out rows.
    """

    vocab_size: int
    num_rows: int = 1 << 20

    def __post_init__(self) -> None:
        counts = {'vocab_size': self.vocab_size, 'num_rows': self.num_rows}
        check_counts(**{f'RandomTokens.{name}': count for name, count in counts.items()})

    @property
    def num_tokens(self) -> int:
        return self.vocab_size

    def blank_row(self, length: Lengths = None) -> Row:
        return blank_tokens(target_length(length))

    def open(self, length: Lengths = None, progress: Progress = no_progress) -> OpenExamples:
        def rows(part: int) -> Any:
            return _RandomRows(self.num_rows, target_length(length), self.vocab_size, part)

        version = f'random tokens below {self.vocab_size}'
        return OpenExamples(rows(_TRAINING), rows(_HELD_OUT), 'random tokens', version)


@dataclasses.dataclass(frozen=True)
class _RandomRows:
    """Rows of `length` targets, each of which depends only on its index."""

    num_rows: int
    length: int
    vocab_size: int
    part: int

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Row:
        check_within(index, self)
        generator = np.random.default_rng((self.part, int(index)))
        tokens = generator.integers(0, self.vocab_size, self.length + 1, dtype=np.int32)
        return {
            'decoder_input_tokens': tokens[:-1],
            'decoder_target_tokens': tokens[1:],
            'decoder_loss_weights': np.ones(self.length, np.float32),
        }
