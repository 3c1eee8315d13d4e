"""T5X's `utils`: the settings of datasets and checkpoints, and learning rate schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from train.data import CausalLM, Task
from train.errors import check_counts
from train.t5x import seqio
from train.t5x.checkpoint_configs import (
    CheckpointConfig,
    RestoreCheckpointConfig,
    SaveCheckpointConfig,
)
from train.t5x.refusals import check_off, check_one_of, refusal
from train.t5x.run_functions import (
    TrainStateInitializer,
    get_dataset,
    get_training_eval_datasets,
    prepare_train_iter,
    verify_matching_vocabs,
)
from train.t5x.schedules import create_learning_rate_scheduler

__all__ = [
    'CheckpointConfig',
    'DatasetConfig',
    'RestoreCheckpointConfig',
    'SaveCheckpointConfig',
    'TrainStateInitializer',
    'create_learning_rate_scheduler',
    'get_dataset',
    'get_training_eval_datasets',
    'prepare_train_iter',
    'verify_matching_vocabs',
]

HELD_OUT = ('validation', 'test')


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """The rows to train or evaluate on.

    Attributes:
      mixture_or_task_name: a task of train.data, or the name of one.
      task_feature_lengths: {'targets': the number of tokens in a row}. Evaluations may leave it as
        None, as in T5X.
      split: 'train' for the training part of the task; 'validation' or 'test' for its held-out
        part.
      batch_size: the number of rows in a batch.
      shuffle: must be True for training and False for evaluation.
      seed: the seed of the training rows. None uses the seed of the run.
      use_cached: has no effect on the rows; text is always tokenized once and stored.
      pack: whether a row may hold several examples.
      use_custom_packing_ops: must be off.
      trim_output_features: must be True.
      module: must be None; gin files import the modules of their tasks.
      use_memory_cache: has no effect on the rows.
    """

    mixture_or_task_name: str | Task
    task_feature_lengths: Mapping[str, int] | None
    split: str
    batch_size: int
    shuffle: bool
    seed: int | None = None
    use_cached: bool = False
    pack: bool = False
    use_custom_packing_ops: bool = False
    trim_output_features: bool = True
    module: str | None = None
    use_memory_cache: bool = True

    def __post_init__(self) -> None:
        key = 'utils.DatasetConfig'
        check_counts(**{f'{key}.batch_size': self.batch_size})
        if self.seed is not None:
            check_counts(minimum=0, **{f'{key}.seed': self.seed})
        why = 'there is only one way to pack rows'
        check_off(f'{key}.use_custom_packing_ops', self.use_custom_packing_ops, why)
        why = 'rows always have the requested length'
        check_one_of(f'{key}.trim_output_features', self.trim_output_features, (True,), why)
        why = 'import the module that adds the tasks in the gin file (--gin_allow)'
        check_off(f'{key}.module', self.module, why)

    def check_trains(self, scope: str) -> None:
        """Checks that these rows are for training.

        Args:
          scope: the scope of these settings in a gin file, such as `train/`.

        Raises:
          ConfigError: if they are held out or not shuffled.
        """
        key = f'{scope}utils.DatasetConfig'
        check_one_of(f'{key}.split', self.split, ('train',), 'a task has only one training part')
        why = 'training rows come in an order that depends on the seed'
        check_one_of(f'{key}.shuffle', self.shuffle, (True,), why)

    def check_evaluates(self, scope: str) -> None:
        """Checks that these rows are for evaluation.

        Args:
          scope: the scope of these settings in a gin file, such as `train_eval/`.

        Raises:
          ConfigError: if they are not held out, or if they are shuffled.
        """
        key = f'{scope}utils.DatasetConfig'
        check_one_of(
            f'{key}.split', self.split, HELD_OUT, 'evaluations use the held-out part of a task'
        )
        check_one_of(f'{key}.shuffle', self.shuffle, (False,), 'held-out rows are not shuffled')

    @property
    def task(self) -> Task:
        """The task.

        Raises:
          ConfigError: if no task has this name, or if the task packs training rows but `pack` is
            False.
        """
        task = seqio.get_mixture_or_task(self.mixture_or_task_name)
        packed = isinstance(task, CausalLM) and task.packing == 'pack'
        if packed and not self.pack and self.split == 'train':
            why = "the task packs documents (CausalLM.packing is 'pack'); write pack = True"
            raise refusal('train/utils.DatasetConfig.pack', self.pack, why)
        return task

    @property
    def sequence_length(self) -> int | None:
        """The number of tokens in a row, or None if it is not set.

        Raises:
          ConfigError: if features other than the targets have a length.
        """
        lengths, key = self.task_feature_lengths, 'utils.DatasetConfig.task_feature_lengths'
        if lengths is None:
            return None
        if not isinstance(lengths, Mapping) or 'targets' not in lengths:
            raise refusal(key, lengths, "write {'targets': number of tokens in a row}")
        others = sorted(name for name, length in lengths.items() if name != 'targets' and length)
        if others:
            why = f'rows have only targets, not {", ".join(others)}; write '
            raise refusal(key, dict(lengths), f"{why}{{'targets': {lengths['targets']}}}")
        check_counts(**{f"{key}['targets']": lengths['targets']})
        return lengths['targets']
