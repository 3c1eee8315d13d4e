"""Tasks and mixtures of the package seqio, as tasks of this trainer.

Their examples are read once, with TensorFlow, into token indices. Training reads only the indices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from train.data import (
    ByT5Tokenizer,
    InputsToTargets,
    Mixture,
    SentencePieceTokenizer,
    Source,
    TokenIds,
    Tokenizer,
)
from train.data.text.sources import Document, Listing, Tokens
from train.errors import ConfigError, first_line

FEATURES = ('inputs', 'targets')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How the examples of a task of seqio are read.

    `lengths` are the numbers of tokens that preprocessors see; see seqio's `sequence_length`.
    """

    lengths: Mapping[str, int] | None = None
    split: str = 'train'
    use_cached: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioTask(InputsToTargets):
    """A task of seqio. Training and evaluation read the same split, which seqio selects."""


def find_task(name: str, reading: Reading) -> Any:
    """The task or mixture of seqio with a name, or None if seqio is not installed or has none.

    Raises a ConfigError if its vocabulary has no equivalent.
    """
    if importlib.util.find_spec('seqio') is None:
        return None
    seqio = importlib.import_module('seqio')
    try:
        found = seqio.get_mixture_or_task(name)
    except ValueError:  # seqio's error for a name that it does not know
        return None
    return as_task(found, reading)


def as_task(found: Any, reading: Reading) -> Any:
    """A task or mixture of seqio as a task of this trainer."""
    if hasattr(found, 'tasks'):
        tasks = list(found.tasks)
        rates = [float(found.get_rate(task)) for task in tasks]
        return Mixture(tasks=[as_task(task, reading) for task in tasks], weights=rates)
    vocabularies = {
        name: _as_tokenizer(found.name, feature.vocabulary)
        for name, feature in found.output_features.items()
        if name in FEATURES
    }
    if 'targets' not in vocabularies:
        raise ConfigError(f"the seqio task {found.name!r} has no feature 'targets'")
    source = SeqioExamples(task=found, reading=reading)
    return SeqioTask(
        source=source,
        held_out=source,
        inputs='inputs' if 'inputs' in vocabularies else None,
        architecture='encoder_decoder' if 'inputs' in vocabularies else 'decoder_only',
        tokenizer=vocabularies['targets'],
        inputs_tokenizer=vocabularies.get('inputs'),
        add_end=(),  # the preprocessors of the task have added it
        name=found.name,
        metrics=tuple(getattr(found, 'predict_metric_fns', found.metric_fns)),
        postprocess=found.postprocess_fn,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeqioExamples(Source):
    """The tokens of one feature of the examples of a task.

    The examples are read in the order of the task, and random preprocessing is drawn once. The
    index is built again if the settings or the code of the preprocessors change, but not if the
    files of the task change: then delete the index.
    """

    task: Any
    reading: Reading
    feature: str = 'targets'

    def select(self, field: str | int) -> SeqioExamples:
        return dataclasses.replace(self, feature=str(field))

    def listing(self) -> Listing:
        signature = {
            'source': 'seqio',
            'task': self.task.name,
            'feature': self.feature,
            'split': self.reading.split,
            'lengths': dict(self.reading.lengths or {}),
            'use_cached': self.reading.use_cached,
            'holdout_percent': float(self.holdout_percent),
            'data': str(type(self.task.source)) + str(vars(self.task.source)),
            'preprocessors': [_describe(fn) for fn in getattr(self.task, 'preprocessors', ())],
        }
        return Listing(signature, 1, self._documents())

    def _documents(self) -> Iterator[Document]:
        lengths = self.reading.lengths
        try:
            dataset = self.task.get_dataset(
                sequence_length=None if lengths is None else dict(lengths),
                split=self.reading.split,
                use_cached=self.reading.use_cached,
                shuffle=False,
                seed=0,
                num_epochs=1,
                trim_output_features=False,
            )
            for number, example in enumerate(dataset.as_numpy_iterator()):
                tokens = np.asarray(example[self.feature]).astype(np.int32)
                if tokens.ndim != 1:
                    raise ConfigError(
                        f'{self.task.name}: example {number}: {self.feature!r} has the shape '
                        f'{tokens.shape}: only lists of tokens can be read'
                    )
                where = f'{self.task.name} {self.reading.split}: example {number}'
                yield Document(f'{number}', Tokens(tokens.tobytes()), 1, where)
        except ConfigError:
            raise
        except Exception as error:  # TensorFlow and the preprocessors have errors of many kinds
            raise ConfigError(
                f'the seqio task {self.task.name!r} cannot be read: {first_line(error)}'
            ) from error


def _describe(function: Any) -> str:
    """A text that changes with the code and the arguments of a preprocessor."""
    parts = [repr(getattr(function, 'args', ())), repr(getattr(function, 'keywords', {}))]
    inner = getattr(function, 'func', function)
    with contextlib.suppress(OSError, TypeError):  # There is no file of the source code.
        parts.append(inspect.getsource(inner))
    return ' '.join([getattr(inner, '__qualname__', type(inner).__name__), *parts])


def _as_tokenizer(task: str, vocabulary: Any) -> Tokenizer:
    kind = type(vocabulary).__name__
    if kind == 'SentencePieceVocabulary':
        return SentencePieceTokenizer(
            path=vocabulary.sentencepiece_model_file, extra_ids=vocabulary.extra_ids
        )
    if kind == 'ByteVocabulary':
        return ByT5Tokenizer(extra_ids=vocabulary.extra_ids)
    if kind == 'PassThroughVocabulary':
        end = vocabulary.eos_id
        return TokenIds(num_tokens=vocabulary.vocab_size, end=1 if end is None else end)
    raise ConfigError(
        f'the seqio task {task!r} has a {kind}, which has no equivalent: use a '
        'SentencePieceVocabulary, ByteVocabulary or PassThroughVocabulary'
    )
