"""Rows from memory, from any object with random access, or from random numbers, without text."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import jax
import numpy as np

from train.data.rows.open_task import EvaluationSet, OpenTask, check_same_arrays, check_seed
from train.data.rows.order import shuffle
from train.data.rows.packing import Lengths, Row, blank_tokens, check_within, target_length
from train.data.rows.tasks import Task, no_progress
from train.data.text.token_index import Progress
from train.errors import ConfigError, check_counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Examples(Task):
    """Examples of any kind, each of which is a row.

    Usage:
      Examples(training={'image': images, 'label': labels}, held_out={'image': ..., 'label': ...})
      Examples(training=my_dataset)  # my_dataset[i] is a dict of arrays

    Attributes:
      training: the examples to train on. Either a dict of arrays [examples, ...], or any object
        with `__len__` and `__getitem__` whose items are dicts of arrays, each with the same shapes.
        Several threads may read items of an object at the same time.
      held_out: the examples to evaluate, in either form. By default, there are none.
      name: the name of the data in messages and in the record of a run.
      version: anything that identifies the contents of objects with `__getitem__`: a run refuses to
        resume if it has changed. The contents of arrays are compared in any case.
    """

    training: Any
    held_out: Any = None
    name: str = 'examples'
    version: str = ''

    @property
    def holds_out(self) -> bool:
        return self.held_out is not None

    def open(self, length: Lengths = None, progress: Progress = no_progress) -> OpenExamples:
        if length is not None:
            raise ConfigError(
                f'sequence_length is {length}, but examples have no tokens: remove sequence_length'
            )
        training = _as_rows('training', self.training)
        held_out = None if self.held_out is None else _as_rows('held_out', self.held_out)
        return OpenExamples(training, held_out, self.name, self.version)

    def blank_row(self, length: Lengths = None) -> Row:
        # The examples are in memory, or the user's own object reads them.
        row = self.open(length).training_rows[0]
        return {name: np.zeros_like(value) for name, value in row.items()}


@dataclasses.dataclass(frozen=True)
class _Columns:
    """Rows of a dict of arrays."""

    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> Row:
        check_within(index, self)
        return _as_row({name: values[index] for name, values in self.columns.items()})


@dataclasses.dataclass(frozen=True)
class _Items:
    """Rows of an object with random access."""

    items: Any

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Row:
        return _as_row(self.items[int(index)])


def _as_row(example: Mapping[str, Any]) -> Row:
    """Returns numpy arrays of the dtypes that JAX gives them: by default, 64 bits become 32."""
    row = {name: np.asarray(value) for name, value in example.items()}
    for name, value in row.items():
        if value.dtype.kind in 'OSUMm':
            raise ConfigError(
                f'the array {name!r} of an example has the dtype {value.dtype}, which JAX does not '
                'have: convert it to numbers of one shape, or leave it out'
            )
        row[name] = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    return row


@dataclasses.dataclass(frozen=True)
class OpenExamples(OpenTask):
    """Examples that are ready to read."""

    training_rows: Sequence[Row]
    held_out: Sequence[Row] | None
    name: str
    version: str
    tokenizer = None

    @property
    def rows_per_epoch(self) -> int:
        return len(self.training_rows)

    def training(self, seed: int) -> Any:
        check_seed(seed)
        return shuffle(self.training_rows, seed)

    def evaluation(self, limit: int | None = None) -> EvaluationSet:
        if self.held_out is None:
            raise ConfigError(
                f'{self.name} has no held-out examples to evaluate: set held_out, or remove the '
                'evaluator'
            )
        count = len(self.held_out)
        if limit is not None:
            check_counts(limit=limit)
            count = min(count, limit)
        check_same_arrays(
            'the held-out examples',
            self.held_out[0],
            'the training examples',
            self.training_rows[0],
            'both need the same arrays',
        )
        return EvaluationSet(grain.MapDataset.source(self.held_out)[:count], count)

    @functools.cached_property
    def _content_hash(self) -> str:
        """Hashes the arrays of examples. The contents of other objects are not read."""
        digest = hashlib.blake2b(digest_size=16)
        if isinstance(self.training_rows, _Columns):
            for name, values in sorted(self.training_rows.columns.items()):
                digest.update(f'{name} {values.dtype} {values.shape}'.encode())
                digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    def record(self) -> list[dict[str, Any]]:
        row_bytes = sum(value.nbytes for value in self.training_rows[0].values())
        return [
            {
                'source': self.name,
                'documents': len(self.training_rows),
                'held_out_documents': len(self.held_out or ()),
                'bytes': len(self.training_rows) * row_bytes,
                'content_hash': self.version + self._content_hash,
                'weight': 1.0,
                'rows': {'task': 'Examples'},
            }
        ]


def _as_rows(setting: str, examples: Any) -> Any:
    """Returns examples as rows with random access, after checking them."""
    if isinstance(examples, Mapping):
        columns = {name: np.asarray(values) for name, values in examples.items()}
        counts = {name: len(values) if values.ndim else None for name, values in columns.items()}
        if len(set(counts.values())) != 1 or None in counts.values():
            raise ConfigError(
                f'Examples.{setting} has the arrays {counts}: each must have the same number of '
                'examples'
            )
        rows: Any = _Columns(columns)
    elif isinstance(examples, type):
        raise ConfigError(f'Examples.{setting} is a class: write {examples.__name__}()')
    elif hasattr(examples, '__len__') and hasattr(examples, '__getitem__'):
        rows = _Items(examples)
        if len(rows) and not isinstance(examples[0], Mapping):
            raise ConfigError(
                f'Examples.{setting}[0] is of type {type(examples[0]).__name__}: every example '
                'must be a dict of arrays'
            )
    else:
        raise ConfigError(
            f'Examples.{setting} is of type {type(examples).__name__}: it must be a dict of '
            'arrays, or an object with __len__ and __getitem__'
        )
    if not len(rows):
        raise ConfigError(f'empty corpus: Examples.{setting} has 0 examples')
    return rows


_TRAINING, _HELD_OUT = 0, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomTokens(Task):
    """Language modeling of random tokens. Its rows have the arrays of `CausalLM`.

    There is nothing to learn from it. It measures the speed of a run, or compiles its step for
    another machine, without files.

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
