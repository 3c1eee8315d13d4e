"""The settings of restoring: the checkpoint from which a run starts, and which arrays it takes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from etils import epath

from train.checkpoints.steps.finding import complete_steps, examine, find_steps, t5x_steps
from train.checkpoints.steps.manifest import DamagedCheckpoint
from train.errors import ConfigError
from train.paths import as_path

if TYPE_CHECKING:
    from train.checkpoints.reading import CheckpointReader

RestoreMode = Literal['latest', 'specific']
Renames = Sequence[tuple[str, str | None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoreConfig:
    """The checkpoint of another run that a run starts from.

    Attributes:
      path: in mode 'specific', one checkpoint, `<model_dir>/checkpoints/<step>`; in mode 'latest',
        the folder of a run or of its checkpoints; the newest complete checkpoint is restored. In
        both, it can be a folder of safetensors, such as a model of Hugging Face. A run takes its
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
        from that of the run are an error; with it, floating-point arrays are converted. It must be
        the dtype in which a run trains; an evaluation can use any.
      parameters_only: whether only the step, the parameters and the other variables of the model
        are restored. The optimizer state is new, and the step counts on. To begin at step 0, leave
        it out with `renames`, ('step', None), and set `initialize_missing`.
    """

    path: str
    mode: RestoreMode = 'latest'
    renames: Renames = ()
    strict: bool = True
    initialize_missing: bool = False
    dtype: str | None = None
    parameters_only: bool = False
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
        if self.dtype not in (None, 'float32', 'bfloat16', 'float16'):
            raise ConfigError(
                f"RestoreConfig.dtype is {self.dtype!r}: use 'float32', 'bfloat16', 'float16' or "
                'None'
            )

    def drops(self, name: str) -> bool:
        """Whether the array of this name is not restored."""
        rules = (new for pattern, new in self.renames if re.fullmatch(pattern, name))
        return next(rules, name) is None

    def find(self, say: Callable[[str], None] = lambda line: None) -> tuple[epath.Path, int]:
        """Finds the checkpoint by looking at files only, so processes need not wait for each other.

        Args:
          say: receives one line for each folder that mode 'latest' skips.

        Returns:
          The folder of checkpoints, and the step to restore.

        Raises:
          DamagedCheckpoint: if the checkpoint that mode 'specific' names is damaged.
          ConfigError: if there is no such checkpoint, or it is incomplete.
        """
        from train.checkpoints.weights import is_weights

        path = as_path(self.setting, self.path)
        if is_weights(path):
            return path, 0
        folder = path.parent if self.mode == 'specific' else path
        if self.mode == 'latest' and (path / 'checkpoints').is_dir():
            folder = path / 'checkpoints'
        t5x_name = re.fullmatch(r'checkpoint_(\d+)', path.name)
        if t5x_name or t5x_steps(path):
            run, step = (path.parent, t5x_name[1]) if t5x_name else (path, '<step>')
            raise ConfigError(
                f'{self.setting} {path} is of T5X: restore it with '
                'train.t5x.configs.RestoreCheckpointConfig(path=...).translated(). A checkpoint of '
                f'this trainer is {run / "checkpoints" / step}'
            )
        if not path.is_dir():
            raise ConfigError(f'{self.setting} {path} does not exist')
        if self.mode == 'specific' and not path.name.isdecimal():
            raise ConfigError(
                f'{self.setting} {path} is not a checkpoint directory (expected '
                ".../checkpoints/<step>): add the step, or use mode 'latest'"
            )
        step = self._find_step(path, folder, say)
        if step is None:
            found = ', '.join(map(str, complete_steps(folder))) or 'none'
            raise ConfigError(
                f'{self.setting} {path} is not a complete checkpoint; complete steps in {folder}: '
                f'{found}'
            )
        return folder, step

    def _find_step(
        self, path: epath.Path, folder: epath.Path, say: Callable[[str], None]
    ) -> int | None:
        """The step to restore, with or without a manifest, or None if there is none."""
        paths = {int(path.name): path} if self.mode == 'specific' else find_steps(folder)[0]
        for step, candidate in reversed(paths.items()):
            found = examine(candidate, step, contents=True)
            if found.status in ('good', 'without a manifest'):
                return step
            if self.mode == 'specific' and found.status == 'damaged':
                raise DamagedCheckpoint(f'{self.setting}: {found.reason}: restore another one')
            say(f'{found.reason}: an older one is looked for')
        return None

    def open(self, folder: epath.Path) -> CheckpointReader:
        """Opens the folder that `find` returned."""
        from train.checkpoints.config import CheckpointConfig
        from train.checkpoints.folder import Checkpoints
        from train.checkpoints.weights import Weights, is_weights

        if is_weights(folder):
            return Weights(folder, self)
        return Checkpoints(folder, CheckpointConfig(keep=None), self)


def check_renames(setting: str, renames: Renames) -> None:
    """Checks that renames are pairs of a regular expression and a replacement.

    Args:
      setting: the name of the setting, for the message.
      renames: its value.

    Raises:
      ConfigError: if they are not.
    """
    for i, pair in enumerate(renames):
        try:
            pattern, replacement = pair
            re.compile(pattern).sub(replacement or '', '')  # also checks the groups it refers to
        except (TypeError, ValueError, re.error, IndexError) as error:
            raise ConfigError(
                f'{setting}[{i}] is {pair!r} ({error}): write a pair of a regular expression and a '
                "replacement, such as ('params/(.*)', 'params/model/\\\\1')"
            ) from error
