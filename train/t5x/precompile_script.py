"""T5X's `precompile`: the compiled train step as files, by `train.planning.precompiling`."""

from __future__ import annotations

from typing import Any

import optax

from partitioning import BasePartitioner
from train.config import TrainConfig
from train.t5x.datasets import DatasetConfig
from train.t5x.evaluations import reader_of
from train.t5x.optimizers import with_learning_rate
from train.t5x.refusals import check_off, expect

KEY = 'train_script.precompile'
# T5X compiles its step with this constant. It does not change the layout or the memory.
LEARNING_RATE = 1e-3


def precompile(
    *,
    model: Any,
    train_dataset_cfg: DatasetConfig,
    partitioner: BasePartitioner,
    model_dir: str,
    random_seed: int | None = None,
    get_dataset_fn: Any = None,
) -> dict[str, Any]:
    """Compiles the train step, and writes its programs and its memory. Nothing is trained.

    Args:
      model: network, vocabulary, optimizer and loss.
      train_dataset_cfg: the rows, whose shapes count.
      partitioner: lays out data, state and step over the mesh.
      model_dir: the folder of the files; see `train.planning.precompiling.precompile`.
      random_seed: the seed of the random numbers in the step. None means 42, as in T5X.
      get_dataset_fn: must be off.

    Returns:
      The sizes in memory, in bytes per device.

    Raises:
      ConfigError: if a setting cannot be honoured.
    """
    from train.planning.precompiling import precompile as precompile_here  # runs do not forecast

    check_off(f'{KEY}.get_dataset_fn', get_dataset_fn, 'tasks of train.data make the rows')
    expect(f'{KEY}.train_dataset_cfg', train_dataset_cfg, DatasetConfig, '@utils.DatasetConfig()')
    task = train_dataset_cfg.training_task(reader_of(model))
    model.check_vocabulary(task)
    return precompile_here(
        TrainConfig(
            model_dir=model_dir,
            objective=model.objective(),
            partitioner=partitioner,
            optimizer=with_learning_rate(
                model.optimizer_def, optax.constant_schedule(LEARNING_RATE)
            ),
            task=task,
            total_steps=1,
            batch_size=train_dataset_cfg.batch_size,
            sequence_length=train_dataset_cfg.lengths(task),
            evaluators={},
            seed=random_seed or 42,
        )
    )
