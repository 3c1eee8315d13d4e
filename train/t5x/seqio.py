"""What T5X's gin files name of seqio: tasks by name, vocabularies, the evaluator.

Tasks are those of `train.data`. A name stands for one that Python has added,

    from train.t5x import seqio
    seqio.TaskRegistry.add('my_text', CausalLM(source=TextFiles(pattern='corpus/**/*.txt')))

in a module that a gin file imports (`--gin_allow=my_tasks`), or that a gin file gives:

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
from train.t5x.refusals import expect_class, off, refusal

_registered: dict[str, Task] = {}


class TaskRegistry:
    """Tasks by name, in this process."""

    @staticmethod
    def add(name: str, task: Task) -> None:
        """Gives a task a name.

        Raises:
          ConfigError: the name is another task's.
        """
        if not isinstance(task, Task):
            raise ConfigError(f'TaskRegistry.add: {name!r} is {task!r}, no Task of train.data')
        if _registered.setdefault(name, task) != task:
            raise ConfigError(f'TaskRegistry.add: another task has the name {name!r}')

    @staticmethod
    def names() -> list[str]:
        """The names that were added."""
        return sorted(_registered)

    @staticmethod
    def remove(name: str) -> None:
        """Forgets a name."""
        del _registered[name]


MixtureRegistry = TaskRegistry


@gin.configurable
def get_mixture_or_task(name: str | Task, tasks: Mapping[str, Task] | None = None) -> Task:
    """The task of a name; a task is its own.

    Args:
      name: one of `tasks` or of `TaskRegistry`, or a task.
      tasks: more tasks by name, for a gin file to give.

    Raises:
      ConfigError: nothing has this name.
    """
    if isinstance(name, Task):
        return name
    known = _registered | dict(tasks or {})
    if not isinstance(name, str) or name not in known:
        shown = f'@{name.__name__}' if isinstance(name, type) else repr(name)
        raise ConfigError(
            f'mixture_or_task_name is {shown}, of which there is no task.'
            f'{nearest(str(name), known)} Give it one: seqio.get_mixture_or_task.tasks = '
            "{'name': @data.CausalLM()}, or seqio.TaskRegistry.add in a module of your own; or "
            'name a task itself, @data.CausalLM()'
        )
    return known[name]


def SentencePieceVocabulary(  # seqio's name
    sentencepiece_model_file: str, extra_ids: int | None = None
) -> Tokenizer:
    """The tokenizer of a SentencePiece model.

    Raises:
      ConfigError: extra_ids, which are a setting of SpanCorruption here.
    """
    why = 'tokens beyond those of the model are of tasks that need them (SpanCorruption)'
    off('seqio.SentencePieceVocabulary.extra_ids', extra_ids, why)
    return SentencePieceTokenizer(path=sentencepiece_model_file)


def ByteVocabulary(extra_ids: int = 0) -> Tokenizer:  # seqio's name
    """The tokenizer of bytes: 0 to 255, and a separator.

    Raises:
      ConfigError: extra_ids, which are a setting of SpanCorruption here.
    """
    why = 'tokens beyond the bytes are of tasks that need them (SpanCorruption)'
    off('seqio.ByteVocabulary.extra_ids', extra_ids, why)
    return ByteTokenizer()


class PyLoggingLogger:
    """Scores as lines of the console, which every run writes."""


class TensorBoardLogger:
    """Scores as TensorBoard events, which every run writes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JSONLogger:
    """Scores as lines of metrics.jsonl, which every run writes."""

    write_n_results: int | None = None

    def __post_init__(self) -> None:
        why = 'no text is decoded, so there are no results to write'
        off('seqio.JSONLogger.write_n_results', self.write_n_results, why)


LOGGERS = (PyLoggingLogger, TensorBoardLogger, JSONLogger)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluator:
    """How T5X evaluates decoded text. Tasks here have no metrics of such text: nothing is decoded.

    Attributes:
      logger_cls: where scores go; every run writes all of them.
      num_examples: decode so many; None: all.
      use_memory_cache: without an effect on what is scored.
    """

    logger_cls: Sequence[Any] = LOGGERS
    num_examples: int | None = None
    use_memory_cache: bool = True

    def __post_init__(self) -> None:
        key = 'seqio.Evaluator'
        for logger in self.logger_cls:
            if not isinstance(logger, type) or not issubclass(logger, LOGGERS):
                names = ', '.join(f'@seqio.{one.__name__}' for one in LOGGERS)
                raise refusal(f'{key}.logger_cls', logger, f'scores go to {names} only')
            logger()  # its own settings are checked
        why = 'the rows of an evaluation are counted by train_script.train.eval_steps'
        off(f'{key}.num_examples', self.num_examples, why)


def check_evaluator(key: str, evaluator_cls: Any) -> None:
    """The evaluator of decoded text is seqio's, with settings that mean something.

    Args:
      key: the setting that names it.
      evaluator_cls: the class; None: none is named.

    Raises:
      ConfigError: another class, or a setting that cannot be honoured.
    """
    if evaluator_cls is not None:
        expect_class(key, evaluator_cls, Evaluator, '@seqio.Evaluator')
        evaluator_cls()
