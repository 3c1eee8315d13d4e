"""Checkpoints by Orbax: saved without a mesh, restored onto any."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gin
import jax
import orbax.checkpoint as ocp

from partitioning.state import path_str
from train.errors import ConfigError, check_counts, first_line


@gin.configurable
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save, and what to keep.

    Attributes:
      period: steps between two checkpoints; 0: only at the end of the run.
      keep: the newest so many stay.
    """

    period: int = 1000
    keep: int = 3

    def __post_init__(self) -> None:
        check_counts(least=0, period=self.period)
        check_counts(keep=self.keep)


class Checkpoints:
    """The checkpoints of one run, in `<model_dir>/checkpoints/<step>`."""

    def __init__(self, model_dir: Path, config: CheckpointConfig):
        self.directory = model_dir.resolve() / 'checkpoints'
        self._period = config.period
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={'state': ocp.StandardCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                create=False,
                preservation_policy=ocp.checkpoint_managers.LatestN(config.keep),
            ),
        )

    def latest_step(self) -> int | None:
        """The newest step whose checkpoint is whole.

        Orbax takes any directory named by a number for a checkpoint; one without the metadata that
        a finished save writes is passed over.
        """
        self._manager.wait_until_finished()
        return max(filter(self._is_whole, self._manager.all_steps()), default=None)

    def _is_whole(self, step: int) -> bool:
        return (self.directory / str(step) / '_CHECKPOINT_METADATA').is_file()

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
        try:
            self._compare(step, abstract_state)
            return self._manager.restore(step, args=args)['state']
        except ConfigError:
            raise
        except Exception as error:  # Orbax and tensorstore raise of every kind for a missing file
            raise ConfigError(
                f'checkpoint {self.directory / str(step)} is damaged; delete it to go on from the '
                f'one before ({first_line(error)})'
            ) from error

    def is_due(self, step: int) -> bool:
        """Whether the period ends with this step."""
        return bool(self._period) and step % self._period == 0

    def save(self, step: int, state: Any) -> None:
        """Begins to save; the write goes on beside the training."""
        if step in self._manager.all_steps() and not self._is_whole(step):
            self._manager.delete(step)  # what a save that died or a user left there
        if step not in self._manager.all_steps():
            args = ocp.args.Composite(state=ocp.args.StandardSave(state))
            self._manager.save(step, args=args, force=True)

    def close(self) -> None:
        """Waits until everything is written."""
        self._manager.close()

    def _compare(self, step: int, abstract_state: Any) -> None:
        """Compares names, shapes and types before any array is read (Orbax casts silently)."""
        metadata = self._manager.item_metadata(step)['state']
        saved = _described(metadata.tree if hasattr(metadata, 'tree') else metadata)
        wanted = _described(abstract_state)
        differing = sorted(k for k in saved.keys() | wanted.keys() if saved.get(k) != wanted.get(k))
        if differing:
            first = differing[0]
            raise ConfigError(
                f'checkpoint {self.directory / str(step)} is of another model or optimizer: '
                f'{len(differing)} arrays differ, first {first}: {saved.get(first, "absent")} in '
                f'the checkpoint, {wanted.get(first, "absent")} in this run. Use the settings it '
                'was trained with, or another MODEL_DIR'
            )


def _described(tree: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_str(p): f'{tuple(x.shape)} {jax.numpy.dtype(x.dtype)}' for p, x in leaves}
