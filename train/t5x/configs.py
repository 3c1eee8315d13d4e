"""T5X's `utils`: the settings of datasets and checkpoints, and learning rate schedules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from train import checkpoints
from train.data import CausalLM, Task
from train.errors import check_counts
from train.t5x import seqio
from train.t5x.refusals import check_off, check_one_of, expect, refusal
from train.t5x.schedules import create_learning_rate_scheduler

__all__ = [
    'CheckpointConfig',
    'DatasetConfig',
    'RestoreCheckpointConfig',
    'SaveCheckpointConfig',
    'create_learning_rate_scheduler',
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveCheckpointConfig:
    """When checkpoints are saved, and how many of them are kept.

    Attributes:
      dtype: must be 'float32'.
      period: the number of steps between checkpoints. None saves only at the end.
      checkpoint_steps: additional steps to save.
      keep: the number of newest checkpoints to keep. None keeps all.
      save_dataset: has no effect; the step already determines the next row.
      checkpointer_cls: must be off.
      state_transformation_fns: must be empty.
    """

    dtype: str = 'float32'
    period: int | None = None
    checkpoint_steps: Sequence[int] | None = None
    keep: int | None = None
    save_dataset: bool = False
    checkpointer_cls: Any = None
    state_transformation_fns: Sequence[Any] = ()

    def __post_init__(self) -> None:
        key = 'utils.SaveCheckpointConfig'
        if self.period is not None:
            check_counts(minimum=0, **{f'{key}.period': self.period})
        if self.keep is not None:
            check_counts(**{f'{key}.keep': self.keep})
        for i, step in enumerate(self.checkpoint_steps or ()):
            check_counts(**{f'{key}.checkpoint_steps[{i}]': step})
        why = 'arrays are saved in their own dtypes, so that a resumed run continues exactly'
        check_one_of(f'{key}.dtype', self.dtype, ('float32',), why)
        check_off(
            f'{key}.checkpointer_cls', self.checkpointer_cls, 'checkpoints are written by Orbax'
        )
        transformations = self.state_transformation_fns
        why = 'a checkpoint holds the unchanged state of the run'
        check_off(f'{key}.state_transformation_fns', transformations, why)

    def translated(self) -> checkpoints.CheckpointConfig:
        """The same settings for this trainer."""
        return checkpoints.CheckpointConfig(
            period=self.period or 0, steps=tuple(self.checkpoint_steps or ()), keep=self.keep
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreCheckpointConfig:
    """The checkpoint that a run starts from if its own directory has none.

    Attributes:
      path: see `train.checkpoints.RestoreConfig`. None or an empty path starts from scratch.
      mode: 'specific' or 'latest'.
      assignment_map: must be off.
      strict: must be True.
      fallback_to_scratch: must be off.
      dtype: must be None or 'float32'.
      restore_dataset: has no effect; rows always continue at the step of the checkpoint.
      checkpointer_cls: must be off.
      state_transformation_fns: must be empty.
    """

    path: str | Sequence[str] | None
    mode: str = 'latest'
    assignment_map: Sequence[Any] | None = None
    strict: bool = True
    fallback_to_scratch: bool = False
    dtype: str | None = None
    restore_dataset: bool = False
    checkpointer_cls: Any = None
    state_transformation_fns: Sequence[Any] = ()

    def __post_init__(self) -> None:
        key = 'utils.RestoreCheckpointConfig'
        whole = 'a checkpoint is restored completely, and compared before any array is read'
        check_off(f'{key}.assignment_map', self.assignment_map, whole)
        check_one_of(f'{key}.strict', self.strict, (True,), whole)
        check_off(f'{key}.fallback_to_scratch', self.fallback_to_scratch, whole)
        check_off(f'{key}.state_transformation_fns', self.state_transformation_fns, whole)
        why = 'arrays are restored in the dtypes in which they were saved'
        check_one_of(f'{key}.dtype', self.dtype, (None, 'float32'), why)
        check_off(f'{key}.checkpointer_cls', self.checkpointer_cls, 'checkpoints are read by Orbax')
        why = 'exactly one checkpoint is restored'
        check_one_of(f'{key}.mode', self.mode, ('latest', 'specific'), why)
        if self.path and self._one_path is None:
            raise refusal(f'{key}.path', self.path, f'{why}; give one path')

    def translated(self) -> checkpoints.RestoreConfig | None:
        """The same settings for this trainer, or None if nothing is restored."""
        if not self._one_path:
            return None
        mode: checkpoints.RestoreMode = 'specific' if self.mode == 'specific' else 'latest'
        return _Restore(path=self._one_path, mode=mode)

    @property
    def _one_path(self) -> str | None:
        """The path, which users of T5X may also write as a list of one path."""
        paths = self.path if isinstance(self.path, list | tuple) else [self.path]
        return paths[0] if len(paths) == 1 and isinstance(paths[0], str) else None


class _Restore(checkpoints.RestoreConfig):
    """A RestoreConfig whose messages name the setting in T5X's gin files."""

    setting = 'utils.RestoreCheckpointConfig.path'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints are saved, and which one a run starts from.

    Attributes:
      save: when checkpoints are saved, and how many of them are kept.
      restore: the checkpoint to start from. None starts from scratch.
    """

    save: SaveCheckpointConfig | None = None
    restore: RestoreCheckpointConfig | None = None

    def __post_init__(self) -> None:
        if self.save is None:
            why = 'every run saves its last step; write @utils.SaveCheckpointConfig()'
            raise refusal('utils.CheckpointConfig.save', None, why)
        for name, kind in (('save', SaveCheckpointConfig), ('restore', RestoreCheckpointConfig)):
            if (value := getattr(self, name)) is not None:
                expect(f'utils.CheckpointConfig.{name}', value, kind, f'@utils.{kind.__name__}()')

    def translated(self) -> tuple[checkpoints.CheckpointConfig, checkpoints.RestoreConfig | None]:
        """The same settings for this trainer."""
        save = (self.save or SaveCheckpointConfig()).translated()
        return save, self.restore.translated() if self.restore else None
