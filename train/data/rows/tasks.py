"""Tasks: what a model learns from, and how rows are made of it."""

from __future__ import annotations

import abc
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import gin

from train.data.rows.open_task import OpenTask, Part, Rows
from train.data.rows.packing import SplitRows, pack
from train.data.rows.span_corruption import Corruption, CorruptSpans, Texts
from train.data.text.sources import Source
from train.data.text.stream import Stream
from train.data.text.token_index import Progress, open_index
from train.data.text.tokenizers import ByteTokenizer, Tokenizer
from train.errors import ConfigError, check_counts

Packing = Literal['split', 'pack']
# The least share of a mixture that a task may have is one in so many.
MOST_UNLIKE = 1_000_000


def tell_nobody(name: str, done: int, total: int) -> None:
    """A `Progress` that says nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task(abc.ABC):
    """What a model learns from.

    Usage:
      task = CausalLM(source=TextFiles(pattern='corpus/**/*.txt'))
      rows = task.open(length=1024).training(seed=0)
      rows[12345]  # a dict of numpy arrays
    """

    @property
    @abc.abstractmethod
    def num_tokens(self) -> int:
        """Tokens in its rows are below it."""

    @abc.abstractmethod
    def open(self, length: int, progress: Progress = tell_nobody) -> OpenTask:
        """Builds what of its token indices is not in the cache.

        Args:
          length: places of a row; of the encoder's part, where there is one.
          progress: told how far the building is.

        Raises:
          ConfigError: sources, tokenizers or settings that cannot be honoured.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTask(Task):
    """A task with a source.

    Attributes:
      source: the documents.
      tokenizer: makes tokens of them.
      cache_dir: where token indices are kept; None: in the user's cache folder.
    """

    source: Source
    tokenizer: Tokenizer = dataclasses.field(default_factory=ByteTokenizer)
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        for name, kind in (('source', Source), ('tokenizer', Tokenizer)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(
                    f'{type(self).__name__}.{name} is {getattr(self, name)!r}, no {kind.__name__}; '
                    'in a gin file write @Name(), with the brackets'
                )
        if not isinstance(self.cache_dir, str | os.PathLike | None):
            raise ConfigError(f'cache_dir is {self.cache_dir!r}: it must be the path of a folder')

    def open(self, length: int, progress: Progress = tell_nobody) -> OpenTask:
        check_counts(length=length)
        rows = self._rows(length)
        index = open_index(self.source, self.tokenizer, self.cache_dir, progress)
        name = str(getattr(self.source, 'pattern', type(self.source).__name__))
        kept = {'source', 'tokenizer', 'cache_dir'}
        settings = {
            'task': type(self).__name__,
            **{
                f.name: getattr(self, f.name)
                for f in dataclasses.fields(self)
                if f.name not in kept
            },
        }
        return OpenTask(self.tokenizer, [Part(name, index, rows, settings, self._scores_bytes)])

    _scores_bytes = True

    @abc.abstractmethod
    def _rows(self, length: int) -> Callable[[Stream], Rows]:
        """What makes rows of a stream."""


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLM(SourceTask):
    """Each token from those before it.

    Attributes:
      packing: 'split' cuts the stream of documents into rows, over their ends; 'pack' keeps
        documents apart and whole where they fit, several in a row (see `PackedRows`).
    """

    packing: Packing = 'split'

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing not in get_args(Packing):
            raise ConfigError(f"CausalLM.packing is {self.packing!r}: use 'split' or 'pack'")

    @property
    def num_tokens(self) -> int:
        return self.tokenizer.num_tokens

    def _rows(self, length: int) -> Callable[[Stream], Rows]:
        separator = self.tokenizer.separator
        if self.packing == 'pack':
            return lambda stream: Rows(pack(stream, length, separator))
        return lambda stream: Rows(SplitRows(stream, length, separator))


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpanCorruption(SourceTask):
    """T5's pretraining: the decoder writes spans that are cut out of the encoder's text.

    Attributes:
      noise_density: share of the tokens that is cut out.
      mean_noise_span_length: tokens of a span, in the mean.
      num_sentinels: tokens that stand for spans; they follow those of the tokenizer, and the last
        stands for the first span.
    """

    noise_density: float = 0.15
    mean_noise_span_length: float = 3.0
    num_sentinels: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(num_sentinels=self.num_sentinels)
        density, span = self.noise_density, self.mean_noise_span_length
        if not isinstance(density, float) or not 0 < density < 1:
            raise ConfigError(f'noise_density is {self.noise_density!r}: use one between 0 and 1')
        if not isinstance(span, int | float) or not 1 <= span < math.inf:
            raise ConfigError(
                f'mean_noise_span_length is {self.mean_noise_span_length!r}: use 1 or more'
            )

    @property
    def num_tokens(self) -> int:
        return self.tokenizer.num_tokens + self.num_sentinels

    _scores_bytes = False

    def _rows(self, length: int) -> Callable[[Stream], Rows]:
        corruption = Corruption(self.noise_density, self.mean_noise_span_length)
        text_length = corruption.longest_text(length)
        if not text_length:
            raise ConfigError(f'no text fits into {length} places of an encoder: use 4 or more')
        spans = corruption.counts(text_length)[1]
        if spans > self.num_sentinels:
            raise ConfigError(
                f'a text of {text_length} tokens has {spans} spans, more than num_sentinels '
                f'({self.num_sentinels})'
            )
        make_row = CorruptSpans(
            corruption,
            encoder_length=length,
            decoder_length=corruption.lengths(text_length)[1],
            separator=self.tokenizer.separator,
            first_sentinel=self.num_tokens - 1,
        )
        return lambda stream: Rows(Texts(stream, text_length), make_row)


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture(Task):
    """Rows of several tasks, each by its weight; every task goes through epochs of its own.

    Attributes:
      tasks: tasks with the same tokenizer and the same arrays in a row.
      weights: their shares of the rows, of any sum.
    """

    tasks: Sequence[Task]
    weights: Sequence[float]

    def __post_init__(self) -> None:
        tasks, weights = self.tasks, self.weights
        listed = isinstance(tasks, Sequence) and isinstance(weights, Sequence)
        if not listed or not tasks or not all(isinstance(task, Task) for task in tasks):
            raise ConfigError(
                f'Mixture.tasks is {str(tasks)[:60]} and Mixture.weights {weights!r}: give a list '
                'of each; in a gin file write [@one/CausalLM(), @two/CausalLM()]'
            )
        numbers = all(isinstance(w, int | float) and 0 < w < math.inf for w in weights)
        if len(tasks) != len(weights) or not numbers or min(weights) < sum(weights) / MOST_UNLIKE:
            raise ConfigError(
                f'Mixture.weights is {weights!r}: give each of the {len(tasks)} tasks a weight '
                'above 0, none below a millionth of all'
            )

    @property
    def num_tokens(self) -> int:
        return max(task.num_tokens for task in self.tasks)

    def open(self, length: int, progress: Progress = tell_nobody) -> OpenTask:
        opened = [task.open(length, progress) for task in self.tasks]
        identities = sorted({task.tokenizer.identity for task in opened})
        if len(identities) > 1:
            raise ConfigError(
                f'tasks of a mixture have the same tokenizer, not {", ".join(identities)}'
            )
        parts = [
            dataclasses.replace(part, weight=part.weight * weight / sum(self.weights))
            for task, weight in zip(opened, self.weights, strict=True)
            for part in task.parts
        ]
        return OpenTask(opened[0].tokenizer, parts)
