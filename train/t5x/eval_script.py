"""T5X's `evaluate`, translated to `train.running.evaluation.evaluate`.

For an example, see configs/t5x/eval.gin.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from partitioning import BasePartitioner
from train.evaluators.held_out import HeldOut
from train.running.evaluation import evaluate as evaluate_here
from train.t5x.checkpoint_configs import RestoreCheckpointConfig
from train.t5x.datasets import DatasetConfig, decoded_evaluators
from train.t5x.gin_utils import writers_with
from train.t5x.run_functions import restored_run
from train.t5x.seqio import open_evaluator

KEY = 'eval_script.evaluate'


def evaluate(
    *,
    model: Any,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: BasePartitioner,
    output_dir: str,
    inference_evaluator_cls: Any = None,
    summarize_config_fn: Any = None,
    train_state_initializer_cls: Any = None,
    fallback_init_rng: int | None = None,
    use_orbax: bool = False,
) -> dict[str, float]:
    """Evaluates checkpoints on held-out examples.

    Each checkpoint is scored by predicting each target from the ones before it, and, if the task
    has metrics, by decoding the targets of each example.

    Args:
      model: the network and vocabulary of the checkpoint, and its decoding.
      dataset_cfg: the examples.
      restore_checkpoint_cfg: the checkpoint, or several that are evaluated one after another.
      partitioner: lays out data and parameters over the mesh.
      output_dir: the directory for the scores.
      inference_evaluator_cls: the class `seqio.Evaluator`. None decodes nothing.
      summarize_config_fn: a function of the directory, a writer and the step, which is called for
        each checkpoint, such as `gin_utils.summarize_gin_config`; or None.
      train_state_initializer_cls: `utils.TrainStateInitializer`, or None.
      fallback_init_rng: must be None.
      use_orbax: has no effect; checkpoints of both formats are read.

    Returns:
      The scores of the last checkpoint: `eval/loss`, `eval/accuracy` and, for text that rows cover
      completely, `eval/bits_per_byte`; and `inference_eval/<metric>`.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    config, checkpoints = restored_run(KEY, locals())
    evaluator = open_evaluator(f'{KEY}.inference_evaluator_cls', inference_evaluator_cls)
    evaluators = {'eval': HeldOut(), **decoded_evaluators(model, dataset_cfg, evaluator, every=0)}
    writers = writers_with(f'{KEY}.summarize_config_fn', summarize_config_fn)
    config = dataclasses.replace(config, evaluators=evaluators, writers=writers)
    scores: dict[str, float] = {}
    for restore in checkpoints:
        scores = evaluate_here(config, restore=restore, output_dir=output_dir)
    return scores
