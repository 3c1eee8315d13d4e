"""T5X's `utils`: the settings of datasets and checkpoints, and the learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from train import checkpoints
from train.data import CausalLM, Task
from train.errors import check_counts
from train.schedules import create_learning_rate_scheduler
from train.t5x import seqio
from train.t5x.refusals import expect, off, only, refusal

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
    """Which rows are trained or evaluated on.

    Attributes:
      mixture_or_task_name: a task of train.data, or the name of one.
      task_feature_lengths: {'targets': tokens of a row}; None, where T5X finds it out.
      split: 'train', or the held-out part of the task as 'validation' or 'test'.
      batch_size: rows of a batch.
      shuffle: training rows are shuffled, evaluated ones are not.
      seed: of the training rows; None: any.
      use_cached: without an effect on the rows: text is tokenized once and then kept.
      pack: several examples in a row.
      use_custom_packing_ops: off.
      trim_output_features: on.
      module: off; gin files import the modules of their tasks.
      use_memory_cache: without an effect on the rows.
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
        why = 'rows are packed in one way'
        off(f'{key}.use_custom_packing_ops', self.use_custom_packing_ops, why)
        why = 'rows have the length that is asked for'
        only(f'{key}.trim_output_features', self.trim_output_features, (True,), why)
        why = 'a gin file imports the module that adds its tasks (--gin_allow)'
        off(f'{key}.module', self.module, why)

    def check_trains(self, scope: str) -> None:
        """These are rows to train on.

        Args:
          scope: of the settings in a gin file, such as `train/`.

        Raises:
          ConfigError: they are held out, or not shuffled.
        """
        key = f'{scope}utils.DatasetConfig'
        only(f'{key}.split', self.split, ('train',), 'a task has one part to train on')
        why = 'training rows come in an order that the seed decides'
        only(f'{key}.shuffle', self.shuffle, (True,), why)

    def check_evaluates(self, scope: str) -> None:
        """These are rows to evaluate; as `check_trains`."""
        key = f'{scope}utils.DatasetConfig'
        only(f'{key}.split', self.split, HELD_OUT, 'a task has one part that is held out')
        only(f'{key}.shuffle', self.shuffle, (False,), 'held-out rows come in their order')

    @property
    def task(self) -> Task:
        """The task, whose rows are as `pack` asks for.

        Raises:
          ConfigError: a name without a task; packed training rows that are not to be.
        """
        task = seqio.get_mixture_or_task(self.mixture_or_task_name)
        packed = isinstance(task, CausalLM) and task.packing == 'pack'
        if packed and not self.pack and self.split == 'train':
            why = "the task packs documents (CausalLM.packing is 'pack'); write pack = True"
            raise refusal('train/utils.DatasetConfig.pack', self.pack, why)
        return task

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a row; None: not said.

        Raises:
          ConfigError: lengths of other features than the targets.
        """
        lengths, key = self.task_feature_lengths, 'utils.DatasetConfig.task_feature_lengths'
        if lengths is None:
            return None
        if not isinstance(lengths, Mapping) or 'targets' not in lengths:
            raise refusal(key, lengths, "write {'targets': tokens of a row}")
        others = sorted(name for name, length in lengths.items() if name != 'targets' and length)
        if others:
            why = f"rows have targets alone, without {', '.join(others)}: write {{'targets': "
            raise refusal(key, dict(lengths), f'{why}{lengths["targets"]}}}')
        check_counts(**{f"{key}['targets']": lengths['targets']})
        return lengths['targets']


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveCheckpointConfig:
    """When checkpoints are saved, and how many stay.

    Attributes:
      dtype: 'float32'.
      period: steps between two checkpoints; None: only at the end.
      checkpoint_steps: steps to save beside those of the period.
      keep: the newest so many stay; None: all.
      save_dataset: a run goes on with the next row either way: the step says which.
      checkpointer_cls, state_transformation_fns: off.
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
        why = 'arrays are saved in their own types, so that a run goes on as it was'
        only(f'{key}.dtype', self.dtype, ('float32',), why)
        off(f'{key}.checkpointer_cls', self.checkpointer_cls, 'checkpoints are written by Orbax')
        transformations = self.state_transformation_fns
        why = 'a checkpoint holds the state of the run as it is'
        off(f'{key}.state_transformation_fns', transformations, why)

    def translated(self) -> checkpoints.CheckpointConfig:
        """The same in this trainer's words."""
        return checkpoints.CheckpointConfig(
            period=self.period or 0, steps=tuple(self.checkpoint_steps or ()), keep=self.keep
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreCheckpointConfig:
    """The checkpoint that a run begins with where its own folder has none.

    Attributes:
      path: see `train.checkpoints.RestoreConfig`; None or empty: begin from scratch.
      mode: 'specific' or 'latest'.
      dtype: None or 'float32'.
      strict: on.
      restore_dataset: rows go on at the step of the checkpoint either way.
      assignment_map, fallback_to_scratch, checkpointer_cls, state_transformation_fns: off.
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
        whole = 'a checkpoint is restored whole, and compared before any array is read'
        off(f'{key}.assignment_map', self.assignment_map, whole)
        only(f'{key}.strict', self.strict, (True,), whole)
        off(f'{key}.fallback_to_scratch', self.fallback_to_scratch, whole)
        off(f'{key}.state_transformation_fns', self.state_transformation_fns, whole)
        why = 'arrays are restored in the types they were saved in'
        only(f'{key}.dtype', self.dtype, (None, 'float32'), why)
        off(f'{key}.checkpointer_cls', self.checkpointer_cls, 'checkpoints are read by Orbax')
        why = 'one checkpoint is restored'
        only(f'{key}.mode', self.mode, ('latest', 'specific'), why)
        if self.path and self._one_path is None:
            raise refusal(f'{key}.path', self.path, 'one checkpoint is restored: give one path')

    def translated(self) -> checkpoints.RestoreConfig | None:
        """The same in this trainer's words; None: nothing is restored."""
        if not self._one_path:
            return None
        mode: checkpoints.RestoreMode = 'specific' if self.mode == 'specific' else 'latest'
        return _Restore(path=self._one_path, mode=mode)

    @property
    def _one_path(self) -> str | None:
        """The path, which T5X's users may write as a list of one."""
        paths = self.path if isinstance(self.path, list | tuple) else [self.path]
        return paths[0] if len(paths) == 1 and isinstance(paths[0], str) else None


class _Restore(checkpoints.RestoreConfig):
    """A restore whose messages name the setting that T5X's files have."""

    setting = 'utils.RestoreCheckpointConfig.path'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and what a run begins with.

    Attributes:
      save: when, and how many stay.
      restore: the checkpoint to begin with; None: from scratch.
    """

    save: SaveCheckpointConfig | None = None
    restore: RestoreCheckpointConfig | None = None

    def __post_init__(self) -> None:
        if self.save is None:
            why = 'every run saves its end; write @utils.SaveCheckpointConfig()'
            raise refusal('utils.CheckpointConfig.save', None, why)
        for name, kind in (('save', SaveCheckpointConfig), ('restore', RestoreCheckpointConfig)):
            if (value := getattr(self, name)) is not None:
                expect(f'utils.CheckpointConfig.{name}', value, kind, f'@utils.{kind.__name__}()')

    def translated(self) -> tuple[checkpoints.CheckpointConfig, checkpoints.RestoreConfig | None]:
        """The same in this trainer's words."""
        save = (self.save or SaveCheckpointConfig()).translated()
        return save, self.restore.translated() if self.restore else None
