"""T5X's `utils.DatasetConfig`: the rows to train or evaluate on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from train.data import CausalLM, Lengths, Mixture, PairTask, Subset, Task, TextTask, Tokenizer
from train.data.rows.lengths import FEATURES
from train.data.rows.pair_tasks import Architecture, adapt, map_parts
from train.data.rows.subset import parse_split
from train.errors import ConfigError, check_counts
from train.t5x import seqio, seqio_tasks
from train.t5x.refusals import check_one_of, refusal

KEY = 'utils.DatasetConfig'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """The model that reads the rows.

    Attributes:
      architecture: its kind.
      vocabulary: the tokenizer of the targets.
      inputs_vocabulary: the tokenizer of the inputs.
    """

    architecture: Architecture
    vocabulary: Tokenizer
    inputs_vocabulary: Tokenizer

    def with_vocabularies(self, task: Any) -> Any:
        """A task with the vocabularies of the model, unless it has a tokenizer of its own."""
        field = getattr(task, '__dataclass_fields__', {}).get('tokenizer')
        if field is None or task.tokenizer != field.default_factory():
            return task
        changes = {'tokenizer': self.vocabulary}
        if self.inputs_vocabulary != self.vocabulary and hasattr(task, 'inputs_tokenizer'):
            changes['inputs_tokenizer'] = self.inputs_vocabulary
        return dataclasses.replace(task, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """The rows to train or evaluate on.

    Attributes:
      mixture_or_task_name: a task of train.data, or the name of one of them or of seqio. A task
        whose tokenizer is not set has the vocabulary of the model.
      task_feature_lengths: {'inputs': the number of input tokens in a row, 'targets': the number of
        target tokens}. None does not cut them: rows are as long as the longest text.
      split: 'train', 'validation' or 'test', or a slice such as 'train[:90%]'. The last two,
        also with an ending as in 'validation_matched', are the held-out part of a task of
        train.data.
      batch_size: the number of rows in a batch.
      shuffle: whether rows are shuffled.
      seed: the seed of the order of the rows. None uses the seed of the run.
      use_cached: whether a task of seqio reads its own cache. It has no effect on other tasks; text
        is always tokenized once and stored.
      pack: whether a row may hold several examples. Examples are packed in their order.
      use_custom_packing_ops: has no effect; there is only one way to pack rows.
      trim_output_features: whether texts are cut to the lengths. Otherwise longer ones are errors.
      module: the module that adds the task of this name to seqio or to `seqio.TaskRegistry`. It is
        only imported if no known task has the name, and if --gin_allow allows it.
      use_memory_cache: has no effect on the rows.
    """

    mixture_or_task_name: str | Task
    task_feature_lengths: Mapping[str, int] | None
    split: str
    batch_size: int
    shuffle: bool
    seed: int | None = None
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    trim_output_features: bool = True
    module: str | None = None
    use_memory_cache: bool = True

    def __post_init__(self) -> None:
        check_counts(**{f'{KEY}.batch_size': self.batch_size})
        if self.seed is not None:
            check_counts(minimum=0, **{f'{KEY}.seed': self.seed})
        for name in ('shuffle', 'pack', 'trim_output_features'):
            value = getattr(self, name)
            check_one_of(f'{KEY}.{name}', value, (True, False), 'it must be True or False')
        if not isinstance(self.split, str):
            raise refusal(f'{KEY}.split', self.split, "write 'train', 'validation' or 'test'")

    def training_task(self, reader: Reader) -> Task:
        """The task to train on.

        Args:
          reader: the model that reads the rows.

        Raises:
          ConfigError: if no task has this name, or if its rows cannot be made as the settings say.
        """
        task = self._adapted(reader)
        if isinstance(task, CausalLM) and task.packing == 'pack' and not self.pack:
            why = "the task packs documents (CausalLM.packing is 'pack'); write pack = True"
            raise refusal(f'train/{KEY}.pack', self.pack, why)
        split = self._own_split
        return self._subset(task, split == 'train' and self.shuffle, training=split)

    def evaluated_task(self, reader: Reader, *, pack: bool | None = None) -> Task:
        """The task whose held-out part is evaluated.

        Args:
          reader: the model that reads the rows.
          pack: whether a row may hold several examples, by default the setting.

        Raises:
          ConfigError: as in `training_task`.
        """
        task = self._adapted(reader, pack)
        split = self._own_split
        plain = split in ('validation', 'test') and not self.shuffle
        return self._subset(task, plain, held_out=split)

    @property
    def _own_split(self) -> str:
        """The split of a task of this trainer, which has only one held-out part."""
        return re.sub(r'^(validation|test)_\w+', r'\1', self.split)

    def _adapted(self, reader: Reader, pack: bool | None = None) -> Any:
        pack = self.pack if pack is None else pack
        task = map_parts(reader.with_vocabularies, self.task)
        task = adapt(task, architecture=reader.architecture, pack=pack)
        return task if self.trim_output_features else adapt(task, cut=False)

    def _subset(self, task: Any, plain: bool, **split: str) -> Task:
        if isinstance(task, seqio_tasks.SeqioTask) or _is_mixture_of_seqio(task):
            split = dict.fromkeys(split, 'train')  # seqio has read this split only
            plain = self.shuffle == ('training' in split)
        if plain:
            return task
        if not isinstance(task, TextTask):
            raise refusal(
                f'{KEY}.split', self.split, f'{type(task).__name__} has no splits and no slices'
            )
        try:
            for one in split.values():
                parse_split(one)
        except ConfigError as error:
            raise ConfigError(f'{KEY}.{error}') from error
        training = {'shuffle': self.shuffle} if 'training' in split else {}
        held_out = {'shuffle_held_out': self.shuffle, 'seed': self.seed} if not training else {}
        return Subset(task=task, **split, **training, **held_out)  # type: ignore[arg-type]

    @property
    def task(self) -> Task:
        """The task as it is, in any form.

        Raises:
          ConfigError: if no task has this name.
        """
        return seqio.get_mixture_or_task(
            self.mixture_or_task_name,
            module=self.module,
            reading=seqio_tasks.Reading(
                lengths=self.task_feature_lengths, split=self.split, use_cached=self.use_cached
            ),
        )

    def lengths(self, task: Task) -> Lengths:
        """The numbers of tokens in a row of the task.

        Raises:
          ConfigError: if they do not fit to the task.
        """
        lengths, key = self.task_feature_lengths, f'{KEY}.task_feature_lengths'
        has_inputs = _has_inputs(task)
        if lengths is None and has_inputs is not None:
            return dict.fromkeys(FEATURES)
        if not isinstance(lengths, Mapping) or 'targets' not in lengths:
            raise refusal(key, lengths, "write {'targets': number of tokens in a row}")
        others = sorted(
            name
            for name, length in lengths.items()
            if length and name != 'targets' and not (has_inputs and name == 'inputs')
        )
        if others:
            why = f'rows have only targets, not {", ".join(others)}; write '
            if has_inputs:
                why = f'rows have inputs and targets, not {", ".join(others)}; write '
            kept = {k: v for k, v in lengths.items() if k not in others}
            raise refusal(key, dict(lengths), f'{why}{kept}')
        check_counts(**{f'{key}[{name!r}]': n for name, n in lengths.items() if n is not None})
        if has_inputs:
            return {name: lengths.get(name) for name in FEATURES}
        return lengths['targets']


def _is_mixture_of_seqio(task: Any) -> bool:
    return isinstance(task, Mixture) and isinstance(task.tasks[0], seqio_tasks.SeqioTask)


def has_pairs(task: Task) -> bool:
    """Whether the examples of a task have targets of their own, and so a longest one."""
    return _has_inputs(task) is not None


def _has_inputs(task: Any) -> bool | None:
    """Whether the rows of a task have inputs; None if it is no task with inputs and targets."""
    if isinstance(task, Mixture):
        return _has_inputs(task.tasks[0])
    if isinstance(task, Subset):
        return _has_inputs(task.task)
    return getattr(task, 'inputs', '') is not None if isinstance(task, PairTask) else None
