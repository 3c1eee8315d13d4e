"""The settings of saving: when a run saves checkpoints, and which of them it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from etils import epath

from train.checkpoints.restore import RestoreConfig
from train.checkpoints.steps import t5x_steps
from train.errors import ConfigError, check_counts

if TYPE_CHECKING:
    from train.checkpoints.folder import Checkpoints


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints, and which of them to keep.

    Attributes:
      period: the number of steps between two checkpoints. 0 saves only at the end of the run.
      keep: the number of newest checkpoints to keep. None keeps all.
      steps: additional steps after which to save a checkpoint.
      at_end: whether the end of the run saves a checkpoint, too.
    """

    period: int = 1000
    keep: int | None = 3
    steps: Sequence[int] = ()
    at_end: bool = True

    def __post_init__(self) -> None:
        check_counts(minimum=0, period=self.period)
        if isinstance(self.steps, str) or not isinstance(self.steps, Sequence):
            raise ConfigError(f'CheckpointConfig.steps is {self.steps!r}: it must be a list')
        check_counts(**{f'steps[{i}]': step for i, step in enumerate(self.steps)})
        if self.keep is not None:
            check_counts(keep=self.keep)

    def open(self, model_dir: epath.Path) -> Checkpoints:
        """Opens the checkpoints of a run, which may be none yet.

        Raises:
          ConfigError: if the folder of the run contains checkpoints of T5X.
        """
        from train.checkpoints.folder import Checkpoints

        if steps := t5x_steps(model_dir):
            raise ConfigError(
                f'MODEL_DIR {model_dir} contains checkpoints of T5X, up to checkpoint_{steps[-1]}: '
                'this run cannot continue them. Use another MODEL_DIR, or resume them with a gin '
                'file of T5X (train.t5x)'
            )
        return Checkpoints(model_dir / 'checkpoints', self)

    def restore_of(self, model_dir: epath.Path, step: int) -> RestoreConfig:
        """The settings that restore one of the checkpoints of a run."""
        return RestoreConfig(path=str(model_dir / f'checkpoints/{step}'), mode='specific')
