"""A folder of checkpoints, which Orbax writes."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from etils import epath

from train.checkpoints.config import CheckpointConfig
from train.checkpoints.reading import CheckpointReader
from train.checkpoints.restore import RestoreConfig
from train.checkpoints.steps import complete_steps
from train.paths import absolute, is_remote
from train.runtime.arrays_on_s3 import support_s3


class Checkpoints(CheckpointReader):
    """The checkpoints of one run, in `<directory>/<step>`.

    Args:
      directory: the folder of the checkpoints.
      config: when to save, and which checkpoints to keep.
      restore: the settings that name `directory`, if it belongs to another run.
    """

    def __init__(
        self, directory: epath.Path, config: CheckpointConfig, restore: RestoreConfig | None = None
    ):
        self.directory = absolute(epath.Path(directory))
        self._restore = restore
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
            item_handlers=self._handlers(),
            options=ocp.CheckpointManagerOptions(
                create=False,
                step_prefix=self.prefix or None,
                preservation_policy=ocp.checkpoint_managers.LatestN(self._config.keep),
                # A store of objects cannot rename a folder, so a last file completes a checkpoint.
                temporary_path_class=(
                    ocp.path.atomicity.CommitFileTemporaryPath if remote else None
                ),
            ),
        )

    # The format, which subclasses may change.

    prefix: ClassVar[str] = ''

    def _handlers(self) -> dict[str, Any]:
        import orbax.checkpoint as ocp

        return {'state': ocp.StandardCheckpointHandler()}

    def _saved_items(self, state: Any) -> Any:
        import orbax.checkpoint as ocp

        return ocp.args.Composite(state=ocp.args.StandardSave(state))

    def path(self, step: int) -> epath.Path:
        """The folder of the checkpoint of a step."""
        return self.directory / str(step)

    def steps(self) -> list[int]:
        """The steps of complete checkpoints, in ascending order."""
        return complete_steps(self.directory)

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, or None."""
        if '_manager' in self.__dict__:
            self._manager.wait_until_finished()
        return max(self.steps(), default=None)

    # Saving.

    def is_due(self, step: int, *, ending: bool = False) -> bool:
        """Whether a checkpoint is to be saved after this step.

        Args:
          step: the step.
          ending: whether the run ends after it.
        """
        periodic = self._config.period and step % self._config.period == 0
        return bool(periodic) or step in self._steps or (ending and self._config.at_end)

    def save(self, step: int, state: Any) -> None:
        """Starts to save a state. Files are written in the background while training continues."""
        if step in self._manager.all_steps() and step not in self.steps():
            self._manager.delete(step)  # An earlier save did not finish.
        if step not in self._manager.all_steps():
            self._manager.save(step, args=self._saved_items(state), force=True)

    def close(self) -> None:
        """Waits until everything is written."""
        if '_manager' in self.__dict__:
            self._manager.close()
