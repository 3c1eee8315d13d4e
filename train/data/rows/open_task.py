"""A task whose tokens are at hand: rows at any place, without a state."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from train.data.rows.order import MOST_ROWS, mixed, shuffled
from train.data.rows.packing import Row
from train.data.text.stream import Stream
from train.data.text.token_index import TokenIndex
from train.data.text.tokenizers import Tokenizer
from train.errors import ConfigError, check_counts

# Yardsticks of evaluation look at the beginning of a text only, so that they take a second or two.
YARDSTICK_TOKENS = 4 << 20


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows at random access: examples, and what makes rows of them.

    Attributes:
      examples: a sequence.
      make_row: makes a row of an example and random numbers; None: the examples are rows.
    """

    examples: Any
    make_row: Callable[[Any, np.random.Generator], Row] | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def shuffled(self, seed: int) -> grain.MapDataset:
        """Rows without an end: each of them once an epoch, in an order of its own."""
        dataset = shuffled(self.examples, seed)
        return dataset if self.make_row is None else dataset.random_map(self.make_row)

    def in_order(self) -> grain.MapDataset:
        """Each row once, and the same every time."""
        dataset = grain.MapDataset.source(self.examples)
        return dataset if self.make_row is None else dataset.seed(0).random_map(self.make_row)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a task that draws from one source.

    Attributes:
      name: of the source.
      index: its tokens.
      rows: makes rows of a stream of them.
      settings: what decides, with the tokens, what the rows are.
      scores_bytes: whether the rows' targets are all bytes of the text, each once.
      weight: this part's share of the training rows.
    """

    name: str
    index: TokenIndex
    rows: Callable[[Stream], Rows]
    settings: Mapping[str, Any]
    scores_bytes: bool
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Held-out rows.

    Attributes:
      rows: random access, each row once.
      num_documents: documents that they are of.
      num_bytes: bytes of those; None where the rows do not score every byte.
      text: the beginning of them.
    """

    rows: Sequence[Row]
    num_documents: int
    num_bytes: int | None
    text: bytes


@dataclasses.dataclass(frozen=True)
class OpenTask:
    """A task whose tokens are at hand.

    Attributes:
      tokenizer: of all its text.
      parts: one for each source.
    """

    tokenizer: Tokenizer
    parts: Sequence[Part]

    @functools.cached_property
    def training_rows(self) -> list[Rows]:
        """The training rows of each part, each row once."""
        return [part.rows(part.index.training) for part in self.parts]

    @property
    def rows_per_epoch(self) -> int:
        """Training rows until every part has been seen whole."""
        rows_and_parts = zip(self.training_rows, self.parts, strict=True)
        return max(math.ceil(len(rows) / part.weight) for rows, part in rows_and_parts)

    def training(self, seed: int) -> grain.MapDataset:
        """The training rows, without an end: row i is a function of the task, `seed` and i alone.

        Args:
          seed: of the order of the rows, and of what is random in them.

        Raises:
          ConfigError: a part has nothing to train on, or rows of one part have other arrays than
            those of another.
        """
        check_counts(minimum=0, seed=seed)
        if seed >= 1 << 32:
            raise ConfigError(f'seed is {seed}: grain shuffles by numbers below {1 << 32}')
        for part, rows in zip(self.parts, self.training_rows, strict=True):
            _check_trainable(part, len(rows))
        _check_features([rows.in_order() for rows in self.training_rows])
        if len(self.parts) == 1:
            return self.training_rows[0].shuffled(seed)
        seeds = np.random.SeedSequence(seed).generate_state(len(self.parts)).tolist()
        datasets = [rows.shuffled(s) for rows, s in zip(self.training_rows, seeds, strict=True)]
        return mixed(datasets, [part.weight for part in self.parts])

    def evaluation(self, max_targets: int | None = None) -> EvaluationSet:
        """The held-out rows of all parts, each once.

        Args:
          max_targets: take the first so many held-out tokens, of several parts as many of each.

        Raises:
          ConfigError: nothing is held out, or rows of one part have other arrays than those of
            another.
        """
        streams = [part.index.held_out for part in self.parts]
        if max_targets is not None:
            check_counts(max_targets=max_targets)
            each = max(1, max_targets // len(streams))
            streams = [stream.head(each, self.tokenizer) for stream in streams]
        if not sum(stream.num_documents for stream in streams):
            documents = sum(part.index.training.num_documents for part in self.parts)
            raise ConfigError(
                f'empty corpus: of {", ".join(part.name for part in self.parts)} nothing is held '
                f'out to evaluate, {documents} documents are to train on; see holdout_percent'
            )
        datasets = [p.rows(s).in_order() for p, s in zip(self.parts, streams, strict=True)]
        datasets = [dataset for dataset in datasets if len(dataset)]
        _check_features(datasets)
        scored = all(part.scores_bytes for part in self.parts)
        each = YARDSTICK_TOKENS // len(streams)
        beginnings = [stream.tokens[: each + 1] for stream in streams]
        return EvaluationSet(
            rows=grain.MapDataset.concatenate(datasets),
            num_documents=sum(stream.num_documents for stream in streams),
            num_bytes=sum(stream.num_bytes for stream in streams) if scored else None,
            text=b''.join(map(self.tokenizer.decode, beginnings)),
        )


def features(row: Row) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of each array of a row."""
    return {name: (value.shape, value.dtype) for name, value in row.items()}


def _check_trainable(part: Part, num_rows: int) -> None:
    if not num_rows:
        raise ConfigError(
            f'empty corpus: {part.name} has no document to train on, '
            f'{part.index.held_out.num_documents} held out; see holdout_percent'
        )
    if num_rows > MOST_ROWS:
        raise ConfigError(
            f'{part.name} makes {num_rows} rows, more than the {MOST_ROWS} that grain can shuffle: '
            'use longer rows'
        )


def _check_features(datasets: Sequence[Any]) -> None:
    """The rows of all parts have the same arrays."""
    expected = features(datasets[0][0])
    for dataset in datasets[1:]:
        found = features(dataset[0])
        if found != expected:
            differing = sorted(
                name
                for name in expected.keys() | found.keys()
                if expected.get(name) != found.get(name)
            )
            shapes = ', '.join(
                f'{name} {_described(expected.get(name))} and {_described(found.get(name))}'
                for name in differing
            )
            raise ConfigError(
                f'tasks of a mixture make rows of the same arrays, but they differ in {shapes}'
            )


def _described(feature: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return 'absent' if feature is None else f'{feature[0]} {feature[1]}'
