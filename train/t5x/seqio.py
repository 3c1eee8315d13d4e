"""The parts of seqio that T5X's gin files name: tasks by name, vocabularies, the evaluator.

The tasks are tasks of `train.data`. To give a task a name, either add it in a module that the gin
file imports (`--gin_allow=my_tasks`),

    from train.t5x import seqio
    seqio.TaskRegistry.add('my_text', CausalLM(source=TextFiles(pattern='corpus/**/*.txt')))

or add it in a gin file:

    seqio.get_mixture_or_task.tasks = {'my_text': @data.CausalLM()}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import gin

from partitioning.rules import nearest
from train.data import ByteTokenizer, SentencePieceTokenizer, Task, Tokenizer
from train.errors import ConfigError
from train.t5x.refusals import check_off, expect_class, refusal

_registered: dict[str, Task] = {}


class TaskRegistry:
    """The tasks of this process, by name."""

    @staticmethod
    def add(name: str, task: Task) -> None:
        """Adds a task under a name.

        Raises:
          ConfigError: if another task has the name, or if `task` is not a task.
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


@gin.configurable  # names in Python code find the tasks that gin files set
def get_mixture_or_task(name: str | Task, tasks: Mapping[str, Task] | None = None) -> Task:
    """The task with a name.

    Args:
      name: a name in `tasks` or in `TaskRegistry`, or a task, which is returned.
      tasks: additional tasks by name, which gin files can set.

    Raises:
      ConfigError: if no task has this name.
    """
    if isinstance(name, Task):
        return name
    known = _registered | dict(tasks or {})
    if not isinstance(name, str) or name not in known:
        shown = f'@{name.__name__}' if isinstance(name, type) else repr(name)
        raise ConfigError(
            f'mixture_or_task_name is {shown}: there is no task with this name.'
            f'{nearest(str(name), known)} Write a task, @data.CausalLM(), or name one with '
            "seqio.get_mixture_or_task.tasks = {'name': @data.CausalLM()} or with "
            'seqio.TaskRegistry.add in your own module'
        )
    return known[name]


def SentencePieceVocabulary(  # seqio's name
    sentencepiece_model_file: str, extra_ids: int | None = None
) -> Tokenizer:
    """The tokenizer of a SentencePiece model.

    Raises:
      ConfigError: if `extra_ids` is set; use `SpanCorruption.num_sentinels` instead.
    """
    why = 'tasks add the tokens that they need (SpanCorruption.num_sentinels)'
    check_off('seqio.SentencePieceVocabulary.extra_ids', extra_ids, why)
    return SentencePieceTokenizer(path=sentencepiece_model_file)


def ByteVocabulary(extra_ids: int = 0) -> Tokenizer:  # seqio's name
    """The tokenizer of bytes: 0 to 255, and a separator.

    Raises:
      ConfigError: if `extra_ids` is set; use `SpanCorruption.num_sentinels` instead.
    """
    why = 'tasks add the tokens that they need (SpanCorruption.num_sentinels)'
    check_off('seqio.ByteVocabulary.extra_ids', extra_ids, why)
    return ByteTokenizer()


class PyLoggingLogger:
    """Stands for the scores on the console, which every run writes."""


class TensorBoardLogger:
    """Stands for the scores as TensorBoard events, which every run writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JSONLogger:
    """Stands for the scores in metrics.jsonl, which every run writes.

    Attributes:
      write_n_results: must be None.
    """

    write_n_results: int | None = None

    def __post_init__(self) -> None:
        why = 'no text is decoded, so there are no results to write'
        check_off('seqio.JSONLogger.write_n_results', self.write_n_results, why)


LOGGERS = (PyLoggingLogger, TensorBoardLogger, JSONLogger)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Stands for T5X's evaluation of decoded text. Tasks here have no such metrics.

    Attributes:
      logger_cls: the loggers of the scores. Every run writes to all of them.
      num_examples: must be None.
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
            logger()  # this checks the logger's own settings
        why = 'train_script.train.eval_steps sets the number of evaluated batches'
        check_off(f'{key}.num_examples', self.num_examples, why)


def check_evaluator(key: str, evaluator_cls: Any) -> None:
    """Checks that the evaluator of decoded text is `Evaluator`, with supported settings.

    Args:
      key: the setting that names the class.
      evaluator_cls: the class, or None.

    Raises:
      ConfigError: if it is another class, or if a setting of it cannot be honoured.
    """
    if evaluator_cls is not None:
        expect_class(key, evaluator_cls, Evaluator, '@seqio.Evaluator')
        evaluator_cls()
