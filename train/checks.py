"""Checks of a run's settings, made before anything is compiled or written."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
from jax.sharding import AxisType

from partitioning import BasePartitioner
from train.checkpoints import CheckpointConfig, RestoreConfig
from train.data import OpenTask, Prefetch, Task
from train.data.rows.open_task import features
from train.data.rows.packing import Row
from train.errors import ConfigError, check_counts, first_line
from train.machine import raise_on_all_processes
from train.optimizers import Optimizer
from train.sampling import SampleConfig
from train.steps import BATCH_ARRAYS, LossConfig

COUNTS = ('total_steps', 'batch_size', 'sequence_length', 'num_microbatches', 'log_period')


def check_training(settings: Mapping[str, Any]) -> Path:
    """Checks each argument of `train.train.train` by itself.

    Returns:
      The folder of the run, which does not have to exist yet.

    Raises:
      ConfigError, ValueError: if an argument is malformed.
    """
    check_counts(**{name: settings[name] for name in COUNTS})
    check_counts(minimum=0, eval_period=settings['eval_period'], seed=settings['seed'])
    if settings['eval_tokens'] is not None:
        check_counts(eval_tokens=settings['eval_tokens'])
    required = {
        'model': nn.Module,
        'partitioner': BasePartitioner,
        'optimizer': Optimizer,
        'task': Task,
        'checkpoints': CheckpointConfig,
    }
    optional = {
        'sample': SampleConfig,
        'prefetch': Prefetch,
        'restore': RestoreConfig,
        'loss': LossConfig,
    }
    given = {name: kind for name, kind in optional.items() if settings[name] is not None}
    check_objects('train', settings, required | given)
    if settings['eval_tasks'] is not None:
        check_tasks('train.eval_tasks', settings['eval_tasks'])
    check_partitioner(settings['partitioner'])
    check_batch(settings['partitioner'], settings['batch_size'], settings['num_microbatches'])
    return check_writable('MODEL_DIR', settings['model_dir'])


def check_evaluation(settings: Mapping[str, Any]) -> Path:
    """Checks each argument of `train.evaluation.evaluate_checkpoint`, as `check_training` does."""
    check_counts(**{name: settings[name] for name in ('batch_size', 'sequence_length')})
    if settings['eval_tokens'] is not None:
        check_counts(eval_tokens=settings['eval_tokens'])
    kinds = {'model': nn.Module, 'partitioner': BasePartitioner, 'restore': RestoreConfig}
    if settings['prefetch'] is not None:
        kinds['prefetch'] = Prefetch
    check_objects('evaluate_checkpoint', settings, kinds)
    check_tasks('evaluate_checkpoint.tasks', settings['tasks'])
    check_partitioner(settings['partitioner'])
    check_batch(settings['partitioner'], settings['batch_size'], 1)
    return check_writable('output_dir', settings['output_dir'])


def check_batch(partitioner: BasePartitioner, batch_size: int, num_microbatches: int) -> None:
    """Checks that the data axis divides the batch and each microbatch."""
    partitioner.get_data_layout(batch_size)
    parts = partitioner.data_mesh_size * num_microbatches
    if batch_size % parts:
        raise ConfigError(
            f'batch_size {batch_size} cannot be split into {num_microbatches} microbatches over a '
            f'data axis of size {partitioner.data_mesh_size}: use a multiple of {parts}'
        )


def check_partitioner(partitioner: BasePartitioner) -> None:
    """Checks that the partitioner has a mesh, and settings that this trainer supports."""
    try:
        axis_types = partitioner.mesh.axis_types
    except RuntimeError as error:  # jax raises it for a backend that does not exist.
        raise ConfigError(f'the partitioner has no mesh: {first_line(error)}') from error
    if any(axis_type is not AxisType.Auto for axis_type in axis_types):
        raise ConfigError(
            f'the mesh has the axis types {axis_types}, but the models of this trainer need Auto '
            'axes: remove axis_types'
        )
    if not partitioner.params_on_devices:
        raise ConfigError(
            'PjitPartitioner.params_on_devices is False, but this trainer always creates and '
            'restores parameters on devices: remove the setting'
        )


def check_vocabulary(model: Any, num_tokens: int) -> None:
    """Checks that the model's vocabulary has every token of the task."""
    vocab_size = model.config.vocab_size
    if vocab_size < num_tokens:
        raise ConfigError(
            f'vocab_size {vocab_size} is smaller than the {num_tokens} tokens of the task: use '
            f'{num_tokens} or more'
        )


def check_rows(row: Row, evaluated: Mapping[str, Row]) -> None:
    """Checks that the steps support every array of a row, and that evaluations have the same.

    Args:
      row: a row to train on.
      evaluated: a row of each evaluation, by the name of its task.
    """
    unknown = sorted(row.keys() - BATCH_ARRAYS)
    if unknown:
        raise ConfigError(
            f'the rows of the task contain {", ".join(unknown)}, which no model of this trainer '
            'uses: use CausalLM, or feed these rows to your own trainer'
        )
    for name, other in evaluated.items():
        if features(other) != features(row):
            raise ConfigError(
                f'the rows of the evaluation {name!r} have {_shapes(other)}, but the rows of the '
                f'training have {_shapes(row)}: use the same kind of task and packing for both'
            )


def check_tasks(setting: str, tasks: Any) -> None:
    """Checks that a setting maps names to tasks."""
    if not isinstance(tasks, Mapping) or not tasks:
        raise ConfigError(
            f'{setting} is {"empty" if tasks == {} else f"a {type(tasks).__name__}"}: write '
            "{'name': @CausalLM(), ...}"
        )
    for name, task in tasks.items():
        check_object(f'{setting}[{name!r}]', task, Task)


def check_evaluated(training: OpenTask, evaluated: Mapping[str, OpenTask]) -> None:
    """Checks that the evaluations use the tokenizer of the training."""
    for name, task in evaluated.items():
        if task.tokenizer.identity != training.tokenizer.identity:
            raise ConfigError(
                f'the evaluation {name!r} uses the tokenizer {task.tokenizer.identity[:28]}, but '
                f'the training uses {training.tokenizer.identity[:28]}: use the same for both'
            )


def _shapes(row: Row) -> str:
    return ', '.join(f'{name} {shape}' for name, (shape, _) in sorted(features(row).items()))


def check_finite(
    scalars: Mapping[str, float], step: int, latest_step: Callable[[], int | None]
) -> None:
    """Stops a run whose metrics are not finite, before its state is saved.

    Args:
      scalars: the metrics of the step.
      step: the step.
      latest_step: returns the step of the newest checkpoint, or None.

    Raises:
      FloatingPointError: if a metric is not finite.
    """
    for name, value in scalars.items():
        if not math.isfinite(value):
            last = latest_step()
            kept = 'no checkpoint' if last is None else f'the newest checkpoint is of step {last}'
            raise FloatingPointError(
                f'{name} is {value} at step {step} ({kept}): lower the learning rate or clip_norm'
            )


def check_objects(function: str, settings: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Checks that settings of a function are objects of the types in `kinds`."""
    for name, kind in kinds.items():
        check_object(f'{function}.{name}', settings[name], kind)


def check_object(setting: str, value: Any, kind: type) -> None:
    """Checks that a setting is an object of its type (in a gin file, `@Name` is the class)."""
    if not isinstance(value, kind):
        shown = f'the class {value.__name__}' if isinstance(value, type) else repr(value)
        raise ConfigError(
            f'{setting} is {shown}, but it must be an instance of {kind.__name__}: in a gin file, '
            f'write @{getattr(value, "__name__", kind.__name__)}(), with parentheses'
        )


def check_steps_left(restore: RestoreConfig, restored_step: int, total_steps: int) -> None:
    """Checks that a run that starts from another run's checkpoint has steps left to train."""
    if restored_step >= total_steps:
        raise ConfigError(
            f'total_steps is {total_steps}, but the checkpoint of {restore.setting} '
            f'{restore.path} is already at step {restored_step}, which counts '
            f'towards total_steps: use {restored_step + total_steps} to train for {total_steps} '
            'more steps'
        )


def check_writable(setting: str, value: Any) -> Path:
    """Checks that a setting names a folder that can be written, without creating it.

    Returns:
      The folder.
    """
    if not isinstance(value, str) or not value.strip() or '://' in value:
        raise ConfigError(f'{setting} {value!r} must be the path of a local or mounted folder')
    directory = Path(os.path.expanduser(value))
    with raise_on_all_processes():
        existing = next(p for p in [directory, *directory.resolve().parents] if p.exists())
        if not existing.is_dir():
            raise ConfigError(f'{setting} {directory}: {existing} is a file, not a folder')
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f'{setting} {directory}: no permission to write in {existing}')
    return directory


def make_writable(setting: str, directory: Path) -> None:
    """Creates the folder that a setting names, and writes a temporary file to prove it works."""
    with raise_on_all_processes():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(
                f'{setting} {directory} cannot be written: {error.strerror}'
            ) from error
