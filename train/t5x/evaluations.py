"""The evaluations of T5X's scripts: losses of held-out rows, and metrics of decoded text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from train.data import Mixture, Subset, Task
from train.evaluators.decoded import DecodedText
from train.evaluators.held_out import HeldOut
from train.t5x.datasets import DatasetConfig
from train.t5x.models import BaseTransformerModel
from train.t5x.seqio import Evaluator

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

    Args:
      model: T5X's model.
      config: the rows to evaluate.
      training: the task that the run trains on.
      every: the number of steps between evaluations. 0 evaluates only at the end.
      num_batches: the number of batches of each task. None evaluates all.
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
