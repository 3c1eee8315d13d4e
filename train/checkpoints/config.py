"""The settings of checkpoints: when a run saves them, which it keeps, and which it starts from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

from etils import epath

from train.errors import ConfigError, FailurePolicy, check_counts
from train.paths import is_remote

RestoreMode = Literal['latest', 'specific']
Renames = Sequence[tuple[str, str | None]]
WhenBusy = Literal['later', 'skip', 'wait']
Mode = Literal['min', 'max']
AVERAGES = 'ema/'  # the beginning of the names of the averages of the parameters
_LOCAL = 'CheckpointConfig.local_dir'
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
      local_dir: a folder on a disk of each host, or in its memory, such as '/dev/shm/meshwright',
        for local checkpoints, from which a run resumes after the loss of a process or a host. Each
        process keeps its part of the state there, and a process of another host keeps a copy.
      local_every: the number of steps between two local checkpoints. The newest two are kept, until
        the run is done.
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
    local_dir: str | None = None
    local_every: int = 0

    def __post_init__(self) -> None:
        check_counts(minimum=0, period=self.period, local_every=self.local_every)
        if (self.local_dir is None) != (self.local_every == 0):
            raise ConfigError(
                f'{_LOCAL} is {self.local_dir!r} and local_every is {self.local_every}: set both, '
                "such as local_dir = '/dev/shm/meshwright' and local_every = 50, or none"
            )
        if self.local_dir is not None and is_remote(self.local_dir):
            raise ConfigError(
                f'{_LOCAL} {self.local_dir} is in a store: use a folder on a disk of each host, or '
                'in its memory (/dev/shm)'
            )
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

    def restore_of(self, model_dir: epath.Path, step: int) -> RestoreConfig:
        """The settings that restore one of the checkpoints of a run."""
        return RestoreConfig(path=str(model_dir / f'checkpoints/{step}'), mode='specific')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreConfig:
    """The checkpoint of another run that a run starts from.

    Attributes:
      path: in mode 'specific', one checkpoint, `<model_dir>/checkpoints/<step>`; in mode 'latest',
        the folder of a run or of its checkpoints; the newest complete checkpoint is restored. In
        both, it can be a folder of safetensors, such as a Hugging Face model. A run takes its
        parameters, and begins at step 0.
      mode: 'latest' or 'specific'.
      renames: pairs of a regular expression, which must match the whole path of an array of this
        run, such as 'params/(.*)/kernel', and the path of the array in the checkpoint, such as
        'params/\\1/weights'. The first pair that matches counts, and an array without one keeps its
        path. With None, an array is not restored. Every pair must match an array.
      strict: whether an array of the checkpoint that the run does not use is an error.
      initialize_missing: whether an array that is not in the checkpoint is initialized as in a new
        run; otherwise it is an error.
      dtype: the dtype of the parameters, such as 'bfloat16'. Without it, arrays whose dtype differs
        from the dtype in the run are an error; with it, floating-point arrays are converted. It
        must be the dtype in which a run trains; an evaluation can use any.
      parameters_only: whether only the step, the parameters and the other variables of the model
        are restored. The optimizer state is new, and the step counts on. To begin at step 0, leave
        it out with `renames`, ('step', None), and set `initialize_missing`.
      restart_data: whether the data begins with its first row, although the step counts on.
        Otherwise, it continues with the row that follows this step.
    """

    path: str
    mode: RestoreMode = 'latest'
    renames: Renames = ()
    strict: bool = True
    initialize_missing: bool = False
    dtype: str | None = None
    parameters_only: bool = False
    restart_data: bool = False
    # The names of settings in messages.
    setting: ClassVar[str] = 'RestoreConfig.path'
    renames_setting: ClassVar[str] = 'RestoreConfig.renames'
    initialize_setting: ClassVar[str] = 'RestoreConfig.initialize_missing'
    dtype_setting: ClassVar[str] = 'RestoreConfig.dtype'

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise ConfigError(f'{self.setting} is {self.path!r}: it must be the path of a folder')
        if self.mode not in get_args(RestoreMode):
            raise ConfigError(f"RestoreConfig.mode is {self.mode!r}: use 'latest' or 'specific'")
        check_renames(self.renames_setting, self.renames)
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"RestoreConfig.dtype is {self.dtype!r}: use 'float32', 'bfloat16', 'float16' or "
                'None'
            )

    @property
    def is_one(self) -> bool:
        """Whether `path` names one checkpoint, so that no older one can take its place."""
        return self.mode == 'specific'

    def drops(self, name: str) -> bool:
        """Whether the array of this name is not restored."""
        rules = (new for pattern, new in self.renames if re.fullmatch(pattern, name))
        return next(rules, name) is None


def check_renames(setting: str, renames: Renames) -> None:
    """Checks that renames are pairs of a regular expression and a replacement."""
    for i, pair in enumerate(renames):
        try:
            pattern, replacement = pair
            re.compile(pattern).sub(replacement or '', '')  # also checks the groups it refers to
        except (TypeError, ValueError, re.error, IndexError) as error:
            raise ConfigError(
                f'{setting}[{i}] is {pair!r} ({error}): write a pair of a regular expression and a '
                "replacement, such as ('params/(.*)', 'params/model/\\\\1')"
            ) from error
