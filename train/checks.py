"""What a run is checked for before it costs anything."""

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
    """The arguments of `train.train.train` mean something, each by itself.

    Returns:
      The folder of the run, which is not made yet.
    """
    check_counts(**{name: settings[name] for name in COUNTS})
    check_counts(minimum=0, eval_period=settings['eval_period'], seed=settings['seed'])
    if settings['eval_tokens'] is not None:
        check_counts(eval_tokens=settings['eval_tokens'])
    needed = {
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
    check_objects('train', settings, needed | given)
    if settings['eval_tasks'] is not None:
        check_tasks('train.eval_tasks', settings['eval_tasks'])
    check_partitioner(settings['partitioner'])
    check_batch(settings['partitioner'], settings['batch_size'], settings['num_microbatches'])
    return check_writable('MODEL_DIR', settings['model_dir'])


def check_evaluation(settings: Mapping[str, Any]) -> Path:
    """The same of the arguments of `train.evaluation.evaluate_checkpoint`."""
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
    """The data axis divides the batch, and each microbatch."""
    partitioner.get_data_layout(batch_size)
    parts = partitioner.data_mesh_size * num_microbatches
    if batch_size % parts:
        raise ConfigError(
            f'batch_size {batch_size} does not divide into {num_microbatches} microbatches over a '
            f'data axis of {partitioner.data_mesh_size}: use a multiple of {parts}'
        )


def check_partitioner(partitioner: BasePartitioner) -> None:
    """There is its mesh; models and states are laid out over it as this trainer does.

    Models are laid out by constraints, which only Auto axes take, and parameters are born on their
    devices or restored to them.
    """
    try:
        axis_types = partitioner.mesh.axis_types
    except RuntimeError as error:  # jax's, for a backend that is not there
        raise ConfigError(f'the partitioner has no mesh: {first_line(error)}') from error
    if any(axis_type is not AxisType.Auto for axis_type in axis_types):
        raise ConfigError(
            f'the mesh has axis types {axis_types}: these models need Auto axes, so leave '
            'axis_types out'
        )
    if not partitioner.params_on_devices:
        raise ConfigError(
            'PjitPartitioner.params_on_devices is False: parameters are born on their devices or '
            'restored to them, so leave it out'
        )


def check_vocabulary(model: Any, num_tokens: int) -> None:
    """The model knows every token of the task."""
    vocab_size = model.config.vocab_size
    if vocab_size < num_tokens:
        raise ConfigError(
            f'vocab_size {vocab_size} is smaller than the {num_tokens} tokens of the task: use '
            f'{num_tokens} or more'
        )


def check_rows(row: Row, evaluated: Mapping[str, Row]) -> None:
    """The steps know every array of a row, and evaluations have the same ones."""
    unknown = sorted(row.keys() - BATCH_ARRAYS)
    if unknown:
        raise ConfigError(
            f'the task makes rows with {", ".join(unknown)}, which this trainer has no model for: '
            'use CausalLM, or its rows in a trainer of your own'
        )
    for name, other in evaluated.items():
        if features(other) != features(row):
            raise ConfigError(
                f'rows of the evaluation {name!r} have {_shapes(other)}, those of the training '
                f'{_shapes(row)}: use the same kind of task and packing'
            )


def check_tasks(setting: str, tasks: Any) -> None:
    """Evaluations are tasks, by name."""
    if not isinstance(tasks, Mapping) or not tasks:
        raise ConfigError(
            f'{setting} is {"empty" if tasks == {} else f"a {type(tasks).__name__}"}: write '
            "{'name': @CausalLM(), ...}"
        )
    for name, task in tasks.items():
        check_object(f'{setting}[{name!r}]', task, Task)


def check_evaluated(training: OpenTask, evaluated: Mapping[str, OpenTask]) -> None:
    """Evaluations are of the same tokens as the training."""
    for name, task in evaluated.items():
        if task.tokenizer.identity != training.tokenizer.identity:
            raise ConfigError(
                f'the evaluation {name!r} has another tokenizer than the training: '
                f'{task.tokenizer.identity[:28]}, not {training.tokenizer.identity[:28]}'
            )


def _shapes(row: Row) -> str:
    return ', '.join(f'{name} {shape}' for name, (shape, _) in sorted(features(row).items()))


def check_finite(
    scalars: Mapping[str, float], step: int, latest_step: Callable[[], int | None]
) -> None:
    """Stops a run that is lost, before it is saved."""
    for name, value in scalars.items():
        if not math.isfinite(value):
            last = latest_step()
            kept = 'nothing saved' if last is None else f'the checkpoint of step {last} stays'
            raise FloatingPointError(
                f'{name} is {value} at step {step} ({kept}): lower the learning rate or clip_norm'
            )


def check_objects(of: str, settings: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    """Each of these settings of a function is an object of its type."""
    for name, kind in kinds.items():
        check_object(f'{of}.{name}', settings[name], kind)


def check_object(setting: str, value: Any, kind: type) -> None:
    """A setting is an object of its type (`@Name` in a gin file is the class)."""
    if not isinstance(value, kind):
        raise ConfigError(
            f'{setting} is {_shown(value)}, no object of {kind.__name__}: in a gin file write '
            f'@{getattr(value, "__name__", kind.__name__)}(), with the brackets'
        )


def _shown(value: Any) -> str:
    return f'the class {value.__name__}' if isinstance(value, type) else repr(value)


def check_steps_left(restore: RestoreConfig, restored_step: int, total_steps: int) -> None:
    """A run that begins with the checkpoint of another one goes beyond its step."""
    if restored_step >= total_steps:
        raise ConfigError(
            f'total_steps is {total_steps}, but the checkpoint of {restore.setting} '
            f'{restore.path} is of step {restored_step} already: steps count from the beginning '
            'of that run, so train to '
            f'{restored_step + total_steps} for {total_steps} steps more'
        )


def check_writable(setting: str, value: Any) -> Path:
    """The folder that a setting names, which may be unusable: that is found without making it."""
    if not isinstance(value, str) or not value.strip() or '://' in value:
        raise ConfigError(f'{setting} {value!r} must be the path of a folder, local or mounted')
    directory = Path(os.path.expanduser(value))
    with raise_on_all_processes():
        existing = next(p for p in [directory, *directory.resolve().parents] if p.exists())
        if not existing.is_dir():
            raise ConfigError(f'{setting} {directory}: {existing} is a file, not a folder')
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f'{setting} {directory}: no permission to write in {existing}')
    return directory


def make_writable(setting: str, directory: Path) -> None:
    """Makes the folder that a setting names, and proves that files can be written there."""
    with raise_on_all_processes():
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(
                f'{setting} {directory} cannot be written: {error.strerror}'
            ) from error
