"""What T5X's `evaluate` and `infer` share: a model, its checkpoints, and examples."""

from __future__ import annotations

import dataclasses
from typing import Any

import optax

from partitioning import BasePartitioner
from partitioning.untrusted_text import parse_json
from train.checkpoints import RestoreConfig, find_checkpoint
from train.config import TrainConfig
from train.data import Lengths, Subset, Task, TextTask, record
from train.errors import ConfigError
from train.processes.together import raise_on_all_processes
from train.t5x.checkpoint_configs import RestoreCheckpointConfig
from train.t5x.datasets import DatasetConfig, has_pairs
from train.t5x.evaluations import reader_of
from train.t5x.models import BaseTransformerModel
from train.t5x.refusals import expect, refusal
from train.t5x.run_functions import STANDARD, check_standard


def restored_run(
    key: str,
    *,
    model: Any,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: BasePartitioner,
    output_dir: str,
    pack: bool | None = None,
) -> tuple[TrainConfig, list[RestoreConfig]]:
    """The settings of a run that evaluates checkpoints, without evaluators.

    Args:
      key: the function that gin files configure, for messages.
      model: the model of the checkpoints.
      dataset_cfg: the examples.
      restore_checkpoint_cfg: the checkpoints.
      partitioner: lays out data and parameters over the mesh.
      output_dir: the folder of the results.
      pack: whether a row may hold several examples, by default the setting of `dataset_cfg`.

    Returns:
      The settings, and the checkpoints in their order.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    written = '@models.EncoderDecoderModel() or @models.DecoderOnlyModel()'
    expect(f'{key}.model', model, BaseTransformerModel, written)
    expect(f'{key}.dataset_cfg', dataset_cfg, DatasetConfig, '@utils.DatasetConfig()')
    kind, written = RestoreCheckpointConfig, '@utils.RestoreCheckpointConfig()'
    expect(f'{key}.restore_checkpoint_cfg', restore_checkpoint_cfg, kind, written)
    with raise_on_all_processes():
        checkpoints = restore_checkpoint_cfg.each()
        if not checkpoints:
            raise ConfigError('utils.RestoreCheckpointConfig.path is empty: give a checkpoint')
        task = dataset_cfg.evaluated_task(reader_of(model), pack=pack)
        model.check_vocabulary(task)
        lengths = _lengths(dataset_cfg, task, checkpoints[0])
    config = TrainConfig(
        model_dir=output_dir,
        objective=model.objective(),
        partitioner=partitioner,
        optimizer=optax.identity(),  # no state of the optimizer is restored
        task=_only_evaluated(task),
        total_steps=1,
        batch_size=dataset_cfg.batch_size,
        sequence_length=lengths,
        evaluators={},
    )
    return config, list(checkpoints)


def _only_evaluated(task: Task) -> Task:
    """The task with the evaluated rows in place of its training rows, which may be empty."""
    if isinstance(task, Subset):
        return dataclasses.replace(task, training=task.held_out)
    if isinstance(task, TextTask):
        return Subset(task=task, training='validation', held_out='validation')
    return task


def check_standard_of_checkpoints(key: str, initializer: Any, verify: Any = None) -> None:
    """Checks that the functions around a checkpoint are T5X's own, or None."""
    check_standard(key, {**dict.fromkeys(STANDARD), 'train_state_initializer_cls': initializer})
    if verify is not None and getattr(verify, '__name__', '') != 'verify_matching_vocabs':
        why = 'every run compares the vocabularies of model and task; leave it out'
        raise refusal(f'{key}.verify_matching_vocabs_fn', verify, why)


def _lengths(dataset_cfg: DatasetConfig, task: Task, restore: RestoreConfig) -> Lengths:
    """The numbers of tokens in a row. Rows without inputs are as long as in the training."""
    if dataset_cfg.task_feature_lengths is not None or has_pairs(task):
        return dataset_cfg.lengths(task)
    path = record.record_of(find_checkpoint(restore)[0])
    try:
        return parse_json(path.read_text())['settings']['sequence_length']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'utils.DatasetConfig.task_feature_lengths is None, and {path} does not contain the '
            "length of rows: write {'targets': number of tokens in a row}"
        ) from error
