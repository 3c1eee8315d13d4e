"""T5X's `evaluate`, translated to `train.evaluation.evaluate`.

For an example, see configs/t5x/eval.gin.
"""

from __future__ import annotations

import json
from typing import Any

import optax

from partitioning import BasePartitioner
from train.checkpoints import RestoreConfig
from train.config import TrainConfig
from train.data import Lengths, record
from train.errors import ConfigError
from train.evaluation import evaluate as evaluate_here
from train.evaluators import HeldOut
from train.runtime.machine import raise_on_all_processes
from train.t5x.configs import DatasetConfig, RestoreCheckpointConfig
from train.t5x.datasets import has_pairs
from train.t5x.evaluations import decoded, reader_of
from train.t5x.gin_utils import writers_with
from train.t5x.models import BaseTransformerModel
from train.t5x.refusals import check_off, expect
from train.t5x.seqio import open_evaluator

KEY = 'eval_script.evaluate'


def evaluate(
    *,
    model: BaseTransformerModel,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: BasePartitioner,
    output_dir: str,
    inference_evaluator_cls: Any = None,
    summarize_config_fn: Any = None,
    fallback_init_rng: int | None = None,
) -> dict[str, float]:
    """Evaluates a checkpoint on held-out rows, by predicting each target from the ones before it.

    Args:
      model: the network and vocabulary of the checkpoint.
      dataset_cfg: the rows. Without `task_feature_lengths`, they are as long as the rows that the
        checkpoint was trained on.
      restore_checkpoint_cfg: the checkpoint.
      partitioner: lays out data and parameters over the mesh.
      output_dir: the directory for the scores.
      inference_evaluator_cls: the class `seqio.Evaluator`, which predicts, decodes and scores
        the targets of tasks with metrics, or None.
      summarize_config_fn: a function of the directory, a writer and the step, which is called once,
        such as `gin_utils.summarize_gin_config`; or None.
      fallback_init_rng: must be None.

    Returns:
      The scores: `eval/loss`, `eval/accuracy` and, for text, `eval/bits_per_byte`.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    why = 'an evaluation needs a complete checkpoint'
    check_off(f'{KEY}.fallback_init_rng', fallback_init_rng, why)
    evaluator = open_evaluator(f'{KEY}.inference_evaluator_cls', inference_evaluator_cls)
    expect(f'{KEY}.model', model, BaseTransformerModel, '@models.EncoderDecoderModel()')
    expect(f'{KEY}.dataset_cfg', dataset_cfg, DatasetConfig, '@utils.DatasetConfig()')
    kind, written = RestoreCheckpointConfig, '@utils.RestoreCheckpointConfig()'
    expect(f'{KEY}.restore_checkpoint_cfg', restore_checkpoint_cfg, kind, written)
    task = dataset_cfg.evaluated_task(reader_of(model))
    restore = restore_checkpoint_cfg.translated()
    if restore is None:
        raise ConfigError('utils.RestoreCheckpointConfig.path is empty: give a checkpoint')
    with raise_on_all_processes():
        model.check_vocabulary(task)
        unset = dataset_cfg.task_feature_lengths is None and not has_pairs(task)
        length = _trained_length(restore) if unset else dataset_cfg.lengths(task)
    config = TrainConfig(
        model_dir=output_dir,
        objective=model.objective(),
        partitioner=partitioner,
        optimizer=model.optimizer(optax.constant_schedule(0.0)),  # restores no state for it
        task=task,
        total_steps=1,
        batch_size=dataset_cfg.batch_size,
        sequence_length=length,
        evaluators={'eval': HeldOut(), **decoded(model, dataset_cfg, evaluator, every=0)},
        writers=writers_with(f'{KEY}.summarize_config_fn', summarize_config_fn),
    )
    return evaluate_here(config, restore=restore, output_dir=output_dir)


def _trained_length(restore: RestoreConfig) -> Lengths:
    """The numbers of tokens in a row, from the record next to the checkpoints."""
    path = record.record_of(restore.find()[0])
    try:
        return json.loads(path.read_text())['settings']['sequence_length']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'utils.DatasetConfig.task_feature_lengths is None, and {path} does not contain the '
            "length of rows: write {'targets': number of tokens in a row}"
        ) from error
