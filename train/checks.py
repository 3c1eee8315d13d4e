"""What a run is checked for before it costs anything."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import AxisType, Mesh

from partitioning import BasePartitioner
from train.data import OpenTask, Task
from train.data.rows.open_task import features
from train.data.rows.packing import Row
from train.errors import ConfigError
from train.steps import BATCH_ARRAYS


def check_batch(partitioner: BasePartitioner, batch_size: int, num_microbatches: int) -> None:
    """The data axis divides the batch, and each microbatch."""
    partitioner.get_data_layout(batch_size)
    parts = partitioner.data_mesh_size * num_microbatches
    if batch_size % parts:
        raise ConfigError(
            f'batch_size {batch_size} does not divide into {num_microbatches} microbatches over a '
            f'data axis of {partitioner.data_mesh_size}: use a multiple of {parts}'
        )


def check_mesh(mesh: Mesh) -> None:
    """The models are laid out by constraints, which only Auto axes take."""
    if any(axis_type is not AxisType.Auto for axis_type in mesh.axis_types):
        raise ConfigError(
            f'the mesh has axis types {mesh.axis_types}: these models need Auto axes, so leave '
            'axis_types out'
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


def check_tasks(tasks: Any) -> None:
    """Evaluations are tasks, by name."""
    if not isinstance(tasks, Mapping) or not tasks:
        raise ConfigError(
            f'train.eval_tasks is a {type(tasks).__name__}: write '
            "{'name': @CausalLM(), ...}, or None"
        )
    check_objects(**{f'eval_tasks[{name!r}]': (task, Task) for name, task in tasks.items()})


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


def check_objects(**objects: tuple[Any, type]) -> None:
    """Each setting of train() is an object of its type (`@Name` in a gin file is the class)."""
    for name, (value, expected) in objects.items():
        if not isinstance(value, expected):
            what = f'the class {value.__name__}' if isinstance(value, type) else repr(value)
            raise ConfigError(
                f'train.{name} is {what}, no object of {expected.__name__}: in a gin file write '
                f'@{getattr(value, "__name__", expected.__name__)}(), with the brackets'
            )


def check_writable(model_dir: str) -> Path:
    """The folder of model_dir, which may be unusable: that is found without creating it."""
    if not isinstance(model_dir, str) or not model_dir.strip() or '://' in model_dir:
        raise ConfigError(f'MODEL_DIR {model_dir!r} must be the path of a folder, local or mounted')
    directory = Path(os.path.expanduser(model_dir))
    existing = next(p for p in [directory, *directory.resolve().parents] if p.exists())
    if not existing.is_dir():
        raise ConfigError(f'MODEL_DIR {directory}: {existing} is a file, not a folder')
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f'MODEL_DIR {directory}: no permission to write in {existing}')
    return directory


def make_writable(directory: Path) -> None:
    """Creates model_dir and proves that files can be written there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError(f'MODEL_DIR {directory} cannot be written: {error.strerror}') from error
