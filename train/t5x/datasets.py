"""T5X's `utils.DatasetConfig`: the rows to train or evaluate on, and their evaluators."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from train.data import CausalLM, Lengths, Mixture, PairTask, Subset, Task, TextTask
from train.data.rows.packing import FEATURES
from train.data.rows.pair_tasks import adapt, map_parts
from train.data.rows.subset import parse_split
from train.errors import ConfigError, check_counts, check_fields
from train.evaluators.decoded import DecodedText
from train.evaluators.held_out import HeldOut
from train.t5x import seqio, seqio_tasks
from train.t5x.models import BaseTransformerModel
from train.t5x.refusals import refusal
from train.t5x.seqio import Evaluator

KEY = 'utils.DatasetConfig'


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
        check_fields(DatasetConfig, self, f'{KEY}.', seed='[0, inf)')
        if not isinstance(self.split, str):
            raise refusal(f'{KEY}.split', self.split, "write 'train', 'validation' or 'test'")

    def training_task(self, model: BaseTransformerModel) -> Task:
        """The task to train a model on.

        Raises:
          ConfigError: if no task has this name, or if its rows cannot be made as the settings say.
        """
        task = self._adapted(model)
        if isinstance(task, CausalLM) and task.packing == 'pack' and not self.pack:
            why = "the task packs documents (CausalLM.packing is 'pack'); write pack = True"
            raise refusal(f'train/{KEY}.pack', self.pack, why)
        return self._subset(task, training=True)

    def evaluated_task(self, model: BaseTransformerModel, *, pack: bool | None = None) -> Task:
        """The task whose held-out part is evaluated; see `training_task`.

        `pack` says whether a row may hold several examples, by default as the setting does.
        """
        return self._subset(self._adapted(model, pack), training=False)

    def _adapted(self, model: BaseTransformerModel, pack: bool | None = None) -> Any:
        def with_vocabularies(task: Any) -> Any:
            """A task with the vocabularies of the model, unless it has a tokenizer of its own."""
            field = getattr(task, '__dataclass_fields__', {}).get('tokenizer')
            if field is None or task.tokenizer != field.default_factory():
                return task
            changes = {'tokenizer': model.output_vocabulary}
            differs = model.input_vocabulary != model.output_vocabulary
            if differs and hasattr(task, 'inputs_tokenizer'):
                changes['inputs_tokenizer'] = model.input_vocabulary
            return dataclasses.replace(task, **changes)

        pack = self.pack if pack is None else pack
        task = map_parts(with_vocabularies, self.task)
        task = adapt(task, architecture=model.architecture, pack=pack)
        return task if self.trim_output_features else adapt(task, cut=False)

    def _subset(self, task: Any, *, training: bool) -> Task:
        """The task whose training or held-out part is what `split` names."""
        split = re.sub(r'^(validation|test)_\w+', r'\1', self.split)  # one part is held out
        whole = split == 'train' if training else split in ('validation', 'test')
        first = task.tasks[0] if isinstance(task, Mixture) else task
        if isinstance(first, seqio_tasks.SeqioTask):
            split, whole = 'train', True  # seqio has read this split only
        if whole and self.shuffle == training:
            return task
        if not isinstance(task, TextTask):
            why = f'{type(task).__name__} has no splits and no slices'
            raise refusal(f'{KEY}.split', self.split, why)
        try:
            parse_split(split)
        except ConfigError as error:
            raise ConfigError(f'{KEY}.{error}') from error
        if training:
            return Subset(task=task, training=split, shuffle=self.shuffle)
        shuffled = {'shuffle_held_out': self.shuffle, 'seed': self.seed}
        return Subset(task=task, held_out=split, **shuffled)  # type: ignore[arg-type]

    @property
    def task(self) -> Task:
        """The task as it is, in any form. Raises a ConfigError if no task has this name."""
        return seqio.get_mixture_or_task(
            self.mixture_or_task_name,
            module=self.module,
            reading=seqio_tasks.Reading(
                lengths=self.task_feature_lengths, split=self.split, use_cached=self.use_cached
            ),
        )

    def lengths(self, task: Task) -> Lengths:
        """The numbers of tokens in a row of the task.

        Raises a ConfigError if they do not fit to the task.
        """
        lengths, key = self.task_feature_lengths, f'{KEY}.task_feature_lengths'
        with_inputs = has_inputs(task)
        if lengths is None and with_inputs is not None:
            return dict.fromkeys(FEATURES)
        if not isinstance(lengths, Mapping) or 'targets' not in lengths:
            raise refusal(key, lengths, "write {'targets': number of tokens in a row}")
        others = sorted(
            name
            for name, length in lengths.items()
            if length and name != 'targets' and not (with_inputs and name == 'inputs')
        )
        if others:
            features = 'inputs and targets' if with_inputs else 'only targets'
            kept = {k: v for k, v in lengths.items() if k not in others}
            why = f'rows have {features}, not {", ".join(others)}; write {kept}'
            raise refusal(key, dict(lengths), why)
        check_counts(**{f'{key}[{name!r}]': n for name, n in lengths.items() if n is not None})
        if with_inputs:
            return {name: lengths.get(name) for name in FEATURES}
        return lengths['targets']


def has_inputs(task: Any) -> bool | None:
    """Whether the rows of a task have inputs; None if it is not a task of inputs and targets."""
    if isinstance(task, Mixture):
        return has_inputs(task.tasks[0])
    if isinstance(task, Subset):
        return has_inputs(task.task)
    return getattr(task, 'inputs', '') is not None if isinstance(task, PairTask) else None


# ---- losses of held-out rows, and metrics of decoded text

# The name of the evaluation of decoded text, and the folder of its files.
DECODED = 'inference_eval'


def held_out_evaluators(
    model: BaseTransformerModel,
    config: DatasetConfig,
    training: Task,
    *,
    every: int,
    num_batches: int | None,
) -> dict[str, HeldOut]:
    """Evaluators of the losses of held-out rows. Each task of a mixture has its own.

    `training` is the task that the run trains on. Without `num_batches`, all batches of each task
    are evaluated.
    """
    task = config.evaluated_task(model)
    parts = _parts(task)
    found = {f'eval/{_name_of(config)}': task}
    if task == training:
        found = {'eval': task}
    elif len(parts) > 1:
        found = {f'eval/{name or number}': part for number, (name, part) in enumerate(parts)}
    return {name: _held_out(task, config, every, num_batches) for name, task in found.items()}


def _held_out(task: Task, config: DatasetConfig, every: int, num_batches: int | None) -> HeldOut:
    lengths = config.lengths(task)
    # Text is limited by its tokens, so that the bits per byte of these tokens are known.
    counted = num_batches is not None and isinstance(lengths, int)
    return HeldOut(
        task=task,
        every=every,
        limit=num_batches * config.batch_size * lengths if counted else None,  # type: ignore[operator]
        num_batches=None if counted else num_batches,
        batch_size=config.batch_size,
        sequence_length=lengths,
    )


def decoded_evaluators(
    model: BaseTransformerModel,
    config: DatasetConfig | None,
    evaluator: Evaluator | None,
    *,
    every: int,
) -> dict[str, DecodedText]:
    """The evaluator of decoded text, if any task has metrics; see `held_out_evaluators`.

    Without rows to predict or without settings of the evaluator, nothing is evaluated.
    """
    if config is None:
        return {}
    task = config.evaluated_task(model, pack=False)
    scored = any(getattr(_inner(part), 'metrics', ()) for _, part in _parts(task))
    if evaluator is None or not scored:
        return {}
    found = DecodedText(
        predict=model.predict,
        task=task,
        every=every,
        num_examples=evaluator.num_examples,
        batch_size=config.batch_size,
        sequence_length=config.lengths(task),
        write_n_results=evaluator.write_n_results,
    )
    return {DECODED: found}


def tasks_of(
    evaluators: Mapping[str, Any], config: DatasetConfig | None
) -> dict[str, dict[str, str]]:
    """For each of T5X's modes, how the names of the scores of each task begin.

    `config` has the rows of the losses.
    """
    losses = {name for name in evaluators if name != DECODED}
    found = {'TRAIN_EVAL': {name.removeprefix('eval/'): name for name in losses}}
    if config is not None and 'eval' in losses:
        found['TRAIN_EVAL'] = {_name_of(config): 'eval'}
    if DECODED in evaluators:
        names = [name for name, _ in _parts(evaluators[DECODED].task)]
        many = len(names) > 1
        found['INFER_EVAL'] = {name: f'{DECODED}/{name}' if many else DECODED for name in names}
    return found


def _name_of(config: DatasetConfig) -> str:
    name = config.mixture_or_task_name
    return name if isinstance(name, str) else getattr(name, 'name', '') or 'train_eval'


def _parts(task: Any) -> list[tuple[str, Task]]:
    """The tasks of a mixture with their names, or the task itself."""
    if isinstance(task, Mixture):
        return [found for part in task.tasks for found in _parts(part)]
    if isinstance(task, Subset) and isinstance(task.task, Mixture):
        changed = [Subset(**{**vars(task), 'task': part}) for part in task.task.tasks]
        return [found for part in changed for found in _parts(part)]
    return [(getattr(_inner(task), 'name', ''), task)]


def _inner(task: Any) -> Any:
    return task.task if isinstance(task, Subset) else task
