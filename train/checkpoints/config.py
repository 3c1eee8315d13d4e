"""The settings of saving: when a run saves checkpoints, and which of them it keeps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from etils import epath

from train.checkpoints.restore import RestoreConfig
from train.checkpoints.steps.finding import t5x_steps
from train.errors import ConfigError, FailurePolicy, check_counts

if TYPE_CHECKING:
    from train.checkpoints.folder import Checkpoints

WhenBusy = Literal['later', 'skip', 'wait']
Mode = Literal['min', 'max']
DTYPES = (None, 'float32', 'bfloat16', 'float16')


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save checkpoints, and which of them to keep.

    A checkpoint is kept if any of `keep`, `keep_period` and `keep_best` says so.

    Attributes:
      period: the number of steps between two checkpoints. 0 saves only at the end of the run.
      keep: the number of newest checkpoints to keep. None keeps all.
      keep_period: checkpoints of the steps that it divides are kept, too.
      keep_best: the number of best checkpoints to keep, too.
      best_metric: the metric or score that tells which are the best, such as 'eval/loss'. A
        checkpoint of a step without it is not among the best.
      best_mode: whether small ('min') or large ('max') values are good.
      steps: additional steps after which to save a checkpoint.
      at_end: whether the end of the run saves a checkpoint, too. A signal always saves one, unless
        `period`, `steps` and `at_end` say that nothing is ever saved.
      dtype: the dtype in which floating-point parameters are saved, by default their own. To save
        them in another one loses precision: a run that resumes differs from one that did not stop.
      asynchronous: whether files are written while training continues. The arrays are copied first.
        Otherwise, training waits for the files, and needs less memory.
      when_busy: what happens if a checkpoint is due while an earlier one is being written: 'later'
        saves at the first step after it is written, 'skip' does not save, 'wait' waits. The end of
        the run and the steps that `steps` names always wait.
      on_failure: what happens if a checkpoint cannot be saved, for example because the disk is
        full. 'stop' ends the run with an error, within a step. 'continue' says so, and tries again
        when the next checkpoint is due. If the last one of a run fails, the run always ends with an
        error.
    """

    period: int = 1000
    keep: int | None = 3
    keep_period: int | None = None
    keep_best: int | None = None
    best_metric: str | None = None
    best_mode: Mode = 'min'
    steps: Sequence[int] = ()
    at_end: bool = True
    dtype: str | None = None
    asynchronous: bool = True
    when_busy: WhenBusy = 'later'
    on_failure: FailurePolicy = 'stop'

    def __post_init__(self) -> None:
        check_counts(minimum=0, period=self.period)
        if isinstance(self.steps, str) or not isinstance(self.steps, Sequence):
            raise ConfigError(f'CheckpointConfig.steps is {self.steps!r}: it must be a list')
        check_counts(**{f'steps[{i}]': step for i, step in enumerate(self.steps)})
        for name in ('keep', 'keep_period', 'keep_best'):
            if (value := getattr(self, name)) is not None:
                check_counts(**{f'CheckpointConfig.{name}': value})
        if (self.keep_best is None) != (self.best_metric is None):
            raise ConfigError(
                f'CheckpointConfig.keep_best is {self.keep_best} and best_metric is '
                f"{self.best_metric!r}: set both, such as keep_best = 1 and best_metric = 'eval/"
                "loss', or none"
            )
        if self.keep is None and (self.keep_period is not None or self.keep_best is not None):
            raise ConfigError(
                'CheckpointConfig.keep is None, which keeps all checkpoints, so keep_period and '
                'keep_best have no effect: set keep = 1, or leave them out'
            )
        for name, allowed in (
            ('best_mode', get_args(Mode)),
            ('when_busy', get_args(WhenBusy)),
            ('on_failure', get_args(FailurePolicy)),
            ('dtype', DTYPES),
        ):
            if (value := getattr(self, name)) not in allowed:
                options = ', '.join(map(repr, allowed))
                raise ConfigError(f'CheckpointConfig.{name} is {value!r}: use one of {options}')

    def plans(self, step: int) -> bool:
        """Whether a checkpoint is to be saved after a step, unless it is put off."""
        return step in self.steps or bool(self.period and step % self.period == 0)

    @property
    def saves_anything(self) -> bool:
        """Whether a run saves any checkpoints."""
        return bool(self.period or self.steps or self.at_end)

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
