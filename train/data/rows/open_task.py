"""An opened task: its rows have random access without state."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from train.data.rows.order import MAX_ROWS, mix, shuffle
from train.data.rows.packing import Row
from train.data.text.stream import Stream
from train.data.text.token_index import TokenIndex
from train.data.text.tokenizers import Tokenizer
from train.errors import ConfigError, check_counts

# Baselines are computed on at most this many tokens of the text, which takes about a second.
BASELINE_TOKENS = 4 << 20


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows with random access: examples, and a function that makes a row of each.

    `make_row` makes a row from an example and a random generator. With None, the examples are
    already rows.
    """

    examples: Any
    make_row: Callable[[Any, np.random.Generator], Row] | None = None

    def __len__(self) -> int:
        return len(self.examples)

    def shuffled(self, seed: int) -> grain.MapDataset:
        """Endless rows: every row once per epoch, and each epoch in a different order."""
        dataset = shuffle(self.examples, seed)
        return dataset if self.make_row is None else dataset.random_map(self.make_row)

    def in_order(self) -> grain.MapDataset:
        """Every row once, in order, and with the same random numbers each time."""
        dataset = grain.MapDataset.source(self.examples)
        return dataset if self.make_row is None else dataset.seed(0).random_map(self.make_row)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a task that reads one source.

    Attributes:
      rows: makes rows from a token stream.
      settings: the settings that, together with the tokens, determine the rows.
      scores_bytes: whether the targets of the rows cover every byte of the text exactly once.
      postprocess: turns decoded text into what the metrics compare. None compares the text.
      inputs_tokenizer: the tokenizer of the inputs, if the targets have another one.
      weight: this part's share of the training rows.
    """

    name: str
    index: TokenIndex
    rows: Callable[[Stream], Rows]
    settings: Mapping[str, Any]
    scores_bytes: bool
    metrics: tuple[Callable[..., Any], ...] = ()
    postprocess: Callable[..., Any] | None = None
    inputs_tokenizer: Tokenizer | None = None
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """The held-out rows of a task.

    Attributes:
      rows: the rows, each once, with random access.
      num_documents: the number of documents or examples that the rows come from.
      num_bytes: the size of these documents in bytes, or None if the rows do not score every byte.
      text: the beginning of these documents.
    """

    rows: Sequence[Row]
    num_documents: int
    num_bytes: int | None = None
    text: bytes = b''


class OpenTask(abc.ABC):
    """A task that is ready to read.

    Attributes:
      tokenizer: the tokenizer of its text, or None if its rows are not text.
    """

    tokenizer: Tokenizer | None

    @property
    def tokenizer_identity(self) -> str | None:
        """What identifies the tokenizer, or None if there is none."""
        return None if self.tokenizer is None else self.tokenizer.identity

    @property
    @abc.abstractmethod
    def rows_per_epoch(self) -> int:
        """The number of training rows after which every row has been seen."""

    @abc.abstractmethod
    def training(self, seed: int) -> Any:
        """The endless training rows. Row i depends only on the task, `seed` and i.

        Args:
          seed: determines the order of the rows and the randomness in them.

        Raises:
          ConfigError: if there is nothing to train on, or if rows have different arrays.
        """

    @abc.abstractmethod
    def evaluation(self, limit: int | None = None) -> EvaluationSet:
        """The held-out rows, each once.

        Args:
          limit: the number of held-out tokens (of text) or rows to use, from the first one on.
            Several parts share it equally. By default, all are used.

        Raises:
          ConfigError: if nothing is held out, or if rows have different arrays.
        """

    @abc.abstractmethod
    def record(self) -> list[dict[str, Any]]:
        """Describes all data that determines the rows, as JSON: one dict per part, with 'source',
        'documents', 'held_out_documents', 'bytes', 'content_hash', 'weight' and 'rows'."""


@dataclasses.dataclass(frozen=True)
class OpenText(OpenTask):
    """A task on text whose token indices are built."""

    tokenizer: Tokenizer
    parts: Sequence[Part]

    @functools.cached_property
    def training_rows(self) -> list[Rows]:
        """The training rows of each part."""
        return [part.rows(part.index.training) for part in self.parts]

    @property
    def rows_per_epoch(self) -> int:
        rows_and_parts = zip(self.training_rows, self.parts, strict=True)
        return max(math.ceil(len(rows) / part.weight) for rows, part in rows_and_parts)

    def record(self) -> list[dict[str, Any]]:
        return [
            {
                'source': part.name,
                'documents': part.index.training.num_documents,
                'held_out_documents': part.index.held_out.num_documents,
                'bytes': part.index.training.num_bytes,
                'content_hash': part.index.content_hash,
                'weight': part.weight,
                'rows': dict(part.settings),
            }
            for part in self.parts
        ]

    def training(self, seed: int) -> grain.MapDataset:
        check_seed(seed)
        for part, rows in zip(self.parts, self.training_rows, strict=True):
            if not len(rows):
                raise ConfigError(
                    f'{part.name} has no document to train on, because all '
                    f'{part.index.held_out.num_documents} are held out: lower holdout_percent'
                )
            if len(rows) > MAX_ROWS:
                raise ConfigError(
                    f'{part.name} has {len(rows)} rows, but grain can shuffle at most {MAX_ROWS}: '
                    'use longer rows'
                )
        _check_features([rows.in_order() for rows in self.training_rows])
        if len(self.parts) == 1:
            return self.training_rows[0].shuffled(seed)
        seeds = np.random.SeedSequence(seed).generate_state(len(self.parts)).tolist()
        datasets = [rows.shuffled(s) for rows, s in zip(self.training_rows, seeds, strict=True)]
        return mix(datasets, [part.weight for part in self.parts])

    def evaluation(self, limit: int | None = None) -> EvaluationSet:
        streams = [part.index.held_out for part in self.parts]
        if limit is not None:
            check_counts(limit=limit)
            each = max(1, limit // len(streams))
            streams = [stream.head(each, self.tokenizer) for stream in streams]
        if not sum(stream.num_documents for stream in streams):
            documents = sum(part.index.training.num_documents for part in self.parts)
            raise ConfigError(
                f'{", ".join(part.name for part in self.parts)} has {documents} training '
                'documents, but nothing is held out to evaluate: raise holdout_percent, or '
                'evaluate nothing with TrainConfig.evaluators = {}'
            )
        datasets = [p.rows(s).in_order() for p, s in zip(self.parts, streams, strict=True)]
        datasets = [dataset for dataset in datasets if len(dataset)]
        _check_features(datasets)
        scored = all(part.scores_bytes for part in self.parts)
        each = BASELINE_TOKENS // len(streams)
        beginnings = [stream.read(0, each + 1) for stream in streams]
        return EvaluationSet(
            rows=grain.MapDataset.concatenate(datasets),
            num_documents=sum(stream.num_documents for stream in streams),
            num_bytes=sum(stream.num_bytes for stream in streams) if scored else None,
            text=b''.join(map(self.tokenizer.decode, beginnings)) if scored else b'',
        )


def features(row: Row) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """The shape and dtype of each array of a row."""
    return {name: (value.shape, value.dtype) for name, value in row.items()}


def describe_features(found: Mapping[str, Any]) -> str:
    """Lists the arrays of a row, such as 'label int32 (), pixels float32 (64,)'."""
    return ', '.join(f'{name} {dtype} {shape}' for name, (shape, dtype) in sorted(found.items()))


def check_seed(seed: int) -> None:
    """Checks that grain can shuffle rows with this seed."""
    check_counts(minimum=0, seed=seed)
    if seed >= 1 << 32:
        raise ConfigError(f'seed is {seed}: it must be below {1 << 32}, the limit of grain')


def check_same_arrays(first: str, first_row: Row, second: str, second_row: Row, hint: str) -> None:
    """Checks that two kinds of rows have the same arrays.

    Raises a ConfigError if they differ; `first` and `second` say which rows they are.
    """
    ours, theirs = features(first_row), features(second_row)
    if ours != theirs:
        raise ConfigError(
            f'{first} have {describe_features(ours)}, but {second} have '
            f'{describe_features(theirs)}: {hint}'
        )


def _check_features(datasets: Sequence[Any]) -> None:
    """Checks that the rows of all parts have the same arrays."""
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
                f'{name} {_describe(expected.get(name))} and {_describe(found.get(name))}'
                for name in differing
            )
            raise ConfigError(
                'the tasks of a mixture must make rows with the same arrays, but they differ in '
                f'{shapes}'
            )


def _describe(feature: tuple[tuple[int, ...], np.dtype] | None) -> str:
    return 'absent' if feature is None else f'{feature[0]} {feature[1]}'
