"""The parts of seqio that T5X's gin files name: tasks by name, vocabularies, the evaluator.

A name belongs to a task of `train.data`, or to a task or mixture of the package seqio, if it is
installed. To give a task a name, either add it in a module that the gin file imports
(`--gin_allow=my_tasks`),

    from train.t5x import seqio
    seqio.TaskRegistry.add('my_text', InputsToTargets(source=JsonLines(pattern='corpus/*.jsonl')))

or add it in a gin file:

    seqio.get_mixture_or_task.tasks = {'my_text': @data.InputsToTargets()}
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import gin

from partitioning.rules import nearest
from train.data import ByT5Tokenizer, SentencePieceTokenizer, Task, TokenIds, Tokenizer
from train.errors import ConfigError, check_counts, check_fields
from train.gin.parsing import is_allowed
from train.paths import as_path
from train.t5x import seqio_tasks
from train.t5x.refusals import check_bools, check_off, check_one_of, expect, expect_class, refusal
from train.t5x.seqio_tasks import Reading

_registered: dict[str, Task] = {}


class TaskRegistry:
    """The tasks of this process, by name."""

    @staticmethod
    def add(name: str, task: Task) -> None:
        """Adds a task under a name.

        Raises a ConfigError if another task has the name, or if `task` is not a task.
        """
        if not isinstance(task, Task):
            raise ConfigError(
                f'TaskRegistry.add: {name!r} is {task!r}: it must be a Task of train.data'
            )
        if _registered.setdefault(name, task) != task:
            raise ConfigError(
                f'TaskRegistry.add: another task already has the name {name!r}: use another name'
            )

    @staticmethod
    def names() -> list[str]:
        """The names of all added tasks, sorted."""
        return sorted(_registered)

    @staticmethod
    def remove(name: str) -> None:
        """Removes the task with this name."""
        del _registered[name]


MixtureRegistry = TaskRegistry


# Names in Python code find the tasks that gin files set.
@gin.configurable(denylist=['module', 'reading'])
def get_mixture_or_task(
    name: str | Task,
    tasks: Mapping[str, Task] | None = None,
    module: str | None = None,
    reading: Reading | None = None,
) -> Task:
    """The task with a name. Raises a ConfigError if no task has this name.

    Args:
      name: a name in `tasks`, in `TaskRegistry` or in seqio; or a task, which is returned.
      tasks: additional tasks by name, which gin files can set.
      module: a module that adds the task. It is imported if no task has this name, and if the user
        allows it.
      reading: how a task of seqio is read.
    """
    if isinstance(name, Task):
        return name
    reading = reading or Reading()
    if hasattr(name, 'output_features'):
        return seqio_tasks.as_task(name, reading)
    known = _registered | dict(tasks or {})
    if isinstance(name, str) and name not in known:
        if module is not None and is_allowed(module):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigError(
                    f'utils.DatasetConfig.module: cannot import {module!r}: {error}'
                ) from error
            known |= _registered
        if name not in known and (found := seqio_tasks.find_task(name, reading)) is not None:
            return found
    if not isinstance(name, str) or name not in known:
        shown = f'@{name.__name__}' if isinstance(name, type) else repr(name)
        hint = nearest(str(name), known)
        if module is not None and not is_allowed(module):
            hint += f' The module {module!r} is imported only with --gin_allow={module}.'
        raise ConfigError(
            f'utils.DatasetConfig.mixture_or_task_name is {shown}: there is no task with this name.'
            f'{hint} Write a task in its place: --gin.MIXTURE_OR_TASK_NAME=@InputsToTargets(), '
            '@SpanCorruption() or @CausalLM(), with the parentheses'
        )
    return known[name]


def SentencePieceVocabulary(  # seqio's name
    sentencepiece_model_file: str,
    extra_ids: int | None = 0,
    normalizer_spec_overrides: Any = None,
    reverse_extra_ids: bool = True,
    use_fast_tokenizer: bool = False,
) -> Tokenizer:
    """The tokenizer of a SentencePiece model. Raises a ConfigError if a setting cannot be honoured.

    Args:
      sentencepiece_model_file: the path of the model.
      extra_ids: the number of sentinels after the tokens of the model.
      normalizer_spec_overrides: must be off.
      reverse_extra_ids: must be True: <extra_id_0> is the last token.
      use_fast_tokenizer: has no effect on the tokens.
    """
    key = 'seqio.SentencePieceVocabulary'
    why = 'the normalization is part of the model'
    check_off(f'{key}.normalizer_spec_overrides', normalizer_spec_overrides, why)
    why = 'T5 numbers its sentinels from the end'
    check_one_of(f'{key}.reverse_extra_ids', reverse_extra_ids, (True,), why)
    check_counts(minimum=0, **{f'{key}.extra_ids': extra_ids or 0})
    try:
        as_path(f'{key}.sentencepiece_model_file', sentencepiece_model_file)
    except ConfigError as error:
        other = '--gin.VOCABULARY=@seqio.ByteVocabulary()'
        raise ConfigError(f'{error}; or replace the vocabulary: {other}') from error
    return SentencePieceTokenizer(path=sentencepiece_model_file, extra_ids=extra_ids or 0)


def ByteVocabulary(extra_ids: int = 0) -> Tokenizer:  # seqio's name
    """The tokenizer of ByT5: padding, the end and unknown, then 256 bytes, then `extra_ids`."""
    return ByT5Tokenizer(extra_ids=extra_ids)


def PassThroughVocabulary(size: int, eos_id: int | None = None) -> Tokenizer:  # seqio's name
    """The tokenizer of data that is tokens already.

    Args:
      size: the size of the vocabulary.
      eos_id: the token at the end of a text, by default 1.
    """
    return TokenIds(num_tokens=size, end=1 if eos_id is None else eos_id)


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of examples.

    Attributes:
      vocabulary: its tokenizer.
      add_eos: whether texts get an end token.
      required: must be True.
      dtype: must be the default, int32.
      rank: must be 1.
    """

    vocabulary: Tokenizer
    add_eos: bool = True
    required: bool = True
    dtype: Any = 'int32'
    rank: int = 1

    def __post_init__(self) -> None:
        key = 'seqio.Feature'
        expect(f'{key}.vocabulary', self.vocabulary, Tokenizer, '@seqio.SentencePieceVocabulary()')
        check_bools(key, add_eos=self.add_eos)
        check_one_of(f'{key}.required', self.required, (True,), 'every example has all features')
        check_one_of(f'{key}.dtype', str(self.dtype), ('int32',), 'features are tokens')
        check_one_of(f'{key}.rank', self.rank, (1,), 'features are lists of tokens')


class PyLoggingLogger:
    """Stands for the scores on the console, which every run writes."""


class TensorBoardLogger:
    """Stands for the scores as TensorBoard events, which every run writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JSONLogger:
    """Writes the scores and the predictions of each task to files in `inference_eval`.

    Attributes:
      write_n_results: the number of examples that are written with their predictions. None
        writes all.
    """

    write_n_results: int | None = None

    def __post_init__(self) -> None:
        check_fields(JSONLogger, self, 'seqio.JSONLogger.', write_n_results='[0, inf)')


LOGGERS = (PyLoggingLogger, TensorBoardLogger, JSONLogger)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator:
    """The evaluation of decoded text, by the metrics of each task.

    Attributes:
      logger_cls: the loggers of the scores. The console and TensorBoard always have them.
      num_examples: the number of examples of each task. None evaluates all.
      use_memory_cache: has no effect on the scores.
    """

    logger_cls: Sequence[Any] = LOGGERS
    num_examples: int | None = None
    use_memory_cache: bool = True

    def __post_init__(self) -> None:
        key = 'seqio.Evaluator'
        for logger in self.logger_cls:
            if not isinstance(logger, type) or not issubclass(logger, LOGGERS):
                names = ', '.join(f'@seqio.{one.__name__}' for one in LOGGERS)
                raise refusal(f'{key}.logger_cls', logger, f'use {names}')
        check_fields(Evaluator, self, f'{key}.')

    @property
    def write_n_results(self) -> int | None:
        """The number of examples that are written. None writes all."""
        loggers = [logger() for logger in self.logger_cls if issubclass(logger, JSONLogger)]
        return loggers[0].write_n_results if loggers else 0  # gin provides its arguments


def open_evaluator(key: str, evaluator_cls: Any) -> Evaluator | None:
    """The evaluator of decoded text with the settings of gin files, or None.

    Raises a ConfigError if it is another class, or if a setting of it cannot be honoured.
    """
    if evaluator_cls is None:
        return None
    expect_class(key, evaluator_cls, Evaluator, '@seqio.Evaluator')
    evaluator = evaluator_cls()
    _ = evaluator.write_n_results  # checks the logger's own settings
    return evaluator
