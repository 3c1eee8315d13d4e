"""T5X's `evaluate`: its settings, translated to those of `train.evaluation.evaluate_checkpoint`.

Usage: configs/t5x/eval.gin.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from partitioning import BasePartitioner
from train.checkpoints import RestoreConfig
from train.data import record
from train.errors import ConfigError
from train.evaluation import evaluate_checkpoint
from train.machine import raise_on_all_processes
from train.t5x.configs import DatasetConfig, RestoreCheckpointConfig
from train.t5x.gin_utils import check_summarize
from train.t5x.models import DecoderOnlyModel
from train.t5x.network import with_kv_heads
from train.t5x.refusals import expect, off
from train.t5x.seqio import check_evaluator

KEY = 'eval_script.evaluate'


def evaluate(
    *,
    model: DecoderOnlyModel,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: BasePartitioner,
    output_dir: str,
    inference_evaluator_cls: Any = None,
    summarize_config_fn: Any = None,
    fallback_init_rng: int | None = None,
) -> dict[str, float]:
    """Evaluates a checkpoint on held-out rows, each target after those that come before it.

    Args:
      model: whose network and vocabulary the checkpoint is of.
      dataset_cfg: the rows; without `task_feature_lengths` they are as long as those that the
        checkpoint was trained on.
      restore_checkpoint_cfg: the checkpoint.
      partitioner: lays out data and parameters over the mesh.
      output_dir: where the scores go.
      inference_evaluator_cls: `seqio.Evaluator`; nothing is decoded.
      summarize_config_fn: `gin_utils.summarize_gin_config`.
      fallback_init_rng: off.

    Returns:
      The scores: `eval/loss`, `eval/accuracy` and, of text, `eval/bits_per_byte`.

    Raises:
      ConfigError: a setting that cannot be honoured, with what to write instead.
    """
    off(f'{KEY}.fallback_init_rng', fallback_init_rng, 'what is evaluated is a checkpoint, whole')
    check_summarize(f'{KEY}.summarize_config_fn', summarize_config_fn)
    check_evaluator(f'{KEY}.inference_evaluator_cls', inference_evaluator_cls)
    expect(f'{KEY}.model', model, DecoderOnlyModel, '@models.DecoderOnlyModel()')
    expect(f'{KEY}.dataset_cfg', dataset_cfg, DatasetConfig, '@utils.DatasetConfig()')
    kind, written = RestoreCheckpointConfig, '@utils.RestoreCheckpointConfig()'
    expect(f'{KEY}.restore_checkpoint_cfg', restore_checkpoint_cfg, kind, written)
    dataset_cfg.check_evaluates('')
    task = dataset_cfg.task
    restore = restore_checkpoint_cfg.translated()
    if restore is None:
        raise ConfigError('utils.RestoreCheckpointConfig.path is empty: name a checkpoint')
    with raise_on_all_processes():
        model.check_vocabulary(task)
        length = dataset_cfg.sequence_length or _trained_length(restore)
    return inspect.unwrap(evaluate_checkpoint)(
        output_dir=output_dir,
        model=model.transformer(),
        partitioner=with_kv_heads(partitioner),
        tasks={'': task},
        restore=restore,
        batch_size=dataset_cfg.batch_size,
        sequence_length=length,
        prefetch=None,
    )


def _trained_length(restore: RestoreConfig) -> int:
    """Tokens of a row that a run noted beside its checkpoints."""
    path = restore.find()[0].resolve().parent / record.FILE
    try:
        return json.loads(path.read_text())['settings']['sequence_length']
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'utils.DatasetConfig.task_feature_lengths is None, and {path} does not say how long '
            "rows are: write {'targets': tokens of a row}"
        ) from error
