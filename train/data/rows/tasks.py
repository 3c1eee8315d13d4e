"""Tasks: which documents a model learns from, and how rows are made from them."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from train.data.rows.open_task import OpenTask, OpenText, Part, Rows
from train.data.rows.packing import Lengths, Row, SplitRows, blank_tokens, pack, target_length
from train.data.text.sources import Source
from train.data.text.stream import Stream
from train.data.text.token_index import Progress, open_index
from train.data.text.tokenizers import ByteTokenizer, Tokenizer
from train.errors import ConfigError

Packing = Literal['split', 'pack']
# The smallest share of a mixture that a task may have.
MIN_SHARE = 1e-6


def no_progress(name: str, done: int, total: int) -> None:
    """A `Progress` callback that does nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """Data to learn from, as rows: dicts of numpy arrays.

    Usage:
      task = CausalLM(source=TextFiles(pattern='corpus/**/*.txt'))
      rows = task.open(length=1024).training(seed=0)
      rows[12345]  # a dict of numpy arrays
    """

    @property
    def num_tokens(self) -> int | None:
        """The size of the vocabulary; every token is smaller. None if rows have no tokens."""
        return None

    @property
    def holds_out(self) -> bool:
        """Whether the task has held-out data to evaluate."""
        return True

    @abc.abstractmethod
    def open(self, length: Lengths = None, progress: Progress = no_progress) -> OpenTask:
        """Opens the task. Token indices that are not in the cache are built.

        Args:
          length: the number of tokens in a row. Tasks with inputs and targets take the numbers of
            both, {'inputs': 512, 'targets': 114}. Tasks without tokens take None.
          progress: a callback that reports the progress of building.

        Raises:
          ConfigError: if a source or a tokenizer cannot be read, or if the settings conflict.
        """

    def blank_row(self, length: Lengths = None) -> Row:
        """A row of zeros, with the arrays of the rows of this task. No data is opened.

        Raises:
          ConfigError: if only the data says how long rows are, or which arrays they have.
        """
        raise ConfigError(
            f'{type(self).__name__} does not say without its data which arrays its rows have: '
            'define its method blank_row(length), or set the task RandomTokens'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A task on text."""

    @property
    @abc.abstractmethod
    def num_tokens(self) -> int:
        """The size of the vocabulary: every token in a row is smaller."""

    @abc.abstractmethod
    def open(self, length: Lengths = None, progress: Progress = no_progress) -> OpenText:
        """Opens the task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTask(TextTask):
    """A task that reads one source.

    Attributes:
      source: the documents.
      tokenizer: turns the documents into tokens.
      cache_dir: the directory where token indices are stored; by default, a directory in the user's
        cache.
    """

    source: Source
    tokenizer: Tokenizer = dataclasses.field(default_factory=ByteTokenizer)
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (('source', Source), ('tokenizer', Tokenizer)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f'{type(self).__name__}.{name} is {getattr(self, name)!r}: it must be a '
                    f'{kind.__name__}; in a gin file write @Name(), with the parentheses'
                )
        if not isinstance(self.cache_dir, str | os.PathLike | None):
            raise ConfigError(f'cache_dir is {self.cache_dir!r}: it must be a path')

    def open(self, length: Lengths = None, progress: Progress = no_progress) -> OpenText:
        rows = self._rows(length)
        index = open_index(self.source, self.tokenizer, self.cache_dir, progress)
        not_settings = {'source', 'tokenizer', 'cache_dir', 'name', 'metrics', 'postprocess'}
        names = [f.name for f in dataclasses.fields(self) if f.name not in not_settings]
        settings = {'task': type(self).__name__, **{name: getattr(self, name) for name in names}}
        scored = {k: getattr(self, k) for k in ('metrics', 'postprocess') if hasattr(self, k)}
        name = getattr(self, 'name', '') or str(
            getattr(self.source, 'pattern', type(self.source).__name__)
        )
        part = Part(name, index, rows, settings, self._scores_bytes, **scored)
        return OpenText(self.tokenizer, [part])

    _scores_bytes = True

    @abc.abstractmethod
    def _rows(self, lengths: Lengths) -> Callable[[Stream], Rows]:
        """A function that makes rows of these lengths from a token stream."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLM(SourceTask):
    """Language modeling: predicts each token from the tokens before it.

    Attributes:
      packing: 'split' cuts the stream of documents into rows, across the ends of documents. 'pack'
        puts several documents into a row, and separates them by segments (see `PackedRows`).
    """

    packing: Packing = 'split'

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing not in get_args(Packing):
            raise ConfigError(f"CausalLM.packing is {self.packing!r}: use 'split' or 'pack'")

    @property
    def num_tokens(self) -> int:
        return self.tokenizer.num_tokens

    def blank_row(self, length: Lengths = None) -> Row:
        return blank_tokens(target_length(length), packed=self.packing == 'pack')

    def _rows(self, lengths: Lengths) -> Callable[[Stream], Rows]:
        length, separator = target_length(lengths), self.tokenizer.separator
        if self.packing == 'pack':
            return lambda stream: Rows(pack(stream, length, separator))
        return lambda stream: Rows(SplitRows(stream, length, separator))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(TextTask):
    """Rows of several tasks, mixed by weights. Each task has its own epochs.

    Attributes:
      tasks: the tasks. All must have the same tokenizer and make rows with the same arrays.
      weights: the share of each task in the rows. The weights need not add up to 1.
    """

    tasks: Sequence[TextTask]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        tasks, weights = self.tasks, self.weights
        listed = isinstance(tasks, Sequence) and isinstance(weights, Sequence)
        if not listed or not tasks or not all(isinstance(task, TextTask) for task in tasks):
            raise ConfigError(
                f'Mixture.tasks is {str(tasks)[:60]} and Mixture.weights is {weights!r}: both must '
                'be lists; in a gin file write [@one/CausalLM(), @two/CausalLM()] and [1, 1]'
            )
        numbers = all(isinstance(w, int | float) and 0 < w < math.inf for w in weights)
        if len(tasks) != len(weights) or not numbers or min(weights) < sum(weights) * MIN_SHARE:
            raise ConfigError(
                f'Mixture.weights is {weights!r}: it must have one number > 0 for each of the '
                f'{len(tasks)} tasks, at least {MIN_SHARE} of their sum'
            )

    @property
    def num_tokens(self) -> int:
        return max(task.num_tokens for task in self.tasks)

    def blank_row(self, length: Lengths = None) -> Row:
        return self.tasks[0].blank_row(length)

    def open(self, length: Lengths = None, progress: Progress = no_progress) -> OpenText:
        opened = [task.open(length, progress) for task in self.tasks]
        identities = sorted({task.tokenizer.identity for task in opened})
        if len(identities) > 1:
            raise ConfigError(
                f'the tasks of a mixture must have the same tokenizer, not {", ".join(identities)}'
            )
        parts = [
            dataclasses.replace(part, weight=part.weight * weight / sum(self.weights))
            for task, weight in zip(opened, self.weights, strict=True)
            for part in task.parts
        ]
        return OpenText(opened[0].tokenizer, parts)
