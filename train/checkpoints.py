"""Checkpoints by Orbax: saved without a mesh, restored onto any."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import gin
import jax
import orbax.checkpoint as ocp

from partitioning.state import path_str
from train.errors import ConfigError, check_counts, first_line
from train.machine import raise_on_all_processes


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep.

    Attributes:
      period: steps between two checkpoints; 0: only at the end of the run.
      keep: the newest so many stay; None: all do.
      steps: steps that are saved beside those of the period.
    """

    period: int = 1000
    keep: int | None = 3
    steps: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_counts(minimum=0, period=self.period)
        if isinstance(self.steps, str) or not isinstance(self.steps, Sequence):
            raise ConfigError(f'CheckpointConfig.steps is {self.steps!r}: it must be a list')
        check_counts(**{f'steps[{i}]': step for i, step in enumerate(self.steps)})
        if self.keep is not None:
            check_counts(keep=self.keep)


RestoreMode = Literal['latest', 'specific']


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreConfig:
    """The checkpoint of another run that a run begins with.

    Attributes:
      path: with mode 'specific' one checkpoint, `<model_dir>/checkpoints/<step>`; with 'latest' the
        folder of a run or of its checkpoints, whose newest whole one is taken.
      mode: see `path`.
    """

    path: str
    mode: RestoreMode = 'latest'
    setting: ClassVar[str] = 'RestoreConfig.path'  # what messages call `path`

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f'{self.setting} is {self.path!r}: it must be the path of a folder')
        if self.mode not in get_args(RestoreMode):
            raise ConfigError(f"RestoreConfig.mode is {self.mode!r}: use 'latest' or 'specific'")

    def find(self) -> tuple[Path, int]:
        """The folder of checkpoints that `path` is of, and the step to restore of them.

        It looks at files alone, so that processes need not wait for each other.

        Raises:
          ConfigError: there is no such checkpoint, or it is not whole.
        """
        path = Path(os.path.expanduser(self.path))
        folder = path.parent if self.mode == 'specific' else path
        if self.mode == 'latest' and (path / 'checkpoints').is_dir():
            folder = path / 'checkpoints'
        if of_t5x := re.fullmatch(r'checkpoint_(\d+)', path.name):
            raise ConfigError(
                f'{self.setting} {path} is named as in T5X, whose checkpoints cannot be read; '
                f'that of a run of this trainer is {path.parent / "checkpoints" / of_t5x[1]}'
            )
        if not path.is_dir():
            raise ConfigError(f'{self.setting} {path}: there is no such folder')
        if self.mode == 'specific' and not path.name.isdecimal():
            raise ConfigError(
                f"{self.setting} {path} is no checkpoint, whose folder has its step's number: "
                "add that, or use mode 'latest'"
            )
        steps = whole_steps(folder)
        step = int(path.name) if self.mode == 'specific' else max(steps, default=None)
        if step not in steps:
            raise ConfigError(
                f'{self.setting} {path}: there is no whole checkpoint; {folder} has those of '
                f'the steps {steps}'
            )
        return folder, step

    def open(self, folder: Path) -> Checkpoints:
        """The checkpoints of the folder that `find` has found."""
        return Checkpoints(folder, CheckpointConfig(keep=None), self.setting)


def whole_steps(directory: Path) -> list[int]:
    """The steps whose checkpoints are whole, in their order.

    Orbax takes any directory named by a number for a checkpoint; one without the metadata that a
    finished save writes is passed over.
    """
    if not directory.is_dir():
        return []
    steps = (int(path.name) for path in directory.iterdir() if path.name.isdecimal())
    return sorted(step for step in steps if _is_whole(directory / str(step)))


def _is_whole(checkpoint: Path) -> bool:
    return (checkpoint / '_CHECKPOINT_METADATA').is_file()


class Checkpoints:
    """The checkpoints of one run, in `<directory>/<step>`.

    Args:
      directory: its folder of checkpoints.
      config: when to save, and what to keep.
      restored_by: the setting that names `directory`, where it is another run's.
    """

    def __init__(self, directory: Path, config: CheckpointConfig, restored_by: str | None = None):
        self.directory = directory.resolve()
        self._restored_by = restored_by
        self._period, self._steps = config.period, frozenset(config.steps)
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={'state': ocp.StandardCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                create=False,
                preservation_policy=ocp.checkpoint_managers.LatestN(config.keep),
            ),
        )

    def latest_step(self) -> int | None:
        """The newest step whose checkpoint is whole."""
        self._manager.wait_until_finished()
        return max(whole_steps(self.directory), default=None)

    def restore(self, step: int, abstract_state: Any) -> Any:
        """The state of a step.

        Args:
          step: one that was saved.
          abstract_state: ShapeDtypeStructs with the shardings to restore to.

        Raises:
          ConfigError: the checkpoint holds other arrays, shapes or types than the state, or cannot
            be read.
        """
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        self._check(step, abstract_state)
        try:
            return self._manager.restore(step, args=args)['state']
        except Exception as error:  # Orbax and tensorstore raise of every kind for a missing file
            raise self._damaged(step, error) from error

    def restore_params(self, step: int, abstract_params: Any) -> Any:
        """The parameters of a step, without what the optimizer keeps; as `restore`."""
        wanted = {'params': abstract_params}
        args = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        self._check(step, wanted, of='params/')
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                return checkpointer.restore(self.directory / str(step) / 'state', args=args)[
                    'params'
                ]
        except Exception as error:
            raise self._damaged(step, error) from error

    def _check(self, step: int, abstract_state: Any, of: str = '') -> None:
        """Compares as `_compare`, all processes together: the restore itself waits for all."""
        with raise_on_all_processes():
            try:
                self._compare(step, abstract_state, of)
            except ConfigError:
                raise
            except Exception as error:
                raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> ConfigError:
        way_out = 'delete it to go on from the one before'
        if self._restored_by is not None:
            way_out = f'name another one by {self._restored_by}'
        return ConfigError(
            f'checkpoint {self.directory / str(step)} is damaged; {way_out} ({first_line(error)})'
        )

    def is_due(self, step: int) -> bool:
        """Whether the period ends with this step, or it is one of those to save."""
        return step in self._steps or (bool(self._period) and step % self._period == 0)

    def save(self, step: int, state: Any) -> None:
        """Begins to save; the write goes on beside the training."""
        if step in self._manager.all_steps() and not _is_whole(self.directory / str(step)):
            self._manager.delete(step)  # what a save that died or a user left there
        if step not in self._manager.all_steps():
            args = ocp.args.Composite(state=ocp.args.StandardSave(state))
            self._manager.save(step, args=args, force=True)

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()

    def _compare(self, step: int, abstract_state: Any, of: str = '') -> None:
        """Compares names, shapes and types before any array is read (Orbax casts silently).

        Args:
          of: only of arrays whose paths begin so.
        """
        metadata = self._manager.item_metadata(step)['state']
        saved = _described(metadata.tree if hasattr(metadata, 'tree') else metadata)
        saved = {path: value for path, value in saved.items() if path.startswith(of)}
        wanted = _described(abstract_state)
        differing = sorted(k for k in saved.keys() | wanted.keys() if saved.get(k) != wanted.get(k))
        if differing:
            first, other = differing[0], self._restored_by or 'MODEL_DIR'
            raise ConfigError(
                f'checkpoint {self.directory / str(step)} is of another model or optimizer: '
                f'{len(differing)} arrays differ, first {first}: {saved.get(first, "absent")} in '
                f'the checkpoint, {wanted.get(first, "absent")} in this run. Use the settings it '
                f'was trained with, or another {other}'
            )


def _described(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_str(p): f'{tuple(x.shape)} {jax.numpy.dtype(x.dtype)}' for p, x in leaves}
