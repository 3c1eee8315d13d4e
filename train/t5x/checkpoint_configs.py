"""T5X's settings of checkpoints, which are names of its `utils`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from train import checkpoints
from train.errors import ConfigError, check_counts, check_fields
from train.t5x.checkpoints import (
    Checkpointer,
    CheckpointManager,
    T5XCheckpointConfig,
    T5XRestore,
    UpcycleCheckpointer,
)
from train.t5x.refusals import check_off, check_one_of, expect, expect_class, refusal

RESTORE, SAVE = 'utils.RestoreCheckpointConfig', 'utils.SaveCheckpointConfig'
DTYPES = (None, 'float32', 'bfloat16')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveCheckpointConfig:
    """When checkpoints are saved in T5X's format, and how many of them are kept.

    Attributes:
      dtype: the dtype of saved parameters, 'float32' or 'bfloat16'; None saves their own.
      period: the number of steps between checkpoints. None saves only at the end.
      checkpoint_steps: additional steps to save.
      keep: the number of newest checkpoints to keep. None keeps all.
      keep_dataset_checkpoints: has no effect; the position in the data needs no files.
      save_dataset: whether a run that resumes from a checkpoint that T5X itself has written
        continues with the next row. Otherwise, it begins with the first one, as T5X does. A run
        that resumes from a checkpoint of this trainer always continues, because the step determines
        the next row; T5X would begin again, and warns that this is dangerous.
      checkpointer_cls: None or `checkpoints.Checkpointer`.
      state_transformation_fns: must be empty.
      use_gda: has no effect; every array is a jax.Array.
      checkpoint_manager_cls: None or `checkpoints.CheckpointManager`.
    """

    dtype: str | None = 'float32'
    period: int | None = None
    checkpoint_steps: Sequence[int] | None = None
    keep: int | None = None
    keep_dataset_checkpoints: int | None = None
    save_dataset: bool = False
    checkpointer_cls: Any = None
    state_transformation_fns: Sequence[Any] = ()
    use_gda: bool = True
    checkpoint_manager_cls: Any = None

    def __post_init__(self) -> None:
        intervals = dict.fromkeys(('period', 'keep_dataset_checkpoints'), '[0, inf)')
        check_fields(SaveCheckpointConfig, self, f'{SAVE}.', **intervals)
        for i, step in enumerate(self.checkpoint_steps or ()):
            check_counts(**{f'{SAVE}.checkpoint_steps[{i}]': step})
        check_one_of(f'{SAVE}.dtype', self.dtype, ('float32', *DTYPES), 'T5X has no other')
        if type(_checkpointer(SAVE, self.checkpointer_cls)) is not Checkpointer:
            why = 'it only restores checkpoints; leave it out'
            raise refusal(f'{SAVE}.checkpointer_cls', self.checkpointer_cls, why)
        _check_manager(SAVE, self.checkpoint_manager_cls)
        why = 'a checkpoint holds the unchanged state of the run'
        check_off(f'{SAVE}.state_transformation_fns', self.state_transformation_fns, why)

    def translated(self) -> T5XCheckpointConfig:
        """The same settings for this trainer."""
        return T5XCheckpointConfig(
            period=self.period or 0,
            steps=tuple(self.checkpoint_steps or ()),
            keep=self.keep,
            dtype=self.dtype,
            save_dataset=self.save_dataset,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreCheckpointConfig:
    """The checkpoint that a run starts from if its own directory has none.

    It is one of T5X, in either format, or of this trainer.

    Attributes:
      path: in mode 'specific', one checkpoint, `<model_dir>/checkpoint_<step>`, or several for an
        evaluation; in the other modes, the folder of a run. None or an empty path starts from
        scratch.
      mode: 'specific'; 'latest', the newest one; or 'all', one after another, for an evaluation.
      assignment_map: pairs of a regular expression, which must match the whole T5X name of an array
        of the run, such as 'target/(.*)', and its name in the checkpoint, such as
        'target/model/\\1'. None does not restore the array.
      strict: whether an array of the checkpoint that the run does not use is an error, unless
        `fallback_to_scratch` is set.
      fallback_to_scratch: whether arrays that are not restored are initialized as in a new run.
      dtype: the dtype of restored parameters: 'float32', 'bfloat16' or 'float16'; None keeps the
        run's dtype.
      restore_dataset: whether the data continues with the row that follows the step of the
        checkpoint. Otherwise, it begins with the first one, as in T5X.
      checkpointer_cls: None, `checkpoints.Checkpointer` or
        `contrib.moe.checkpoints.UpcycleCheckpointer`.
      state_transformation_fns: functions that rename arrays; see `train.t5x.state_utils`.
      use_gda: has no effect; every array is a jax.Array.
      checkpoint_manager_cls: None or `checkpoints.CheckpointManager`.
    """

    path: str | Sequence[str] | None
    mode: str = 'latest'
    assignment_map: Sequence[Any] | None = None
    strict: bool = True
    fallback_to_scratch: bool = False
    dtype: str | None = None
    restore_dataset: bool = False
    checkpointer_cls: Any = None
    state_transformation_fns: Sequence[Callable[..., Any]] = ()
    use_gda: bool = True
    checkpoint_manager_cls: Any = None

    def __post_init__(self) -> None:
        why = 'it is specific, latest or all'
        check_one_of(f'{RESTORE}.mode', self.mode, ('latest', 'specific', 'all'), why)
        dtypes = (*DTYPES, 'float16')
        check_one_of(f'{RESTORE}.dtype', self.dtype, dtypes, 'T5X has no other')
        check_fields(RestoreCheckpointConfig, self, f'{RESTORE}.')
        checkpoints.check_renames(f'{RESTORE}.assignment_map', self.assignment_map or ())
        _checkpointer(RESTORE, self.checkpointer_cls)
        _check_manager(RESTORE, self.checkpoint_manager_cls)
        for function in self.state_transformation_fns:
            if not callable(function):
                why = 'write a list of functions, such as [@state_utils.apply_assignment_map]'
                raise refusal(f'{RESTORE}.state_transformation_fns', function, why)
        if not all(path and isinstance(path, str) for path in self._paths):
            raise refusal(f'{RESTORE}.path', self.path, 'write a path, or a list of paths')

    def translated(self) -> T5XRestore | None:
        """The one checkpoint that these settings name, or None if nothing is restored.

        Raises a ConfigError if they name several.
        """
        if self.mode == 'all' and self._paths:
            why = "a run starts from one checkpoint; write 'latest' or 'specific'"
            raise refusal(f'{RESTORE}.mode', self.mode, why)
        if len(self._paths) > 1:
            why = 'a run starts from one checkpoint; give one path'
            raise refusal(f'{RESTORE}.path', self.path, why)
        return self._restore(self._paths[0], self.mode) if self._paths else None

    def each(self) -> list[T5XRestore]:
        """All checkpoints that these settings name, in their order.

        Raises a ConfigError if there are none in a folder, in mode 'all'.
        """
        if self.mode != 'all':
            return [self._restore(path, self.mode) for path in self._paths]
        return [one for path in self._paths for one in self._restore(path, 'latest').all()]

    def _restore(self, path: str, mode: str) -> T5XRestore:
        checkpointer = _checkpointer(RESTORE, self.checkpointer_cls)
        return T5XRestore(
            path=path,
            mode='specific' if mode == 'specific' else 'latest',
            renames=tuple((new, old) for new, old in self.assignment_map or ()),
            # As in T5X, a fallback restores whatever the checkpoint and the run share.
            strict=self.strict and not self.fallback_to_scratch,
            initialize_missing=self.fallback_to_scratch,
            dtype=self.dtype,
            transformations=tuple(self.state_transformation_fns),
            num_experts=getattr(checkpointer, 'num_experts', None),
            restart_data=not self.restore_dataset,
        )

    @property
    def _paths(self) -> list[Any]:
        """The paths, which users of T5X write as one or as a list."""
        if isinstance(self.path, list | tuple):
            return [path for path in self.path if path != '']
        return [self.path] if self.path else []


def _checkpointer(key: str, cls: Any) -> Checkpointer:
    """The checkpointer of a class, to which gin gives its settings."""
    if cls is None:
        return Checkpointer()
    expect_class(f'{key}.checkpointer_cls', cls, Checkpointer, '@checkpoints.Checkpointer')
    try:
        return cls()
    except TypeError as error:
        name = UpcycleCheckpointer.__name__
        raise ConfigError(
            f'{key}.checkpointer_cls is @{name}, which needs the number of experts: write '
            f'{name}.num_experts = ...'
        ) from error


def _check_manager(key: str, cls: Any) -> None:
    if cls is not None:
        written = '@checkpoints.CheckpointManager'
        expect_class(f'{key}.checkpoint_manager_cls', cls, CheckpointManager, written)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Which checkpoints are saved, and which one a run starts from.

    Attributes:
      save: when checkpoints are saved, and how many of them are kept. None saves none.
      restore: the checkpoint to start from. None starts from scratch.
    """

    save: SaveCheckpointConfig | None = None
    restore: RestoreCheckpointConfig | None = None

    def __post_init__(self) -> None:
        for name, kind in (('save', SaveCheckpointConfig), ('restore', RestoreCheckpointConfig)):
            if (value := getattr(self, name)) is not None:
                expect(f'utils.CheckpointConfig.{name}', value, kind, f'@utils.{kind.__name__}()')

    def translated(self) -> tuple[T5XCheckpointConfig, T5XRestore | None]:
        """The same settings for this trainer."""
        restore = self.restore.translated() if self.restore else None
        if self.save is None:
            return T5XCheckpointConfig(period=0, at_end=False), restore
        return self.save.translated(), restore
