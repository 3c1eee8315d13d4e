"""Checkpoints by Orbax: saved without a mesh, restored onto any mesh."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, get_args

import jax
from etils import epath

from partitioning.state import path_str
from train.errors import ConfigError, check_counts, first_line
from train.paths import absolute, as_path, is_remote
from train.runtime.arrays_on_s3 import support_s3
from train.runtime.machine import raise_on_all_processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints, and which of them to keep.

    Attributes:
      period: the number of steps between two checkpoints. 0 saves only at the end of the run.
      keep: the number of newest checkpoints to keep. None keeps all.
      steps: additional steps after which to save a checkpoint.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreConfig:
    """The checkpoint of another run that a run starts from.

    Attributes:
      path: in mode 'specific', one checkpoint, `<model_dir>/checkpoints/<step>`; in mode 'latest',
        the folder of a run or of its checkpoints; the newest complete checkpoint is restored.
      mode: 'latest' or 'specific'.
    """

    path: str
    mode: RestoreMode = 'latest'
    setting: ClassVar[str] = 'RestoreConfig.path'  # the name of `path` in messages

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f'{self.setting} is {self.path!r}: it must be the path of a folder')
        if self.mode not in get_args(RestoreMode):
            raise ConfigError(f"RestoreConfig.mode is {self.mode!r}: use 'latest' or 'specific'")

    def find(self) -> tuple[epath.Path, int]:
        """Finds the checkpoint by looking at files only, so processes need not wait for each other.

        Returns:
          The folder of checkpoints, and the step to restore.

        Raises:
          ConfigError: if there is no such checkpoint, or it is incomplete.
        """
        path = as_path(self.setting, self.path)
        folder = path.parent if self.mode == 'specific' else path
        if self.mode == 'latest' and (path / 'checkpoints').is_dir():
            folder = path / 'checkpoints'
        if t5x_name := re.fullmatch(r'checkpoint_(\d+)', path.name):
            raise ConfigError(
                f'{self.setting} {path} looks like a T5X checkpoint, which cannot be read; a '
                f'checkpoint of this trainer is {path.parent / "checkpoints" / t5x_name[1]}'
            )
        if not path.is_dir():
            raise ConfigError(f'{self.setting} {path} does not exist')
        if self.mode == 'specific' and not path.name.isdecimal():
            raise ConfigError(
                f'{self.setting} {path} is not a checkpoint directory (expected '
                ".../checkpoints/<step>): add the step, or use mode 'latest'"
            )
        steps = complete_steps(folder)
        step = int(path.name) if self.mode == 'specific' else max(steps, default=None)
        if step not in steps:
            raise ConfigError(
                f'{self.setting} {path} is not a complete checkpoint; complete steps in {folder}: '
                f'{", ".join(map(str, steps)) or "none"}'
            )
        return folder, step

    def open(self, folder: epath.Path) -> Checkpoints:
        """Opens the folder that `find` returned."""
        return Checkpoints(folder, CheckpointConfig(keep=None), self.setting)


def complete_steps(directory: epath.Path) -> list[int]:
    """Returns the steps of complete checkpoints, in ascending order.

    Orbax treats every directory whose name is a number as a checkpoint. This function skips those
    without the last file that a save writes.
    """
    if not directory.is_dir():
        return []
    steps = (int(path.name) for path in directory.iterdir() if path.name.isdecimal())
    return sorted(step for step in steps if _is_complete(directory / str(step)))


def _is_complete(checkpoint: epath.Path) -> bool:
    last_file = 'commit_success.txt' if is_remote(checkpoint) else '_CHECKPOINT_METADATA'
    return (checkpoint / last_file).exists()


class Checkpoints:
    """The checkpoints of one run, in `<directory>/<step>`.

    Args:
      directory: the folder of the checkpoints.
      config: when to save, and which checkpoints to keep.
      restored_by: the setting that names `directory`, if it belongs to another run.
    """

    def __init__(
        self, directory: epath.Path, config: CheckpointConfig, restored_by: str | None = None
    ):
        self.directory = absolute(epath.Path(directory))
        self._restored_by = restored_by
        self._config, self._steps = config, frozenset(config.steps)

    @functools.cached_property
    def _manager(self) -> Any:
        # At first use, because a new run can compile and begin without Orbax.
        import orbax.checkpoint as ocp

        remote = is_remote(self.directory)
        if str(self.directory).startswith('s3://'):
            support_s3()
        return ocp.CheckpointManager(
            self.directory,
            item_handlers={'state': ocp.StandardCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                create=False,
                preservation_policy=ocp.checkpoint_managers.LatestN(self._config.keep),
                # A store of objects cannot rename a folder, so a last file completes a checkpoint.
                temporary_path_class=(
                    ocp.path.atomicity.CommitFileTemporaryPath if remote else None
                ),
            ),
        )

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        if '_manager' in self.__dict__:
            self._manager.wait_until_finished()
        return max(complete_steps(self.directory), default=None)

    def restore(self, step: int, abstract_state: Any) -> Any:
        """Restores the state of a step.

        Args:
          step: the step of a saved checkpoint.
          abstract_state: ShapeDtypeStructs with the shardings of the restored arrays.

        Raises:
          ConfigError: if the checkpoint has different arrays, shapes or dtypes than the state, or
            cannot be read.
        """
        import orbax.checkpoint as ocp

        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        self._check(step, abstract_state)
        try:
            return self._manager.restore(step, args=args)['state']
        except Exception as error:  # Orbax and tensorstore raise many types for a missing file.
            raise self._damaged(step, error) from error

    def restore_variables(self, step: int, abstract_state: Any) -> Any:
        """Restores the step, the parameters and the other variables, without the optimizer state.

        Args:
          step: the step of a saved checkpoint.
          abstract_state: the TrainState of ShapeDtypeStructs, as in `restore`.

        Returns:
          The state, whose `opt_state` is None.

        Raises:
          ConfigError: as in `restore`.
        """
        import orbax.checkpoint as ocp

        state = abstract_state.replace(opt_state=None)
        fields = ('step', 'params', 'flax_mutables')
        wanted = {name: value for name in fields if (value := getattr(state, name)) is not None}
        args = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        self._check(step, wanted, prefixes=tuple(wanted))
        path = self.directory / str(step) / 'state'
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                return state.replace(**checkpointer.restore(path, args=args))
        except Exception as error:
            raise self._damaged(step, error) from error

    def _check(self, step: int, abstract_state: Any, prefixes: tuple[str, ...] = ('',)) -> None:
        """Compares the checkpoint with the state, before `restore` makes processes wait."""
        manager = self._manager  # Creating it may wait for the other processes.
        with raise_on_all_processes():
            try:
                self._compare(manager.item_metadata(step)['state'], step, abstract_state, prefixes)
            except ConfigError:
                raise
            except Exception as error:
                raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> ConfigError:
        hint = 'delete it to resume from the previous checkpoint'
        if self._restored_by is not None:
            hint = f'set {self._restored_by} to another checkpoint'
        return ConfigError(
            f'checkpoint {self.directory / str(step)} is damaged ({first_line(error)}): {hint}'
        )

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after this step."""
        return step in self._steps or bool(self._config.period and step % self._config.period == 0)

    def save(self, step: int, state: Any) -> None:
        """Starts to save a state. Files are written in the background while training continues."""
        import orbax.checkpoint as ocp

        if step in self._manager.all_steps() and not _is_complete(self.directory / str(step)):
            self._manager.delete(step)  # An earlier save did not finish.
        if step not in self._manager.all_steps():
            args = ocp.args.Composite(state=ocp.args.StandardSave(state))
            self._manager.save(step, args=args, force=True)

    def close(self) -> None:
        """Waits until everything is written."""
        if '_manager' in self.__dict__:
            self._manager.close()

    def _compare(
        self, metadata: Any, step: int, abstract_state: Any, prefixes: tuple[str, ...]
    ) -> None:
        """Compares paths, shapes and dtypes before any array is read (Orbax casts silently).

        Args:
          metadata: what Orbax knows about the arrays of the checkpoint.
          step: the step of the checkpoint.
          abstract_state: the arrays that are wanted.
          prefixes: only arrays whose paths start with one of them are compared.
        """
        saved = _shapes(metadata.tree if hasattr(metadata, 'tree') else metadata)
        saved = {path: value for path, value in saved.items() if path.startswith(prefixes)}
        wanted = _shapes(abstract_state)
        differing = sorted(k for k in saved.keys() | wanted.keys() if saved.get(k) != wanted.get(k))
        if differing:
            first, setting = differing[0], self._restored_by or 'MODEL_DIR'
            raise ConfigError(
                f'checkpoint {self.directory / str(step)} belongs to another model or optimizer: '
                f'{len(differing):,} arrays differ. The first is {first}: '
                f'{saved.get(first, "absent")} in the checkpoint, {wanted.get(first, "absent")} in '
                f'this run. Use the settings it was trained with, or another {setting}'
            )


def _shapes(tree: Any) -> dict[str, str]:
    """Returns the shape and dtype of every array, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_str(p): f'{tuple(x.shape)} {jax.numpy.dtype(x.dtype)}' for p, x in leaves}
