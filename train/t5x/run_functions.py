"""The functions and classes of T5X's `utils` that its runs name, but that have one form here.

T5X's settings may name them, as their defaults do. Other functions in their place are refused, with
the exception of `verify_matching_vocabs`. T5X's `evaluate` and `infer` share `restored_run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optax

from partitioning.untrusted_text import parse_json
from train.checkpoints import RestoreConfig, find_checkpoint
from train.config import TrainConfig
from train.data import Lengths, Subset, Task, TextTask, record
from train.errors import ConfigError
from train.processes.together import raise_on_all_processes
from train.t5x.checkpoint_configs import RestoreCheckpointConfig
from train.t5x.datasets import DatasetConfig, has_inputs
from train.t5x.models import BaseTransformerModel
from train.t5x.refusals import check_off, expect, refusal


class TrainStateInitializer:
    """Stands for the creation of the state: in its shards, or restored into them."""


def get_dataset(*args: Any, **kwargs: Any) -> None:
    """Stands for the opening of the training rows. It is never called."""


def get_training_eval_datasets(*args: Any, deterministic: bool = False, **kwargs: Any) -> None:
    """Stands for the opening of the rows to evaluate. It is never called.

    Args:
      args: has no effect.
      deterministic: has no effect; the order of the rows depends only on their seed.
      kwargs: has no effect.
    """


def prepare_train_iter(*args: Any, **kwargs: Any) -> None:
    """Stands for the reading of batches in advance. It is never called."""


def verify_matching_vocabs(cfg: Any, model: Any) -> None:
    """Checks that the task of a `DatasetConfig` has the vocabulary of the model."""
    model.check_vocabulary(cfg.evaluated_task(model))


# The settings of `train_script.train` that may name them, with the reason.
_ROWS = 'tasks of train.data make the rows'
STANDARD: Mapping[str, tuple[Any, str]] = {
    'get_dataset_fn': (get_dataset, _ROWS),
    'train_eval_get_dataset_fn': (get_training_eval_datasets, _ROWS),
    'prepare_train_iter_fn': (prepare_train_iter, 'train.data.Feed reads batches in advance'),
    'train_state_initializer_cls': (
        TrainStateInitializer,
        'parameters are created or restored on their own devices',
    ),
}


def check_standard(key: str, settings: Mapping[str, Any]) -> None:
    """Checks that the settings of `key` name T5X's own functions, or None."""
    for name, (standard, why) in STANDARD.items():
        value = settings.get(name)
        # gin wraps what its files set parameters of, so it is not always the same object.
        if value is not None and getattr(value, '__name__', '') != standard.__name__:
            written = f'use @utils.{standard.__name__} or leave it out'
            raise refusal(f'{key}.{name}', value, f'{why}; {written}')


def restored_run(
    key: str, settings: Mapping[str, Any], *, pack: bool | None = None
) -> tuple[TrainConfig, list[RestoreConfig]]:
    """The settings of a run that evaluates checkpoints, without evaluators, and the checkpoints.

    `key` is the function that gin files configure, with these settings. `pack` says whether a row
    may hold several examples, by default as the rows do. Raises a ConfigError if a setting cannot
    be honoured.
    """
    why = 'it needs a complete checkpoint'
    check_off(f'{key}.fallback_init_rng', settings['fallback_init_rng'], why)
    check_standard(key, settings)
    verify = settings.get('verify_matching_vocabs_fn')
    if verify is not None and getattr(verify, '__name__', '') != 'verify_matching_vocabs':
        why = 'every run compares the vocabularies of model and task; leave it out'
        raise refusal(f'{key}.verify_matching_vocabs_fn', verify, why)
    model, dataset_cfg = settings['model'], settings['dataset_cfg']
    restore = settings['restore_checkpoint_cfg']
    written = '@models.EncoderDecoderModel() or @models.DecoderOnlyModel()'
    expect(f'{key}.model', model, BaseTransformerModel, written)
    expect(f'{key}.dataset_cfg', dataset_cfg, DatasetConfig, '@utils.DatasetConfig()')
    kind, written = RestoreCheckpointConfig, '@utils.RestoreCheckpointConfig()'
    expect(f'{key}.restore_checkpoint_cfg', restore, kind, written)
    with raise_on_all_processes():
        checkpoints = restore.each()
        if not checkpoints:
            raise ConfigError('utils.RestoreCheckpointConfig.path is empty: give a checkpoint')
        task = dataset_cfg.evaluated_task(model, pack=pack)
        model.check_vocabulary(task)
        lengths = _lengths(dataset_cfg, task, checkpoints[0])
    # The evaluated rows stand in for the training rows, which may be empty.
    evaluated: Any = task
    if isinstance(task, Subset):
        evaluated = dataclasses.replace(task, training=task.held_out)
    elif isinstance(task, TextTask):
        evaluated = Subset(task=task, training='validation', held_out='validation')
    config = TrainConfig(
        model_dir=settings['output_dir'],
        objective=model.objective(),
        partitioner=settings['partitioner'],
        optimizer=optax.identity(),  # no state of the optimizer is restored
        task=evaluated,
        total_steps=1,
        batch_size=dataset_cfg.batch_size,
        sequence_length=lengths,
        evaluators={},
    )
    return config, list(checkpoints)


def _lengths(dataset_cfg: DatasetConfig, task: Task, restore: RestoreConfig) -> Lengths:
    """The numbers of tokens in a row. Rows without inputs are as long as in the training."""
    if dataset_cfg.task_feature_lengths is not None or has_inputs(task) is not None:
        return dataset_cfg.lengths(task)
    path = record.record_of(find_checkpoint(restore)[0])
    try:
        return parse_json(path.read_text())['settings']['sequence_length']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'utils.DatasetConfig.task_feature_lengths is None, and {path} does not contain the '
            "length of rows: write {'targets': number of tokens in a row}"
        ) from error
